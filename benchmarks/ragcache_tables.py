"""RAGCache's tables in the simulator: eviction policies, reordering, sustainable rate.

    python benchmarks/ragcache_tables.py --musique FILE --mooncake FILE --out docs/results --docs docs/ragcache.md

Computes the parts named by `--parts` (all if left out), writes each as JSON into `--out`, and with `--docs` puts the
tables between the page's markers.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from docs_tables import markdown_table, update_page
from rich.console import Console
from rich.progress import track
from simulator_experiments import MODERN, POLICIES, policy_rows, reordering_row, sustainable_rows

from chunkweave.eval.results import BenchmarkResult, write_json
from chunkweave.eval.simulator.trace import Arrival, build_trace
from chunkweave.eval.simulator.workloads import SourceConfig, open_source
from chunkweave.planning.cost import CostModel, analytic_cost, known_shape
from chunkweave.settings import GIB

SHAPE = "mistral-7b"
FLOPS_PER_S = 50e12
COST = analytic_cost(known_shape(SHAPE).geometry, flops_per_s=FLOPS_PER_S)
FLAT = CostModel((0,), (1, 1000), ((1.0, 1000.0),), COST.kv_bytes_per_token)
"""A second for every token, whatever is cached: a policy that knows no costs."""
MEMORY_BYTES = [n * GIB for n in (8, 16, 32, 64, 128)]
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6)
QUEUED = 2000
"""Requests of the parts with a queue: enough for half an hour at the rates that they arrive at."""
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
    parser.add_argument("--musique", type=Path, help="MuSiQue JSON")
    parser.add_argument("--mooncake", type=Path, help="Mooncake trace")
    parser.add_argument("--requests", type=int, default=10_000, help="of drawn workloads")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one a budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--docs", type=Path)
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    for name, file in (("policies-musique", arguments.musique), ("policies-mooncake", arguments.mooncake)):
        if name in parts and file is None:
            parser.error(f"{name} needs --{name.removeprefix('policies-')} FILE")
    for part in parts:
        rows = list(track(_rows(part, arguments), part, console=Console(stderr=True)))
        config = {"shape": SHAPE, "flops_per_s": FLOPS_PER_S, "requests": arguments.requests}
        command = shlex.join(["python", *sys.argv])
        written = arguments.out / f"ragcache-{part}.json"
        write_json(written, BenchmarkResult(part, command, arguments.seed, config, rows, {}).as_dict())
        if arguments.docs is not None:
            update_page(arguments.docs, written)


def _rows(part: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    jobs = arguments.jobs
    drawn = SourceConfig(requests=arguments.requests, seed=arguments.seed)
    if part == "policies-mmlu-like":
        yield from _policies("mmlu-like, top-2", open_source("mmlu-like", drawn), jobs, MEMORY_BYTES)
    elif part == "policies-drifting":
        moving = SourceConfig(requests=arguments.requests, drift=DRIFT, seed=arguments.seed)
        yield from _policies(f"mmlu-like, top-2, drift {DRIFT}", open_source("mmlu-like", moving), jobs, MEMORY_BYTES)
    elif part == "policies-musique":
        yield from _policies("MuSiQue, top-5", open_source(str(arguments.musique), drawn), jobs)
    elif part == "policies-mooncake":
        whole = SourceConfig(seed=arguments.seed)
        # Of equal sizes reuse-frequency counts uses like lfu, only in other units: left out.
        different = [name for name in POLICIES if name != "reuse-frequency"]
        yield from _policies(
            "Mooncake synthetic", open_source(str(arguments.mooncake), whole), jobs, policies=different
        )
    elif part == "cost-term":
        trace = build_trace("mmlu-like", open_source("mmlu-like", drawn), COST.kv_bytes_per_token)
        for profiled, flat in zip(
            *(policy_rows(trace, MEMORY_BYTES, cost, ["pgdsf"]) for cost in (COST, FLAT)), strict=True
        ):
            rates = {"profiled": profiled["hit_rate"]["pgdsf"], "flat": flat["hit_rate"]["pgdsf"]}
            yield {"budget_bytes": profiled["budget_bytes"], "hit_rate": rates}
    elif part == "reordering":
        arrivals = open_source("mmlu-like", drawn)[:QUEUED]
        for budget in MEMORY_BYTES[1:]:
            yield reordering_row(arrivals, budget, COST, seed=arguments.seed)
    else:
        arrivals = open_source("mmlu-like", drawn)[:QUEUED]
        yield from sustainable_rows(arrivals, 64 * GIB, COST, seed=arguments.seed)


def _policies(
    name: str,
    arrivals: list[Arrival],
    jobs: int,
    budgets: Sequence[int] = (),
    policies: Sequence[str] = POLICIES,
) -> Iterator[dict[str, Any]]:
    if not budgets:
        whole = build_trace(name, arrivals, COST.kv_bytes_per_token).working_set_bytes
        budgets = [int(share * whole) for share in SHARES]
    count = len(budgets)
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_policy_row, [name] * count, [arrivals] * count, budgets, [policies] * count)


def _policy_row(name: str, arrivals: list[Arrival], budget: int, policies: Sequence[str]) -> dict[str, Any]:
    trace = build_trace(name, arrivals, COST.kv_bytes_per_token)
    return next(policy_rows(trace, [budget], COST, policies))


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
                f"{row['budget_bytes'] / GIB:.0f} GiB ({row['budget_share']:.1%})",
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
                f"{row['budget_bytes'] / GIB:.0f} GiB",
                f"{row['rate_per_s']:.2f}/s",
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
        [[row["method"], f"{row['rate_per_s']:.2f}/s", f"{row['rate_per_s'] / base:.2f}x"] for row in rows],
    )


def _cost_table(rows: list[dict[str, Any]]) -> str:
    return markdown_table(
        ["memory", "profiled cost", "a second a token"],
        [
            [f"{row['budget_bytes'] / GIB:.0f} GiB", *(f"{row['hit_rate'][name]:.4f}" for name in ("profiled", "flat"))]
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
