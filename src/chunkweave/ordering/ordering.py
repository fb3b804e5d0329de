"""How chunks are put in order: who may choose, what an ordering is, and those of this package.

An ordering is a class that has `name` and `order`; it is found by its name in `plugins.ORDERINGS`, from this package
or another one (docs/extending.md). Nothing else in the project needs to know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from chunkweave.errors import UsageError
from chunkweave.plugins import ORDERINGS
from chunkweave.settings import PROGRAMS, SERVERS, Place, configuration, setting
from chunkweave.store.prefix_trie import TreePlace
from chunkweave.types import ChunkId


class ChunkOrder(StrEnum):
    """What a request says about the order of its chunks."""

    FREE = "free"
    """They may stand in any order; the caller's is how well they fit, the best first."""
    FIXED = "fixed"
    """They stand where the caller put them."""

    @classmethod
    def parse(cls, text: str) -> "ChunkOrder":
        """By its name.

        Raises:
            UsageError: there is no such order.
        """
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"unknown order {text!r}; there are: {', '.join(cls)}") from None


_EVERY_PATH = {Place.COMMANDS: None, Place.ENGINE: None, Place.VLLM: None}
"""Commands and servers keep every exact path: a command counts its own few questions only."""


@configuration(PROGRAMS)
@dataclass(frozen=True, slots=True)
class OrderingConfig:
    """How requests of free order are arranged (CRAFT §4), and what is promoted.

    An exact method keeps an exact path only over promoted chunks; without a `promotion_threshold` over all. A method
    that weaves computes the chunk right behind the exact prefix in full, so that the prefix grows, once
    `continuation_threshold` requests began with that path. That costs several times what weaving saves each later
    request, so it is the path that must come back; by CRAFT's rule, the chunk, nearly every request would pay for it.

    >>> from chunkweave import Engine, OrderingConfig
    >>> with Engine.load("reader", order="free", ordering=OrderingConfig("tree-greedy")) as engine:
    ...     engine.generate("Who leads?", ["Otto leads.", "The tower is old."]).report.order
    'tree-greedy'
    """

    ordering: str = setting(
        "frequency",
        "How a free order is chosen.",
        plugins=ORDERINGS,
    )
    window: int = setting(
        1000,
        "Latest requests over which chunks are counted (CRAFT §6.2.4).",
        name="ordering_window",
        places=SERVERS,
        least=1,
    )
    promotion_threshold: int | None = setting(
        2,
        "With a free order, promote a chunk that so many of the counted requests took (CRAFT §6.2.5); none: all.",
        defaults=_EVERY_PATH,
        least=1,
    )
    continuation_threshold: int | None = setting(
        4,
        "With a free order, weaving methods grow a prefix that so many counted requests began with; none: never.",
        defaults={Place.COMMANDS: None},
        least=1,
    )
    path_chunks: int | None = setting(
        None,
        "With full and prefix, store only so many of a prompt's first chunks (RAGCache §8); none: all.",
        least=1,
    )

    def __post_init__(self) -> None:
        make_ordering(self.ordering)


@dataclass(frozen=True, slots=True)
class Unordered:
    """The chunks of one request, the best first, and what is known of them.

    `counts` says how many recent requests asked for each, `tokens` how long each is. `place` is the end of what stands
    before them in the tree of stored paths; None if that is not stored, so that nothing behind it can be.
    """

    chunks: Sequence[ChunkId]
    counts: Sequence[int]
    tokens: Sequence[int]
    place: TreePlace[ChunkId] | None = None

    def by_count(self) -> list[int]:
        """Their numbers by falling count, of equal counts by id."""
        return sorted(range(len(self.chunks)), key=lambda number: (-self.counts[number], self.chunks[number]))


class Ordering(Protocol):
    """Decides in which order chunks stand."""

    @property
    def name(self) -> str:
        """As it is written on the command line and in reports."""

    def order(self, given: Unordered) -> list[int]:
        """The numbers of all chunks as they are to stand. Pure: of equal sets with equal counts the orders are equal,
        unless the ordering is to keep the caller's.
        """


