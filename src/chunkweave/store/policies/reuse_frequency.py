"""Least reusable first: f_r, what reuse of a segment has saved so far (Cache-Craft §3.3)."""

from collections.abc import Callable

from chunkweave.store.eviction import RankedPolicy
from chunkweave.store.records import SegmentRecord


def exact_or_lost(record: SegmentRecord) -> float:
    """The impact CCI (1 - beta') of a reuse, as far as it is known without the prompt: none where it is exact."""
    return 0.0 if record.exact else 1.0


class ReuseFrequencyPolicy(RankedPolicy):
    """Evicts the least f_r, of equal ones the one that was stored or used longest ago.

    Each reuse adds 1 / max(impact, 1/|C|): the number of tokens of a segment that needed no recomputation, one for a
    segment that had to be recomputed whole. A segment starts at 0, and f_r does not age, as in the paper, which uses
    it to bound the variants of a chunk; here it chooses among all segments. All operations are O(log n), but for what
    `victim` passes over.
    """

    def __init__(self, impact: Callable[[SegmentRecord], float] = exact_or_lost) -> None:
        super().__init__()
        self._impact = impact

    def on_insert(self, record: SegmentRecord) -> None:
        self._ranking.rank(record.id, 0.0)

    def on_hit(self, record: SegmentRecord) -> None:
        saved = 1.0 / max(self._impact(record), 1.0 / len(record))
        self._ranking.rank(record.id, self._ranking.of(record.id) + saved)


POLICY = ReuseFrequencyPolicy
