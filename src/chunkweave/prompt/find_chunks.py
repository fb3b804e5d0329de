"""Finds earlier text in a prompt that names no chunks, from its token ids alone, which never change.

First the longest stored beginning, whose KV is exact, however earlier prompts were cut. Behind it text is found by its
content, at any offset (`prompt.runs`), never across a control token or a role. New text is stored as one run; a later
prompt that has a part of it gets that part's KV cut out of the run's. No text and no torch here: what tokens look like
is in a `TokenTable`, made once for a tokenizer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from chunkweave.errors import UsageError
from chunkweave.prompt.parts import FOUND, NEW, PartKind, Prompt, PromptPart, RunView, chunk_id, chunk_salt
from chunkweave.prompt.rendering import Marks, Messages
from chunkweave.prompt.runs import GRAM, LEAST, Ids, Match, Path, RunIndex
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.types import ChunkId, Span

QUESTION_TOKENS = 32
"""Most tokens of new text at the end of a prompt that are its question."""

_MOST_KEYS = 10_000
"""Most keys of which is known that their earlier runs were added."""

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_CONTROL = 1
_BLANK = 2

RESULT_BEGINS = "<tool_response>"
"""Begins a tool's result in plain text, as many chat templates have it."""

_RESULT = "result "
"""Beginning of the names of results' headers."""

_MOST_DIGITS = 0.12
_MOST_SIGNS = 0.12
"""Highest shares of a passage's characters without white space. Of XQuAD's paragraphs 99 % have at most .11 digits, all
at most .11 signs; half of this repository's Python has .16 signs and more, its JSON results .20 and more.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """What the tokens of one tokenizer look like, by id; the last row is for ids that it does not have.

    `bits` say whether a token is a control token, or only white space. `characters` are numbers of letters, digits and
    other signs `[ids, 3]`. `headers` are the tokens before a message's text by role, each beginning with a control
    token, and those before results of tools; None: the chat template has no control tokens there, so roles are unknown.
    """

    bits: npt.NDArray[np.uint8]
    characters: npt.NDArray[np.uint8]
    headers: Mapping[str, tuple[int, ...]] | None

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "TokenTable":
        """The table of a tokenizer; takes a second for 150,000 tokens."""
        control = tokenizer.control_ids
        return cls.of_texts(tokenizer.token_texts(), control, _headers(tokenizer, control))

    @classmethod
    def of_texts(
        cls, texts: Sequence[str], control: Set[int], headers: Mapping[str, tuple[int, ...]] | None
    ) -> "TokenTable":
        """The table of tokens with these `texts`, by id; those in `control` are no text."""
        rows = [_CONTROL if token in control else _BLANK * (not text.strip()) for token, text in enumerate(texts)]
        return cls(
            np.array([*rows, _CONTROL], np.uint8),
            np.minimum([*map(_characters, texts), (0, 0, 0)], 255).astype(np.uint8),
            headers,
        )


def _characters(text: str) -> tuple[int, int, int]:
    """Letters, digits and other signs. A character of several tokens, which none of them has whole, is a letter."""
    digits = sum(map(str.isdigit, text))
    letters = sum(one.isalpha() or one == "\ufffd" or ord(one) > 0x2FF for one in text if not one.isdigit())
    return letters, digits, sum(not one.isspace() for one in text) - letters - digits


def _headers(tokenizer: TextTokenizer, control: Set[int]) -> Mapping[str, tuple[int, ...]] | None:
    """For each role the shortest beginning of its messages that no other role has; see `TokenTable`."""
    marks = Marks.absent_from()
    texts = {"system": marks.instruction, "user": marks.chunks, "assistant": marks.answer}
    chat = [{"role": role, "content": text} for role, text in texts.items()]
    rendered: str | None = None
    for messages in (chat, chat[1:]):  # not all have a system role
        try:
            rendered = tokenizer.render_chat([*messages, {"role": "user", "content": marks.question}])
        except UsageError:
            continue
        if rendered is None:
            return {}
        if all(rendered.count(message["content"]) == 1 for message in messages):
            break
        rendered = None
    suffixes: dict[str, list[tuple[int, ...]]] = {}
    for role, text in texts.items():
        before, found, rendered_after = (rendered or "").partition(text)
        if found:
            suffixes[role] = _suffixes(tokenizer, before, control)
            rendered = rendered_after
    headers = {}
    for role, own in suffixes.items():
        others = {one for other, those in suffixes.items() if other != role for one in those}
        own = [one for one in own if one not in others]
        if own:
            headers[role] = own[0]
    if "user" not in headers:
        return None
    return headers | _result_headers(tokenizer, control, {one for those in suffixes.values() for one in those})


def _result_headers(
    tokenizer: TextTokenizer, control: Set[int], others: Set[tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shortest beginnings of tools' results that messages of `others` do not have."""
    found: dict[str, tuple[int, ...]] = {}
    for number, rendered in enumerate(_rendered_results(tokenizer)):
        own = [one for one in _suffixes(tokenizer, rendered, control) if one not in others]
        found |= {f"{_RESULT}{number}": one for one in own[:1]}
    return found


