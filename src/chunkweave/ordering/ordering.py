"""How chunks are put in order: who may choose, the contract of orderings, and the registry.

To add one: write `ordering/orderings/<name>.py` with a class that has `name` and `order`, end it with
`ORDERING = <the class>`, and write a test. Nothing else in the project needs to know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from chunkweave.errors import UsageError
from chunkweave.ordering import orderings
from chunkweave.plugins import plugin, plugin_names
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
        plugins="chunkweave.ordering.orderings",
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


ORDERINGS = plugin_names(orderings)
"""The names of all orderings."""


def make_ordering(name: str) -> Ordering:
    """The ordering of that name.

    Raises:
        UnknownMethodError: no such ordering; the message lists those there are.
    """
    ordering: Ordering = plugin(orderings, name, "ordering", "ORDERING")()
    return ordering
