"""TTFT, TPOT, throughput and errors of an OpenAI-compatible server under open-loop load, by reuse method.

    python benchmarks/server_load.py --serve "chunkweave serve --model reader --port 8011" --url http://127.0.0.1:8011 \
        --out server-load.json --update-docs docs/benchmarks.md
    python benchmarks/server_load.py --url http://127.0.0.1:8000 --methods none

Requests are questions over documents that are popular by Zipf's law. They are sent at their times (Poisson, or those
of `--arrivals`, stretched to the rate), whether or not earlier ones were answered. For each method: warm-up requests,
requests one after the other (the unloaded server), the highest sustainable rate, and runs at `--rates`, or else at
half, once and twice the rate that the first method sustains. With `--serve` each method has a fresh server; without,
they find what those before have stored. `none` sends no `chunkweave` field.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from docs_tables import markdown_table, update_page
from load_generator import LoadResult, run_load, sustainable_rate
from rich.console import Console
from rich.table import Table
from server_load_client import FAILURES, Asker
from server_load_workload import Workload, arrival_times, read_arrivals
from server_process import serving

from chunkweave.errors import ChunkweaveError
from chunkweave.eval.results import BenchmarkResult, check_writable, write_json

METHODS = ["full", "prefix", "cacheblend", "cachecraft"]
RATE_SHARES = (0.5, 1.0, 2.0)
WITHIN = 5.0
"""RAGCache §7.1: a rate is sustained if the mean TTFT is at most so many times that of the unloaded server."""
HEADS = ["method", "rate/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "requests/s", "tokens/s", "errors"]
SUMMARY_HEADS = ["method", "unloaded TTFT", "sustainable rate/s", "over full", "over prefix"]
NONE = "none"

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and how they are made."""

    url: str
    path: str
    key: str
    timeout_s: float
    trace: tuple[float, ...] | None
    seed: int

    def client(self) -> httpx.AsyncClient:
        """A client that opens as many connections as there are requests under way."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx.Timeout(self.timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )


class Contender:
    """One method's runs against one server."""

    def __init__(
        self, method: str, target: Target, client: httpx.AsyncClient, bodies: Iterator[dict[str, Any]]
    ) -> None:
        self.method = method
        self._target = target
        self._client = client
        self._bodies = bodies
        self._runs = 0

    async def in_turn(self, requests: int) -> LoadResult:
        """One request after the other.

        Raises:
            ChunkweaveError: not every request was answered.
        """
        result = await self._asker(requests).in_turn()
        if result.error_rate:
            raise ChunkweaveError(f"{self.method}: the unloaded server fails: {_errors(result)}")
        return result

    async def at_rate(self, rate_per_s: float, requests: int) -> LoadResult:
        """A run under load."""
        self._runs += 1
        times = arrival_times(requests, rate_per_s, self._target.trace, self._target.seed + self._runs)
        result = await run_load(self._asker(requests), times, timeout_s=self._target.timeout_s, errors=FAILURES)
        figures = f"TTFT {result.ttft_mean_s:.3f} s, errors {result.error_rate:.0%}"
        console.print(f"{self.method} at {rate_per_s:.3g}/s: {figures}")
        return result

    def _asker(self, requests: int) -> Asker:
        return Asker(self._client, self._target.path, list(islice(self._bodies, requests)))


async def measure(arguments: argparse.Namespace, target: Target, method: str, rates: list[float]) -> dict[str, Any]:
    """All runs of one method; `rates` are filled in by the first one if they are empty."""
    workload = workload_of(arguments)
    async with target.client() as client:
        contender = Contender(method, target, client, workload.bodies(None if method == NONE else method))
        await contender.in_turn(arguments.warm)
        unloaded = await contender.in_turn(arguments.unloaded)
        guess = 1 / unloaded.ttft_mean_s
        found = await sustainable_rate(
            lambda rate: contender.at_rate(rate, arguments.requests),
            WITHIN * unloaded.ttft_mean_s,
            low_per_s=0.0,
            high_per_s=guess,
            trials=arguments.trials,
        )
        if not rates:
            rates += [share * (found.rate_per_s or guess) for share in RATE_SHARES]
        runs = [await contender.at_rate(rate, arguments.requests) for rate in rates]
    return {
        "method": method,
        "sustainable_rate_per_s": found.rate_per_s,
        "sustainable_rate_bounded": found.bounded,
        "unloaded": unloaded.as_dict(),
        "runs": [
            {"rate_per_s": rate, **run.as_dict(), "errors": _errors(run)} for rate, run in zip(rates, runs, strict=True)
        ],
        "trials": [{"rate_per_s": rate, **run.as_dict(), "errors": _errors(run)} for rate, run in found.trials],
    }


def _errors(result: LoadResult) -> dict[str, int]:
    return dict(Counter(request.error for request in result.requests if request.error is not None))


