"""Least frequently used, ties by least recently used."""

from collections.abc import Callable, Iterator

from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


class LFUPolicy:
    """Evicts what was used least often since it came in; storing counts as the first use.

    Counts do not age: what was popular once stays. `gdsf` is the one that ages. Updates are O(1), `victim` is O(n).
    """

    def __init__(self) -> None:
        self._uses: dict[SegmentId, tuple[int, int]] = {}
        self._ticks = 0

    def on_insert(self, record: SegmentRecord) -> None:
        self._use(record.id, 1)

    def on_hit(self, record: SegmentRecord) -> None:
        count, _ = self._uses[record.id]
        self._use(record.id, count + 1)

    def on_remove(self, segment: SegmentId) -> None:
        self._uses.pop(segment, None)

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        least = min(self._uses, key=self._uses.__getitem__, default=None)
        if least is None or evictable(least):
            return least
        return min(filter(evictable, self._uses), key=self._uses.__getitem__, default=None)

    def ids(self) -> Iterator[SegmentId]:
        return iter(tuple(self._uses))

    def _use(self, segment: SegmentId, count: int) -> None:
        self._ticks += 1
        self._uses[segment] = (count, self._ticks)


POLICY = LFUPolicy