def make_ordering(name: str) -> Ordering:
    """The ordering of that name.

    Raises:
        UnknownMethodError: no such ordering; the message lists those there are.
        UsageError: it cannot be imported.
    """
    ordering: Ordering = ORDERINGS.get(name)()
    return ordering


class OriginalOrder:
    """`original`: chunks stand as they came, the best first. What the other orderings are compared with."""

    name = "original"

    def order(self, given: Unordered) -> list[int]:
        """As they are."""
        return list(range(len(given.chunks)))


class FrequencyOrder:
    """`frequency`: by falling count, so that shared chunks come at the same place in every request (CRAFT §4.2).

    The paper's `sort(C, -freq(c))` says nothing of equal counts. Of these a chunk goes first that continues the path of
    the chunks before it in the tree of stored paths, then the one of the lesser id: equal sets get equal orders.
    """

    name = "frequency"

    def order(self, given: Unordered) -> list[int]:
        """The chunks by count."""
        return by_frequency(given, given.by_count(), given.place)


def by_frequency(given: Unordered, by_count: Sequence[int], place: TreePlace[ChunkId] | None) -> list[int]:
    """`by_count`, some numbers of `given` by falling count, with ties broken by what is stored behind `place`."""
    waiting, ordered = list(by_count), []
    while waiting and place is not None:
        chosen, place = _next(given, waiting, place)
        waiting.remove(chosen)
        ordered.append(chosen)
    return [*ordered, *waiting]


def _next(given: Unordered, waiting: Sequence[int], place: TreePlace[ChunkId]) -> tuple[int, TreePlace[ChunkId] | None]:
    """Of the first of `waiting` and those of its count the first that is stored behind `place`, and where that is."""
    for number in waiting:
        if given.counts[number] != given.counts[waiting[0]]:
            break
        below = place.child(given.chunks[number])
        if below is not None:
            return number, below
    return waiting[0], None


MOST_NODES = 100
"""Nodes looked at before the best path found so far is taken: of ten chunks, drawn by Zipf's law from 1000 and every
path stored, 20 nodes already save 99.8 % of what 5000 save.
"""


class TreeGreedyOrder:
    """`tree-greedy`: first the stored path with the most tokens that chunks of this request make up, then the others.

    It saves the most that any order can save this request. Chunks that continue no path follow by falling count, so
    that what is stored anew is what will be asked for again.
    """

    name = "tree-greedy"

    def order(self, given: Unordered) -> list[int]:
        """The heaviest path, then by count."""
        by_count = given.by_count()
        if given.place is None:
            return by_count
        path = heaviest_path(given, by_count, given.place)
        taken = set(path)
        return [*path, *by_frequency(given, [number for number in by_count if number not in taken], None)]


def heaviest_path(given: Unordered, numbers: Sequence[int], place: TreePlace[ChunkId]) -> list[int]:
    """Those of `numbers`, in order, whose path behind `place` is stored and has the most tokens.

    Of equal ones that which is found first, trying `numbers` in their order: a depth-first search that leaves a branch
    as soon as all that is left could not make it the best. A chunk that comes twice is followed once.
    """
    own: dict[ChunkId, int] = {}
    for number in numbers:
        own.setdefault(given.chunks[number], number)
    last_first = list(own)[::-1]
    tokens_of = {key: given.tokens[number] for key, number in own.items()}
    best: tuple[ChunkId, ...] = ()
    best_tokens = visited = 0
    pending = [(place, best, 0, sum(tokens_of.values()))]
    while pending and visited < MOST_NODES:
        node, path, tokens, left_tokens = pending.pop()
        if tokens + left_tokens <= best_tokens:
            continue
        visited += 1
        if tokens > best_tokens:
            best, best_tokens = path, tokens
        for key, child in node.children_among(last_first):
            if key not in path:
                more = tokens_of[key]
                pending.append((child, (*path, key), tokens + more, left_tokens - more))
    return [own[key] for key in best]