def _suffixes(tokenizer: TextTokenizer, rendered: str, control: Set[int]) -> list[tuple[int, ...]]:
    """The ends of a prompt that begin with a control token, the shortest first."""
    ids = tokenizer.encode(rendered, control_tokens=True)
    return [tuple(ids[at:]) for at in reversed(range(len(ids))) if ids[at] in control]


def _rendered_results(tokenizer: TextTokenizer) -> Iterator[str]:
    """The prompt up to a tool's result: as the chat template has it, and as plain text of the user."""
    marks = Marks.absent_from()
    asked = {"role": "user", "content": marks.question}
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": marks.chunks}
    plain = {"role": "user", "content": f"{RESULT_BEGINS}{marks.chunks}"}
    chats: list[Messages] = [[asked, called, result], [asked, {"role": "assistant", "content": marks.answer}, plain]]
    for messages in chats:
        try:
            rendered, found, _ = (tokenizer.render_chat(messages) or "").partition(marks.chunks)
        except UsageError:
            continue
        if found:
            yield rendered.removesuffix(">")


class ChunkFinder:
    """Makes prompts of parts of earlier text, found by content in one tokenizer's prompts. Thread-safe."""

    def __init__(
        self,
        table: TokenTable | None,
        runs: RunIndex,
        *,
        control: Set[int] = frozenset(),
        earlier: Callable[[str, str], Iterable[Path]] = lambda fingerprint, salt: (),  # noqa: ARG005
    ) -> None:
        """A finder of `runs` for the tokenizer with this `table`.

        Without a table roles are unknown, except for the tokens `control`: nothing is woven. `earlier` returns the
        paths that were stored before this process began under a fingerprint and a salt.
        """
        self._table = table
        self._runs = runs
        self._earlier = earlier
        self._keys: set[str] = set()
        self._control = np.array(sorted(control), np.int64)

    def prompt(
        self,
        token_ids: Sequence[int],
        start: tuple[int, ...],
        *,
        fingerprint: str,
        salt: str,
    ) -> Prompt:
        """The prompt with these tokens: parts that were found, new text, and the QUESTION.

        Ids are those of chunks of the model with this `fingerprint`, whose prompts begin with `start`. The QUESTION is
        what follows the last match, of new text at most `QUESTION_TOKENS` of the last message before the header of the
        answer. `add` the prompt if it is stored, so that its text is found again.
        """
        first = len(start) if tuple(token_ids[: len(start)]) == start else 0
        salt = chunk_salt(salt, token_ids[:first], start)
        key = self._key_of(fingerprint, salt)
        ids = np.fromiter(token_ids[first:], np.int64, len(token_ids) - first)
        text = _TokenText(ids, self._table, self._control)
        parts: list[PromptPart] = []
        for span, match in self._spans(ids, key, text):
            part_ids = tuple(token_ids[first + span.start : first + span.stop])
            in_place = self._roleless or text.stays_in_place(span) or (match is None and len(span) < LEAST)
            view = None if match is None or match.whole else RunView(match.run, match.offset)
            if in_place and view is not None and view.offset:
                view = None  # it is in another context there
            kind = PartKind.CHUNK if parts or not in_place else PartKind.SYSTEM
            source = NEW if match is None else FOUND
            name = chunk_id(fingerprint, salt, part_ids)
            parts.append(PromptPart(kind, part_ids, name, source, in_place, match is None, view))
        opening = [PromptPart(PartKind.START, tuple(token_ids[:first]))] if first else []
        question = tuple(token_ids[first + sum(map(len, parts)) :])
        return Prompt((*opening, *parts, PromptPart(PartKind.QUESTION, question)) if question else tuple(opening))

    def add(self, prompt: Prompt, start: tuple[int, ...], *, fingerprint: str, salt: str) -> None:
        """Let later prompts find the parts of a prompt that `prompt` made with these arguments."""
        path = [(part.id, part.token_ids) for part in prompt.parts if part.id is not None]
        self._runs.add(path, self._key_of(fingerprint, _salt_of(prompt, start, salt)))

    def answered(
        self, prompt: Prompt, answer_ids: Sequence[int], start: tuple[int, ...], *, fingerprint: str, salt: str
    ) -> PromptPart:
        """The part of a later prompt that has the QUESTION of a prompt and its answer but for the last token.

        Later prompts find it.
        """
        *parts, question = prompt.parts
        part_ids = (*question.token_ids, *answer_ids[:-1])
        name = chunk_id(fingerprint, _salt_of(prompt, start, salt), part_ids)
        turn = PromptPart(PartKind.TURN, part_ids, name, NEW, in_place=True, novel=True)
        self.add(Prompt((*parts, turn)), start, fingerprint=fingerprint, salt=salt)
        return turn

    def forget(self, is_gone: Callable[[ChunkId, Ids], bool]) -> frozenset[ChunkId]:
        """Find no text any more for whose chunk and ids `is_gone` is true; returns these chunks."""
        return self._runs.forget(is_gone)

    def clear(self) -> None:
        """Find nothing of what was added."""
        self._runs.clear()

    def _key_of(self, fingerprint: str, salt: str) -> str:
        """The key of a model's runs under a salt; what was stored before this process began is added under it."""
        key = chunk_id(fingerprint, salt, ())
        if key not in self._keys:
            if len(self._keys) >= _MOST_KEYS:
                self._keys.clear()
            self._keys.add(key)
            for path in self._earlier(fingerprint, salt):
                self._runs.add(path, key)
        return key

    def _spans(self, ids: Ints, key: str, text: "_TokenText") -> Iterator[tuple[Span, Match | None]]:
        """The spans of the parts before the question, each with its match (None: new text)."""
        done = 0
        for match in self._runs.beginning(ids[:-1], key):
            if match.whole or len(match.span) >= GRAM:
                yield match.span, match
                done = match.span.stop
        header = max(done, text.header_start)
        for match in self._runs.matches(ids, key, text.fences, within=Span(done, header)):
            if done < match.span.start:
                yield Span(done, match.span.start), None
            yield match.span, match
            done = match.span.stop
        asked = min(header, max(header - QUESTION_TOKENS, text.last_message))
        if asked - done >= LEAST:
            yield Span(done, asked), None

    @property
    def _roleless(self) -> bool:
        """Whether results of tools cannot be distinguished from other text, so that nothing is woven."""
        return self._table is None or self._table.headers is None


