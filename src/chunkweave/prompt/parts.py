"""A prompt as a list of parts, tokenized separately, so that a chunk's token ids do not depend on its neighbours.

Chunks are computed ahead of requests behind neutral passages: text unrelated to any document. A chunk computed with
nothing before it is treated as the beginning of a prompt: its first tokens become attention sinks, and its other tokens
give each other the attention that earlier passages would get in a prompt. Behind an instruction and a few unrelated
passages its KV is close to that among other chunks (docs/methods.md).
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path

from chunkweave.errors import PromptTooLongError, UsageError
from chunkweave.types import ChunkId, Context, Span


class PartKind(StrEnum):
    """The kinds of prompt parts."""

    START = "start"
    """Only the model's BOS tokens. Never stored, never in a context, always computed."""
    SYSTEM = "system"
    """The instruction and all other text before the first chunk. Stored like a chunk."""
    CHUNK = "chunk"
    TURN = "turn"
    """An earlier question of a conversation with its answer. Stored like a chunk."""
    QUESTION = "question"
    """The question and the header of the assistant's turn. Never stored, always computed."""


_PLACES = {PartKind.START: 0, PartKind.SYSTEM: 1, PartKind.CHUNK: 2, PartKind.TURN: 2, PartKind.QUESTION: 3}


FOUND = "found in the prompt"
NEW = "new in the prompt"
"""Sources of parts of prompts that name no chunks: of earlier text, and of text that is stored for later prompts."""


