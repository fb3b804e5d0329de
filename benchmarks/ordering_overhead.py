"""Measures the cost of chunk order per request (reordering, lookup, update), and the memory of table and tree.

    python benchmarks/ordering_overhead.py --out docs/results/ordering-overhead.json

Requests of k chunks are drawn by Zipf's law. Every path is stored, so the tree is larger and walks are longer than with
promotion. `arrange` is what the engine calls: it reorders a prompt and counts it.
"""

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from random import Random
from statistics import median, quantiles
from typing import Any

from bench_program import parse, settings, write
from docs_tables import markdown_table
from rich.console import Console
from rich.table import Table

from chunkweave.ordering.arrangement import AccessTable, Arranger
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig, Unordered, make_ordering
from chunkweave.plugins import ORDERINGS
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.types import ChunkId

SYSTEM = ChunkId("system")
TOKENS = 128


def requests(count: int, k: int, documents: int, exponent: float, seed: int) -> list[list[ChunkId]]:
    """Distinct chunks, drawn by popularity."""
    rng = Random(f"ordering overhead {seed}")
    ids = [ChunkId(f"{rng.getrandbits(128):032x}") for _ in range(documents)]
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(documents)))
    drawn = []
    for _ in range(count):
        chosen: dict[ChunkId, None] = {}
        while len(chosen) < k:
            chosen[rng.choices(ids, cum_weights=weights)[0]] = None
        drawn.append(list(chosen))
    return drawn


def hold(tree: KnowledgeTree[ChunkId], path: list[ChunkId]) -> None:
    """Store a path."""
    for end in range(tree.match(path).nodes + 1, len(path) + 1):
        tree.placed(path[:end], "host", TOKENS)


def parts(ordering: str, requested: list[list[ChunkId]], window: int) -> Iterator[dict[str, float]]:
    """Seconds of each part of each request's ordering."""
    table: AccessTable[ChunkId] = AccessTable(window)
    tree: KnowledgeTree[ChunkId] = KnowledgeTree(["host"])
    made = make_ordering(ordering)
    hold(tree, [SYSTEM])
    for ids in requested:
        started = time.perf_counter()
        given = Unordered(ids, [table.count(one) for one in ids], [TOKENS] * len(ids), tree.at([SYSTEM]))
        path = [SYSTEM, *(ids[place] for place in made.order(given))]
        ordered = time.perf_counter()
        tree.match(path)
        looked_up = time.perf_counter()
        table.note(ids)
        ended = time.perf_counter()
        hold(tree, path)
        yield {"reorder": ordered - started, "lookup": looked_up - ordered, "update": ended - looked_up}


def arranged(ordering: str, requested: list[list[ChunkId]], window: int) -> Iterator[float]:
    """Seconds of `Arranger.arrange` on prompts, promotion included."""
    tree: KnowledgeTree[ChunkId] = KnowledgeTree(["host"])
    arranger = Arranger(OrderingConfig(ordering, window), tree)
    head = (PromptPart(PartKind.START, (1,)), PromptPart(PartKind.SYSTEM, (5,) * 90, SYSTEM))
    question = PromptPart(PartKind.QUESTION, (7,) * 30)
    ids_of_tokens = (9,) * TOKENS
    for ids in requested:
        prompt = Prompt((*head, *(PromptPart(PartKind.CHUNK, ids_of_tokens, one) for one in ids), question))
        started = time.perf_counter()
        found = arranger.arrange(prompt, ChunkOrder.FREE)
        yield time.perf_counter() - started
        hold(tree, [part.id for part in found.prompt.parts if part.id is not None])


def memory(make: Callable[[], object]) -> int:
    """Bytes of the object that `make` returns."""
    gc.collect()
    tracemalloc.start()
    kept = make()
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return taken


def sizes(requested: list[list[ChunkId]], window: int) -> dict[str, int]:
    """Entries and bytes of the table, and of the tree with every path by frequency."""

    def table() -> AccessTable[ChunkId]:
        made: AccessTable[ChunkId] = AccessTable(window)
        for ids in requested:
            made.note(ids)
        return made

    def tree() -> KnowledgeTree[ChunkId]:
        counts, made, ordering = (
            AccessTable[ChunkId](window),
            KnowledgeTree[ChunkId](["host"]),
            make_ordering("frequency"),
        )
        for ids in requested:
            given = Unordered(ids, [counts.count(one) for one in ids], [TOKENS] * len(ids), made.at(()))
            hold(made, [ids[place] for place in ordering.order(given)])
            counts.note(ids)
        return made

    return {
        "table_chunks": len(table()),
        "table_bytes": memory(table),
        "tree_nodes": len(tree()),
        "tree_bytes": memory(lambda: tree()),
    }


def summary(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {"p50_s": median(times), "p99_s": quantiles(times, n=100)[98]}


def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Rows of all orderings, and sizes."""
    requested = requests(arguments.requests, arguments.k, arguments.documents, arguments.zipf, arguments.seed)
    rows = []
    for ordering in sorted(
        ORDERINGS.names, key=lambda name: name != "original"
    ):  # what the others are held against comes first
        taken = list(parts(ordering, requested, arguments.window))[arguments.requests // 5 :]
        row: dict[str, Any] = {"ordering": ordering}
        row |= {name: summary([one[name] for one in taken]) for name in taken[0]}
        row["together"] = summary([sum(one.values()) for one in taken])
        row["arrange"] = summary(list(arranged(ordering, requested, arguments.window))[arguments.requests // 5 :])
        rows.append(row)
    return rows, sizes(requested, arguments.window)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    rows, more = measure(arguments)
    table = Table(title=f"{arguments.k} chunks a request, microseconds (median / 99th percentile)")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "ordering" else "right")
    for row in rows:
        texts = [
            f"{one['p50_s'] * 1e6:.1f} / {one['p99_s'] * 1e6:.1f}" for one in row.values() if isinstance(one, dict)
        ]
        table.add_row(row["ordering"], *texts)
    console = Console(width=140)
    console.print(table)
    console.print(
        f"table: {more['table_chunks']} chunks, {more['table_bytes'] / 1e6:.2f} MB; "
        f"tree: {more['tree_nodes']} nodes, {more['tree_bytes'] / 1e6:.2f} MB"
    )
    write("ordering-overhead", arguments, settings(arguments), rows, {"memory": more})


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation: medians in microseconds, and what is held in memory."""
    steps = {name: name for name in ("reorder", "lookup", "update", "together")} | {"arrange": "whole `arrange` call"}
    cells = [[f"`{row['ordering']}`", *(f"{row[s]['p50_s'] * 1e6:.1f}" for s in steps)] for row in result["rows"]]
    memory = result["memory"]
    table = f"{memory['table_bytes'] / 1e6:.2f} MB for {memory['table_chunks']:,} chunks"
    tree = f"{memory['tree_bytes'] / 1e6:.1f} MB for {memory['tree_nodes']:,} nodes"
    shown = markdown_table(["ordering", *steps.values()], cells)
    return {"ordering-overhead": f"{shown}\n\nTable: {table}; tree: {tree}."}


if __name__ == "__main__":
    main()
