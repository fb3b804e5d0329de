"""TTFT, TPOT, throughput and errors of an OpenAI-compatible server under open-loop load, by reuse method or settings.

    python benchmarks/server_load.py --serve "chunkweave serve --model reader --method {method} --port 8011" \
        --url http://127.0.0.1:8011 --out server-load.json
    python benchmarks/server_load.py --url http://127.0.0.1:8000 --methods none
    python benchmarks/server_load.py --serve "chunkweave serve --model smollm2 --port 8011 {way}" \
        --url http://127.0.0.1:8011 --way "full: --method full" --way "PGDSF: --method prefix --policy pgdsf" \
        --dataset xquad.en.json --top-k 1 3 5 --rate-shares .5 .9 1.2 --out server-load-served.json

Requests are questions over documents that are popular by Zipf's law. They are sent at their times (Poisson, or those of
`--arrivals`, stretched to the rate), whether or not earlier ones were answered. A contender is a method with its chunks
in the order given (`fixed`) or, apart, in the order that is best for reuse (`free`): the gain of reordering is not a
method's, and `prefix, fixed` is plain prefix caching. For each contender: warm-up requests, requests one after the
other (the unloaded server), the highest sustainable rate, and runs at `--rates`, or else at half, once and twice the
rate that the first contender sustains. With `--serve` each has a new server; `{method}` and `{order}` in its command
are the contender's, so it stores nothing for other methods. Without, contenders find the KV stored by earlier ones.
`none` sends no `chunkweave` field.

A contender may be a `--way` instead, which is a named set of server flags: they replace `{way}` in the command, and
requests have no fields about reuse. With `--dataset` requests are its questions, popular by Zipf's law, to a corpus of
the server that its passages are uploaded to first; the server retrieves, and each contender is measured for each
`--top-k`. Rates, and of ways the longest TTFT that counts as sustained, are those of the first contender with the same
top-k. `limit_over_full` is how many times fewer tokens than `full` a contender computes in the runs at `--rates`. It
ignores answers' tokens, and weighs all tokens of a prompt equally.

A rate is sustained if at least 95 % of what was offered is served, the mean TTFT is at most five times the unloaded
one and nothing fails, in a run at least 20 times as long as a mean unloaded answer. What a contender sustains lies
between the greatest rate that it did and the least one above that it did not, and so do quotients of two contenders.

With `--recurring` requests bring their chunks: questions about generated `--worlds`, or those of `--dataset`, come
again by Zipf's law, each with the `--top-k` passages that a noisy retrieval ranks first (CRAFT §6, the requests of
`craft_ordering.py`). `--search first` looks for the sustainable rate of the first contender of each top-k only.

With an existing `--out`, contenders in it are kept, and only the others are measured.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import httpx
from docs_tables import markdown_table, read_result
from load_generator import LoadResult, Objective, SustainableRate, reuse_of, sustainable_rate
from rich.console import Console
from rich.table import Table
from server_load_client import Asker, server_counts, upload
from server_load_workload import (
    CORPUS,
    NONE,
    Choice,
    CorpusWorkload,
    RecurringWorkload,
    Way,
    Workload,
    arrival_times,
    choices,
    read_arrivals,
)
from server_process import serving

from chunkweave.calibration.results import BenchmarkResult, commit, refuse_other_settings
from chunkweave.cli.console import check_writable, to_json, write_json
from chunkweave.errors import ChunkweaveError, UsageError

METHODS = ["full", "prefix", "cacheblend", "cachecraft"]
ORDERS = ["fixed", "free"]
RATE_SHARES = [0.5, 1.0, 2.0]
WITHIN = 5.0
"""RAGCache §7.1: a rate is sustained if the mean TTFT is at most so many times that of the unloaded server.

