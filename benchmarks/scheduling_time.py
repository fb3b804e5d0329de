"""Time of decisions per request: lookup, update of the tree, reordering, speculation (RAGCache §7.4, Table 4).

    python benchmarks/scheduling_time.py --nodes 10000 --waiting 32 --out scheduling-time.json

A knowledge tree of `--nodes` nodes is full, so that what is new evicts. Requests for two documents each, as skewed as
RAGCache found MMLU to be, keep a queue of `--waiting` filled. Timed, one request at a time:

- lookup: how much of the prompt is stored, and on which tier;
- update: Algorithm 1: frequencies, costs, priorities, the new nodes, and the evictions that they take;
- reordering: entering the queue, and taking out the next with priorities that follow the cache;
- speculation: the decisions after four stages of a search.

Times are wall-clock times: on a shared machine the p99 mostly reflects other processes.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any

from bench_program import parse, show, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track

from chunkweave.planning.cost import analytic_cost, known_shape
from chunkweave.retrieval.speculation import Speculation
from chunkweave.scheduling.queue import CacheAwareQueue
from chunkweave.store.eviction import make_policy
from chunkweave.types import ChunkId
from chunkweave_lab.simulator.trace import TraceRequest, build_trace, poisson_times
from chunkweave_lab.simulator.tree_cache import TreeCache, TreeTier
from chunkweave_lab.simulator.workloads import draw_requests, mmlu_like

PARTS = ("lookup", "update", "reordering", "speculation")


class Scheduler:
    """The deciding components, and the seconds of each for each request."""

    def __init__(self, policy: str, budget_bytes: int) -> None:
        cost = analytic_cost(known_shape("mistral-7b").geometry, flops_per_s=50e12)
        self.cache = TreeCache([TreeTier("memory", budget_bytes, make_policy(policy, prefill_s=cost.prefill))])
        self.queue: CacheAwareQueue[int] = CacheAwareQueue(self.cache.tree)
        self.speculation: Speculation[int, ChunkId] = Speculation(max_prefill_batch=4)
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}

    def submit(self, number: int, request: TraceRequest) -> None:
        """A request arrives: its search names documents four times, then it waits."""
        path = [record.chunk_id for record in request.path]
        documents = path[request.documents_from :]
        started = time.perf_counter()
        self.speculation.on_stage(number, documents[::-1], len(self.queue) % 8)
        self.speculation.on_stage(number, documents, len(self.queue) % 8)
        self.speculation.on_stage(number, documents, len(self.queue) % 8)
        self.speculation.on_final(number, documents)
        speculated = time.perf_counter()
        self.queue.submit(number, path, request.prompt_tokens)
        self.times["speculation"].append(speculated - started)
        self.times["reordering"].append(time.perf_counter() - speculated)

    def serve(self, requests: list[TraceRequest]) -> None:
        """The next request is taken out, looked up and entered in the tree."""
        started = time.perf_counter()
        served = self.queue.pop()
        popped = time.perf_counter()
        assert served is not None, "the queue is kept filled"
        request = requests[served.request]
        self.cache.tree.match(served.path)
        found = time.perf_counter()
        self.cache.use(request.path, request.question_tokens)
        self.times["update"].append(time.perf_counter() - found)
        self.times["lookup"].append(found - popped)
        self.times["reordering"][-1] += popped - started


def main() -> None:
    """Fill the tree, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--waiting", type=int, default=32)
    parser.add_argument("--requests", type=int, default=5_000, help="measured, after the tree is full")
    parser.add_argument("--policy", default="pgdsf")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    scheduler, requests = _full_tree(arguments)
    nodes = len(scheduler.cache.tree)
    gc.collect()
    gc.freeze()
    first = len(requests) - arguments.requests
    for number in track(range(first, len(requests)), "measuring", console=Console(stderr=True)):
        scheduler.submit(number, requests[number])
        if len(scheduler.queue) > arguments.waiting:
            scheduler.serve(requests)
        else:
            for part in PARTS:
                scheduler.times[part].clear()
    rows = [_row(part, scheduler.times[part]) for part in PARTS]
    rows.append(_row("in all", [sum(parts) for parts in zip(*scheduler.times.values(), strict=True)]))
    _show(rows, nodes, arguments.waiting)
    config = {"policy": arguments.policy, "waiting": arguments.waiting, "nodes": nodes}
    write("scheduling-time", arguments, config, rows)


def _full_tree(arguments: argparse.Namespace) -> tuple[Scheduler, list[TraceRequest]]:
    """A scheduler whose tree has as many nodes as asked for and no room for more, and the requests of the run."""
    count = 4 * arguments.nodes + arguments.requests
    corpus = mmlu_like(10_000)
    drawn = draw_requests(corpus, poisson_times(count, 1.0, arguments.seed), arguments.seed)
    requests = list(build_trace("mmlu-like", drawn, 1).requests)
    scheduler = Scheduler(arguments.policy, corpus.mean_tokens * arguments.nodes)
    for request in requests[: -arguments.requests]:
        scheduler.cache.use(request.path, request.question_tokens)
    return scheduler, requests


def _row(part: str, times_s: list[float]) -> dict[str, object]:
    percentiles = statistics.quantiles(times_s, n=100)
    return {"part": part, "requests": len(times_s), "p50_s": percentiles[49], "p99_s": percentiles[98]}


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    cells = [[row["part"], *(f"{row[key] * 1e6:.1f} us" for key in ("p50_s", "p99_s"))] for row in result["rows"]]
    return {"scheduling-time": markdown_table(["part", "p50", "p99"], cells)}


def _show(rows: list[dict[str, object]], nodes: int, waiting: int) -> None:
    cells = [
        [str(row["part"]), *(f"{float(str(row[key])) * 1e6:.1f} us" for key in ("p50_s", "p99_s"))] for row in rows
    ]
    show(("part", "p50", "p99"), cells, f"scheduling a request: tree of {nodes} nodes, {waiting} waiting")


if __name__ == "__main__":
    main()
