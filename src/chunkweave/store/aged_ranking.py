"""A ranking that gets older by evictions: what the greedy-dual family of policies is made on."""

from collections.abc import Callable, Iterator

from chunkweave.store.ranking import Ranking
from chunkweave.types import SegmentId


class AgedRanking:
    """Segments by priority = clock + worth (RAGCache §5.1; GreedyDual-Size before it).

    The clock is the greatest priority evicted so far, so that a segment gets older by the evictions it survives.
    Removals that are no evictions leave the clock alone.
    """

    def __init__(self) -> None:
        self._ranking = Ranking()
        self._clock = 0.0
        self._proposed: SegmentId | None = None

    def __contains__(self, segment: SegmentId) -> bool:
        return segment in self._ranking

    def __iter__(self) -> Iterator[SegmentId]:
        return iter(self._ranking)

    def of(self, segment: SegmentId) -> float | None:
        """A segment's priority; None if it is not ranked."""
        priority: float | None = self._ranking.of(segment)
        return priority

    def rank(self, segment: SegmentId, worth: float) -> None:
        """Give a segment its priority as of now."""
        self._ranking.rank(segment, self._clock + worth)

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The evictable segment with the least priority; if it is what is removed next, that was an eviction."""
        self._proposed = self._ranking.least(evictable)
        return self._proposed

    def remove(self, segment: SegmentId) -> None:
        """Forget a segment, and move the clock on if it was evicted."""
        priority = self.of(segment)
        if priority is not None and segment == self._proposed:
            self._clock = max(self._clock, priority)
        self._proposed = None
        self._ranking.remove(segment)
