"""RAGCache's ablations in the simulator (its §7.1 and §7.3): eviction policies, reordering, the sustainable rate.

    python lab/chunkweave_lab/ragcache.py policies --trace mmlu-like --cost-model cost-smollm2-135m.json --out FILE

The cost of a prefill and the bytes of a token are measured (Algorithm 1, lines 6 to 9): an engine writes them into the
file that its setting `cost_model` names.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.cli.console import check_writable, write_json
from chunkweave.planning.cost import CostModel
from chunkweave.scheduling.queue import DEFAULT_WINDOW
from chunkweave_lab.simulator.simulation import SimulationConfig, Tier, bounds_of, simulate
from chunkweave_lab.simulator.trace import Arrival, Trace, at_times, build_trace, poisson_times
from chunkweave_lab.simulator.workloads import SourceConfig, open_source

POLICIES = ("pgdsf", "gdsf", "lru", "lfu", "reuse-frequency")
SHARES = (0.005, 0.01, 0.02, 0.04, 0.1, 0.2)
"""Memory as a share of all documents' KV."""

QUEUED = 2000
"""Requests of the parts with a queue: enough for half an hour at their arrival rates."""

_BISECTIONS = 7


def policy_rows(
    trace: Trace, budgets: Sequence[int], cost: CostModel, policies: Sequence[str] = POLICIES
) -> Iterator[dict[str, Any]]:
    """One row per budget: every policy's hit rates, and the bounds (Figure 17)."""
    for budget in budgets:
        runs = {name: simulate(trace, SimulationConfig(name, (Tier("memory", budget),)), cost) for name in policies}
        yield {
            "workload": trace.name,
            "budget_bytes": budget,
            "budget_share": budget / trace.working_set_bytes,
            "hit_rate": {name: run.hit_rate for name, run in runs.items()},
            "token_hit_rate": {name: run.token_hit_rate for name, run in runs.items()},
            "mean_service_s": {name: run.mean_service_s for name, run in runs.items()},
            "bound": asdict(bounds_of(trace, budget)),
        }


def reordering_row(
    arrivals: Sequence[Arrival],
    budget: int,
    cost: CostModel,
    *,
    policy: str = "pgdsf",
    load: float = 1.1,
    seed: int = 0,
) -> dict[str, Any]:
    """Mean TTFT with and without cache-aware reordering at `load` times the rate that first come first served sustains.

    That rate is 1 / the mean time that a request occupies the engine in order of arrival (Figure 18).
    """
    tiers = (Tier("memory", budget),)
    capacity = _capacity(arrivals, SimulationConfig(policy, tiers), cost)
    trace = _arriving(arrivals, load * capacity, cost, seed)
    plain = simulate(trace, SimulationConfig(policy, tiers), cost)
    ordered = simulate(trace, SimulationConfig(policy, tiers, DEFAULT_WINDOW), cost)
    return {
        "budget_bytes": budget,
        "rate_per_s": load * capacity,
        "requests": len(trace.requests),
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
    result = simulate(build_trace("", arrivals, cost.kv_bytes_per_token), config, cost)
    return 1.0 / result.mean_service_s


def _arriving(arrivals: Sequence[Arrival], rate_per_s: float, cost: CostModel, seed: int) -> Trace:
    times = poisson_times(len(arrivals), rate_per_s, seed)
    return build_trace("", at_times(arrivals, times), cost.kv_bytes_per_token)


def main() -> None:
    """Compute one part, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["policies", "reordering", "sustainable-rate"])
    parser.add_argument("--trace", default="mmlu-like", help="as `chunkweave simulate` takes it")
    parser.add_argument("--cost-model", type=Path, required=True, help="file of measured costs (setting `cost_model`)")
    parser.add_argument("--requests", type=int, help="of drawn workloads; default: 10000, with a queue 2000")
    parser.add_argument("--drift", type=float, default=0.0, help="of a drawn workload's popularity")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="memory, of all documents' KV")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    check_writable(arguments.out)
    cost = CostModel.read(arguments.cost_model)
    count = arguments.requests or (None if arguments.part == "policies" else QUEUED)
    source = SourceConfig(requests=count, drift=arguments.drift, seed=arguments.seed)
    arrivals = open_source(arguments.trace, source)
    trace = build_trace(Path(arguments.trace).name, arrivals, cost.kv_bytes_per_token)
    budgets = [int(share * trace.working_set_bytes) for share in arguments.shares]
    if arguments.part == "policies":
        rows = list(policy_rows(trace, budgets, cost))
    elif arguments.part == "reordering":
        rows = [reordering_row(arrivals, budget, cost, seed=arguments.seed) for budget in budgets]
    else:
        rows = [row for budget in budgets for row in sustainable_rows(arrivals, budget, cost, seed=arguments.seed)]
    config = {"cost_model": asdict(cost), "trace": trace.name, **asdict(source)}
    command = shlex.join(["python", *sys.argv])
    result = BenchmarkResult(f"ragcache-{arguments.part}", command, arguments.seed, config, rows, {})
    write_json(arguments.out, result.as_dict())


if __name__ == "__main__":
    main()
