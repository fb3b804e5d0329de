"""Least recently used: the plain baseline, and the store's default."""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from chunkweave.store.eviction import EvictionPolicy
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class LRUPolicy(EvictionPolicy):
    """Evicts what was used longest ago. Updates are O(1); `victim` passes over what may not go."""

    def __init__(self) -> None:
        self._by_age: OrderedDict[SegmentId, None] = OrderedDict()

    def on_insert(self, record: SegmentRecord) -> None:
        self._by_age[record.id] = None
        self._by_age.move_to_end(record.id)

    def on_hit(self, record: SegmentRecord) -> None:
        self._by_age.move_to_end(record.id)

    def on_remove(self, segment: SegmentId) -> None:
        self._by_age.pop(segment, None)

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        return next((segment for segment in self._by_age if evictable(segment)), None)

    def ids(self) -> Iterator[SegmentId]:
        return iter(tuple(self._by_age))


POLICY = LRUPolicy
