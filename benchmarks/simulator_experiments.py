"""RAGCache's ablations in the simulator (its §7.1 and §7.3), and the same traces through libcachesim.

Policies, reordering, the sustainable rate. libcachesim is an independent cache simulator: plain objects, no tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import gcd
from typing import Any

from chunkweave.errors import UsageError, install_extra
from chunkweave.planning.cost import CostModel
from chunkweave.scheduling.queue import DEFAULT_WINDOW
from chunkweave.store.records import SegmentRecord
from chunkweave_lab.simulator.simulation import SimulationConfig, SimulationResult, Tier, bounds_of, simulate
from chunkweave_lab.simulator.trace import Arrival, Trace, at_times, build_trace, poisson_times

POLICIES = ("pgdsf", "gdsf", "lru", "lfu", "reuse-frequency")
_BISECTIONS = 7
MODERN = ("S3FIFO", "WTinyLFU", "LHD")
"""Newer policies, without a knowledge tree."""

_HASH_POWER = 18


def policy_rows(
    trace: Trace, budgets: Sequence[int], cost: CostModel, policies: Sequence[str] = POLICIES
) -> Iterator[dict[str, Any]]:
    """One row per budget: every policy's hit rates, the best modern policy of libcachesim, the bounds (Figure 17)."""
    for budget in budgets:
        runs = {name: simulate(trace, SimulationConfig(name, (Tier("memory", budget),)), cost) for name in policies}
        modern = [reference_hits(name, trace, budget) for name in MODERN] if installed() else []
        yield {
            "workload": trace.name,
            "budget_bytes": budget,
            "budget_share": budget / trace.working_set_bytes,
            "hit_rate": {name: run.hit_rate for name, run in runs.items()},
            "token_hit_rate": {name: run.token_hit_rate for name, run in runs.items()},
            "mean_service_s": {name: run.mean_service_s for name, run in runs.items()},
            "modern_hit_rate": {one.policy: one.hit_rate for one in modern},
            "modern_object_hit_rate": {one.policy: one.object_hits / one.documents for one in modern},
            "bound": asdict(bounds_of(trace, budget)),
        }


def reordering_row(
    arrivals: Sequence[Arrival],
    budget: int,
    cost: CostModel,
    *,
    policy: str = "pgdsf",
    load: float = 1.1,
    window: int = DEFAULT_WINDOW,
    seed: int = 0,
) -> dict[str, Any]:
    """Mean TTFT with and without cache-aware reordering at `load` times the rate that first come first served sustains.

    That rate is 1 / the mean time that a request occupies the engine in order of arrival (Figure 18).
    """
    tiers = (Tier("memory", budget),)
    capacity = _capacity(arrivals, SimulationConfig(policy, tiers), cost)
    rate = load * capacity
    trace = _arriving(arrivals, rate, cost, seed)
    plain = simulate(trace, SimulationConfig(policy, tiers), cost)
    ordered = simulate(trace, SimulationConfig(policy, tiers, window), cost)
    return {
        "budget_bytes": budget,
        "capacity_per_s": capacity,
        "rate_per_s": rate,
        "requests": len(trace.requests),
        "window": window,
        "ttft_mean_s": {"in order": plain.ttft_mean_s, "reordered": ordered.ttft_mean_s},
        "ttft_p99_s": {"in order": plain.ttft_percentile_s(99), "reordered": ordered.ttft_percentile_s(99)},
        "hit_rate": {"in order": plain.hit_rate, "reordered": ordered.hit_rate},
        "speedup": plain.ttft_mean_s / ordered.ttft_mean_s,
        "most_passed_over": ordered.most_passed_over,
    }


