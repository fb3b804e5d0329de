"""Compares our orderings with ContextPilot's on one sequence of requests: prefix-token hit rate and ordering time.

    python3 -m venv contextpilot
    contextpilot/bin/pip install --no-deps contextpilot==0.5.0 numpy scipy tqdm
    python benchmarks/contextpilot_comparison.py --contextpilot contextpilot/bin/python \
        --trace zipf --out docs/results/contextpilot-zipf.json
    python benchmarks/contextpilot_comparison.py --contextpilot contextpilot/bin/python \
        --trace FILE --top-k 5 --out docs/results/contextpilot-FILE.json

`--trace` is `zipf` (chunks drawn by Zipf's law) or a file that `chunkweave analyze` reads. All orders are replayed
through the same simulated caches of exact paths: one unlimited, and one of `--budget-share` of all distinct chunks
under LRU. ContextPilot runs on the CPU, once with one request at a time and once with all requests at once. In the
latter mode it also returns a serving order, which a real server cannot know ahead; both sequences are shown.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from ordering_overhead import requests as zipf_requests

from chunkweave.cli.console import status
from chunkweave.errors import UsageError
from chunkweave.ordering.ordering import Unordered, make_ordering
from chunkweave_lab.chunk_order import (
    LimitedCache,
    PathCache,
    ReplayConfig,
    UnlimitedCache,
    read_requests,
    replay_arranged,
    saving_bound,
)
from chunkweave_lab.simulator.trace import Arrival, Part

OURS = ("original", "frequency", "tree-greedy")
SCRIPT = Path(__file__).with_name("contextpilot_orders.py")


def contextpilot(python: Path, mode: str, requests: Sequence[Sequence[int]]) -> dict[str, Any]:
    """ContextPilot's orders; it runs under another Python.

    Raises:
        UsageError: it does not run there.
    """
    job = json.dumps({"mode": mode, "requests": requests})
    command = [python, SCRIPT]  # the script beside this one
    done = subprocess.run(command, input=job, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise UsageError(f"ContextPilot does not run under {python}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


class Timed:
    """One of our orderings that records its time, including table look-ups."""

    def __init__(self, name: str) -> None:
        self._ordering = make_ordering(name)
        self.seconds: list[float] = []

    def __call__(self, number: int, given: Unordered) -> Sequence[int]:  # noqa: ARG002
        """The order of one request."""
        started = time.perf_counter()
        order = self._ordering.order(given)
        self.seconds.append(time.perf_counter() - started)
        return order


def rows_of(
    arrivals: Sequence[Arrival], python: Path | None, caches: dict[str, Callable[[], PathCache]]
) -> list[dict[str, Any]]:
    """One row per contender: hit rates by cache, and seconds per request."""
    rows = []
    for name in OURS:
        row: dict[str, Any] = {"contender": name}
        for cache, make in caches.items():
            arrange = Timed(name)
            saved = replay_arranged(arrivals, name, arrange, ReplayConfig(), cache=make())
            row[cache] = saved.saved_share
        rows.append({**row, "order_median_s": median(arrange.seconds), "order_mean_s": fmean(arrange.seconds)})
    if python is None:
        return rows
    numbers: dict[str, int] = {}
    sets = [[numbers.setdefault(part.name, len(numbers)) for part in arrival.documents] for arrival in arrivals]
    for mode in ("incremental", "offline"):
        with status(f"ContextPilot, {mode}"):
            found = contextpilot(python, mode, sets)
        times = {"order_median_s": median(found["seconds"]), "order_mean_s": fmean(found["seconds"])}
        orders = dict(zip(found["served"], found["ordered"], strict=True))
        for served in dict.fromkeys((tuple(range(len(arrivals))), tuple(found["served"]))):
            as_they_came = served == tuple(range(len(arrivals)))
            row = {"contender": f"contextpilot {mode}{'' if as_they_came else ', rescheduled'}"}
            places = [_places(sets[number], orders[number]) for number in served]
            for cache, make in caches.items():
                sequence = [arrivals[number] for number in served]
                saved = replay_arranged(sequence, "", lambda i, _, places=places: places[i], cache=make())
                row[cache] = saved.saved_share
            rows.append({**row, **times})
    return rows


def _places(given: Sequence[int], ordered: Sequence[int]) -> list[int]:
    """The given position of each chunk of `ordered`.

    Raises:
        UsageError: they are not the given chunks.
    """
    left = list(given)
    places = []
    for chunk in ordered:
        if chunk not in left:
            raise UsageError(f"ContextPilot changed a request: {given} became {ordered}")
        place = left.index(chunk)
        left[place] = -1
        places.append(place)
    if len(places) < len(given):
        raise UsageError(f"ContextPilot changed a request: {given} became {ordered}")
    return places


def main() -> None:
    """Order, replay, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", default="zipf", help="zipf, or a file")
    parser.add_argument(
        "--contextpilot", type=Path, help="Python of the environment that has it; left out if not given"
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--top-k", type=int, default=5)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--budget-share", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    if arguments.trace == "zipf":
        drawn = zipf_requests(arguments.requests, arguments.top_k, arguments.documents, arguments.zipf, arguments.seed)
        arrivals = [Arrival(float(i), tuple(Part(one, 128) for one in ids)) for i, ids in enumerate(drawn)]
    else:
        arrivals = read_requests(Path(arguments.trace), top_k=arguments.top_k, seed=arguments.seed)[1]
        arrivals = arrivals[: arguments.requests]
    distinct = sum({part.name: part.tokens for one in arrivals for part in one.documents}.values())
    budget = int(arguments.budget_share * distinct)
    caches: dict[str, Callable[[], PathCache]] = {
        "unlimited_hit_rate": UnlimitedCache,
        "limited_hit_rate": lambda: LimitedCache(budget),
    }
    rows = rows_of(arrivals, arguments.contextpilot, caches)
    total = sum(part.tokens for one in arrivals for part in one.documents)
    bound = saving_bound(arrivals) / total
    _show(rows, bound, len(arrivals), budget)
    config = {name: str(value) for name, value in settings(arguments, "contextpilot").items()}
    more = {"bound_hit_rate": bound, "budget_tokens": budget, "contextpilot": "0.5.0"}
    write("contextpilot-comparison", arguments, config, rows, more)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    heads = ["", "unlimited cache", f"{result['budget_tokens']:,} tokens, LRU", "time a request, median"]
    cells = [
        [
            row["contender"],
            *(f"{row[name]:.1%}" for name in ("unlimited_hit_rate", "limited_hit_rate")),
            f"{row['order_median_s'] * 1e6:,.1f} us",
        ]
        for row in result["rows"]
    ]
    bound = f"No order can save more than {result['bound_hit_rate']:.1%}."
    return {"contextpilot": f"{markdown_table(heads, cells)}\n\n{bound}"}


def _show(rows: Sequence[dict[str, Any]], bound: float, requests: int, budget: int) -> None:
    heads = ("contender", "unlimited cache", f"{budget} tokens, LRU", "median us", "mean us")
    cells = []
    for row in rows:
        rates = (f"{row[name]:.1%}" for name in ("unlimited_hit_rate", "limited_hit_rate"))
        times = (f"{row[name] * 1e6:,.1f}" for name in ("order_median_s", "order_mean_s"))
        cells.append([row["contender"], *rates, *times])
    show(heads, cells, f"{requests} requests; no order in an unlimited cache exceeds {bound:.1%}")


if __name__ == "__main__":
    main()
