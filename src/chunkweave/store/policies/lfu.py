"""Least frequently used, ties by least recently used."""

from collections.abc import Callable, Iterator

from chunkweave.store.eviction import EvictionPolicy, Ranking
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class LFUPolicy(EvictionPolicy):
    """Evicts what was used least often since it came in; storing counts as the first use.

    Counts do not age: what was popular once stays. `gdsf` is the one that ages. All operations are O(log n), but for
    what `victim` passes over.
    """

    def __init__(self) -> None:
        self._uses = Ranking()

    def on_insert(self, record: SegmentRecord) -> None:
        self._uses.rank(record.id, 1)

    def on_hit(self, record: SegmentRecord) -> None:
        self._uses.rank(record.id, self._uses.of(record.id) + 1)

    def on_remove(self, segment: SegmentId) -> None:
        self._uses.remove(segment)

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        return self._uses.least(evictable)

    def ids(self) -> Iterator[SegmentId]:
        return iter(self._uses)


POLICY = LFUPolicy
