"""How often a segment was seen: what admission to slow levels goes by."""

from collections import OrderedDict

from chunkweave.types import SegmentId


class Sightings:
    """Counters by segment, the least recently seen forgotten first. Not thread-safe."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[SegmentId, int] = OrderedDict()

    def see(self, segment: SegmentId) -> int:
        """Count one more sighting; returns how many there are."""
        count = self._counts.get(segment, 0) + 1
        self._counts[segment] = count
        self._counts.move_to_end(segment)
        if len(self._counts) > self._capacity:
            self._counts.popitem(last=False)
        return count

    def count(self, segment: SegmentId) -> int:
        """Sightings so far, 0 if it is unknown or forgotten."""
        return self._counts.get(segment, 0)
