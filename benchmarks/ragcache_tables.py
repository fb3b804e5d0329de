"""RAGCache's tables in the simulator: eviction policies, reordering, sustainable rate.

    chunkweave profile --shape smollm2-135m --cached-tokens 0,512,2048,4000 --new-tokens 32,128,512,2048,4000 \
        --threads 1 --repeats 1 --out cost-smollm2-135m.json
    python benchmarks/ragcache_tables.py --cost-model cost-smollm2-135m.json --musique FILE --mooncake FILE \
        --out docs/results

The cost of a prefill and the bytes of a token are measured (Algorithm 1, lines 6 to 9). Computes the parts named by
`--parts` (default: all), and writes each as JSON into `--out`.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track
from simulator_experiments import MODERN, POLICIES, policy_rows, reordering_row, sustainable_rows

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.cli.console import write_json
from chunkweave.planning.cost import CostModel, analytic_cost, known_shape
from chunkweave.settings import GIB
from chunkweave_lab.simulator.trace import Arrival, Trace, build_trace
from chunkweave_lab.simulator.workloads import SourceConfig, open_source

SHAPE = "smollm2-135m"
"""The model of the measured costs; other costs are computed from its floating-point operations."""
FEW = (0.002, 0.005, 0.01, 0.02, 0.04)
"""Memory as a share of all documents' KV, for workloads with many documents requested once."""
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6)
QUEUED_SHARES = (0.01, 0.02, 0.04, 0.08)
QUEUED = 2000
"""Requests of the parts with a queue: enough for half an hour at their arrival rates."""
DRIFT = 0.2
PARTS = (
    "policies-mmlu-like",
    "policies-drifting",
    "policies-musique",
    "policies-mooncake",
    "cost-term",
    "reordering",
    "sustainable-rate",
)


def main() -> None:
    """Compute, write, render."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cost-model", type=Path, required=True, help="what `chunkweave profile` measured")
    parser.add_argument("--musique", type=Path, help="MuSiQue JSON")
    parser.add_argument("--mooncake", type=Path, help="Mooncake trace")
    parser.add_argument("--requests", type=int, default=10_000, help="of drawn workloads")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one a budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    for name, file in (("policies-musique", arguments.musique), ("policies-mooncake", arguments.mooncake)):
        if name in parts and file is None:
            parser.error(f"{name} needs --{name.removeprefix('policies-')} FILE")
    cost = CostModel.read(arguments.cost_model)
    for part in parts:
        rows = list(track(_rows(part, arguments, cost), part, console=Console(stderr=True)))
        config = {"cost_model": asdict(cost), "shape": SHAPE, "requests": arguments.requests}
        command = shlex.join(["python", *sys.argv])
        written = arguments.out / f"ragcache-{part}.json"
        write_json(written, BenchmarkResult(part, command, arguments.seed, config, rows, {}).as_dict())


def _rows(part: str, arguments: argparse.Namespace, cost: CostModel) -> Iterator[dict[str, Any]]:
    policies = partial(_policies, cost, arguments.jobs)
    drawn = SourceConfig(requests=arguments.requests, seed=arguments.seed)
    if part == "policies-mmlu-like":
        yield from policies("mmlu-like, top-2", open_source("mmlu-like", drawn), FEW)
    elif part == "policies-drifting":
        moving = SourceConfig(requests=arguments.requests, drift=DRIFT, seed=arguments.seed)
        yield from policies(f"mmlu-like, top-2, drift {DRIFT}", open_source("mmlu-like", moving), FEW)
    elif part == "policies-musique":
        yield from policies("MuSiQue, top-5", open_source(str(arguments.musique), drawn), SHARES)
    elif part == "policies-mooncake":
        whole = SourceConfig(seed=arguments.seed)
        # Of equal sizes reuse-frequency counts uses like lfu, only in other units: left out.
        different = [name for name in POLICIES if name != "reuse-frequency"]
        yield from policies("Mooncake synthetic", open_source(str(arguments.mooncake), whole), SHARES, different)
    elif part == "cost-term":
        yield from _cost_rows(open_source("mmlu-like", drawn), cost)
    else:
        arrivals = open_source("mmlu-like", drawn)[:QUEUED]
        budgets = _budgets(build_trace("", arrivals, cost.kv_bytes_per_token), QUEUED_SHARES)
        if part == "reordering":
            for budget in budgets:
                yield reordering_row(arrivals, budget, cost, seed=arguments.seed)
        else:
            yield from sustainable_rows(arrivals, budgets[-2], cost, seed=arguments.seed)


def _budgets(trace: Trace, shares: Sequence[float]) -> list[int]:
    return [int(share * trace.working_set_bytes) for share in shares]


def _cost_rows(arrivals: list[Arrival], cost: CostModel) -> Iterator[dict[str, Any]]:
    """PGDSF's hit rates by the cost of a token that it assumes."""
    operations = analytic_cost(known_shape(SHAPE).geometry, flops_per_s=1e12)
    costs = {
        "measured": cost,
        "operations": replace(operations, kv_bytes_per_token=cost.kv_bytes_per_token),
        "flat": CostModel((0,), (1, 1000), ((1.0, 1000.0),), cost.kv_bytes_per_token),
    }
    trace = build_trace("mmlu-like", arrivals, cost.kv_bytes_per_token)
    for budget in _budgets(trace, FEW):
        runs = {name: next(policy_rows(trace, [budget], one, ["pgdsf"])) for name, one in costs.items()}
        yield {
            "budget_bytes": budget,
            "budget_share": runs["flat"]["budget_share"],
            "hit_rate": {name: run["hit_rate"]["pgdsf"] for name, run in runs.items()},
        }


