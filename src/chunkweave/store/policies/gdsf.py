"""Greedy-dual-size with frequency: what is cheap to make again, large and seldom used goes first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


@dataclass(frozen=True, slots=True)
class _Rank:
    frequency: int
    priority: float


class GDSFPolicy:
    """Evicts the least priority = clock + cost * frequency / size (Cherkasova 1998, "GDSF"; RAGCache §5.1 compares it).

    `frequency` counts uses since the segment came in, storing being the first; `size` is its bytes in this tier; `cost`
    is what making it again takes, in any unit. `clock` is the greatest priority evicted so far, so that a segment
    gets older by the evictions it survives. Removals that are no evictions leave the clock alone.

    The default cost is the number of tokens. A segment's bytes grow with its tokens too, so that with one model
    and one codec this ranks by frequency and age alone; a cost that grows faster (attention over a long
    context) is to be passed in. Updates are O(1), `victim` is O(n).
    """

    def __init__(self, cost: Callable[[SegmentRecord], float] = len) -> None:
        self._cost = cost
        self._ranks: dict[SegmentId, _Rank] = {}
        self._clock = 0.0
        self._proposed: SegmentId | None = None

    def on_insert(self, record: SegmentRecord) -> None:
        self._rank(record, 1)

    def on_hit(self, record: SegmentRecord) -> None:
        self._rank(record, self._ranks[record.id].frequency + 1)

    def on_remove(self, segment: SegmentId) -> None:
        rank = self._ranks.pop(segment, None)
        if rank is not None and segment == self._proposed:
            self._clock = max(self._clock, rank.priority)
        self._proposed = None

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        self._proposed = self._least(evictable)
        return self._proposed

    def ids(self) -> Iterator[SegmentId]:
        return iter(tuple(self._ranks))

    def _least(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        least = min(self._ranks, key=self._priority, default=None)
        if least is None or evictable(least):
            return least
        return min(filter(evictable, self._ranks), key=self._priority, default=None)

    def _priority(self, segment: SegmentId) -> float:
        return self._ranks[segment].priority

    def _rank(self, record: SegmentRecord, frequency: int) -> None:
        # Entered anew, not in place: of equal priorities the one ranked longest ago comes first.
        self._ranks.pop(record.id, None)
        priority = self._clock + self._cost(record) * frequency / record.nbytes
        self._ranks[record.id] = _Rank(frequency, priority)


POLICY = GDSFPolicy
