"""Eviction policies: the protocol, lookup by name, the rankings that policies use, and the built-in policies.

Policies are registered by name in `plugins.POLICIES`; other packages can add some (docs/extending.md).
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain, count
from typing import Any, Protocol, runtime_checkable

from chunkweave.plugins import POLICIES
from chunkweave.store.records import SegmentRecord, Sightings
from chunkweave.types import SegmentId


@dataclass(frozen=True, slots=True)
class PathRequest:
    """The path that a request asked for: its stored segments, then its missing ones.

    `cached_tokens` and `new_tokens` are alpha and beta of RAGCache's Algorithm 1: tokens of the prompt that the stored
    exact prefix covers, and all other tokens, including the question's. `reused` are segments that the request's plan
    uses although they are not on the path: they were computed in other contexts. `saved` is what each segment of the
    plan adds to its f_r (`Plan.saved`).
    """

    stored: tuple[SegmentId, ...]
    missing: tuple[SegmentId, ...]
    cached_tokens: int
    new_tokens: int
    reused: tuple[SegmentId, ...] = ()
    saved: Mapping[SegmentId, float] = field(default_factory=dict, hash=False)


PrefillSeconds = Callable[[float, float], float]
"""Seconds to compute `new` tokens behind `cached` ones, in this order: `CostModel.prefill`."""


@runtime_checkable
class ExplainedPolicy(Protocol):
    """A policy that reports the numbers by which it ranks a segment."""

    def explain(self, segment: SegmentId) -> dict[str, float]:
        """The numbers by name, including `priority` (lowest is evicted first). Empty for an unknown segment."""


class EvictionPolicy(Protocol):
    """Chooses which segment is evicted next. Holds no payload; the store calls it under the store's lock.

    The policy tracks exactly the stored segments. It must not call back into the store. The store knows which segments
    *may* be evicted (pins, inner nodes of the path index) and passes that to `victim` as a predicate. A policy that
    derives from this class may leave out `on_request` and `on_hit`.
    """

    def on_request(self, request: PathRequest) -> None:  # noqa: ARG002 - a default for policies that do not care
        """Note that a request asked for a path: which of its segments are stored on any tier, and which are missing.

        Called before the uses and inserts that follow from the request. The default does nothing.
        """
        return

    def on_insert(self, record: SegmentRecord) -> None:
        """Track `record`, which was just stored. This does not count as a use: the request that needed it does."""

    def on_hit(self, record: SegmentRecord) -> None:  # noqa: ARG002 - likewise
        """Count one use of a stored segment by a request. Within a request the deepest part is reported first."""
        return

    def on_remove(self, segment: SegmentId) -> None:
        """Stop tracking a segment that was evicted, removed, replaced or lost. Unknown ids are ignored."""

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The tracked segment to evict next among those that `evictable` admits; None if there is none.

        Changes nothing: the store follows up with `on_remove`.
        """

    def ids(self) -> Iterator[SegmentId]:
        """All ids tracked, in no order."""


def make_policy(name: str, *, prefill_s: PrefillSeconds | None = None) -> EvictionPolicy:
    """A new policy by name.

    `prefill_s` is the cost of computing. It is passed to policies whose constructor has a parameter of that name; with
    None they keep their default cost.

    Raises:
        UnknownMethodError: no policy has that name; the message lists the known names.
        UsageError: the policy cannot be imported.
    """
    build = POLICIES.get(name)
    policy: EvictionPolicy = build(prefill_s=prefill_s) if prefill_s is not None and weighs_cost(name) else build()
    return policy


def weighs_cost(name: str) -> bool:
    """Whether the policy of that name uses the cost of computing. Raises the errors of `make_policy`."""
    return "prefill_s" in signature(POLICIES.get(name)).parameters


_SLACK = 64
_MOST_PASSED = 512

_Entry = tuple[Any, int, SegmentId]