@dataclass(frozen=True, slots=True)
class RunView:
    """Where a part's tokens are within a stored run: from `offset` on in the chunk `run`."""

    run: ChunkId
    offset: int


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One part: its token ids and, for parts that are stored, its id.

    `id` is None exactly for parts that are never stored (START, QUESTION). Of an `in_place` part only a segment is
    reused that was wholly computed behind the same parts. A `novel` part was found in a prompt (`find_chunks`) and not
    seen before. A part with a `view` may be cut out of a stored run.
    """

    kind: PartKind
    token_ids: tuple[int, ...]
    id: ChunkId | None = None
    source: str = ""
    in_place: bool = field(default=False, compare=False)
    novel: bool = field(default=False, compare=False)
    view: RunView | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.id is None) != (self.kind in (PartKind.START, PartKind.QUESTION)):
            raise ValueError(f"a {self.kind} part {'must' if self.id is None else 'cannot'} have an id")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Parts in order: at most one START, at most one SYSTEM, any number of CHUNKs, at most one QUESTION.

    In a conversation each TURN follows the chunks that were new in it; chunks after the last TURN are new now. A prompt
    without a question is for precomputing. Empty parts are not allowed.
    """

    parts: tuple[PromptPart, ...]

    def __post_init__(self) -> None:
        order = [_PLACES[part.kind] for part in self.parts]
        if order != sorted(order):
            raise ValueError("parts must come in the order start, system, chunks and turns, question")
        for kind in (PartKind.START, PartKind.SYSTEM, PartKind.QUESTION):
            if sum(part.kind is kind for part in self.parts) > 1:
                raise ValueError(f"more than one {kind} part")
        if any(len(part) == 0 for part in self.parts):
            raise ValueError("a prompt part has no tokens")

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids in order, `[tokens]`."""
        return tuple(token for part in self.parts for token in part.token_ids)

    @property
    def history_tokens(self) -> int:
        """Tokens of earlier turns, including the chunks before their questions."""
        last = max((place for place, part in enumerate(self.parts) if part.kind is PartKind.TURN), default=-1)
        opening = (PartKind.START, PartKind.SYSTEM)
        return sum(len(part) for part in self.parts[: last + 1] if part.kind not in opening)

    def room_in(self, context_tokens: int) -> int:
        """Tokens that a context of `context_tokens` leaves for the answer.

        Raises:
            PromptTooLongError: none are left; the message names the lengths of the prompt and its longest part.
        """
        if len(self) >= context_tokens:
            longest = max(self.parts, key=len)
            raise PromptTooLongError(
                f"the prompt has {len(self)} tokens (its longest part, {longest.source or longest.kind}, "
                f"has {len(longest)}), but the model's context is {context_tokens}; send fewer or smaller chunks"
            )
        return context_tokens - len(self)

    def spans(self) -> tuple[Span, ...]:
        """The positions of each part."""
        spans: list[Span] = []
        start = 0
        for part in self.parts:
            spans.append(Span(start, start + len(part)))
            start += len(part)
        return tuple(spans)

    def contexts(self) -> tuple[Context, ...]:
        """For each part the ids of the stored parts before it, without START."""
        contexts: list[Context] = []
        before: tuple[ChunkId, ...] = ()
        for part in self.parts:
            contexts.append(before)
            if part.id is not None:
                before = (*before, part.id)
        return tuple(contexts)


def chunk_id(fingerprint: str, cache_salt: str, token_ids: Sequence[int]) -> ChunkId:
    """BLAKE2b-128 over model fingerprint, cache salt and token ids, as 32 hex digits.

    Every field is preceded by its length, so different inputs are different bytes. Equal ids do not prove equal tokens:
    the store compares the tokens on a hit.
    """
    digest = hashlib.blake2b(digest_size=16)
    for text in (fingerprint, cache_salt):
        encoded = text.encode("utf-8")
        digest.update(struct.pack("<Q", len(encoded)))
        digest.update(encoded)
    digest.update(struct.pack(f"<Q{len(token_ids)}I", len(token_ids), *token_ids))
    return ChunkId(digest.hexdigest())


def chunk_salt(salt: str, first: Sequence[int], start: tuple[int, ...]) -> str:
    """The salt in the ids of chunks whose prompt begins with the tokens `first`; usually these are `start`.

    A context does not include START, so a chunk after other leading tokens gets another id instead: it is no exact
    prefix here.
    """
    salt = salt.replace("\0", "\0\0")  # so that no salt ends like one with a start
    return salt if tuple(first) == start else f"{salt}\0start:{','.join(map(str, first))}"


BESIDE_MODEL = "neutral.txt"
_MARK = b"neut".hex()
_MEAN_MARK = b"mean".hex()


def neutral_id(chunk: ChunkId) -> ChunkId:
    """The id of a chunk used as a neutral passage. It is marked, so that segments computed behind it are recognized."""
    return ChunkId(_MARK + chunk[len(_MARK) :])


def is_neutral(chunk: ChunkId) -> bool:
    """Whether an id was made by `neutral_id`. False positives: one in four billion ordinary ids.

    >>> is_neutral(neutral_id(ChunkId("0" * 32))), is_neutral(ChunkId("0" * 32))
    (True, False)
    """
    return chunk.startswith(_MARK)


def mean_id(contexts: Iterable[Context]) -> ChunkId:
    """The id that replaces the context in the record of a mean over `contexts`; no chunk has such an id."""
    digest = hashlib.blake2b(digest_size=16)
    for context in sorted(contexts):
        digest.update(" ".join(context).encode("ascii") + b"\n")
    return ChunkId(_MEAN_MARK + digest.hexdigest()[len(_MEAN_MARK) :])


def is_mean(context: Context) -> bool:
    """Whether a context is a `mean_id`.

    >>> is_mean((mean_id([(ChunkId("0" * 32),)]),)), is_mean((ChunkId("0" * 32),))
    (True, False)
    """
    return len(context) == 1 and context[0].startswith(_MEAN_MARK)


def neutral_passages(path: Path | None = None, folder: Path | None = None) -> tuple[str, ...]:
    """Neutral passages, ideally of the kind of text that the model was trained on.

    They are read from `path` if given, else from `neutral.txt` in the model's `folder` if there is one; else they are
    the bundled ones: 16 passages of about 90 tokens, each on another subject. Passages are separated by empty lines.

    Raises:
        UsageError: the file cannot be read, or has no text.
    """
    if path is None and folder is not None and (folder / BESIDE_MODEL).is_file():
        path = folder / BESIDE_MODEL
    return _bundled() if path is None else _read(path)


def _read(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot read the neutral passages: {error}") from error
    passages = _split(text)
    if not passages:
        raise UsageError(f"no text in {path}: write neutral passages, separated by empty lines")
    return passages


@cache
def _bundled() -> tuple[str, ...]:
    return _split((files("chunkweave") / "assets" / "neutral" / "passages.txt").read_text(encoding="utf-8"))


def _split(text: str) -> tuple[str, ...]:
    return tuple(" ".join(passage.split()) for passage in text.split("\n\n") if passage.strip())