Here 95 % of what was offered has to be served as well, in a run at least 20 times as long as a mean unloaded answer.
"""
HEADS = ["method", "rate/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "requests/s", "tokens/s", "errors"]
OVER = {
    "over_full": ("over full", ("full", "fixed")),
    "over_prefix": ("over prefix", ("prefix", "fixed")),
    "over_prefix_free": ("over prefix, free", ("prefix", "free")),
}
"""The bases of sustainable rates: key, the table's head, method and order."""
FULL = "full"
"""The way that is the base of other ways' rates."""

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
        """A client without a limit on connections."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx.Timeout(self.timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )


def contenders_of(arguments: argparse.Namespace) -> list[Choice | Way]:
    """All that are to be measured, top-k by top-k.

    Raises:
        UsageError: as `Way.of`.
    """
    named = [Way.of(text) for text in arguments.way] or choices(arguments.methods, arguments.orders)
    return [replace(one, top_k=top_k) for top_k in arguments.top_k or [None] for one in named]


def label_of(row: Mapping[str, Any]) -> str:
    """The name of a row; older files have no order."""
    name = row["way"] if "way" in row else row["method"]
    parts = (name, row.get("order"), f"top-{row['top_k']}" if "top_k" in row else None)
    return ", ".join(part for part in parts if part is not None)


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
        result = await self._asker(requests).at_times(times, self._target.timeout_s)
        figures = f"TTFT {result.ttft_mean_s:.3f} s, errors {result.error_rate:.0%}"
        console.print(f"{self.label} at {rate_per_s:.3g}/s: {figures}")
        return result

    def _asker(self, requests: int) -> Asker:
        return Asker(self._client, self._target.path, list(islice(self._bodies, requests)))


async def measure(
    arguments: argparse.Namespace, target: Target, choice: Choice | Way, first: Mapping[str, Any] | None
) -> dict[str, Any]:
    """All runs of one contender; `first` is the row of the first one with its top-k, None if it is that itself."""
    workload = workload_of(arguments, choice.top_k)
    async with target.client() as client:
        if isinstance(workload, CorpusWorkload):
            await upload(client, CORPUS, workload.passages())
        contender = Contender(label_of(choice.keys), target, client, workload.bodies(choice.field))
        await contender.in_turn(arguments.warm)
        unloaded = await contender.in_turn(arguments.unloaded)
        guess = 1 / unloaded.ttft_mean_s
        objective = Objective(WITHIN * unloaded.ttft_mean_s, unloaded.answer_mean_s)
        if first is not None and isinstance(choice, Way):
            # one of its own would hold a faster way to a stricter one
            objective = replace(objective, ttft_s=first["objective_s"])
        found = SustainableRate(0.0, (), bounded=False)
        if first is None or arguments.search is None:
            least = arguments.trial_requests or arguments.requests
            found = await sustainable_rate(
                lambda rate: contender.at_rate(rate, objective.requests(rate, least)),
                objective,
                low_per_s=0.0,
                high_per_s=guess,
                trials=arguments.trials,
            )
        rates = arguments.rates or [share * (found.rate_per_s or guess) for share in arguments.rate_shares]
        if first is not None:
            rates = [run["rate_per_s"] for run in first["runs"]]
        runs = [await contender.at_rate(rate, arguments.requests) for rate in rates]
        counts = await server_counts(client)
    tried = [
        [{"rate_per_s": rate, **run.as_dict(), "errors": _errors(run)} for rate, run in some]
        for some in (zip(rates, runs, strict=True), found.trials)
    ]
    sustained, unsustained = objective.sustained(chain.from_iterable(tried)) if found.trials else (0.0, None)
    return {
        **choice.keys,
        **reuse_of(list(chain.from_iterable(run.usages for run in runs))),
        "server": counts,
        "commit": commit(),
        "objective_s": objective.ttft_s,
        "sustainable_rate_per_s": sustained,
        "unsustained_rate_per_s": unsustained,
        "unloaded": unloaded.as_dict(),
        "runs": tried[0],
        "trials": tried[1],
    }


def _errors(result: LoadResult) -> dict[str, int]:
    return dict(Counter(request.error for request in result.requests if request.error is not None))


def workload_of(
    arguments: argparse.Namespace, top_k: int | None = None
) -> Workload | CorpusWorkload | RecurringWorkload:
    """The workload, with `top_k` chunks if requests carry retrieved chunks."""
    if arguments.recurring:
        return RecurringWorkload(
            arguments.dataset,
            chunks=top_k or arguments.chunks,
            zipf=arguments.zipf,
            worlds=arguments.worlds,
            questions=arguments.questions or 200,
            new_tokens=arguments.new_tokens,
            seed=arguments.seed,
        )
    if arguments.dataset is not None:
        return CorpusWorkload(arguments.dataset, arguments.zipf, arguments.new_tokens, arguments.seed)
    return Workload(
        chunks=arguments.chunks,
        zipf=arguments.zipf,
        worlds=arguments.worlds,
        passages=arguments.passages,
        new_tokens=arguments.new_tokens,
        seed=arguments.seed,
    )


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their sustainable rate over that of `full` and of `prefix` in either order, least and most.

    Ways have that over `full`, and the limit that computed tokens set. Only rows of one top-k are compared.
    """
    measured = {_compared_as(row): row for row in rows}
    return [{**row, **(_way_ratios if "way" in row else _method_ratios)(row, measured)} for row in rows]


def _compared_as(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["way"] if "way" in row else (row["method"], row.get("order")), row.get("top_k"))


