"""Finds chunks in a prompt that names none, from its token ids alone, which never change.

A prompt is cut where its content says so: at control tokens, at documents' tags, blank lines, headings, rules and items
of JSON arrays, else where a rolling hash of the tokens is low (content-defined chunking: LBFS, SOSP 2001; the gear hash
of FastCDC, ATC 2016). So a text that moves within a prompt, or into another one, is cut in the same places, except near
its ends. No text and no torch here: what tokens look like is in a `TokenTable`, made once for a tokenizer.
"""

import hashlib
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from chunkweave.config import PieceKind
from chunkweave.errors import UsageError
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id, chunk_salt
from chunkweave.prompt.rendering import Marks, Messages
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.types import ChunkId, Span

LEAST = 48
MEAN = 128
MOST = 512
"""Tokens of pieces that the rolling hash cuts; a shorter text between two boundaries is a `short` piece."""

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_CUT_BELOW = np.uint32((1 << 32) // (MEAN - LEAST))
"""A hash below this cuts: behind the first `LEAST` tokens on average every `MEAN - LEAST` tokens."""

_TAGS = ("article", "chunk", "context", "doc", "file", "item", "page", "passage", "result", "search", "source")
"""Names of documents' tags, or their beginnings: `<document>`, `<source id="1">`, `<search_result>`."""

_CONTROL, _BLANK, _HEADING, _RULE, _TAG, _OPENS, _CLOSES, _BARE, _NAME, _ITEM, _BRACE, _COMMA, _ENDS = (
    1 << bit for bit in range(13)
)

RESULT_BEGINS = "<tool_response>"
"""Begins a tool's result in plain text, as many chat templates have it."""

_RESULT = "result "
"""Beginning of the names of results' headers."""

_MOST_DIGITS = 0.12
_MOST_SIGNS = 0.12
"""Highest shares of a passage's characters without white space. Of XQuAD's paragraphs 99 % have at most .11 digits, all
at most .11 signs; half of this repository's Python has .16 signs and more, its JSON results .20 and more.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a prompt's tokens. Pieces follow each other without gaps and cover the prompt."""

    span: Span
    kind: PieceKind


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """What the tokens of one tokenizer look like, by id; the last row is for ids that it does not have.

    `bits` are properties, `lines` numbers of line breaks before, within and after the other characters `[ids, 3]`,
    `characters` numbers of letters, digits and other signs `[ids, 3]`. `headers` are the tokens before a message's text
    by role, each beginning with a control token, and those before results of tools; None: the chat template has no
    control tokens there, so roles are unknown.
    """

    bits: npt.NDArray[np.uint16]
    lines: npt.NDArray[np.uint8]
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
        rows = [_CONTROL if token in control else _bits(text) for token, text in enumerate(texts)]
        lines = [_line_breaks(text) for text in texts]
        return cls(
            np.array([*rows, _CONTROL], np.uint16),
            np.minimum([*lines, (0, 0, 0)], 255).astype(np.uint8),
            np.minimum([*map(_characters, texts), (0, 0, 0)], 255).astype(np.uint8),
            headers,
        )


def _bits(text: str) -> int:
    bare = text.lstrip()
    word = text.strip().lower()
    found = {
        _BLANK: not word,
        _HEADING: bare.startswith("#"),
        _RULE: bare.startswith(("---", "===", "***", "___")),
        _TAG: bare.startswith("<") and bare[1:].lower().startswith(_TAGS),
        _OPENS: bare == "<",
        _CLOSES: text.endswith("</"),
        _BARE: bare == "</",
        _NAME: word.startswith(_TAGS),
        _ITEM: "}," in text,
        _BRACE: text.rstrip().endswith("}"),
        _COMMA: bare.startswith(","),
        _ENDS: ">" in text,
    }
    return sum(bit for bit, is_so in found.items() if is_so)


def _line_breaks(text: str) -> tuple[int, int, int]:
    """Line breaks before, within and after the text's other characters; of white space all are "after"."""
    whole = text.count("\n")
    leading = len(text) - len(text.lstrip())
    if leading == len(text):
        return 0, 0, whole
    before = text.count("\n", 0, leading)
    after = text.count("\n", len(text.rstrip()))
    return before, whole - before - after, after


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


class Sketch:
    """Counts how often pieces were seen, in 256 KiB: a count-min sketch with a secret hash.

    Ids of pieces have the tenant's salt, and the hash has a secret, so requests cannot be made to collide with another
    tenant's. Counts are halved after `_HALVED_AFTER` pieces, so that old ones are forgotten. Thread-safe.
    """

    _ROWS = 4
    _CELLS = 1 << 16
    _HALVED_AFTER = 1 << 16
    _HALF = bytes(count >> 1 for count in range(256))

    def __init__(self) -> None:
        self._rows = [bytearray(self._CELLS) for _ in range(self._ROWS)]
        self._key = secrets.token_bytes(16)
        self._noted = 0
        self._lock = threading.Lock()

    def see(self, pieces: Iterable[ChunkId]) -> frozenset[ChunkId]:
        """Count each piece once; returns those that were seen before."""
        seen_before = set()
        with self._lock:
            for piece in dict.fromkeys(pieces):
                digest = hashlib.blake2b(piece.encode(), digest_size=2 * self._ROWS, key=self._key).digest()
                cells = list(zip(self._rows, struct.unpack(f"{self._ROWS}H", digest), strict=True))
                least = min(row[cell] for row, cell in cells)
                for row, cell in cells:  # conservative update: only counts that would be too low
                    row[cell] = max(row[cell], min(least + 1, 255))
                self._noted += 1
                if least:
                    seen_before.add(piece)
            if self._noted >= self._HALVED_AFTER:
                self._rows = [row.translate(self._HALF) for row in self._rows]
                self._noted = 0
        return frozenset(seen_before)


class ChunkFinder:
    """Finds pieces in prompts of one tokenizer, and makes prompts of parts of them. Thread-safe."""

    def __init__(self, table: TokenTable | None, exact: Set[PieceKind], *, control: Set[int] = frozenset()) -> None:
        """A finder for the tokenizer with this `table`, whose pieces of the kinds `exact` are never woven.

        Without a table only the rolling hash cuts, and at the tokens `control`; nothing is known to be a passage.
        """
        self._table = table
        self._exact = exact
        self._control = np.array(sorted(control), np.int64)
        self._sketch = Sketch()

    def pieces(self, token_ids: Sequence[int], *, system_tokens: int = 0) -> tuple[Piece, ...]:
        """The pieces of a prompt in order. The first `system_tokens` are a system prompt, whatever they look like."""
        if not token_ids:
            return ()
        text = _TokenText(np.fromiter(token_ids, np.int64, len(token_ids)), self._table, self._control)
        return tuple(text.pieces(system_tokens))

    def prompt(
        self,
        token_ids: Sequence[int],
        start: tuple[int, ...],
        *,
        fingerprint: str,
        salt: str,
        system_tokens: int = 0,
    ) -> Prompt:
        """The prompt with these tokens, its pieces as parts; counts each of them as seen.

        Ids are those of chunks of the model with this `fingerprint`, whose prompts begin with `start`. Pieces that are
        not woven are joined up to `LEAST` tokens, so that there are few parts. The last piece of text, with what
        follows it, is the QUESTION; the end of the last user message is, if only a short answer's beginning follows.
        """
        first = len(start) if tuple(token_ids[: len(start)]) == start else 0
        found = self.pieces(token_ids, system_tokens=system_tokens)
        parts = [PromptPart(PartKind.START, tuple(token_ids[:first]))] if first else []
        joined = [(span.within(first, len(token_ids)), exact) for span, exact in self._joined(found)]
        joined = [(span, exact) for span, exact in joined if len(span)]
        ids = [tuple(token_ids[span.start : span.stop]) for span, _ in joined]
        salt = chunk_salt(salt, token_ids[:first], start)
        named = [chunk_id(fingerprint, salt, one) for one in ids[:-1]]
        seen_before = self._sketch.see(named)
        for number, (one, name, (_, exact)) in enumerate(zip(ids, named, joined, strict=False)):
            kind = PartKind.CHUNK if number or not exact else PartKind.SYSTEM
            parts.append(PromptPart(kind, one, name, "found in the prompt", exact, name not in seen_before))
        parts += [PromptPart(PartKind.QUESTION, one) for one in ids[-1:]]
        return Prompt(tuple(parts))

    def _joined(self, pieces: Sequence[Piece]) -> Iterator[tuple[Span, bool]]:
        """Spans of parts, and whether each is only reused exactly. The last one is the question."""
        texts = [place for place, piece in enumerate(pieces) if piece.kind is not PieceKind.CONTROL]
        asked = texts[-1] if texts else 0
        begun = asked == len(pieces) - 1  # else the prompt ends with the template's text before an answer
        for place in reversed(texts if begun else ()):  # the beginning of the answer belongs to its question
            if not self._is_exact(pieces[place]):
                break
            if pieces[place].kind is PieceKind.QUESTION and pieces[-1].span.stop - pieces[place].span.stop < LEAST:
                asked = place
        start = pieces[0].span.start if pieces else 0
        for piece in pieces[:asked]:
            exact = self._is_exact(piece)
            if not exact and start < piece.span.start:
                yield Span(start, piece.span.start), True
                start = piece.span.start
            if not exact or piece.span.stop - start >= LEAST:
                yield Span(start, piece.span.stop), exact
                start = piece.span.stop
        if pieces:
            yield Span(start, pieces[-1].span.stop), True

    def _is_exact(self, piece: Piece) -> bool:
        return piece.kind is PieceKind.CONTROL or piece.kind in self._exact or self._roleless

    @property
    def _roleless(self) -> bool:
        """Whether system prompts cannot be distinguished from other text, so that nothing is woven."""
        return self._table is None or self._table.headers is None


class _TokenText:
    """The tokens of one prompt, cut into pieces. Positions are of tokens; a boundary is before its position."""

    def __init__(self, ids: Ints, table: TokenTable | None, control: Ints) -> None:
        self._ids = ids
        self._table = table
        self._size = len(ids)
        if table is None:
            self._bits = np.where(np.isin(ids, control), np.uint16(_CONTROL), np.uint16(0))
        else:
            self._rows = np.minimum(ids, len(table.bits) - 1)
            self._bits = table.bits[self._rows]

    @cached_property
    def _hashes(self) -> npt.NDArray[np.uint32]:
        return _gear(self._ids)

    def pieces(self, system_tokens: int) -> Iterator[Piece]:
        control = (self._bits & _CONTROL) > 0
        system = np.zeros(self._size, bool)
        results = np.zeros(self._size, bool)
        asked = 0
        if self._table is not None:
            control, system, results, asked = self._roles(control, self._table.headers or {})
        system[:system_tokens] = True
        fences = _changes(control) | _changes(system)
        hard, soft = self._boundaries(control)
        edges = np.flatnonzero(fences)
        starts = [
            start for a, b in pairwise([*edges.tolist(), self._size]) for start in self._cut(a, b, control, hard, soft)
        ]
        yield from self._kinds(np.array(starts), control, system, results, asked)

    def _roles(self, control: Flags, headers: Mapping[str, tuple[int, ...]]) -> tuple[Flags, Flags, Flags, int]:
        """Where tokens are of the template, of system messages, of tools' results, and where the last question begins.

        The text of a role ends where the next header begins.
        """
        begins = np.flatnonzero(control)
        control = control.copy()
        events = []
        for role, header in headers.items():
            least = len(header)
            blank = (self._table.bits[list(header)] & _BLANK) > 0 if self._table is not None else np.zeros(least, bool)
            while least > 1 and blank[least - 1]:  # a text may begin with white space that joins the header's
                least -= 1
            found = begins[begins + least <= self._size]
            for offset in range(1, least):
                found = found[self._ids[found + offset] == header[offset]]
            found = found[self._ids[found] == header[0]]
            for at in found.tolist():
                stop = at + least
                while stop < min(at + len(header), self._size) and self._bits[stop] & _BLANK:
                    stop += 1
                control[at:stop] = True
                events.append((at, stop, role))
        events.sort()
        system = np.zeros(self._size, bool)
        results = np.zeros(self._size, bool)
        asked = 0
        for (_, stop, role), (after, _, _) in pairwise([*events, (self._size, 0, "")]):
            if role == "system":
                system[stop:after] = True
            elif role.startswith(_RESULT):
                results[stop:after] = True
            elif role == "user" and stop < after:  # else the header of a result begins with it
                asked = stop
        return control, system, results, asked

    def _boundaries(self, control: Flags) -> tuple[Flags, Flags]:
        """Where documents begin, and where paragraphs, headings and items begin, `[tokens + 1]` each.

        A paragraph begins with the line breaks before it: the last one of a message is often followed by none.
        """
        hard = np.zeros(self._size + 1, bool)
        soft = np.zeros(self._size + 1, bool)
        if self._table is None:
            return hard, soft
        bits = self._bits
        lines = self._table.lines[self._rows].astype(np.int32)
        blank = (bits & _BLANK) > 0
        words = np.flatnonzero(~blank | control)
        # Line breaks between two tokens with text: after the first, of white space, and before the second.
        breaks = np.cumsum(np.where(blank, lines[:, 2], 0))
        between = lines[words[:-1], 2] + np.diff(breaks[words]) + lines[words[1:], 0]
        number = np.append(np.full(len(words[:1]), 2), between)
        begins = words[number > 0]
        blanks = np.append(words[:1], words[:-1] + 1)[number > 0]
        lone = bits[begins]
        following = bits[np.minimum(begins + 1, self._size - 1)]
        tags = ((lone & _TAG) > 0) | (((lone & _OPENS) > 0) & ((following & _NAME) > 0))
        hard[begins[tags]] = True
        hard[self._behind_numbers(begins[tags], self._table)] = True
        soft[blanks[(lone & (_HEADING | _RULE)) > 0]] = True
        soft[blanks[1:][(lone[:-1] & _RULE) > 0]] = True
        closes = np.flatnonzero(((bits[:-1] & _CLOSES) > 0) & ((bits[1:] & _NAME) > 0))
        hard[closes + 1 - ((bits[closes] & _BARE) > 0)] = True
        soft[blanks[number[number > 0] > 1]] = True
        long = np.diff(np.append(begins, self._size)) >= LEAST
        soft[blanks[1:][long[1:] & long[:-1]]] = True
        soft[np.flatnonzero(bits & _ITEM) + 1] = True
        soft[np.flatnonzero(((bits[:-1] & _BRACE) > 0) & ((bits[1:] & _COMMA) > 0)) + 2] = True
        return hard, soft

    def _behind_numbers(self, tags: Ints, table: TokenTable) -> Ints:
        """Where the text behind each of these tags that has a digit begins: a rank changes where the text moves."""
        ends = np.flatnonzero(self._bits & _ENDS)
        tags = tags[tags <= ends[-1]] if len(ends) else tags[:0]
        ends = ends[np.searchsorted(ends, tags)]
        digits = np.cumsum(table.characters[self._rows, 1], dtype=np.int64)
        return ends[(ends - tags < LEAST) & (digits[ends] > digits[tags])] + 1

    def _cut(self, a: int, b: int, control: Flags, hard: Flags, soft: Flags) -> Iterator[int]:
        """The starts of the pieces of positions `[a, b)`, which have one role."""
        if control[a]:
            yield a
            return
        inner = (np.flatnonzero(hard[a + 1 : b] | soft[a + 1 : b]) + a + 1).tolist()
        start = before = a
        for edge in (*inner, b):
            long = edge - before >= LEAST
            if long and start < before:  # short paragraphs are joined with each other only
                yield start
                start = before
            joins = edge - start < LEAST or self._hashes[edge - 1] >> 31
            if long or edge == b or hard[edge] or not joins or edge - start > MOST - LEAST:
                yield from self._cut_long(start, edge)
                start = edge
            before = edge

    def _cut_long(self, start: int, stop: int) -> Iterator[int]:
        """The starts of the pieces of a text without boundaries; whole if it has at most `MOST` tokens."""
        yield start
        if stop - start <= MOST:
            return
        low = (np.flatnonzero(self._hashes[start:stop] < _CUT_BELOW) + start + 1).tolist()
        place = 0
        while stop - start > LEAST:
            while place < len(low) and low[place] < start + LEAST:
                place += 1
            cut = low[place] if place < len(low) else stop
            cut = min(cut, start + MOST)
            if cut >= stop or (stop - cut < LEAST and stop - start <= MOST):
                return
            yield cut
            start = cut

    def _kinds(self, starts: Ints, control: Flags, system: Flags, results: Flags, asked: int) -> Iterator[Piece]:
        """The pieces that begin at `starts`, with their kinds."""
        stops = np.append(starts[1:], self._size)
        kinds = np.full(len(starts), PieceKind.CODE, object)
        if self._table is not None:
            counts = np.add.reduceat(self._table.characters[self._rows].astype(np.int64), starts, axis=0)
            whole = np.maximum(counts.sum(axis=1), 1)
            digits = counts[:, 1] / whole
            signs = counts[:, 2] / whole
            kinds[(signs <= _MOST_SIGNS) & (digits <= _MOST_DIGITS)] = PieceKind.PASSAGE
            kinds[digits > _MOST_DIGITS] = PieceKind.NUMBERS
        kinds[(kinds == PieceKind.PASSAGE) & results[starts]] = PieceKind.RESULTS
        kinds[stops - starts < LEAST] = PieceKind.SHORT
        kinds[system[starts]] = PieceKind.SYSTEM
        if asked:  # the end of the last user message
            of_user = np.flatnonzero((starts >= asked) & ~control[starts])
            ended = np.flatnonzero(control[starts] & (starts > asked))
            last = of_user[of_user < ended[0]] if len(ended) else of_user
            kinds[last[-1:]] = PieceKind.QUESTION
        kinds[control[starts]] = PieceKind.CONTROL
        for start, stop, kind in zip(starts.tolist(), stops.tolist(), kinds, strict=True):
            yield Piece(Span(start, stop), kind)


def _changes(flags: Flags) -> Flags:
    """Where a flag differs from the one before, and the first position."""
    return np.append(True, flags[1:] != flags[:-1])


def _gear(ids: Ints) -> npt.NDArray[np.uint32]:
    """The gear hash over each token and the 31 before it, `[tokens]`: the sum of each one's number, shifted by its age.

    Doubling the window takes 5 additions: h2[i] = h1[i] + (h1[i - 1] << 1), h4[i] = h2[i] + (h2[i - 2] << 2), ...
    """
    numbers = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers ^= numbers >> np.uint64(32)
    hashes = ((numbers * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(32)).astype(np.uint32)
    for age in (1, 2, 4, 8, 16):
        hashes[age:] += hashes[:-age] << np.uint32(age)
    return hashes
