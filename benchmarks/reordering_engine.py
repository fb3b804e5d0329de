"""On the real engine: TTFT with and without cache-aware reordering, and the rate that each method sustains.

    python benchmarks/reordering_engine.py --out reordering-engine.json

Reordering (RAGCache Figure 18): Poisson arrivals at `--load` times what first come first served serves of a burst, for
two documents each that 3 % of the documents get 60 % of (RAGCache §3.2). In order (window 0) and reordered (window 32)
answer the same requests at the same times, in rounds that alternate; each has its own engine and store, warmed by
earlier requests. One new token, as with MMLU. No request is sent twice to an engine.

Sustained rate (its §7): the greatest rate, by bisection, at which the mean TTFT stays within five times that of `full`
without load. The objective is the same for all methods, so that a faster method has no stricter one. A trial lasts
`--trial-seconds` and has at least `--trial-requests`, so that a growing queue is seen. The store has every chunk
computed alone, except that of `prefix`, which earlier requests have filled.
"""

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import torch
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from load_generator import LoadResult, Objective, SustainableRate, poisson_arrivals, run_load, sustainable_rate
from passages import passages
from rich.console import Console
from rich.progress import Progress

from chunkweave import AsyncEngine, BatchingConfig, Engine, Request, ReuseReport, SamplingParams, StoreConfig
from chunkweave.models.loading import LoadedModel, load_shape
from chunkweave.scheduling.queue import DEFAULT_WINDOW
from chunkweave_lab.simulator.workloads import Corpus, draw_requests, exponent_for

REORDER_HEADS = ["memory", "requests/s", "TTFT in order", "reordered", "ratio", "token hits in order", "reordered"]
RATE_HEADS = ["method", "unloaded TTFT", "sustained rate", "of full", "TTFT there", "p99 there"]
METHODS = ("full", "prefix", "cacheblend", "cachecraft")
IN_ORDER, REORDERED = "in order", "reordered"
ALONE = 8
"""Number of requests for the mean TTFT without load."""


@dataclass
class Served:
    """An engine for many requests, its requests, and the reports of its answers."""

    batching: AsyncEngine
    requests: Sequence[Request]
    method: str
    reports: list[ReuseReport] = field(default_factory=list)

    async def ask(self, number: int) -> AsyncIterator[int]:
        """One for each token of an answer; its report is kept."""
        async for event in self.batching.submit(self.requests[number], method=self.method):
            if event.answer is None:
                yield 1
            else:
                self.reports.append(event.answer.report)

    async def run(self, first: int, arrivals: Sequence[float]) -> LoadResult:
        """The requests from number `first` on, at these times."""
        self.reports.clear()
        return await run_load(lambda number: self.ask(first + number), arrivals)

    @property
    def token_hits(self) -> float:
        """Share of the prompts' tokens that were stored and exact, in the last run."""
        stored = sum(report.prefix_exact_tokens for report in self.reports)
        return stored / sum(report.prompt_tokens for report in self.reports)


def drawn_requests(loaded: LoadedModel, arguments: argparse.Namespace, in_all: int) -> list[Request]:
    """Requests for two of the passages each, skewed as RAGCache's."""
    documents = arguments.documents
    texts = passages(loaded.tokenizer, documents, arguments.chunk_tokens)
    corpus = Corpus(documents, exponent_for(documents, 0.03, 0.6), 2)
    arrivals = draw_requests(corpus, [float(number) for number in range(in_all)], arguments.seed)
    numbers: dict[str, int] = {}
    sampling = SamplingParams(max_new_tokens=1)
    requests = []
    for number, arrival in enumerate(arrivals):
        chosen = [numbers.setdefault(part.name, len(numbers)) for part in arrival.parts[int(arrival.has_system) :]]
        requests.append(Request(f"How many carts, of {number}?", [texts[one] for one in chosen], sampling=sampling))
    return requests


