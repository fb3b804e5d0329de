"""How old segments are: what a time to live goes by."""

from collections.abc import Callable, Iterable

from chunkweave.types import SegmentId


class Ages:
    """When each segment was computed, in seconds since the epoch; a segment moved between levels does not get younger.

    What was there before this process is asked for once (`stored_at_s`); if nobody knows, it counts from now.
    Not thread-safe; interrupted at any point, a segment may at worst get older.
    """

    def __init__(
        self,
        ttl_s: float | None,
        clock: Callable[[], float],
        stored_at_s: Callable[[SegmentId], float | None],
        ageless: frozenset[SegmentId] = frozenset(),
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored_at_s = stored_at_s
        self._ageless = ageless
        self._born_s: dict[SegmentId, float] = {}

    def born(self, segment: SegmentId) -> None:
        """It was computed now."""
        if self._ttl_s is not None:
            self._born_s[segment] = self._clock()

    def expired(self, segments: Iterable[SegmentId], now_s: float | None = None) -> list[SegmentId]:
        """Those of `segments` that have outlived their time."""
        if self._ttl_s is None:
            return []
        oldest_s = (self._clock() if now_s is None else now_s) - self._ttl_s
        return [s for s in segments if s not in self._ageless and self._since(s) <= oldest_s]

    def keep_only(self, segments: Iterable[SegmentId]) -> None:
        """Forget all others."""
        kept = set(segments)
        self._born_s = {segment: born_s for segment, born_s in tuple(self._born_s.items()) if segment in kept}

    def _since(self, segment: SegmentId) -> float:
        if segment not in self._born_s:
            stored_at_s = self._stored_at_s(segment)
            self._born_s[segment] = self._clock() if stored_at_s is None else stored_at_s
        return self._born_s[segment]
