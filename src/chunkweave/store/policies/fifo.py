"""First in, first out: uses do not count."""

from collections.abc import Callable, Iterator

from chunkweave.store.eviction import EvictionPolicy
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class FIFOPolicy(EvictionPolicy):
    """Evicts what was stored longest ago. All updates are O(1)."""

    def __init__(self) -> None:
        self._by_arrival: dict[SegmentId, None] = {}

    def on_insert(self, record: SegmentRecord) -> None:
        self._by_arrival[record.id] = None

    def on_remove(self, segment: SegmentId) -> None:
        self._by_arrival.pop(segment, None)

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        return next((segment for segment in self._by_arrival if evictable(segment)), None)

    def ids(self) -> Iterator[SegmentId]:
        return iter(tuple(self._by_arrival))


POLICY = FIFOPolicy
