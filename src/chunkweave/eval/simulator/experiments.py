"""RAGCache's ablations in the simulator: policies, reordering, sustainable rate (its §7.1 and §7.3)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from chunkweave.eval.simulator.reference import MODERN, installed, reference_hits
from chunkweave.eval.simulator.simulation import SimulationConfig, SimulationResult, Tier, bounds_of, simulate
from chunkweave.eval.simulator.trace import Arrival, Trace, at_times, build_trace, poisson_times
from chunkweave.planning.cost_model import CostModel
from chunkweave.scheduling.queue import DEFAULT_WINDOW

POLICIES = ("pgdsf", "gdsf", "lru", "lfu", "reuse-frequency")
_BISECTIONS = 7


def policy_rows(
    trace: Trace, budgets: Sequence[int], cost: CostModel, policies: Sequence[str] = POLICIES
) -> Iterator[dict[str, Any]]:
    """One row a budget: every policy's hit rates, the best modern policy of libcachesim, the bounds (Figure 17)."""
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

    That rate is one over the mean time a request keeps the engine busy in order of arrival (Figure 18).
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
    """The greatest rate at which the mean TTFT stays below `factor` times the unloaded TTFT without a cache (§7)."""
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
