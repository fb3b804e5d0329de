"""TTFT, TPOT, throughput and errors of an OpenAI-compatible server under open-loop load, by reuse method.

    python benchmarks/server_load.py --serve "chunkweave serve --model reader --method {method} --port 8011" \
        --url http://127.0.0.1:8011 --out server-load.json --update-docs docs/benchmarks.md
    python benchmarks/server_load.py --url http://127.0.0.1:8000 --methods none

Requests are questions over documents that are popular by Zipf's law. They are sent at their times (Poisson, or those
of `--arrivals`, stretched to the rate), whether or not earlier ones were answered. A contender is a method with its
chunks in the order given (`fixed`) or, apart, in the order that is best for reuse (`free`): what reordering gains is no
merit of a method, and `prefix, fixed` is plain prefix caching. For each contender: warm-up requests, requests one after
the other (the unloaded server), the highest sustainable rate, and runs at `--rates`, or else at half, once and twice
the rate that the first contender sustains. With `--serve` each has a fresh server, `{method}` and `{order}` in its
command are the contender's, so that it keeps nothing for other methods; without, they find what those before have
stored. `none` sends no `chunkweave` field.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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

from chunkweave.config import ReuseConfig
from chunkweave.errors import ChunkweaveError
from chunkweave.eval.results import BenchmarkResult, check_writable, write_json
from chunkweave.planning.method import reuses_nothing

METHODS = ["full", "prefix", "cacheblend", "cachecraft"]
ORDERS = ["fixed", "free"]
RATE_SHARES = (0.5, 1.0, 2.0)
WITHIN = 5.0
"""RAGCache §7.1: a rate is sustained if the mean TTFT is at most so many times that of the unloaded server."""
HEADS = ["method", "rate/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "requests/s", "tokens/s", "errors"]
OVER = {
    "over_full": ("over full", ("full", "fixed")),
    "over_prefix": ("over prefix", ("prefix", "fixed")),
    "over_prefix_free": ("over prefix, free", ("prefix", "free")),
}
"""Whose sustainable rate each one's is divided by: the key, the table's head, method and order."""
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


@dataclass(frozen=True, slots=True)
class Choice:
    """A method, and whether chunks may be reordered; no method of ours (`none`) has no order."""

    method: str
    order: str | None

    @property
    def label(self) -> str:
        """The name of its rows."""
        return label_of({"method": self.method, "order": self.order})

    @property
    def field(self) -> dict[str, str] | None:
        """What its requests say to the server about reuse."""
        return None if self.order is None else {"method": self.method, "order": self.order}

    def command(self, serve: str) -> str:
        """The command of its server."""
        return serve.replace("{method}", self.method).replace("{order}", self.order or "fixed")


def choices(methods: Sequence[str], orders: Sequence[str]) -> list[Choice]:
    """Every method in every order; in one order only where nothing is reused, and the order changes nothing."""
    found: list[Choice] = []
    for method in methods:
        if method == NONE:
            found.append(Choice(method, None))
        elif reuses_nothing(method, ReuseConfig()):
            found.append(Choice(method, "fixed"))
        else:
            found += [Choice(method, order) for order in orders]
    return found


def label_of(row: Mapping[str, Any]) -> str:
    """What a row is called: files of before have no order."""
    return row["method"] if row.get("order") is None else f"{row['method']}, {row['order']}"


class Contender:
    """One method's runs against one server."""

    def __init__(self, label: str, target: Target, client: httpx.AsyncClient, bodies: Iterator[dict[str, Any]]) -> None:
        self.label = label
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
            raise ChunkweaveError(f"{self.label}: the unloaded server fails: {_errors(result)}")
        return result

    async def at_rate(self, rate_per_s: float, requests: int) -> LoadResult:
        """A run under load."""
        self._runs += 1
        times = arrival_times(requests, rate_per_s, self._target.trace, self._target.seed + self._runs)
        result = await run_load(self._asker(requests), times, timeout_s=self._target.timeout_s, errors=FAILURES)
        figures = f"TTFT {result.ttft_mean_s:.3f} s, errors {result.error_rate:.0%}"
        console.print(f"{self.label} at {rate_per_s:.3g}/s: {figures}")
        return result

    def _asker(self, requests: int) -> Asker:
        return Asker(self._client, self._target.path, list(islice(self._bodies, requests)))