class Ranking:
    """Ids by rank, lowest first; among equal ranks the one that was ranked longest ago.

    A heap with outdated entries: they are skipped when they reach the top, and cleared when they are the majority.
    Ranking is O(log n). Entries that `least` rejects (mostly inner nodes, which stay inner nodes) are kept in a
    separate sorted list, so that rejecting them again costs one predicate call each. Ranks of one ranking must be
    comparable.
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
        """The rank of `segment`, or None."""
        entry = self._entries.get(segment)
        return None if entry is None else entry[0]

    def remove(self, segment: SegmentId) -> None:
        """Forget `segment`; unknown ids are ignored."""
        self._entries.pop(segment, None)

    def least(self, admitted: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The first id in order that `admitted` accepts, or None. Changes no rank."""
        heap = self._heap
        entries = self._entries
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

    The clock is the highest priority evicted so far, so a segment ages with each eviction that it survives. Removals
    other than evictions do not change the clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        """The highest priority evicted so far."""
        self._proposed: SegmentId | None = None

    def rank(self, segment: SegmentId, worth: float, /, clock: float | None = None) -> None:
        """Set a segment's priority, from the current clock or an earlier `clock`."""
        super().rank(segment, (self.clock if clock is None else clock) + worth)

    def least(self, admitted: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The first id in order that `admitted` accepts. If it is removed next, the removal counts as an eviction."""
        self._proposed = super().least(admitted)
        return self._proposed

    def remove(self, segment: SegmentId) -> None:
        """Forget a segment, and advance the clock if it was evicted."""
        priority = self.of(segment)
        if priority is not None and segment == self._proposed:
            self.clock = max(self.clock, priority)
        self._proposed = None
        super().remove(segment)


class RankedPolicy(EvictionPolicy):
    """A policy that evicts the lowest rank: a subclass ranks segments in `on_insert` and `on_hit`."""

    def __init__(self, ranking: Ranking | None = None) -> None:
        self._ranking = Ranking() if ranking is None else ranking

    def on_remove(self, segment: SegmentId) -> None:
        self._ranking.remove(segment)

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        return self._ranking.least(evictable)

    def ids(self) -> Iterator[SegmentId]:
        return iter(self._ranking)

    def explain(self, segment: SegmentId) -> dict[str, float]:
        """The priority."""
        priority = self._ranking.of(segment)
        return {} if priority is None else {"priority": priority}


class LRUPolicy(EvictionPolicy):
    """Evicts the least recently used segment. Updates are O(1); `victim` skips segments that may not be evicted."""

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


class FIFOPolicy(LRUPolicy):
    """Evicts the segment that was stored longest ago. All updates are O(1)."""

    def on_hit(self, record: SegmentRecord) -> None:
        """Changes nothing."""


class CountingPolicy(RankedPolicy):
    """A policy that counts the requests for a segment since it was stored, and those that missed it before.

    If several requests miss a segment at once, one of them stores it and all of them count.
    """

    def __init__(self, ranking: Ranking | None = None) -> None:
        super().__init__(ranking)
        self._missed = Sightings()
        self._frequencies: dict[SegmentId, int] = {}

    def on_request(self, request: PathRequest) -> None:
        for segment in request.missing:
            self._missed.see(segment)

    def on_insert(self, record: SegmentRecord) -> None:
        self._frequencies[record.id] = max(1, self._missed.forget(record.id))
        self._rank(record, self._frequencies[record.id])

    def on_hit(self, record: SegmentRecord) -> None:
        self._frequencies[record.id] += 1
        self._rank(record, self._frequencies[record.id])

    def on_remove(self, segment: SegmentId) -> None:
        super().on_remove(segment)
        self._frequencies.pop(segment, None)

    def explain(self, segment: SegmentId) -> dict[str, float]:
        """Priority and frequency."""
        counted = {"frequency": self._frequencies[segment]} if segment in self._frequencies else {}
        return {**super().explain(segment), **counted}

    def _rank(self, record: SegmentRecord, frequency: int) -> None:
        self._ranking.rank(record.id, frequency)


class LFUPolicy(CountingPolicy):
    """Evicts the segment with the fewest requests since it was stored; storing counts as the first use.

    Counts do not age: a segment that was popular once stays. `gdsf` ages. All operations are O(log n), plus the entries
    that `victim` skips.
    """


class GDSFPolicy(CountingPolicy):
    """Evicts the lowest priority = clock + cost * frequency / size (Cherkasova 1998, "GDSF"; RAGCache §5.1 compares
    it).

    `frequency` counts uses since the segment was stored; storing is the first. `size` is its bytes in this tier; `cost`
    is the cost of computing it again, in any unit. `clock` is the highest priority evicted so far, so a segment ages
    with each eviction that it survives. Removals other than evictions do not change the clock.

    The default cost is the number of tokens. A segment's bytes grow with its tokens too, so with one model and one
    codec this ranks by frequency and age alone; pass a `cost` that grows faster (attention over a long context) to
    change that. All operations are O(log n), plus the entries that `victim` skips.
    """

    def __init__(self, cost: Callable[[SegmentRecord], float] = len) -> None:
        super().__init__(AgedRanking())
        self._cost = cost

    def _rank(self, record: SegmentRecord, frequency: int) -> None:
        self._ranking.rank(record.id, self._cost(record) * frequency / record.nbytes)


DEFAULT_WINDOW = 100_000
"""Uses over which frequency is counted; the paper has a time window and does not state its length."""


def one_second_a_token(new: float, _cached: float) -> float:
    """The cost if none was measured: one second per new token, whatever is cached."""
    return new


@dataclass(slots=True)
class _Statistics:
    """Statistics of a node, stored or not: uses within the window, and its cost over the misses seen."""

    frequency: int = 0
    total_cost_s: float = 0.0
    misses: int = 0
    clock: float | None = None
    """The tier's clock at the latest request for the node; None before the first request."""


class PGDSFPolicy(RankedPolicy):
    """Evicts the lowest priority = clock + average cost * frequency (RAGCache §5.1, eq. 1 to 3, Algorithm 1).

    The average cost is the mean, over the requests that missed the segment, of T(cached, new) / new: seconds for each
    token that the request had to compute, with T from the profiled table (`CostModel.prefill`, bilinear). `frequency`
    counts the requests for the segment among the last `window` uses, whether it was stored then or not: a segment that
    returns after an eviction keeps its frequency. `clock` is the highest priority evicted so far from this tier; each
    tier has its own policy and clock. As in the paper, a priority is set when the segment is requested: a new node gets
    the clock at its request, before room was made for it (Algorithm 1), and a use that leaves the window lowers the
    priority at the next request only.

    A request counts once for each segment of its path and each other segment that it reuses. Being stored, or stored
    again, is not a use: segments are also computed ahead of requests, by several requests at once, or copied from
    another tier. Nodes that are neither stored nor used within the window are forgotten. All operations are O(log n),
    plus the entries that `victim` skips.
    """

    def __init__(
        self, prefill_s: Callable[[float, float], float] = one_second_a_token, window: int = DEFAULT_WINDOW
    ) -> None:
        """A policy for one tier.

        Args:
            prefill_s: seconds to compute `new` tokens behind `cached` ones. The default is one second per token, so
                that only recency and frequency count.
            window: how many of the latest uses count.

        Raises:
            ValueError: the window holds no use.
        """
        if window < 1:
            raise ValueError(f"frequency needs a window of at least one use, not {window}")
        self._aged = AgedRanking()
        super().__init__(self._aged)
        self._prefill_s = prefill_s
        self._window = window
        self._latest: deque[SegmentId] = deque()
        self._known: dict[SegmentId, _Statistics] = {}
        self._counted: frozenset[SegmentId] = frozenset()
        """Segments that the latest request was counted for."""

    def on_request(self, request: PathRequest) -> None:
        self._counted = frozenset(chain(request.stored, request.missing, request.reused))
        for segment in (*request.stored, *request.reused):
            self._use(segment)
        if not request.missing:
            return
        cost_s = self._prefill_s(request.new_tokens, request.cached_tokens) / request.new_tokens
        for segment in request.missing:
            node = self._use(segment)
            node.total_cost_s += cost_s
            node.misses += 1

    def on_insert(self, record: SegmentRecord) -> None:
        node = self._known.setdefault(record.id, _Statistics())
        self._rank(record, node)

    def on_hit(self, record: SegmentRecord) -> None:
        node = self._known[record.id] if record.id in self._counted else self._use(record.id)
        self._rank(record, node)

    def on_remove(self, segment: SegmentId) -> None:
        super().on_remove(segment)
        self._forget_unused(segment)

    def _use(self, segment: SegmentId) -> _Statistics:
        node = self._known.setdefault(segment, _Statistics())
        node.frequency += 1
        node.clock = self._aged.clock
        self._latest.append(segment)
        if len(self._latest) > self._window:
            oldest = self._latest.popleft()
            self._known[oldest].frequency -= 1
            if oldest != segment:
                self._forget_unused(oldest)
        return node

    def _forget_unused(self, segment: SegmentId) -> None:
        node = self._known.get(segment)
        if node is not None and not node.frequency and segment not in self._ranking:
            del self._known[segment]

    def _rank(self, record: SegmentRecord, node: _Statistics) -> None:
        self._aged.rank(record.id, self._average_s(record, node) * max(1, node.frequency), node.clock)

    def explain(self, segment: SegmentId) -> dict[str, float]:
        """Priority, frequency and, if misses were seen, the average cost in seconds per token."""
        node = self._known.get(segment)
        if node is None:
            return {}
        average_s = {"average_cost_s": node.total_cost_s / node.misses} if node.misses else {}
        return {**super().explain(segment), "frequency": node.frequency, **average_s}

    def _average_s(self, record: SegmentRecord, node: _Statistics) -> float:
        if not node.misses:  # it was computed ahead of any request
            return self._prefill_s(len(record), 0.0) / len(record)
        return node.total_cost_s / node.misses


class ReuseFrequencies:
    """Sum of the savings from reuse by segment: f_r of Cache-Craft §3.3. Not thread-safe.

    Each reuse adds 1/CFO with CFO = max(CCI (1 - beta'), 1/|C|) (`Plan.saved`): 1 for a segment that was recomputed
    whole, its number of tokens for one that was not recomputed at all. The bound is ours; it avoids 1/0. A segment
    starts at 0, since nothing was reused yet (the paper does not define the start); so does one whose uses were
    forgotten. As in the paper, f_r does not age.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        """Remember at most `capacity` segments; beyond that, the least recently updated ones are forgotten."""
        self._capacity = capacity
        self._known: dict[SegmentId, tuple[float, int]] = {}
        self._ticks = 0

    def start(self, segment: SegmentId) -> None:
        """Reset a segment that was just stored: its f_r is 0."""
        self._enter(segment, 0.0)

    def add(self, segment: SegmentId, saved: float) -> None:
        """Count one reuse that `saved` this much."""
        self._enter(segment, self.of(segment) + saved)

    def of(self, segment: SegmentId) -> float:
        """The f_r of a segment, 0 if it is unknown."""
        return self._known.get(segment, (0.0, 0))[0]

    def least_first(self, records: Iterable[SegmentRecord]) -> list[SegmentRecord]:
        """`records` by rising f_r; ties by the time of the last store or reuse, oldest first.

        Unknown records come first, in the order given.
        """
        return sorted(records, key=lambda record: self._known.get(record.id, (0.0, 0)))

    def _enter(self, segment: SegmentId, frequency: float) -> None:
        self._ticks += 1
        self._known.pop(segment, None)
        self._known[segment] = (frequency, self._ticks)
        if len(self._known) > self._capacity:
            del self._known[next(iter(self._known))]


class ReuseFrequencyPolicy(RankedPolicy):
    """Evicts the lowest f_r; among equals the segment that was stored or used longest ago.

    The paper uses f_r to limit the variants of a chunk; here it ranks all segments. A request reports its savings per
    segment (`PathRequest.saved`). A use without a report (in a simulation) counts the segment's tokens if it is exact,
    else 1. An evicted segment keeps its f_r while it is remembered, so that a copy from a slower tier has the same
    rank. All operations are O(log n), plus the entries that `victim` skips.
    """

    def __init__(self) -> None:
        super().__init__()
        self._frequencies = ReuseFrequencies()
        self._counted: Collection[SegmentId] = ()

    def on_request(self, request: PathRequest) -> None:
        self._counted = request.saved.keys()
        for segment, saved in request.saved.items():
            self._frequencies.add(segment, saved)

    def on_insert(self, record: SegmentRecord) -> None:
        self._ranking.rank(record.id, self._frequencies.of(record.id))

    def on_hit(self, record: SegmentRecord) -> None:
        if record.id not in self._counted:
            self._frequencies.add(record.id, float(len(record)) if record.exact else 1.0)
        self._ranking.rank(record.id, self._frequencies.of(record.id))
