"""Least reusable first: f_r, what reuse of a segment has saved so far (Cache-Craft §3.3)."""

from collections.abc import Callable, Iterator

from chunkweave.store.eviction import EvictionPolicy, Ranking
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


def exact_or_lost(record: SegmentRecord) -> float:
    """The impact CCI (1 - beta') of a reuse, as far as it is known without the prompt: none where it is exact."""
    return 0.0 if record.exact else 1.0


class ReuseFrequencyPolicy(EvictionPolicy):
    """Evicts the least f_r, of equal ones the one that was stored or used longest ago.

    Each reuse adds 1 / max(impact, 1/|C|): the number of tokens of a segment that needed no recomputation, one for a
    segment that had to be recomputed whole. A segment starts at 0, and f_r does not age, as in the paper, which uses
    it to bound the variants of a chunk; here it chooses among all segments. All operations are O(log n), but for what
    `victim` passes over.
    """

    def __init__(self, impact: Callable[[SegmentRecord], float] = exact_or_lost) -> None:
        self._impact = impact
        self._frequencies = Ranking()

    def on_insert(self, record: SegmentRecord) -> None:
        self._frequencies.rank(record.id, 0.0)

    def on_hit(self, record: SegmentRecord) -> None:
        saved = 1.0 / max(self._impact(record), 1.0 / len(record))
        self._frequencies.rank(record.id, self._frequencies.of(record.id) + saved)

    def on_remove(self, segment: SegmentId) -> None:
        self._frequencies.remove(segment)

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        return self._frequencies.least(evictable)

    def ids(self) -> Iterator[SegmentId]:
        return iter(self._frequencies)


POLICY = ReuseFrequencyPolicy
