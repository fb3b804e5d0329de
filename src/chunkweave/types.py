"""Plain values that every layer shares; no torch here."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import NewType

ChunkId = NewType("ChunkId", str)
"""32 hex digits: BLAKE2b-128 over model fingerprint, cache salt and token ids."""

SegmentId = NewType("SegmentId", str)
"""32 hex digits: BLAKE2b-128 over a chunk id and the context that the chunk was computed in."""

Context = tuple[ChunkId, ...]
"""Ids of the parts before a chunk, in prompt order; empty: computed alone (after BOS at most)."""


class CacheUse(StrEnum):
    """What a request does with stored KV: use and keep it, only read what is stored, or neither."""

    USE = "use"
    READ = "read"
    OFF = "off"


MOST_SOURCE_CHARACTERS = 1024
"""Most characters of a source that are kept: with chunks, in records and files of segments, in reports."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of retrieved text.

    `source` names its origin (a file, a URL, a title). It is shown in reports, never tokenized, and cut to
    `MOST_SOURCE_CHARACTERS` characters.

    >>> from chunkweave import Chunk
    >>> Chunk("The tower has 230 steps.", source="tower.md").source
    'tower.md'
    """

    text: str
    source: str = ""

    def __post_init__(self) -> None:
        if len(self.source) > MOST_SOURCE_CHARACTERS:
            object.__setattr__(self, "source", self.source[:MOST_SOURCE_CHARACTERS])


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Token positions `start <= p < stop` of one prompt."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a span: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def positions(self) -> range:
        """The positions of this span, ascending."""
        return range(self.start, self.stop)

    def within(self, start: int, stop: int) -> "Span":
        """The intersection with `[start, stop)`; an empty span if there is none."""
        first = max(self.start, start)
        return Span(first, max(first, min(self.stop, stop)))


@dataclass(frozen=True, slots=True)
class Scattered:
    """Single token positions within one part of a prompt: `start` plus each of `offsets`, unordered, without
    duplicates.

    A ranking rarely picks neighbours, and as spans they would be one object per token. `within` is the number of tokens
    of the part if the caller guarantees that all offsets are below it; checking would take as long as choosing them.
    """

    start: int
    offsets: tuple[int, ...]
    within: int | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    def positions(self) -> list[int]:
        """The prompt positions, in the order of the offsets."""
        return [self.start + offset for offset in self.offsets]

    def hull(self) -> Span:
        """A span that covers all positions: the whole part if `within` is known, else from the lowest to the highest
        (at least one needed).
        """
        if self.within is not None:
            return Span(self.start, self.start + self.within)
        return Span(self.start + min(self.offsets), self.start + max(self.offsets) + 1)


def spans_of(positions: Iterable[int]) -> tuple[Span, ...]:
    """The fewest spans that cover exactly `positions` (any order, duplicates allowed).

    >>> spans_of([4, 2, 3, 9])
    (Span(start=2, stop=5), Span(start=9, stop=10))
    """
    return tuple(_runs(sorted(set(positions))))


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The fewest spans that cover exactly the positions of `spans` (any order, overlaps allowed).

    >>> joined([Span(4, 6), Span(1, 2), Span(2, 5), Span(9, 9)])
    (Span(start=1, stop=6),)
    """
    merged: list[Span] = []
    for span in sorted(filter(len, spans), key=attrgetter("start")):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def _runs(ascending: list[int]) -> Iterator[Span]:
    start = 0
    for i in range(1, len(ascending) + 1):
        if i == len(ascending) or ascending[i] != ascending[i - 1] + 1:
            yield Span(ascending[start], ascending[i - 1] + 1)
            start = i


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How attention scores, already scaled by 1/sqrt(head_dim), are changed before the softmax.

    With a `cap`, a score s becomes cap * tanh(s / cap), before keys are masked (Gemma 2). `sinks` are logits, one per
    query head, that join the softmax but belong to no key, so the weights sum to less than 1 (gpt-oss).
    """

    cap: float | None = None
    sinks: tuple[float, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether scores stay unchanged."""
        return self.cap is None and not self.sinks


PLAIN_SCORES = ScoreRule()


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a decoder-only transformer that planning and cost models need."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    windows: tuple[int | None, ...] = ()
    """Per layer, the number of keys up to its own that a token sees (None: all); empty if all layers see all keys."""
    score_cap: float | None = None
    """Soft cap of attention scores; None without one."""
    sinks: tuple[tuple[float, ...], ...] = ()
    """Per layer, the sink logit of each query head; empty without sinks. They are weights: no configuration has them.
    """

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, in keys; None without one."""
        return self.windows[layer] if self.windows else None

    def sees_all(self, layer: int, keys: int) -> bool:
        """Whether a token at position `keys - 1` sees all `keys` keys on this layer."""
        window = self.window(layer)
        return window is None or window >= keys

    def scores(self, layer: int) -> ScoreRule:
        """The score rule of a layer."""
        return ScoreRule(self.score_cap, self.sinks[layer] if self.sinks else ())

    def kv_elements_per_token(self) -> int:
        """Elements of K and V per token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
