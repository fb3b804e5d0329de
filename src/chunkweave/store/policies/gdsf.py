"""Greedy-dual-size with frequency: what is cheap to make again, large and seldom used goes first."""

from collections.abc import Callable

from chunkweave.store.eviction import AgedRanking, RankedPolicy
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class GDSFPolicy(RankedPolicy):
    """Evicts the least priority = clock + cost * frequency / size (Cherkasova 1998, "GDSF"; RAGCache §5.1 compares it).

    `frequency` counts uses since the segment came in, storing being the first; `size` is its bytes in this tier; `cost`
    is what making it again takes, in any unit. `clock` is the greatest priority evicted so far, so that a segment
    gets older by the evictions it survives. Removals that are no evictions leave the clock alone.

    The default cost is the number of tokens. A segment's bytes grow with its tokens too, so that with one model
    and one codec this ranks by frequency and age alone; a cost that grows faster (attention over a long
    context) is to be passed in. All operations are O(log n), but for what `victim` passes over.
    """

    def __init__(self, cost: Callable[[SegmentRecord], float] = len) -> None:
        super().__init__(AgedRanking())
        self._cost = cost
        self._frequencies: dict[SegmentId, int] = {}

    def on_insert(self, record: SegmentRecord) -> None:
        self._rank(record, 1)

    def on_hit(self, record: SegmentRecord) -> None:
        self._rank(record, self._frequencies[record.id] + 1)

    def on_remove(self, segment: SegmentId) -> None:
        super().on_remove(segment)
        self._frequencies.pop(segment, None)

    def _rank(self, record: SegmentRecord, frequency: int) -> None:
        self._frequencies[record.id] = frequency
        self._ranking.rank(record.id, self._cost(record) * frequency / record.nbytes)


POLICY = GDSFPolicy
