"""Staged vector search: the time of each stage, and the stage after which the final top-k is known.

    python benchmarks/staged_search.py --out staged-search.json
    python benchmarks/staged_search.py --index hnsw --index-file hnsw.faiss --out staged-search-hnsw.json

A million synthetic vectors of 384 dimensions; see clustered_index.py. `--index-file` stores the index and loads it
again: a graph over a million vectors takes long to build, and an interrupted build continues.

The search ratio is the share of an IVF index's lists that is probed, as in RAGCache's Table 3; for HNSW it is the share
of the widest queue (efSearch 512). `recall` is against exact search. The final stage is the first whose top-k, order
included, is that of the last: its prefill could have started then, and hidden the rest of the search. `hidden` is that
rest as a share of the search.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_program import parse, settings, show, write
from clustered_index import World, at_ratio, exact_rows, open_index
from docs_tables import markdown_table
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from chunkweave.calibration.results import peak_rss_bytes
from chunkweave.retrieval.faiss_indexes import FaissIndex
from chunkweave.retrieval.indexes import SearchStage, timed_stages


@dataclass(frozen=True)
class Search:
    """One staged search: the rows known after each stage, and each stage's seconds; `whole_s` without stages."""

    stages: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    whole_s: float
    extra_share: float

    @property
    def final_stage(self) -> int:
        """The first stage, from 1, from which on the rows stay those of the last."""
        number = len(self.stages)
        while number > 1 and self.stages[number - 2] == self.stages[-1]:
            number -= 1
        return number

    @property
    def hidden(self) -> float:
        """Share of the search that comes after the final stage."""
        return sum(self.seconds[self.final_stage :]) / sum(self.seconds)


def measured(index: FaissIndex, queries: NDArray[np.float32], k: int, title: str) -> list[Search]:
    """Search every question with and without stages, alternating, so that neither profits from warm CPU caches."""
    found = []
    for number, query in enumerate(track(queries, title, console=Console(stderr=True), transient=True)):
        whole_s = 0.0
        staged: list[tuple[SearchStage, float]] = []
        for turn in range(2):
            if (number + turn) % 2:
                started = time.perf_counter()
                whole = index.search(query, k)
                whole_s = time.perf_counter() - started
            else:
                staged = list(timed_stages(index, query, k))
        stages, seconds = zip(*staged, strict=True)
        assert stages[-1].hits == whole, "the last stage is the search without stages"
        extra = sum(stage.extra_distances for stage in stages) / sum(stage.distances for stage in stages)
        found.append(Search(tuple(stage.hits.rows for stage in stages), seconds, whole_s, extra))
    return found


def row(ratio: float, searches: Sequence[Search], exact: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The row of one ratio."""
    stages = len(searches[0].stages)
    overlaps = (len(set(one.stages[-1]) & set(best)) / len(best) for one, best in zip(searches, exact, strict=True))
    return {
        "search_ratio": ratio,
        "recall": statistics.fmean(overlaps),
        "search_median_s": statistics.median(one.whole_s for one in searches),
        "staged_median_s": statistics.median(sum(one.seconds) for one in searches),
        "overhead_median": statistics.median(sum(one.seconds) / one.whole_s for one in searches),
        "stage_median_s": [statistics.median(one.seconds[i] for one in searches) for i in range(stages)],
        "final_at_stage": [sum(one.final_stage == i + 1 for one in searches) / len(searches) for i in range(stages)],
        "hidden_mean": statistics.fmean(one.hidden for one in searches),
        "extra_distances": statistics.fmean(one.extra_share for one in searches),
    }


def main() -> None:
    """Build, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", choices=["ivf", "hnsw"], default="ivf")
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--lists", type=int, default=1024)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--top-k", type=int, default=2, help="RAGCache retrieves the two best")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--ratios", default="0.125,0.25,0.5,1.0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index-file", type=Path, help="where the index is kept, and resumed from")
    arguments = parse(parser)
    stages = arguments.stages if arguments.index == "ivf" else 2
    world = World(arguments.index, arguments.vectors, arguments.dimension, arguments.lists, arguments.seed)
    built = open_index(world, arguments.index_file)
    queries = world.questions(arguments.queries)
    exact = exact_rows(world, queries, arguments.top_k)
    rows = []
    for ratio in map(float, arguments.ratios.split(",")):
        searched = measured(at_ratio(built.index, ratio, stages), queries, arguments.top_k, f"ratio {ratio}")
        rows.append(row(ratio, searched, exact))
    _show(rows, f"{arguments.index}, {arguments.vectors} x {arguments.dimension}, top-{arguments.top_k}")
    config = {name: str(value) for name, value in settings(arguments).items()}
    more = {"build_s": built.build_s, "peak_rss_bytes": peak_rss_bytes()}
    write("staged-search", arguments, config, rows, more)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation: for an index that is searched whole, and for one that is probed."""
    rows = result["rows"]
    if result["config"]["index"] == "hnsw":
        heads = ["ratio", "search", "staged / search", "final top-2 known after the probe", "distances of the probe"]
        more = [[f"{one['final_at_stage'][0]:.0%}", f"{one['extra_distances']:.0%}"] for one in rows]
    else:
        heads = ["ratio", "recall", "search", "staged", "staged / search", "final top-2 known after stage 1, 2, 3+"]
        heads.append("search after that")
        more = [[_known(one["final_at_stage"]), f"{one['hidden_mean']:.0%}"] for one in rows]
    return {
        "staged-search": markdown_table(
            heads, [[*_times(one, heads), *rest] for one, rest in zip(rows, more, strict=True)]
        )
    }


def _times(one: Mapping[str, Any], heads: Sequence[str]) -> list[str]:
    cells = {
        "ratio": f"{one['search_ratio']:.1%}",
        "recall": f"{one['recall']:.2f}",
        "search": f"{one['search_median_s'] * 1e3:.1f} ms",
        "staged": f"{one['staged_median_s'] * 1e3:.1f} ms",
        "staged / search": f"{one['overhead_median']:.2f}x",
    }
    return [cells[name] for name in heads if name in cells]


def _known(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in (*shares[:2], sum(shares[2:])))


def _show(rows: Sequence[dict[str, Any]], title: str) -> None:
    heads = ("ratio", "recall", "search", "staged", "of it", "extra", "stages, median ms", "final at, %", "hidden")
    cells = [
        (
            f"{one['search_ratio']:.1%}",
            f"{one['recall']:.2f}",
            f"{one['search_median_s'] * 1e3:.1f} ms",
            f"{one['staged_median_s'] * 1e3:.1f} ms",
            f"{one['overhead_median']:.2f}x",
            f"{one['extra_distances']:.1%}",
            " ".join(f"{seconds * 1e3:.1f}" for seconds in one["stage_median_s"]),
            " ".join(f"{share * 100:.0f}" for share in one["final_at_stage"]),
            f"{one['hidden_mean']:.0%}",
        )
        for one in rows
    ]
    show(heads, cells, title)


if __name__ == "__main__":
    main()
