"""`frequency`: what is asked for most stands first (CRAFT §4.2)."""

from collections.abc import Sequence

from chunkweave.ordering.ordering import Unordered
from chunkweave.store.prefix_trie import TreePlace
from chunkweave.types import ChunkId


class FrequencyOrder:
    """Chunks by falling access count, so that shared ones stand at the same place in different requests.

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


ORDERING = FrequencyOrder
