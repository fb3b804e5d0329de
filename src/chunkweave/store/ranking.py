"""Segments in the order in which they would be evicted: what policies by priority are made of."""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from chunkweave.types import SegmentId

_SLACK = 64
_MOST_PASSED = 512

_Entry = tuple[Any, int, SegmentId]


class Ranking:
    """Ids by rank, the least first; of equal ranks the one that was ranked longest ago.

    A heap with outdated entries, which are skipped when they come up and cleared away when they are the most. Ranking
    is O(log n). What `least` passes over (inner nodes, mostly, that stay so) is kept aside in order, so that passing it
    over again costs no more than asking. Ranks of one ranking must be comparable.
    """

    def __init__(self) -> None:
        self._entries: dict[SegmentId, _Entry] = {}
        self._heap: list[_Entry] = []
        self._passed: list[_Entry] = []  # sorted; none of them is in the heap
        self._order = count()

    def __contains__(self, segment: SegmentId) -> bool:
        return segment in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def rank(self, segment: SegmentId, rank: Any) -> None:
        """Enter `segment`, or move it to another rank."""
        entry = (rank, next(self._order), segment)
        self._entries[segment] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) + len(self._passed) > 2 * len(self._entries) + _SLACK:
            self._heap, self._passed = list(self._entries.values()), []
            heapq.heapify(self._heap)

    def of(self, segment: SegmentId) -> Any:
        """The rank of `segment`, None if it has none."""
        entry = self._entries.get(segment)
        return None if entry is None else entry[0]

    def remove(self, segment: SegmentId) -> None:
        """Forget `segment`; unknown ids are ignored."""
        self._entries.pop(segment, None)

    def least(self, admitted: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The first id in order that `admitted` admits, None if there is none. Changes no rank."""
        heap, entries = self._heap, self._entries
        self._passed = [entry for entry in self._passed if entries.get(entry[2]) is entry]
        best = next((entry for entry in self._passed if admitted(entry[2])), None)
        more: list[_Entry] = []
        while heap and (best is None or heap[0] < best):
            entry = heap[0]
            if entries.get(entry[2]) is not entry:
                heapq.heappop(heap)
            elif admitted(entry[2]):
                best = entry
            else:
                more.append(heapq.heappop(heap))
        if more:
            self._set_aside(more)
        return None if best is None else best[2]

    def _set_aside(self, more: list[_Entry]) -> None:
        self._passed.extend(more)
        self._passed.sort()
        for entry in self._passed[_MOST_PASSED:]:
            heapq.heappush(self._heap, entry)
        del self._passed[_MOST_PASSED:]

    def __iter__(self) -> Iterator[SegmentId]:
        return iter(tuple(self._entries))