async def measure(arguments: argparse.Namespace, target: Target, choice: Choice, rates: list[float]) -> dict[str, Any]:
    """All runs of one contender; `rates` are filled in by the first one if they are empty."""
    workload = workload_of(arguments)
    async with target.client() as client:
        contender = Contender(choice.label, target, client, workload.bodies(choice.field))
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
        "method": choice.method,
        "order": choice.order,
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
    """Rows with their sustainable rate over that of `full` and of `prefix` in either order, as far as measured."""
    measured = {(row["method"], row["order"]): row["sustainable_rate_per_s"] for row in rows}
    others = {key: measured.get(other) for key, (_, other) in OVER.items()}
    return [
        {**row, **{key: row["sustainable_rate_per_s"] / rate if rate else None for key, rate in others.items()}}
        for row in rows
    ]


def run_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """One line for each method and rate."""
    return [
        [
            label_of(row),
            f"{run['rate_per_s']:.3g}",
            *(_milliseconds(run[key]) for key in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")),
            f"{run['requests_per_s']:.3g}",
            f"{run['tokens_per_s']:.3g}",
            f"{run['error_rate']:.1%}",
        ]
        for row in rows
        for run in row["runs"]
    ]


def summary_heads(rows: list[dict[str, Any]]) -> list[str]:
    """The heads of `summary_table`: files of before know no `prefix` that reorders."""
    return [
        "method",
        "unloaded TTFT",
        "sustainable rate/s",
        *(head for key, (head, _) in OVER.items() if key in rows[0]),
    ]


def summary_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """One line for each contender."""
    return [
        [
            label_of(row),
            _milliseconds(row["unloaded"]["ttft_mean_s"]),
            ("" if row["sustainable_rate_bounded"] else "at least ") + f"{row['sustainable_rate_per_s']:.3g}",
            *("" if row[key] is None else f"{row[key]:.2f}x" for key in OVER if key in row),
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
    contenders = choices(arguments.methods, arguments.orders)
    for choice in contenders:
        server = nullcontext() if arguments.serve is None else _server(arguments, target, choice)
        with server:
            rows.append(asyncio.run(measure(arguments, target, choice, rates)))
        finished = with_ratios(rows)
        _write(arguments, finished, complete=choice == contenders[-1])
    _show(finished)
    if arguments.update_docs is not None:
        update_page(arguments.update_docs, arguments.out)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation, as one."""
    rows = result["rows"]
    both = (markdown_table(summary_heads(rows), summary_table(rows)), markdown_table(HEADS, run_table(rows)))
    return {"server-load": "\n\n".join(both)}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument(
        "--serve", metavar="COMMAND", help="start this server for each contender, and stop it afterwards"
    )
    parser.add_argument("--ready-path", default="/ready", help="answers with 200 once --serve is ready (vLLM: /health)")
    parser.add_argument("--server-log", type=Path, default=Path("server-load.log"))
    parser.add_argument("--api-key-variable", default="OPENAI_API_KEY", metavar="NAME", help="where the key is")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--orders", nargs="+", default=ORDERS, choices=ORDERS, help="each method is measured in each")
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
    if NONE in arguments.methods and "{method}" in (arguments.serve or ""):
        parser.error("`none` is no method that a server could be started with: leave {method} out of --serve")
    if arguments.out is not None:
        check_writable(arguments.out)
    return arguments


def _server(arguments: argparse.Namespace, target: Target, choice: Choice) -> Any:
    return serving(
        choice.command(arguments.serve), target.url, ready_path=arguments.ready_path, log=arguments.server_log
    )


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
        ("sustained", summary_heads(rows), summary_table(rows)),
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
