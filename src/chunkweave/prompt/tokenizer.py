"""The tokenizer protocol, its adapter for Hugging Face tokenizers, and a cache of token ids."""

import ctypes
import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache, cached_property
from itertools import islice
from threading import Lock
from typing import Any, Protocol

from chunkweave.errors import UsageError


class TextTokenizer(Protocol):
    """Converts text to token ids and back. Implementations must be thread-safe."""

    def encode(self, text: str, *, control_tokens: bool = False, ordinary: Set[int] = frozenset()) -> list[int]:
        """Token ids of `text`, without BOS or EOS.

        With `control_tokens=False` text that spells a control token (`</s>`, `<|im_end|>`) is encoded as ordinary
        characters, so a document cannot end a turn or start another. With `control_tokens=True` this applies only to
        control tokens with a character at one of the `ordinary` positions.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""

    def token_text(self, token_id: int, previous_id: int | None) -> str:
        """The text that a token adds after the token `previous_id`; a control token's own text."""

    def control_texts(self, text: str) -> frozenset[str]:
        """The control tokens that `text` spells, as text."""

    @property
    def control_signs(self) -> frozenset[str]:
        """Characters of control tokens that do not occur in words: brackets and bars."""

    @property
    def control_ids(self) -> Set[int]:
        """Ids of tokens that are no text."""

    def token_texts(self) -> Sequence[str]:
        """The text of each token, by id."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """Ids that the model expects at the start of every prompt (BOS); may be empty."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text of a base model (EOS); may be empty."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: EOS and the end of the assistant's turn."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str | None:
        """`messages` ({"role", "content"}) through the chat template, with the header of the assistant's turn.

        `variables` are other inputs that the template may read: `tools`, `enable_thinking`. None if the tokenizer has
        no chat template.

        Raises:
            UsageError: the template refuses or cannot read these messages, for example a system role.
        """


_LOOKED_AT_TEXTS = 20
_LOOKED_AT_CHARACTERS = 500


def tokens_a_word(tokenizer: TextTokenizer, texts: Iterable[str]) -> float:
    """How many tokens the beginnings of the first texts take a word; 0 without words.

    Text of another kind than the tokenizer was made from takes many more than its own.
    """
    begun = [text[:_LOOKED_AT_CHARACTERS] for text in islice(texts, _LOOKED_AT_TEXTS)]
    words = sum(len(text.split()) for text in begun)
    return sum(len(tokenizer.encode(text)) for text in begun) / words if words else 0.0


_MARK = "CHUNKWEAVE-ANSWER-MARK"

_OF_NAMES_AND_QUOTES = "_-.\"'\\"

_LONG_CHARACTERS = 1 << 18
"""After tokenizing a longer text (about 300 bytes per token), freed memory is returned to the system."""