async def reordering_row(
    loaded: LoadedModel,
    requests: Sequence[Request],
    budget: int,
    arguments: argparse.Namespace,
    tell: Callable[[], None],
) -> dict[str, Any]:
    """Both orders at one budget."""
    served = {}
    for name, window in ((IN_ORDER, 0), (REORDERED, DEFAULT_WINDOW)):
        engine = Engine(loaded, store=StoreConfig(budget, policy="pgdsf"))
        config = BatchingConfig(max_running=arguments.max_running, window=window, max_waiting=len(requests))
        served[name] = Served(AsyncEngine(engine, config), requests, "prefix")
    try:
        warm = [0.0] * arguments.warm_up
        for one in served.values():
            await one.run(0, warm)
        tell()
        burst = [0.0] * arguments.requests
        bursts = [await one.run(arguments.warm_up, burst) for one in served.values()]
        rate = arguments.load * bursts[0].requests_per_s
        rounds = []
        for turn in range(arguments.rounds):
            arrivals = poisson_arrivals(arguments.requests, rate, seed=turn)
            names = [IN_ORDER, REORDERED] if turn % 2 == 0 else [REORDERED, IN_ORDER]
            by_order = {}
            for name in names:
                first = arguments.warm_up + (1 + turn) * arguments.requests
                result = await served[name].run(first, arrivals)
                by_order[name] = result.as_dict() | {"token_hits": served[name].token_hits}
                tell()
            rounds.append(by_order)
    finally:
        for one in served.values():
            one.batching.close()
    mean = {name: statistics.fmean(one[name]["ttft_mean_s"] for one in rounds) for name in served}
    return {
        "budget_bytes": budget,
        "rate_per_s": rate,
        "ttft_mean_s": mean,
        "token_hits": {name: statistics.fmean(one[name]["token_hits"] for one in rounds) for name in served},
        "speedup": mean[IN_ORDER] / mean[REORDERED],
        "speedups": [one[IN_ORDER]["ttft_mean_s"] / one[REORDERED]["ttft_mean_s"] for one in rounds],
        "rounds": rounds,
    }


async def rate_rows(
    loaded: LoadedModel, requests: Sequence[Request], arguments: argparse.Namespace, tell: Callable[[], None]
) -> list[dict[str, Any]]:
    """The sustained rate of every method."""
    chunks = list(dict.fromkeys(chunk for request in requests for chunk in request.chunks))
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        engine = Engine(loaded, store=StoreConfig(4 << 30))
        if method in ("cacheblend", "cachecraft"):
            engine.precompute(chunks)
        config = BatchingConfig(max_running=arguments.max_running, max_waiting=len(requests))
        served = Served(AsyncEngine(engine, config), requests, method)
        try:
            await served.run(0, [0.0] * arguments.warm_up)
            unloaded_s = await _unloaded_ttft_s(served, arguments.warm_up)
            # answers are one token: the first is the last
            objective = Objective(5 * (rows[0]["unloaded_ttft_s"] if rows else unloaded_s), unloaded_s)

            fresh = count(arguments.warm_up + ALONE)

            async def at_rate(rate: float, served: Served = served, fresh: Iterator[int] = fresh) -> LoadResult:
                numbers = list(islice(fresh, _requests_of_trial(rate, arguments)))
                result = await served.run(numbers[0], poisson_arrivals(len(numbers), rate, arguments.seed))
                tell()
                return result

            found = await sustainable_rate(
                at_rate, objective, low_per_s=0.0, high_per_s=1.5 / unloaded_s, trials=arguments.trials
            )
        finally:
            served.batching.close()
        rows.append(_rate_row(method, unloaded_s, objective, found))
    return rows


def _requests_of_trial(rate_per_s: float, arguments: argparse.Namespace) -> int:
    """As many as come in its time, within limits."""
    least, most = arguments.trial_requests
    return min(most, max(least, round(rate_per_s * arguments.trial_seconds)))


async def _unloaded_ttft_s(served: Served, first: int) -> float:
    """Mean TTFT of requests sent one at a time."""
    results = [await served.run(first + number, [0.0]) for number in range(ALONE)]
    return statistics.fmean(result.ttft_mean_s for result in results)