def with_usable_views(prompt: Prompt, *, weaves: bool, stores: bool) -> Prompt:
    """A prompt without those views that its request has no use for: each is cut out of its run, and stored."""
    return Prompt(
        tuple(
            replace(part, view=None)
            if part.view is not None and not (stores and (weaves or not part.view.offset))
            else part
            for part in prompt.parts
        )
    )


def _salt_of(prompt: Prompt, start: tuple[int, ...], salt: str) -> str:
    """The salt in the ids of a prompt's parts."""
    opening = prompt.parts[0]
    return chunk_salt(salt, opening.token_ids if opening.kind is PartKind.START else (), start)


class _TokenText:
    """The roles of one prompt's tokens. Positions are of tokens; a fence is before its position."""

    def __init__(self, ids: Ints, table: TokenTable | None, control: Ints) -> None:
        self._ids = ids
        self._table = table
        self._size = len(ids)
        self._results = np.zeros(self._size, bool)
        self.last_message = 0
        """Where the text of the last message of the user begins; 0 if roles are unknown."""
        if table is None:
            self._is_control = np.isin(ids, control)
        else:
            self._rows = np.minimum(ids, len(table.bits) - 1)
            self._bits = table.bits[self._rows]
            self._is_control = (self._bits & _CONTROL) > 0
            self._read_roles(table, table.headers or {})
        self.fences = np.flatnonzero(_changes(self._is_control)).tolist()
        """Positions where the role changes, which no match crosses."""

    @property
    def header_start(self) -> int:
        """Where the template's text before the answer begins; at least one token is behind it."""
        beside = self._is_control if self._table is None else self._is_control | ((self._bits & _BLANK) > 0)
        texts = np.flatnonzero(~beside[: self._size - 1])
        return int(texts[-1]) + 1 if len(texts) else 0

    def stays_in_place(self, span: Span) -> bool:
        """Whether this text is reused in its own context only: the template's, and what answers may have to repeat."""
        where = slice(span.start, span.stop)
        if self._table is None or self._is_control[where].any() or self._results[where].any():
            return True
        letters, digits, signs = self._table.characters[self._rows[where]].astype(np.int64).sum(axis=0)
        whole = max(1, int(letters + digits + signs))
        return bool(digits > _MOST_DIGITS * whole or signs > _MOST_SIGNS * whole)

    def _read_roles(self, table: TokenTable, headers: Mapping[str, tuple[int, ...]]) -> None:
        """Where tokens are of the template, and of tools' results.

        The text of a role ends where the next header begins.
        """
        begins = np.flatnonzero(self._is_control)
        events = []
        for role, header in headers.items():
            least = len(header)
            blank = (table.bits[list(header)] & _BLANK) > 0
            while least > 1 and blank[least - 1]:  # a text may begin with white space that joins the header's
                least -= 1
            starts = begins[begins + least <= self._size]
            for offset in range(least):
                starts = starts[self._ids[starts + offset] == header[offset]]
            for at in starts.tolist():
                stop = at + least
                while stop < min(at + len(header), self._size) and self._bits[stop] & _BLANK:
                    stop += 1
                self._is_control[at:stop] = True
                events.append((at, stop, role))
        events.sort()
        for (_, stop, role), (after, _, _) in pairwise([*events, (self._size, 0, "")]):
            self._results[stop:after] = role.startswith(_RESULT)
            self.last_message = stop if role == "user" else self.last_message


def _changes(flags: Flags) -> Flags:
    """Where a flag differs from the one before, and the first position."""
    return np.append(True, flags[1:] != flags[:-1])