def _policies(
    cost: CostModel,
    jobs: int,
    name: str,
    arrivals: list[Arrival],
    shares: Sequence[float],
    policies: Sequence[str] = POLICIES,
) -> Iterator[dict[str, Any]]:
    budgets = _budgets(build_trace(name, arrivals, cost.kv_bytes_per_token), shares)
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(_policy_row, name, arrivals, cost, policies), budgets)


def _policy_row(
    name: str, arrivals: list[Arrival], cost: CostModel, policies: Sequence[str], budget: int
) -> dict[str, Any]:
    trace = build_trace(name, arrivals, cost.kv_bytes_per_token)
    return next(policy_rows(trace, [budget], cost, policies))


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of one part for the documentation."""
    part = result["benchmark"]
    return {part: _TABLES[part.split("-")[0]](result["rows"])}


def _policy_table(rows: list[dict[str, Any]]) -> str:
    heads = ["memory", *POLICIES, "best modern", "bound", "PGDSF/GDSF", "/LRU", "/LFU", "token hits", "token bound"]
    lines = []
    for row in rows:
        rates = row["hit_rate"]
        modern = max(MODERN, key=lambda name: row["modern_hit_rate"].get(name, 0.0))
        has_modern = modern in row["modern_hit_rate"]
        best = max(rates.values())
        lines.append(
            [
                f"{row['budget_bytes'] / GIB:.1f} GiB ({row['budget_share']:.1%})",
                *(_marked(rates.get(name), best) for name in POLICIES),
                f"{row['modern_hit_rate'][modern]:.3f} {modern}" if has_modern else "-",
                f"{row['bound']['hit_rate']:.3f}",
                *(f"{rates['pgdsf'] / rates[name]:.2f}" if rates[name] else "-" for name in ("gdsf", "lru", "lfu")),
                f"{row['token_hit_rate']['pgdsf']:.3f}",
                f"{row['bound']['token_hit_rate']:.3f}",
            ]
        )
    return markdown_table(heads, lines)


def _marked(rate: float | None, best: float) -> str:
    if rate is None:
        return "-"
    return f"**{rate:.3f}**" if rate == best else f"{rate:.3f}"


def _reordering_table(rows: list[dict[str, Any]]) -> str:
    heads = ["memory", "rate", "TTFT in order", "reordered", "ratio", "hit rate in order", "reordered", "passed over"]
    return markdown_table(
        heads,
        [
            [
                f"{row['budget_bytes'] / GIB:.1f} GiB",
                f"{row['rate_per_s']:.3f}/s",
                f"{row['ttft_mean_s']['in order']:.1f} s",
                f"{row['ttft_mean_s']['reordered']:.1f} s",
                f"{row['speedup']:.2f}x",
                f"{row['hit_rate']['in order']:.3f}",
                f"{row['hit_rate']['reordered']:.3f}",
                str(row["most_passed_over"]),
            ]
            for row in rows
        ],
    )


def _rate_table(rows: list[dict[str, Any]]) -> str:
    base = rows[0]["rate_per_s"]
    return markdown_table(
        ["method", "sustained rate", "of no cache"],
        [[row["method"], f"{row['rate_per_s']:.3f}/s", f"{row['rate_per_s'] / base:.2f}x"] for row in rows],
    )


def _cost_table(rows: list[dict[str, Any]]) -> str:
    heads = {"measured": "measured", "operations": "by its operations", "flat": "a second a token"}
    return markdown_table(
        ["memory", *heads.values()],
        [
            [
                f"{row['budget_bytes'] / GIB:.1f} GiB ({row['budget_share']:.1%})",
                *(f"{row['hit_rate'][name]:.4f}" for name in heads),
            ]
            for row in rows
        ],
    )


_TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "policies": _policy_table,
    "cost": _cost_table,
    "reordering": _reordering_table,
    "sustainable": _rate_table,
}

if __name__ == "__main__":
    main()