def _rate_row(method: str, unloaded_s: float, objective: Objective, found: SustainableRate) -> dict[str, Any]:
    best = next((result for rate, result in found.trials if rate == found.rate_per_s), None)
    return {
        "method": method,
        "unloaded_ttft_s": unloaded_s,
        "objective_s": objective.ttft_s,
        "rate_per_s": found.rate_per_s,
        "bounded": found.bounded,
        "there": None if best is None else best.as_dict(),
        "trials": [{"rate_per_s": rate} | result.as_dict() for rate, result in found.trials],
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="demo")
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4], help="of all documents' KV, as budgets"
    )
    parser.add_argument("--load", type=float, default=1.1, help="of what first come first served serves")
    parser.add_argument("--requests", type=int, default=200, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=60)
    parser.add_argument("--trials", type=int, default=6, help="runs of a bisection")
    parser.add_argument("--trial-requests", type=int, nargs=2, default=[60, 1500], metavar=("LEAST", "MOST"))
    parser.add_argument("--trial-seconds", type=float, default=15.0)
    parser.add_argument("--max-running", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    torch.set_num_threads(arguments.threads)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows, rates = asyncio.run(_measure(arguments, progress))
    show(REORDER_HEADS, _reorder_cells(rows))
    show(RATE_HEADS, _rate_cells(rates))
    write("reordering-engine", arguments, settings(arguments, "seed"), rows, {"sustained": rates})


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation."""
    return {
        "reordering-engine": markdown_table(REORDER_HEADS, _reorder_cells(result["rows"])),
        "sustained-rate-engine": markdown_table(RATE_HEADS, _rate_cells(result["sustained"])),
    }


async def _measure(
    arguments: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    loaded = load_shape(arguments.shape, seed=arguments.seed)
    trials = ALONE + arguments.trials * arguments.trial_requests[1]
    in_all = arguments.warm_up + max((1 + arguments.rounds) * arguments.requests, trials)
    requests = drawn_requests(loaded, arguments, in_all)
    runs = len(arguments.shares) * (1 + 2 * arguments.rounds) + len(METHODS) * arguments.trials
    task = progress.add_task("measuring", total=runs)
    geometry = loaded.model.geometry
    document_bytes = geometry.kv_elements_per_token() * loaded.model.dtype.itemsize * arguments.chunk_tokens

    def tell() -> None:
        progress.advance(task)

    rows = []
    for share in arguments.shares:
        budget = int(share * arguments.documents * document_bytes)
        rows.append({"share": share} | await reordering_row(loaded, requests, budget, arguments, tell))
    return rows, await rate_rows(loaded, requests, arguments, tell)


def _reorder_cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            f"{row['budget_bytes'] / 2**20:.0f} MiB ({row['share']:.0%})",
            f"{row['rate_per_s']:.1f}",
            f"{row['ttft_mean_s'][IN_ORDER]:.2f} s",
            f"{row['ttft_mean_s'][REORDERED]:.2f} s",
            f"{row['speedup']:.2f}x",
            f"{row['token_hits'][IN_ORDER]:.3f}",
            f"{row['token_hits'][REORDERED]:.3f}",
        ]
        for row in rows
    ]


def _rate_cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    first = rows[0]["rate_per_s"]
    return [
        [
            row["method"],
            f"{row['unloaded_ttft_s'] * 1e3:.0f} ms",
            f"{'' if row['bounded'] else 'at least '}{row['rate_per_s']:.1f}/s",
            f"{row['rate_per_s'] / first:.2f}x" if first else "-",
            "-" if row["there"] is None else f"{row['there']['ttft_mean_s'] * 1e3:.0f} ms",
            "-" if row["there"] is None else f"{row['there']['ttft_p99_s'] * 1e3:.0f} ms",
        ]
        for row in rows
    ]


if __name__ == "__main__":
    main()
