"""Least frequently used, ties by least recently used."""

from chunkweave.store.eviction import RankedPolicy
from chunkweave.store.records import SegmentRecord


class LFUPolicy(RankedPolicy):
    """Evicts what was used least often since it came in; storing counts as the first use.

    Counts do not age: what was popular once stays. `gdsf` is the one that ages. All operations are O(log n), but for
    what `victim` passes over.
    """

    def on_insert(self, record: SegmentRecord) -> None:
        self._ranking.rank(record.id, 1)

    def on_hit(self, record: SegmentRecord) -> None:
        self._ranking.rank(record.id, self._ranking.of(record.id) + 1)


POLICY = LFUPolicy
