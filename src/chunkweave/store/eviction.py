"""What an eviction policy is, how to get one by name, the rankings that policies use, and those of this package.

A policy is found by its name in `plugins.POLICIES`, from this package or another one (docs/extending.md).
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
    """The path that a request asked for: the segments of it that are stored, then those that are not.

    `cached_tokens` and `new_tokens` are alpha and beta of RAGCache's Algorithm 1: tokens of the prompt that the stored
    exact prefix covers, and all the others, the question's among them. `reused` are segments beside the path, computed
    in other contexts, that the request's plan uses. `saved` is what each segment that the plan uses adds to its f_r
    (`Plan.saved`).
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
    """A policy that can say by which numbers it ranks a segment."""

    def explain(self, segment: SegmentId) -> dict[str, float]:
        """The numbers by name, `priority` among them: the least priority is evicted first. Empty if it is unknown."""


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
        """`record` is stored now; it was not before. That is no use: the request that it was computed for counts."""

    def on_hit(self, record: SegmentRecord) -> None:  # noqa: ARG002 - likewise
        """A request uses a stored segment. Within a request the deepest part is reported first."""
        return

    def on_remove(self, segment: SegmentId) -> None:
        """It is stored no longer, be it evicted, removed, replaced or lost; unknown ids are ignored."""

    def victim(self, evictable: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The tracked segment to evict next among those that `evictable` admits; None if there is none.

        Changes nothing: the store follows up with `on_remove`.
        """

    def ids(self) -> Iterator[SegmentId]:
        """All ids tracked, in no order."""


def make_policy(name: str, *, prefill_s: PrefillSeconds | None = None) -> EvictionPolicy:
    """A fresh policy by name.

    `prefill_s` is what computing costs, for a policy whose constructor has a parameter of that name; the others are
    made without. None leaves such a policy with its own assumption.

    Raises:
        UnknownMethodError: there is no policy of that name; the message lists those there are.
        UsageError: it cannot be imported.
    """
    build = POLICIES.get(name)
    policy: EvictionPolicy = build(prefill_s=prefill_s) if prefill_s is not None and weighs_cost(name) else build()
    return policy


def weighs_cost(name: str) -> bool:
    """Whether the policy of that name asks what computing costs. Raises what `make_policy` does."""
    return "prefill_s" in signature(POLICIES.get(name)).parameters


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
        self.clock = 0.0
        """The greatest priority evicted so far."""
        self._proposed: SegmentId | None = None

    def rank(self, segment: SegmentId, worth: float, /, clock: float | None = None) -> None:
        """Give a segment its priority as of now, or as of an earlier `clock`."""
        super().rank(segment, (self.clock if clock is None else clock) + worth)

    def least(self, admitted: Callable[[SegmentId], bool]) -> SegmentId | None:
        """The first id in order that `admitted` admits; if it is what is removed next, that was an eviction."""
        self._proposed = super().least(admitted)
        return self._proposed

    def remove(self, segment: SegmentId) -> None:
        """Forget a segment, and move the clock on if it was evicted."""
        priority = self.of(segment)
        if priority is not None and segment == self._proposed:
            self.clock = max(self.clock, priority)
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

    def explain(self, segment: SegmentId) -> dict[str, float]:
        """The priority."""
        priority = self._ranking.of(segment)
        return {} if priority is None else {"priority": priority}


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


class FIFOPolicy(LRUPolicy):
    """Evicts what was stored longest ago. All updates are O(1)."""

    def on_hit(self, record: SegmentRecord) -> None:
        """Changes nothing."""


class CountingPolicy(RankedPolicy):
    """A policy that counts requests for a segment since it came in, those among them that it came in for.

    Of several that missed it at once one stores it, and all count.
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
    """Evicts what was asked for least often since it came in; storing counts as the first use.

    Counts do not age: what was popular once stays. `gdsf` is the one that ages. All operations are O(log n), but for
    what `victim` passes over.
    """


class GDSFPolicy(CountingPolicy):
    """Evicts the least priority = clock + cost * frequency / size (Cherkasova 1998, "GDSF"; RAGCache §5.1 compares it).

    `frequency` counts uses since the segment came in, storing being the first; `size` is its bytes in this tier; `cost`
    is what making it again takes, in any unit. `clock` is the greatest priority evicted so far, so that a segment
    gets older by the evictions it survives. Removals that are no evictions leave the clock alone.

    The default cost is the number of tokens. A segment's bytes grow with its tokens too, so that with one model
    and one codec this ranks by frequency and age alone; a cost that grows faster (attention over a long
    context) is to be passed in. All operations are O(log n), but for what `victim` passes over.
    """

    def __init__(self, cost: Callable[[SegmentRecord], float] = len) -> None:
        super().__init__(AgedRanking())
        self._cost = cost

    def _rank(self, record: SegmentRecord, frequency: int) -> None:
        self._ranking.rank(record.id, self._cost(record) * frequency / record.nbytes)


DEFAULT_WINDOW = 100_000
"""Uses over which frequency is counted; the paper has a time window and does not say how long."""


def one_second_a_token(new: float, _cached: float) -> float:
    """The cost where none was measured: computing takes equally long behind anything."""
    return new


@dataclass(slots=True)
class _Statistics:
    """What is known of a node, stored or not: uses within the window, and its cost over the misses seen."""

    frequency: int = 0
    total_cost_s: float = 0.0
    misses: int = 0
    clock: float | None = None
    """The tier's at the latest request for it; None if there was none."""


class PGDSFPolicy(RankedPolicy):
    """Evicts the least priority = clock + average cost * frequency (RAGCache §5.1, eq. 1 to 3, Algorithm 1).

    The average cost is the mean, over the requests that missed the segment, of T(cached, new) / new: seconds for each
    token that the request had to compute, with T from the profiled table (`CostModel.prefill`, bilinear).
    `frequency` counts the requests for the segment among the last `window` uses, whether it was stored then or not:
    what comes back after an eviction is as popular as before. `clock` is the greatest priority evicted so far from
    this tier; each tier has a policy, hence a clock, of its own. As in the paper a priority is set when the segment is
    asked for: a new node's has the clock at its request, before room was made for it (Algorithm 1), and a use that
    leaves the window lowers it at the next request only.

    A request counts once for each segment of its path and each that it reuses beside it. Coming in is no use, nor is
    coming in again: what is computed ahead of any request, by several requests at once, or copied from another tier,
    was not asked for once more. Nodes that are neither stored nor used within the window are forgotten. All operations
    are O(log n), but for what `victim` passes over.
    """

    def __init__(
        self, prefill_s: Callable[[float, float], float] = one_second_a_token, window: int = DEFAULT_WINDOW
    ) -> None:
        """A policy for one tier.

        Args:
            prefill_s: seconds to compute `new` tokens behind `cached` ones; one a token if left out, which leaves
                recency and frequency.
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
        """What the latest request has counted for already."""

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
        """Priority, frequency, and the average cost as far as it was observed, in seconds a token."""
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
    """What reuse of each segment has saved so far: f_r of Cache-Craft §3.3. Not thread-safe.

    Each reuse adds 1/CFO with CFO = max(CCI (1 - beta'), 1/|C|) (`Plan.saved`): one for a segment that had to be
    recomputed whole, its number of tokens for one that needed nothing. The bound is ours: 1/0 has no place in a sum. A
    segment starts at 0, since nothing was reused yet (the paper says nothing of the start); so does one whose uses are
    forgotten. As in the paper, f_r does not age.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        """Remember at most `capacity` segments; of more, those that were heard of longest ago are forgotten."""
        self._capacity = capacity
        self._known: dict[SegmentId, tuple[float, int]] = {}
        self._ticks = 0

    def start(self, segment: SegmentId) -> None:
        """It is stored now; what was known of an earlier one under its id is over."""
        self._enter(segment, 0.0)

    def add(self, segment: SegmentId, saved: float) -> None:
        """It was reused, which `saved` so much."""
        self._enter(segment, self.of(segment) + saved)

    def of(self, segment: SegmentId) -> float:
        """The f_r of a segment, 0 if it is unknown."""
        return self._known.get(segment, (0.0, 0))[0]

    def least_first(self, records: Iterable[SegmentRecord]) -> list[SegmentRecord]:
        """`records` by rising f_r; of equal ones, the one first that was stored or reused longest ago.

        Those never heard of come first, in the order given.
        """
        return sorted(records, key=lambda record: self._known.get(record.id, (0.0, 0)))

    def _enter(self, segment: SegmentId, frequency: float) -> None:
        self._ticks += 1
        self._known.pop(segment, None)
        self._known[segment] = (frequency, self._ticks)
        if len(self._known) > self._capacity:
            del self._known[next(iter(self._known))]


class ReuseFrequencyPolicy(RankedPolicy):
    """Evicts the least f_r, of equal ones the one that was stored or used longest ago.

    The paper bounds the variants of a chunk by it; here it chooses among all segments. What a request saved with each
    segment comes with it (`PathRequest.saved`); a use without (in a simulation) is exact or saves nothing. A segment
    that was evicted keeps its f_r as long as it is remembered, so that a copy from a slower tier is worth what it was.
    All operations are O(log n), but for what `victim` passes over.
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
