"""The contract of orderings, and the registry.

To add one: write `ordering/orderings/<name>.py` with a class that has `name` and `order`, add a line to `ORDERINGS`,
and a test. Nothing else in the project needs to know.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from chunkweave.errors import UnknownMethodError
from chunkweave.trees.knowledge_tree import TreePlace
from chunkweave.types import ChunkId


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


ORDERINGS = {
    "original": "chunkweave.ordering.orderings.original:OriginalOrder",
    "frequency": "chunkweave.ordering.orderings.frequency:FrequencyOrder",
    "tree-greedy": "chunkweave.ordering.orderings.tree_greedy:TreeGreedyOrder",
}


def make_ordering(name: str) -> Ordering:
    """The ordering of that name.

    Raises:
        UnknownMethodError: no such ordering; the message lists those there are.
    """
    if name not in ORDERINGS:
        raise UnknownMethodError(f"unknown ordering {name!r}; there are: {', '.join(ORDERINGS)}")
    module, _, attribute = ORDERINGS[name].partition(":")
    factory: Callable[[], Ordering] = getattr(import_module(module), attribute)
    return factory()