class HuggingFaceTokenizer:
    """Adapter around a `transformers.PreTrainedTokenizerFast` (or a compatible class).

    `stop_ids` are added to those found in the tokenizer, for example the `eos_token_id`s of the model's
    generation config.

    Texts go directly to the tokenizer's Rust core, through the function that releases the interpreter's lock (`encode`
    does not) and computes no offsets: the wrapper's call takes twice the time and memory.
    """

    def __init__(self, tokenizer: Any, *, stop_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()  # a tokenizer without a Rust core is not thread-safe
        self._core = getattr(tokenizer, "backend_tokenizer", None)
        if self._core is not None:  # the wrapper's call sets these each time
            self._core.no_truncation()
            self._core.no_padding()
            self._core.encode_special_tokens = getattr(tokenizer, "split_special_tokens", False)
        self._given_stop_ids = frozenset(stop_ids)
        self._control = _control_tokens(tokenizer)

    @property
    def serialized(self) -> str:
        """The tokenizer in the JSON format of `tokenizers`.

        Raises:
            UsageError: it has no such form.
        """
        if self._core is None:
            raise UsageError("this tokenizer has no Rust core: use a fast tokenizer")
        return str(self._core.to_str())

    def encode(self, text: str, *, control_tokens: bool = False, ordinary: Set[int] = frozenset()) -> list[int]:
        """Token ids of `text` without BOS; see `TextTokenizer.encode`."""
        if not text:
            return []
        ids = self._ids(text)
        if (control_tokens and not ordinary) or self._control.keys().isdisjoint(ids):
            return ids
        token_ids: list[int] = []
        positions = sorted(ordinary)
        for piece, start in self._cut_inside_control(text, ordinary if control_tokens else None):
            if piece == text:  # its control tokens may be read
                return ids
            first, last = (bisect_left(positions, at) for at in (start, start + len(piece)))
            inside = frozenset(at - start for at in positions[first:last])
            token_ids += self.encode(piece, control_tokens=control_tokens, ordinary=inside)
        return token_ids

    def token_text(self, token_id: int, previous_id: int | None) -> str:
        """The text that a token adds after the token `previous_id`; a control token's own text."""
        if token_id in self._control:
            return self._control[token_id]
        if previous_id is None:
            return self.decode([token_id])
        return self.decode([previous_id, token_id])[len(self.decode([previous_id])) :]

    def control_texts(self, text: str) -> frozenset[str]:
        """The control tokens that `text` spells."""
        return frozenset(self._control[token] for token in set(self._ids(text)) & self._control.keys())

    @cached_property
    def control_signs(self) -> frozenset[str]:
        """Characters of control tokens except letters, digits, white space, and characters of JSON escapes or names."""
        characters = set("".join(self._control.values())) - set(_OF_NAMES_AND_QUOTES)
        return frozenset(character for character in characters if not character.isalnum() and not character.isspace())

    @property
    def control_ids(self) -> Set[int]:
        """Ids of tokens that are no text."""
        return self._control.keys()

    def token_texts(self) -> Sequence[str]:
        """The text of each token, by id. A token that is only a part of a character has a replacement character."""
        ids = [[token] for token in range(len(self._tokenizer))]
        if self._core is not None:
            texts: list[str] = self._core.decode_batch(ids, skip_special_tokens=False)
            return texts
        with self._lock:
            return [self._tokenizer.decode(sequence, clean_up_tokenization_spaces=False) for sequence in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer itself adds before a text: BOS for Llama, none for Qwen2."""
        bare = self._ids("a")
        framed: list[int] = list(self._tokenizer("a")["input_ids"])
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return tuple(framed[:start])
        return ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokenizer's EOS."""
        return () if self._tokenizer.eos_token_id is None else (self._tokenizer.eos_token_id,)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """EOS, the token that the chat template puts after an answer, and the ids given by the caller."""
        stop_ids = set(self._given_stop_ids)
        if self._tokenizer.eos_token_id is not None:
            stop_ids.add(self._tokenizer.eos_token_id)
        stop_ids.update(self._end_of_turn_ids())
        return frozenset(stop_ids)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str | None:
        """Render `messages` with the chat template and the generation prompt; None without a template.

        Raises:
            UsageError: the template refuses these messages.
        """
        return self._render(messages, variables or {}, add_generation_prompt=True)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str | None:
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise UsageError(f"the chat template refuses these messages: {error}") from error
        return text

    def _end_of_turn_ids(self) -> list[int]:
        """The first token after an assistant's answer, if it is a control token.

        It is found by rendering the template, which needs no list of the models' names for it.
        """
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        try:
            rendered = self._render(conversation, {}, add_generation_prompt=False)
        except UsageError:
            return []
        after = (rendered or "").partition(_MARK)[2].lstrip()
        return [token for token in self._ids(after)[:1] if token in self._control] if after else []

    def _ids(self, text: str) -> list[int]:
        if self._core is not None:
            ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=False)[0].ids
            if len(text) > _LONG_CHARACTERS:
                give_memory_back()
            return ids
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _cut_inside_control(self, text: str, ordinary: Set[int] | None) -> list[tuple[str, int]]:
        """`text` split in the middle of each control token that was found in it; each piece with its start.

        Only control tokens that include an `ordinary` position are split (None: all). Rejected:
        `split_special_tokens=True`. It sets a flag on the tokenizer, which other threads share, and does not split
        added tokens that are not marked special (Qwen3's `<think>`).
        """
        if self._core is None:
            raise UsageError("this tokenizer does not report the positions of control tokens: use a fast tokenizer")
        [encoded] = self._core.encode_batch([text], add_special_tokens=False)
        pieces: list[tuple[str, int]] = []
        done = 0
        for token, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            if token not in self._control or (ordinary is not None and ordinary.isdisjoint(range(start, stop))):
                continue
            middle = (start + stop) // 2
            pieces.append((text[done:middle], done))
            # A single character that a normalizer turned into a control token cannot be split: it is dropped.
            done = stop if stop - start < 2 else middle
        pieces.append((text[done:], done))
        return [(piece, start) for piece, start in pieces if piece]


def give_memory_back() -> None:
    """Return freed memory to the system, which glibc keeps per thread. Does nothing with another C library."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, or none that can be called
        return None


def _control_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Added tokens by id, except runs of white space and single ordinary characters."""
    return {
        token_id: str(token.content)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special or len(token.content.strip()) > 1
    }


_TOKENS_OF_A_TEXT = 8
_LEAST_TEXTS = 64


class TokenCache:
    """LRU cache of token ids by salt and text. Thread-safe.

    It holds at most `max_tokens` ids and `max_tokens` / `_TOKENS_OF_A_TEXT` texts, since for a short text the entry
    itself costs most. Texts are keyed by a hash, so their length does not matter. A text without tokens is not cached.
    """

    def __init__(self, max_tokens: int = 500_000) -> None:
        self._max_tokens = max_tokens
        self._max_texts = max(_LEAST_TEXTS, max_tokens // _TOKENS_OF_A_TEXT)
        self._held_tokens = 0
        self._ids_by_text: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str, salt: str = "") -> tuple[int, ...] | None:
        """The ids of `text`, which becomes the most recently used; None if it is not cached."""
        key = _key(text, salt)
        with self._lock:
            token_ids = self._ids_by_text.get(key)
            if token_ids is not None:
                self._ids_by_text.move_to_end(key)
            return token_ids

    def put(self, text: str, token_ids: tuple[int, ...], salt: str = "") -> None:
        """Cache the ids of `text`, unless they exceed `max_tokens`."""
        key = _key(text, salt)
        with self._lock:
            self._held_tokens -= len(self._ids_by_text.pop(key, ()))
            if not 0 < len(token_ids) <= self._max_tokens:
                return
            self._ids_by_text[key] = token_ids
            self._held_tokens += len(token_ids)
            while self._held_tokens > self._max_tokens or len(self._ids_by_text) > self._max_texts:
                _, dropped = self._ids_by_text.popitem(last=False)
                self._held_tokens -= len(dropped)

    def __len__(self) -> int:
        return len(self._ids_by_text)


def _key(text: str, salt: str) -> bytes:
    salted, encoded = (part.encode("utf-8", "surrogatepass") for part in (salt, text))
    digest = hashlib.blake2b(len(salted).to_bytes(8, "little") + salted, digest_size=16)
    digest.update(encoded)
    return digest.digest()