def workload_of(arguments: argparse.Namespace) -> Workload:
    """What is asked for."""
    return Workload(
        chunks=arguments.chunks,
        zipf=arguments.zipf,
        worlds=arguments.worlds,
        passages=arguments.passages,
        new_tokens=arguments.new_tokens,
        seed=arguments.seed,
    )


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their sustainable rate over that of `full` and `prefix`, where these were measured."""
    by_method = {row["method"]: row["sustainable_rate_per_s"] for row in rows}
    return [
        {
            **row,
            **{
                f"over_{other}": row["sustainable_rate_per_s"] / by_method[other] if by_method.get(other) else None
                for other in ("full", "prefix")
            },
        }
        for row in rows
    ]


def run_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """One line for each method and rate."""
    return [
        [
            row["method"],
            f"{run['rate_per_s']:.3g}",
            *(_milliseconds(run[key]) for key in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")),
            f"{run['requests_per_s']:.3g}",
            f"{run['tokens_per_s']:.3g}",
            f"{run['error_rate']:.1%}",
        ]
        for row in rows
        for run in row["runs"]
    ]


def summary_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """One line for each method."""
    return [
        [
            row["method"],
            _milliseconds(row["unloaded"]["ttft_mean_s"]),
            ("" if row["sustainable_rate_bounded"] else "at least ") + f"{row['sustainable_rate_per_s']:.3g}",
            *("" if row[key] is None else f"{row[key]:.2f}x" for key in ("over_full", "over_prefix")),
        ]
        for row in rows
    ]


def main() -> None:
    """Measure, print, write."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that a server started here is stopped
    trace = None if arguments.arrivals is None else tuple(read_arrivals(arguments.arrivals))
    key = os.environ.get(arguments.api_key_variable, "")
    target = Target(arguments.url.rstrip("/"), arguments.path, key, arguments.timeout, trace, arguments.seed)
    rates: list[float] = list(arguments.rates)
    rows: list[dict[str, Any]] = []
    for method in arguments.methods:
        server = nullcontext() if arguments.serve is None else _server(arguments, target)
        with server:
            rows.append(asyncio.run(measure(arguments, target, method, rates)))
        finished = with_ratios(rows)
        _write(arguments, finished, complete=method == arguments.methods[-1])
    _show(finished)
    if arguments.update_docs is not None:
        update_page(arguments.update_docs, arguments.out)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation, as one."""
    rows = result["rows"]
    both = (markdown_table(SUMMARY_HEADS, summary_table(rows)), markdown_table(HEADS, run_table(rows)))
    return {"server-load": "\n\n".join(both)}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--serve", metavar="COMMAND", help="start this server for each method, and stop it afterwards")
    parser.add_argument("--ready-path", default="/ready", help="answers with 200 once --serve is ready (vLLM: /health)")
    parser.add_argument("--server-log", type=Path, default=Path("server-load.log"))
    parser.add_argument("--api-key-variable", default="OPENAI_API_KEY", metavar="NAME", help="where the key is")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rates", type=float, nargs="+", default=[], metavar="PER_S")
    parser.add_argument("--arrivals", type=Path, metavar="CSV", help="arrival times (column TIMESTAMP), else Poisson")
    parser.add_argument("--requests", type=int, default=100, help="of each run")
    parser.add_argument("--warm", type=int, default=60, help="requests before anything is measured")
    parser.add_argument("--unloaded", type=int, default=20, help="requests one after the other")
    parser.add_argument("--trials", type=int, default=7, help="runs to find the sustainable rate")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a request has failed")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--passages", type=int, default=1, help="of each document")
    parser.add_argument("--worlds", type=int, default=0, help="generated worlds instead of the bundled corpus")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--update-docs", type=Path, metavar="PAGE")
    arguments = parser.parse_args()
    if arguments.out is not None:
        check_writable(arguments.out)
    return arguments


def _server(arguments: argparse.Namespace, target: Target) -> Any:
    return serving(arguments.serve, target.url, ready_path=arguments.ready_path, log=arguments.server_log)


def _write(arguments: argparse.Namespace, rows: list[dict[str, Any]], *, complete: bool) -> None:
    """After every method, so that an interrupted run leaves what it has."""
    if arguments.out is None:
        return
    left_out = ("out", "update_docs", "seed", "server_log")
    config = {key: value for key, value in vars(arguments).items() if key not in left_out}
    config["arrivals"] = "poisson" if arguments.arrivals is None else arguments.arrivals.name
    config["workload"] = asdict(workload_of(arguments))
    command = shlex.join(["python", "benchmarks/server_load.py", *sys.argv[1:]])
    result = BenchmarkResult("server-load", command, arguments.seed, config, rows, {}, complete)
    write_json(arguments.out, result.as_dict())


def _show(rows: list[dict[str, Any]]) -> None:
    for title, heads, lines in (
        ("under load", HEADS, run_table(rows)),
        ("sustained", SUMMARY_HEADS, summary_table(rows)),
    ):
        table = Table(title=title, title_justify="left")
        for head in heads:
            table.add_column(head, justify="left" if head == "method" else "right")
        for line in lines:
            table.add_row(*line)
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(table)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    main()