def _method_ratios(row: Mapping[str, Any], measured: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    others = {key: measured.get((other, row.get("top_k"))) for key, (_, other) in OVER.items()}
    return {key: _over(row, other) for key, other in others.items()}


def _way_ratios(row: Mapping[str, Any], measured: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    full = measured.get((FULL, row.get("top_k")))
    tokens = [one.get("computed_tokens_mean") for one in (full or {}, row)]
    return {"over_full": _over(row, full), "limit_over_full": tokens[0] / tokens[1] if all(tokens) else None}


def _over(row: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[float | None] | None:
    """Minimum and maximum (None: open) of the rate divided by the rate that `other` sustains; None if unknown."""
    if other is None or not row["sustainable_rate_per_s"] or not other.get("unsustained_rate_per_s"):
        return None
    if other is row:
        return [1.0, 1.0]
    most, base = row["unsustained_rate_per_s"], other["sustainable_rate_per_s"]
    return [row["sustainable_rate_per_s"] / other["unsustained_rate_per_s"], most / base if most and base else None]


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
            _sustained(row),
            *(_span(row[key], "{:.2f}x") for key in OVER if key in row),
        ]
        for row in rows
    ]


def way_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each way of one top-k: what it sustains, and its TTFT at each rate."""
    heads = ["", "unloaded TTFT", "sustainable rate/s", "over full", "limit"]
    for run in rows[0]["runs"]:
        heads += [f"p50 at {run['rate_per_s']:.3g}/s", "p99"]
    lines = [
        [
            row["way"],
            _milliseconds(row["unloaded"]["ttft_mean_s"]),
            _sustained(row),
            _span(row["over_full"], "{:.2f}x"),
            "" if row["limit_over_full"] is None else f"{row['limit_over_full']:.2f}x",
            *(_milliseconds(run[key]) for run in row["runs"] for key in ("ttft_p50_s", "ttft_p99_s")),
            f"{row['reused_share']:.0%}" if "reused_share" in row else "",
        ]
        for row in rows
    ]
    return markdown_table([*heads, "reused"], lines)


def main() -> None:
    """Measure what is missing, print, write."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that a server started here is stopped
    trace = None if arguments.arrivals is None else tuple(read_arrivals(arguments.arrivals))
    key = os.environ.get(arguments.api_key_variable, "")
    target = Target(arguments.url.rstrip("/"), arguments.path, key, arguments.timeout, trace, arguments.seed)
    contenders = contenders_of(arguments)
    rows = finished_rows(arguments, contenders)
    for choice in contenders:
        if _is_measured(choice, rows):
            console.print(f"{label_of(choice.keys)}: measured before")
            continue
        first = next((row for row in rows if row.get("top_k") == choice.top_k), None)
        server = nullcontext() if arguments.serve is None else _server(arguments, target, choice)
        with server:
            rows.append(asyncio.run(measure(arguments, target, choice, first)))
        rows = with_ratios(rows)
        write_result(arguments, rows, contenders)
    write_result(arguments, rows, contenders)
    _show(rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation: of methods as one, of ways one for each top-k."""
    rows = result["rows"]
    if "way" in rows[0]:
        by_top_k = {top_k: [row for row in rows if row.get("top_k") == top_k] for top_k in _top_ks(rows)}
        return {
            "server-load-ways" + ("" if top_k is None else f"-{top_k}"): way_table(some)
            for top_k, some in by_top_k.items()
        }
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
    parser.add_argument("--way", action="append", default=[], metavar="NAME: FLAGS", help="repeatable; no methods then")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--orders", nargs="+", default=ORDERS, choices=ORDERS, help="each method is measured in each")
    parser.add_argument("--rates", type=float, nargs="+", default=[], metavar="PER_S")
    parser.add_argument(
        "--rate-shares", type=float, nargs="+", default=RATE_SHARES, help="of what the first contender sustains"
    )
    parser.add_argument("--arrivals", type=Path, metavar="CSV", help="arrival times (column TIMESTAMP), else Poisson")
    parser.add_argument("--requests", type=int, default=100, help="of each run")
    parser.add_argument("--warm", type=int, default=60, help="requests before anything is measured")
    parser.add_argument("--unloaded", type=int, default=20, help="requests one after the other")
    parser.add_argument("--trials", type=int, default=7, help="runs to find the sustainable rate")
    parser.add_argument("--search", choices=["first"], help="whose sustainable rate; of all if left out")
    parser.add_argument("--trial-requests", type=int, help="of each of them, if other than --requests")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a request has failed")
    parser.add_argument("--dataset", type=Path, metavar="FILE", help="questions to a corpus, as `chunkweave bench` has")
    parser.add_argument(
        "--top-k", type=int, nargs="+", default=[], help="chunks that are retrieved; with --dataset or --recurring"
    )
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--recurring", action="store_const", const=True, help="requests bring what retrieval found")
    parser.add_argument("--questions", type=int, help="different ones about worlds, with --recurring (200)")
    parser.add_argument("--passages", type=int, default=1, help="of each document")
    parser.add_argument("--worlds", type=int, default=0, help="generated worlds instead of the bundled corpus")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if len(arguments.way) > 1 and "{way}" not in (arguments.serve or ""):
        parser.error("several ways need --serve with {way} in it")
    if arguments.top_k and arguments.dataset is None and not arguments.recurring:
        parser.error("--top-k is for the questions of a --dataset, or for --recurring ones")
    if arguments.recurring and arguments.dataset is None and not arguments.worlds:
        parser.error("--recurring needs questions: those of a --dataset, or about --worlds")
    if not arguments.way and NONE in arguments.methods and "{method}" in (arguments.serve or ""):
        parser.error("`none` is no method that a server could be started with: leave {method} out of --serve")
    if arguments.out is not None:
        check_writable(arguments.out)
    return arguments


def _server(arguments: argparse.Namespace, target: Target, choice: Choice | Way) -> Any:
    return serving(
        choice.command(arguments.serve), target.url, ready_path=arguments.ready_path, log=arguments.server_log
    )


def finished_rows(arguments: argparse.Namespace, contenders: Sequence[Choice | Way]) -> list[dict[str, Any]]:
    """The finished rows in `--out`.

    Raises:
        UsageError: they were measured under other settings, with methods instead of ways or vice versa, or a way had
            other flags.
        DocumentError: the file cannot be read.
    """
    if arguments.out is None or not arguments.out.is_file():
        return []
    before = read_result(arguments.out)
    settings = [
        {key: value for key, value in {**config, "seed": seed}.items() if key not in _WHO}
        for config, seed in (
            (before.get("config", {}), before.get("seed")),
            (json.loads(to_json(_config(arguments))), arguments.seed),
        )
    ]
    refuse_other_settings(arguments.out, *settings)
    rows: list[dict[str, Any]] = before["rows"]
    if any(("way" in row) != bool(arguments.way) for row in rows):
        raise UsageError(f"{arguments.out} cannot hold methods and ways at once; name another file")
    for one in contenders:
        if isinstance(one, Way) and any(row.get("way") == one.name and row["flags"] != one.flags for row in rows):
            raise UsageError(f"{arguments.out} has the way {one.name!r} with other flags; give it another name")
    return rows


def _is_measured(choice: Choice | Way, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(choice.keys.items() <= row.items() and row.get("top_k") == choice.top_k for row in rows)


_WHO = ("way", "methods", "orders", "top_k")
"""Settings that select contenders: they may differ from those of an existing file."""


def _config(arguments: argparse.Namespace) -> dict[str, Any]:
    left_out = ("out", "seed", "server_log")
    config = {key: value for key, value in vars(arguments).items() if key not in left_out}
    config["arrivals"] = "poisson" if arguments.arrivals is None else arguments.arrivals.name
    config["dataset"] = None if arguments.dataset is None else arguments.dataset.name
    config["workload"] = workload_of(arguments).settings()
    return config


def write_result(arguments: argparse.Namespace, rows: list[dict[str, Any]], contenders: Sequence[Choice | Way]) -> None:
    """Write the result; called after every contender, so that an interrupted run keeps finished ones."""
    if arguments.out is None:
        return
    complete = all(_is_measured(one, rows) for one in contenders)
    command = shlex.join(["python", "benchmarks/server_load.py", *sys.argv[1:]])
    result = BenchmarkResult("server-load", command, arguments.seed, _config(arguments), rows, {}, complete)
    write_json(arguments.out, result.as_dict())


def _show(rows: list[dict[str, Any]]) -> None:
    if "way" in rows[0]:
        print("\n\n".join(tables({"rows": rows}).values()))
        return
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


def _top_ks(rows: Sequence[Mapping[str, Any]]) -> list[int | None]:
    return sorted({row.get("top_k") for row in rows}, key=lambda top_k: top_k or 0)


def _sustained(row: Mapping[str, Any]) -> str:
    least, most = row["sustainable_rate_per_s"], row["unsustained_rate_per_s"]
    return _span([least, most] if least or most else None, "{:.3g}")


def _span(ends: Sequence[float | None] | None, form: str) -> str:
    """`least to most`; empty if it was not measured."""
    if ends is None:
        return ""
    least, most = (None if end is None else form.format(end) for end in ends)
    return f"at least {least}" if most is None else str(least) if least == most else f"{least} to {most}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    main()
