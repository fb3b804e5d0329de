"""Replays a trace: the tree decides what is cached, the queue which request is next, the cost model the times."""

import heapq
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.planning.cost import CostModel
from chunkweave.scheduling.queue import CacheAwareQueue
from chunkweave.store.eviction import make_policy
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId
from chunkweave_lab.simulator.trace import Trace, TraceRequest
from chunkweave_lab.simulator.tree_cache import TreeCache, TreeCounts, TreeTier, TreeUse

Progress = Callable[[int, int], None]
"""Called with (done, total)."""

_PROGRESS_STEPS = 100


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier of the simulated hierarchy and its budget in bytes."""

    name: str
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The settings of a replay.

    `tiers` are sorted from fast to slow; reads from all but the first cost time by the cost model. `window` is the
    queue's: 0 serves in order of arrival. Every `replicate_every` requests the `replicas` hottest upper nodes are
    copied to the second tier.
    """

    policy: str
    tiers: tuple[Tier, ...]
    window: int = 0
    replicas: int = 0
    replicate_every: int = 100

    def __post_init__(self) -> None:
        if not self.tiers:
            raise UsageError("a simulation needs a tier")


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of one replay. All requests count, including those on the cold cache.

    `hits` of `documents` were stored together with everything before them in their prompt (RAGCache §7.3's hit rate);
    `cached_tokens` of `prompt_tokens` were not computed. `ttft_s` has each request's time from arrival to the end of
    its prefill, in the order served. One prefill runs at a time; decoding is not simulated.
    """

    config: SimulationConfig
    documents: int
    hits: int
    prompt_tokens: int
    cached_tokens: int
    busy_s: float
    ttft_s: tuple[float, ...]
    most_passed_over: int
    counts: TreeCounts

    @property
    def hit_rate(self) -> float:
        """Documents found / documents requested."""
        return self.hits / self.documents if self.documents else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens found / prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def ttft_mean_s(self) -> float:
        """Mean time to first token."""
        return statistics.fmean(self.ttft_s) if self.ttft_s else 0.0

    @property
    def mean_service_s(self) -> float:
        """Mean time that a request occupies the engine: 1 / the sustainable rate."""
        return self.busy_s / len(self.ttft_s) if self.ttft_s else 0.0

    def ttft_percentile_s(self, percent: int) -> float:
        """The `percent`-th percentile of time to first token (nearest rank)."""
        ordered = sorted(self.ttft_s)
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)] if ordered else 0.0

    def as_dict(self) -> dict[str, Any]:
        """A row of a result file."""
        return {
            "policy": self.config.policy,
            "window": self.config.window,
            "budget_bytes": {tier.name: tier.budget_bytes for tier in self.config.tiers},
            "requests": len(self.ttft_s),
            "documents": self.documents,
            "hits": self.hits,
            "hit_rate": self.hit_rate,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "token_hit_rate": self.token_hit_rate,
            "busy_s": self.busy_s,
            "ttft_mean_s": self.ttft_mean_s,
            **{f"ttft_p{percent}_s": self.ttft_percentile_s(percent) for percent in (50, 90, 99)},
            "most_passed_over": self.most_passed_over,
            "evictions": self.counts.evictions,
            "swapped_out": self.counts.swapped_out,
            "freed": self.counts.freed,
            "promotions": self.counts.promotions,
            "replicas": self.counts.replicas,
        }


def simulate(
    trace: Trace, config: SimulationConfig, cost: CostModel, progress: Progress | None = None
) -> SimulationResult:
    """Serve every request of `trace`, one prefill at a time.

    Raises:
        UnknownMethodError: no such policy.
    """
    return _Replay(trace, config, cost).run(progress)


class _Replay:
    """The state of one replay."""

    def __init__(self, trace: Trace, config: SimulationConfig, cost: CostModel) -> None:
        tiers = [
            TreeTier(tier.name, tier.budget_bytes, make_policy(config.policy, prefill_s=cost.prefill))
            for tier in config.tiers
        ]
        self._requests = trace.requests
        self._config = config
        self._cost = cost
        self._cache = TreeCache(tiers)
        self._queue: CacheAwareQueue[int] = CacheAwareQueue(self._cache.tree, window=config.window)
        self._ttft_s: list[float] = []
        self._hits = self._documents = self._cached_tokens = self._prompt_tokens = self._most_passed_over = 0
        self._busy_s = 0.0

    def run(self, progress: Progress | None) -> SimulationResult:
        now_s, arrived, total = 0.0, 0, len(self._requests)
        every = max(1, total // _PROGRESS_STEPS)
        while len(self._ttft_s) < total:
            if not self._queue:
                now_s = max(now_s, self._requests[arrived].arrival_s)
            while arrived < total and self._requests[arrived].arrival_s <= now_s:
                self._submit(arrived)
                arrived += 1
            now_s = self._serve_next(now_s)
            if progress is not None and len(self._ttft_s) % every == 0:
                progress(len(self._ttft_s), total)
        return SimulationResult(
            self._config,
            self._documents,
            self._hits,
            self._prompt_tokens,
            self._cached_tokens,
            self._busy_s,
            tuple(self._ttft_s),
            self._most_passed_over,
            self._cache.counts,
        )

    def _submit(self, number: int) -> None:
        request = self._requests[number]
        self._queue.submit(number, [record.chunk_id for record in request.path], request.prompt_tokens)

    def _serve_next(self, now_s: float) -> float:
        """Serve the next request of the queue; returns its end time in seconds."""
        next_up = self._queue.ready()
        assert next_up is not None, "a request waits"
        self._most_passed_over = max(self._most_passed_over, self._queue.passed_over(next_up.request))
        self._queue.pop()
        request = self._requests[next_up.request]
        used = self._cache.use(request.path, request.question_tokens)
        service_s = self._service_s(used)
        self._count(request, used)
        self._busy_s += service_s
        self._ttft_s.append(now_s + service_s - request.arrival_s)
        if self._config.replicas and len(self._ttft_s) % self._config.replicate_every == 0:
            self._cache.replicate(self._config.replicas)
        return now_s + service_s

    def _service_s(self, used: TreeUse) -> float:
        fastest = self._config.tiers[0].name
        load_s = sum(self._cost.load(tokens, tier) for tier, tokens in used.tokens_by_tier.items() if tier != fastest)
        return load_s + self._cost.prefill(max(1, used.new_tokens), used.cached_tokens)

    def _count(self, request: TraceRequest, used: TreeUse) -> None:
        self._documents += len(request.documents)
        self._hits += max(0, used.hits - request.documents_from)
        self._prompt_tokens += request.prompt_tokens
        self._cached_tokens += used.cached_tokens


_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of the hit rates on one trace under one budget, for any cache that never holds more than it.

    Each node (a chunk in its context) is an independent object that may be stored and evicted without its parent, and
    need not be stored when it is requested. The tree is more restricted, so these bound it; they may be unreachable.

    `token_hit_rate` is Belady's MIN with tokens as objects: tokens have equal sizes, so farthest-next-use is optimal;
    part of a node may stay. `hit_rate` is Belady's MIN over documents if all have one size (`exact`). If sizes differ,
    farthest-next-use is not a bound; then it is the relaxation in which only the average room is limited: bytes x
    requests between two uses, cheapest first, until budget x requests is spent (PFOO-L of Berger, Beckmann,
    Harchol-Balter, SIGMETRICS 2018).
    """

    hit_rate: float
    token_hit_rate: float
    exact: bool


def bounds_of(trace: Trace, budget_bytes: int) -> Bounds:
    """Both bounds, including the cold start: a first use is never a hit."""
    paths = [request.path for request in trace.requests]
    documents = [request.documents for request in trace.requests]
    references = sum(map(len, documents))
    if trace.equal_sizes and references:
        hits = float(_unit_hits(documents, budget_bytes))
    else:
        hits = _relaxed_hits(documents, budget_bytes)
    prompt_tokens = sum(request.prompt_tokens for request in trace.requests)
    return Bounds(
        hit_rate=hits / references if references else 0.0,
        token_hit_rate=_token_hits(paths, budget_bytes) / prompt_tokens if prompt_tokens else 0.0,
        exact=trace.equal_sizes,
    )


def _next_uses(references: Sequence[SegmentRecord]) -> list[float]:
    """For each reference the index of the next one to the same node."""
    following = [_NEVER] * len(references)
    seen: dict[SegmentId, int] = {}
    for place in range(len(references) - 1, -1, -1):
        segment = references[place].id
        following[place] = seen.get(segment, _NEVER)
        seen[segment] = place
    return following


def _unit_hits(requests: Iterable[Sequence[SegmentRecord]], budget_bytes: int) -> int:
    """Hits of Belady's MIN with bypass over equal objects."""
    references = [record for request in requests for record in request]
    room = budget_bytes // references[0].nbytes
    held: dict[SegmentId, float] = {}
    farthest: list[tuple[float, SegmentId]] = []
    hits = 0
    for record, following in zip(references, _next_uses(references), strict=True):
        hits += record.id in held
        held[record.id] = following
        heapq.heappush(farthest, (-following, record.id))
        while len(held) > room:
            place, segment = heapq.heappop(farthest)
            if held.get(segment) == -place:
                del held[segment]
    return hits


def _token_hits(requests: Iterable[Sequence[SegmentRecord]], budget_bytes: int) -> float:
    """Token hits of Belady's MIN with bypass if any part of a node may be kept."""
    references = [record for request in requests for record in request]
    held: dict[SegmentId, tuple[float, float]] = {}  # bytes kept, next use
    farthest: list[tuple[float, SegmentId]] = []
    used = hits = 0.0
    for record, following in zip(references, _next_uses(references), strict=True):
        kept, _ = held.pop(record.id, (0.0, _NEVER))
        hits += len(record) * kept / record.nbytes
        used -= kept
        if following == _NEVER:
            continue
        held[record.id] = (float(record.nbytes), following)
        used += record.nbytes
        heapq.heappush(farthest, (-following, record.id))
        while used > budget_bytes:
            place, segment = farthest[0]
            kept, next_use = held.get(segment, (0.0, 0.0))
            if next_use != -place:
                heapq.heappop(farthest)
                continue
            taken = min(kept, used - budget_bytes)
            used -= taken
            if taken < kept:
                held[segment] = (kept - taken, next_use)
            else:
                del held[segment]
                heapq.heappop(farthest)
    return hits


def _relaxed_hits(requests: Sequence[Sequence[SegmentRecord]], budget_bytes: int) -> float:
    """Maximum hits if only the average room over all requests is limited; the last hit may be fractional."""
    last: dict[SegmentId, int] = {}
    costs = []
    for number, request in enumerate(requests):
        for record in request:
            if record.nbytes <= budget_bytes and record.id in last:
                costs.append(record.nbytes * (number - last[record.id]))
            last[record.id] = number
    left = float(budget_bytes) * len(requests)
    hits = 0.0
    for cost in sorted(costs):
        if cost > left:
            return hits + left / cost
        left -= cost
        hits += 1
    return hits
