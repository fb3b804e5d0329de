"""What an eviction policy is, how to get one by name, and the rankings that policies are made of.

To add a policy, put one module into `chunkweave.store.policies`: its file name is the policy's name
(`reuse_frequency.py` is "reuse-frequency") and its `POLICY` is what builds one.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import count
from typing import Any, Protocol

from chunkweave.plugins import plugin, plugin_names
from chunkweave.store import policies
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId


@dataclass(frozen=True, slots=True)
class PathRequest:
    """The path that a request asked for: the segments of it that are stored, then those that are not.

    `cached_tokens` and `new_tokens` are alpha and beta of RAGCache's Algorithm 1: tokens of the prompt that the stored
    exact prefix covers, and all the others, the question's among them.
    """

    stored: tuple[SegmentId, ...]
    missing: tuple[SegmentId, ...]
    cached_tokens: int
    new_tokens: int


PrefillSeconds = Callable[[float, float], float]
"""Seconds to compute `new` tokens behind `cached` ones, in this order: `CostModel.prefill`."""


class EvictionPolicy(Protocol):
    """Chooses which segment goes next. It decides and holds no payload; the store calls it under its own lock.

    The policy tracks exactly the stored segments. It must not call back into the store. Which segments
    *may* go (pins, inner nodes of the path index) is the store's knowledge and reaches `victim` as a predicate.
    A policy that derives from this class may leave out `on_request` and `on_hit`.
    """

    def on_request(self, request: PathRequest) -> None:  # noqa: ARG002 - a default for policies that do not care
        """A request asked for a path; it says which segments are stored on any tier, and which are missing.

        Comes before the uses and inserts that follow from the request. Most policies do not care and inherit this.
        """
        return

    def on_insert(self, record: SegmentRecord) -> None:
        """`record` is stored now; it was not before."""

    def on_hit(self, record: SegmentRecord) -> None:  # noqa: ARG002 - likewise
        """A stored segment is used once more. Within a request the deepest part is reported first."""
        return

    def on_remove(self, segment: SegmentId) -> None:
        """It is stored no longer, be it evicted, removed, replaced or lost; unknown ids are ignored."""

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The tracked segment to evict next among those that `evictable` admits; None if there is none.

        Changes nothing: the store follows up with `on_remove`.
        """

    def ids(self) -> Iterator[SegmentId]:
        """All ids tracked, in no order."""


def known_policies() -> tuple[str, ...]:
    """Names that `make_policy` accepts, sorted."""
    return plugin_names(policies)


def make_policy(name: str, *, prefill_s: PrefillSeconds | None = None, **options: object) -> EvictionPolicy:
    """A fresh policy by name; `options` go to its constructor.

    Args:
        name: one of `known_policies()`.
        prefill_s: what computing costs, for a policy whose constructor has a parameter of that name; the others are
            made without. None leaves such a policy with its own assumption.
        **options: what else this policy's constructor takes.

    Raises:
        UnknownMethodError: there is no policy of that name.
    """
    build = plugin(policies, name, "eviction policy", "POLICY")
    if prefill_s is not None and "prefill_s" in signature(build).parameters:
        options["prefill_s"] = prefill_s
    policy: EvictionPolicy = build(**options)
    return policy


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

    def rank(self, segment: SegmentId, rank: Any, /) -> None:
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


class AgedRanking(Ranking):
    """Segments by priority = clock + worth (RAGCache §5.1; GreedyDual-Size before it).

    The clock is the greatest priority evicted so far, so that a segment gets older by the evictions it survives.
    Removals that are no evictions leave the clock alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0
        self._proposed: SegmentId | None = None

    def rank(self, segment: SegmentId, worth: float, /) -> None:
        """Give a segment its priority as of now."""
        super().rank(segment, self._clock + worth)

    def least(self, admitted: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The first id in order that `admitted` admits; if it is what is removed next, that was an eviction."""
        self._proposed = super().least(admitted)
        return self._proposed

    def remove(self, segment: SegmentId) -> None:
        """Forget a segment, and move the clock on if it was evicted."""
        priority = self.of(segment)
        if priority is not None and segment == self._proposed:
            self._clock = max(self._clock, priority)
        self._proposed = None
        super().remove(segment)


class RankedPolicy(EvictionPolicy):
    """A policy that evicts what ranks least: a subclass ranks segments in `on_insert` and `on_hit`."""

    def __init__(self, ranking: Ranking | None = None) -> None:
        self._ranking = Ranking() if ranking is None else ranking

    def on_remove(self, segment: SegmentId) -> None:
        self._ranking.remove(segment)

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        return self._ranking.least(evictable)

    def ids(self) -> Iterator[SegmentId]:
        return iter(self._ranking)