def sustainable_rows(
    arrivals: Sequence[Arrival], budget: int, cost: CostModel, *, factor: float = 5.0, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """The highest rate at which the mean TTFT stays below `factor` times the unloaded TTFT without a cache (§7)."""
    tiers = (Tier("memory", budget),)
    methods = {
        "no cache": SimulationConfig("lru", (Tier("memory", 0),)),
        "lru": SimulationConfig("lru", tiers),
        "pgdsf": SimulationConfig("pgdsf", tiers),
        "pgdsf, reordered": SimulationConfig("pgdsf", tiers, DEFAULT_WINDOW),
    }
    objective_s = factor / _capacity(arrivals, methods["no cache"], cost)
    for name, config in methods.items():
        low, high = 0.0, 4.0 * _capacity(arrivals, config, cost)
        for _ in range(_BISECTIONS):
            rate = (low + high) / 2
            result = simulate(_arriving(arrivals, rate, cost, seed), config, cost)
            low, high = (rate, high) if result.ttft_mean_s <= objective_s else (low, rate)
        yield {"method": name, "rate_per_s": low, "objective_s": objective_s, "budget_bytes": budget}


def _capacity(arrivals: Sequence[Arrival], config: SimulationConfig, cost: CostModel) -> float:
    result: SimulationResult = simulate(build_trace("", arrivals, cost.kv_bytes_per_token), config, cost)
    return 1.0 / result.mean_service_s


def _arriving(arrivals: Sequence[Arrival], rate_per_s: float, cost: CostModel, seed: int) -> Trace:
    times = poisson_times(len(arrivals), rate_per_s, seed)
    return build_trace("", at_times(arrivals, times), cost.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Hits of a libcachesim policy whose objects are the nodes of a trace (a chunk in its context).

    `object_hits` are documents that were cached when requested. `hits` are those whose whole path was cached: only
    these can be reused as an exact prefix and compared with a tree's hits.
    """

    policy: str
    documents: int
    hits: int
    object_hits: int

    @property
    def hit_rate(self) -> float:
        """Usable hits / documents requested."""
        return self.hits / self.documents if self.documents else 0.0


def installed() -> bool:
    """Whether libcachesim can be used here."""
    return find_spec("libcachesim") is not None


def object_hits(
    policy: str, references: Sequence[SegmentRecord], budget_bytes: int, *, evict_first: bool = False
) -> list[bool]:
    """Whether each reference hits in a libcachesim cache of this policy and size.

    With `evict_first` room is made before an object is inserted, by libcachesim's ranking. Its GDSF otherwise inserts
    the object first and may evict that object itself, which a store that needs the room beforehand cannot do.

    Raises:
        UsageError: libcachesim is not installed.
    """
    unit = gcd(*(record.nbytes for record in references))  # its sketches depend on the size, and overflow
    room = budget_bytes // unit if unit else 0
    if not room:
        return [False] * len(references)
    cache, request = _open(policy, room)
    numbers: dict[str, int] = {}
    hits = []
    for record in references:
        request.obj_id = numbers.setdefault(record.id, len(numbers) + 1)
        request.obj_size = record.nbytes // unit
        if not evict_first:
            hits.append(bool(cache.get(request)))
            continue
        hits.append(cache.find(request, True) is not None)
        if not hits[-1] and request.obj_size <= room:
            while cache.get_occupied_byte() + request.obj_size > room:
                cache.evict(request)
            cache.insert(request)
    return hits


def reference_hits(policy: str, trace: Trace, budget_bytes: int) -> ReferenceResult:
    """Replay all requests of `trace`, part by part from the root.

    Raises:
        UsageError: libcachesim is not installed.
    """
    hit = iter(object_hits(policy, [record for one in trace.requests for record in one.path], budget_bytes))
    documents = usable = loose = 0
    for request in trace.requests:
        found = [next(hit) for _ in request.path]
        prefix = found.index(False) if False in found else len(found)
        documents += len(request.documents)
        usable += max(0, prefix - request.documents_from)
        loose += sum(found[request.documents_from :])
    return ReferenceResult(policy, documents, usable, loose)


def _open(policy: str, room: int) -> tuple[Any, Any]:
    if not installed():
        raise UsageError(f"libcachesim is not installed: {install_extra('reference')}")
    import libcachesim

    request = libcachesim.Request()
    request.valid = True
    return getattr(libcachesim, policy)(cache_size=room, hashpower=_HASH_POWER), request
