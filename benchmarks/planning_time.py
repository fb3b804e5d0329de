"""Time to plan a request: `cachecraft` over chunks that are all stored in several contexts, and the plan's check.

    python benchmarks/planning_time.py --out planning-time.json

Every chunk has `--variants` segments of `--tokens` tokens, each computed behind as many other chunks as there are, some
of them in this prompt and in another order, so that every variant has to be scored. The lookup's result is given; a
request is planned and checked once. Bar: 10 chunks with 5 variants each in 0.2 ms together, median.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from bench_program import parse, settings, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track
from rich.table import Table

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.index import PromptLookup, look_up
from chunkweave.store.records import AttentionProfile, SegmentRecord
from chunkweave.types import ChunkId, Geometry

GEOMETRY = Geometry(24, 896, 14, 2, 64, 4864, 151_936, 32_768)
"""Of Qwen2.5 0.5B."""

STRANGERS = 3
"""Chunks in the contexts that are not in the prompt."""


def lookup_of(chunks: int, variants: int, tokens: int, seed: int) -> PromptLookup:
    """A prompt of chunks that are stored, each behind others in `variants` orders."""
    rng = Random(seed)
    names = [ChunkId(f"{number:032x}") for number in range(chunks + STRANGERS)]
    ids = (1,) * tokens
    stored = {
        name: tuple(_segment(name, [other for other in names if other != name], ids, rng) for _ in range(variants))
        for name in names[:chunks]
    }
    parts = [PromptPart(PartKind.CHUNK, ids, name) for name in names[:chunks]]
    prompt = Prompt((PromptPart(PartKind.START, (1,)), *parts, PromptPart(PartKind.QUESTION, (7,) * 20)))
    return look_up(prompt, [], lambda part: stored[part.id] if part.id is not None else ())


def _segment(name: ChunkId, others: list[ChunkId], ids: tuple[int, ...], rng: Random) -> SegmentRecord:
    context = tuple(rng.sample(others, len(others) - STRANGERS))
    profile = AttentionProfile(
        chunks=context,
        lengths=(len(ids),) * len(context),
        inter=tuple(rng.uniform(1, 20) for _ in context),
        intra=rng.uniform(50, 200),
        sink=100.0,
        outward=tuple(rng.random() for _ in ids),
        received=tuple(rng.random() for _ in ids),
    )
    return SegmentRecord.of(name, context, ids, exact=False, nbytes=1, attention=profile)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=10)
    parser.add_argument("--variants", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    method = make_method("cachecraft", ReuseConfig())
    lookup = lookup_of(arguments.chunks, arguments.variants, arguments.tokens, arguments.seed)
    method.plan(lookup, GEOMETRY)  # values derived from a profile are computed once
    plan_s, check_s = [], []
    for _ in track(range(arguments.runs), "planning", console=Console(stderr=True)):
        started_s = time.perf_counter()
        plan = method.plan(lookup, GEOMETRY)
        planned_s = time.perf_counter()
        plan.validate(GEOMETRY.num_layers)
        plan_s.append(planned_s - started_s)
        check_s.append(time.perf_counter() - planned_s)
    together_s = [planning + checking for planning, checking in zip(plan_s, check_s, strict=True)]
    rows = [
        {"step": name, "median_s": statistics.median(times_s), "least_s": min(times_s)}
        for name, times_s in (("plan", plan_s), ("check", check_s), ("together", together_s))
    ]
    table = Table("step", "median", "least", title=f"{arguments.chunks} chunks x {arguments.variants} variants")
    for row in rows:
        table.add_row(str(row["step"]), f"{row['median_s'] * 1e3:.3f} ms", f"{row['least_s'] * 1e3:.3f} ms")
    Console().print(table)
    write("planning-time", arguments, {name: str(value) for name, value in settings(arguments).items()}, rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    cells = [
        [row["step"], *(f"{row[name] * 1e3:.3f} ms" for name in ("median_s", "least_s"))] for row in result["rows"]
    ]
    return {"planning-time": markdown_table(["step", "median", "least"], cells)}


if __name__ == "__main__":
    main()
