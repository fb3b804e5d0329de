"""Ordering of chunks: who may choose, the contract of an ordering, and the bundled ones.

An ordering is a class with `name` and `order`. It is found by name in `plugins.ORDERINGS`, in this package or another
one (docs/extending.md); no other registration is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from chunkweave.errors import UsageError
from chunkweave.plugins import ORDERINGS
from chunkweave.settings import PROGRAMS, SettingsGroup, setting
from chunkweave.store.prefix_trie import TreePlace
from chunkweave.types import ChunkId


class ChunkOrder(StrEnum):
    """Whether a request's chunks may be reordered."""

    FREE = "free"
    """Any order is allowed; the caller's is by relevance, best first."""
    FIXED = "fixed"
    """Keep the caller's order."""

    @classmethod
    def parse(cls, text: str) -> "ChunkOrder":
        """Parse a name.

        Raises:
            UsageError: no such order.
        """
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"unknown order {text!r}; there are: {', '.join(cls)}") from None


@dataclass(frozen=True, slots=True)
class OrderingConfig(SettingsGroup, places=PROGRAMS):
    """Order of chunks (CRAFT §4), and promotion.

    An exact method stores an exact path only over promoted chunks; without a `promotion_threshold` over all. A weaving
    method computes the chunk after the exact prefix in full, so that the prefix grows, once `continuation_threshold`
    requests began with that path. This costs several times what weaving saves each later request, so the whole path
    must recur; by CRAFT's rule, which counts the chunk, nearly every request would pay for it.

    >>> from chunkweave import Engine, OrderingConfig
    >>> with Engine.load("reader", order="free", ordering=OrderingConfig("frequency")) as engine:
    ...     engine.generate("Who leads?", ["Otto leads.", "The tower is old."]).report.order
    'frequency'
    """

    ordering: str = setting(
        "frequency",
        "Ordering, if the order is free.",
        plugins=ORDERINGS,
    )
    window: int = 1000
    """Latest requests in which chunks are counted (CRAFT §6.2.4)."""
    promotion_threshold: int | None = setting(
        None,
        "With a free order, promote a chunk after this many counted requests with it (CRAFT §6.2.5); none: all.",
        positive=True,
    )
    continuation_threshold: int | None = 4
    """With a free order, weaving methods grow a prefix after this many counted requests with it; none: never."""
    path_chunks: int | None = None
    """With full and prefix, number of a prompt's first chunks that are stored (RAGCache §8); none: all."""
    deduplicate: bool = setting(
        True, "Leave out chunks that an earlier turn of the conversation has (CRAFT §4.3); it changes what is read."
    )

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        make_ordering(self.ordering)


@dataclass(frozen=True, slots=True)
class Unordered:
    """The chunks of one request, best first, and what is known of them.

    `counts` is the number of recent requests for each, `tokens` its length. `place` is the node of the stored-path tree
    that ends the parts before them; None if these are not stored, so nothing after them can be.
    """

    chunks: Sequence[ChunkId]
    counts: Sequence[int]
    tokens: Sequence[int]
    place: TreePlace[ChunkId] | None = None


class Ordering(Protocol):
    """Decides the order of chunks."""

    @property
    def name(self) -> str:
        """The name on the command line and in reports."""

    def order(self, unordered: Unordered) -> list[int]:
        """Indices of all chunks in their new order.

        Pure: equal sets with equal counts get equal orders, unless the ordering keeps the caller's.
        """


def make_ordering(name: str) -> Ordering:
    """The ordering with this name.

    Raises:
        UnknownMethodError: no such ordering; the message lists the known ones.
        UsageError: it cannot be imported.
    """
    ordering: Ordering = ORDERINGS.get(name)()
    return ordering


class OriginalOrder:
    """`original`: keeps the caller's order, best first. The baseline for other orderings."""

    name = "original"

    def order(self, unordered: Unordered) -> list[int]:
        """The given order."""
        return list(range(len(unordered.chunks)))


class FrequencyOrder:
    """`frequency`: by decreasing count, so that shared chunks have the same place in every request (CRAFT §4.2).

    The paper's `sort(C, -freq(c))` does not define ties. Here a chunk that continues the path of the chunks before it
    in the tree of stored paths goes first, then the one with the lower id: equal sets get equal orders.
    """

    name = "frequency"

    def order(self, unordered: Unordered) -> list[int]:
        """The chunks by count."""
        counts, chunks, place = unordered.counts, unordered.chunks, unordered.place
        waiting = sorted(range(len(chunks)), key=lambda number: (-counts[number], chunks[number]))
        ordered = []
        while waiting and place is not None:
            chosen, place = _next(unordered, waiting, place)
            waiting.remove(chosen)
            ordered.append(chosen)
        return [*ordered, *waiting]


def _next(
    unordered: Unordered, waiting: Sequence[int], place: TreePlace[ChunkId]
) -> tuple[int, TreePlace[ChunkId] | None]:
    """The first of `waiting`, among those with the highest count, that is stored after `place`, with its node."""
    for number in waiting:
        if unordered.counts[number] != unordered.counts[waiting[0]]:
            break
        below = place.child(unordered.chunks[number])
        if below is not None:
            return number, below
    return waiting[0], None
