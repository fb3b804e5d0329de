"""A store in use: hit rate, variants per chunk, recomputed fraction and TTFT over many skewed requests.

    python benchmarks/steady_state.py --model reader --out steady-state.json
    python benchmarks/steady_state.py --shape smollm2-135m --queries 100 --out steady-state.json

Requests take `--chunks` passages of the bundled corpus (296, made of held-out worlds), drawn by Zipf's law, in random
order. Every contender has its own store and stores computed segments, as an engine does; each request goes to all
contenders in turn. `cachecraft, one variant` has `max_variants=1`: beside the segments that exact prefixes run over,
only the most reusable one of a chunk. The histogram of segments a chunk is Cache-Craft's Figure 25. Times are from ids
to the first token, `sooner` is the median of quotients within a request; the first `--warm-up` requests fill the stores
and are not counted.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from bench_program import parse, settings, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track
from rich.table import Table

from chunkweave.calibration.questions import bundled_corpus
from chunkweave.config import ReuseConfig, StoreConfig
from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled
from chunkweave.models.loading import LoadedModel, load_folder, load_shape
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import PartKind
from chunkweave.settings import GIB
from chunkweave.types import Chunk

REFERENCE = "prefix"

MOST_SHOWN = 5


@dataclass
class Contender:
    """A method with its own store, and its measurements."""

    name: str
    engine: Engine
    method: str
    reuse: ReuseConfig
    ttft_s: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)

    def serve(self, question: str, chunks: Sequence[Chunk], *, counted: bool) -> None:
        """One request: prefill, first token, then store what is new."""
        prompt = self.engine.builder.build(question, chunks)
        started = time.perf_counter()
        prefilled = self.engine.runner.prefill(prompt, make_method(self.method, self.reuse))
        int(prefilled.logits.argmax())
        elapsed = time.perf_counter() - started
        self.engine.runner.store_new(prefilled)
        if counted:
            self.ttft_s.append(elapsed)
            self._count(prefilled)

    def _count(self, prefilled: Prefilled) -> None:
        parts = [part for part in prefilled.plan.parts if part.part.kind is PartKind.CHUNK]
        self.hits.append(sum(part.kv_source is not KVSource.COMPUTED for part in parts) / len(parts))
        reused = prefilled.plan.tokens(KVSource.REUSED)
        layers = self.engine.loaded.model.geometry.num_layers
        self.fractions.append(prefilled.recompute_work / (layers * reused) if reused else 0.0)

    def row(self, reference: "Contender") -> dict[str, Any]:
        """Its row of the table."""
        percentiles = statistics.quantiles(self.ttft_s, n=100)
        pairs = zip(reference.ttft_s, self.ttft_s, strict=True)
        stats = self.engine.store.stats
        return {
            "contender": self.name,
            "hit_rate": statistics.fmean(self.hits),
            "recompute_fraction": statistics.fmean(self.fractions),
            "ttft_p50_s": percentiles[49],
            "ttft_p99_s": percentiles[98],
            "speedup_median": statistics.median(other / own for other, own in pairs),
            "speedup_p99": statistics.quantiles(reference.ttft_s, n=100)[98] / percentiles[98],
            "segments": stats.segments,
            "chunks": stats.chunks,
            "variants": stats.variants,
            "bytes": stats.bytes,
        }


def contenders(loaded: LoadedModel, alpha: float, budget: int) -> list[Contender]:
    """Exact prefixes, Cache-Craft with and without variants, CacheBlend."""

    def engine(max_variants: int | None) -> Engine:
        return Engine(loaded, store=StoreConfig(budget, max_variants=max_variants))

    craft = ReuseConfig(alpha=alpha)
    return [
        Contender(REFERENCE, engine(5), "prefix", ReuseConfig()),
        Contender("cachecraft", engine(5), "cachecraft", craft),
        Contender("cachecraft, one variant", engine(1), "cachecraft", craft),
        Contender("cacheblend", engine(5), "cacheblend", ReuseConfig()),
    ]


def zipf_requests(count: int, chunks: int, exponent: float, seed: int) -> list[tuple[str, list[Chunk]]]:
    """Questions with different passages, passage number r in an order of popularity drawn with weight r^-exponent."""
    corpus = bundled_corpus()
    rng = Random(f"steady state {seed}")
    passages = rng.sample(corpus.passages, len(corpus.passages))
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(len(passages))))
    requests = []
    for _ in range(count):
        chosen: dict[Chunk, None] = {}
        while len(chosen) < chunks:
            chosen[rng.choices(passages, cum_weights=weights)[0]] = None
        requests.append((rng.choice(corpus.questions).question, list(chosen)))
    return requests


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the popularity")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser)
    if (arguments.model is None) == (arguments.shape is None):
        parser.error("give either --model or --shape")
    loaded = load_folder(arguments.model) if arguments.model else load_shape(arguments.shape)
    field_of = contenders(loaded, arguments.alpha, 4 * GIB)
    requests = zipf_requests(arguments.warm_up + arguments.queries, arguments.chunks, arguments.zipf, arguments.seed)
    for number, (question, chunks) in enumerate(track(requests, "serving", console=Console(stderr=True))):
        for turn in range(len(field_of)):
            one = field_of[(number + turn) % len(field_of)]
            one.serve(question, chunks, counted=number >= arguments.warm_up)
    rows = [one.row(field_of[0]) for one in field_of]
    _show(rows)
    write("steady-state", arguments, {name: str(value) for name, value in settings(arguments).items()}, rows)


def _show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table()
    for title in (
        "contender",
        "hit rate",
        "recomputed",
        "TTFT p50",
        "p99",
        "sooner",
        "p99 sooner",
        "segments",
        "segments a chunk: chunks",
    ):
        table.add_column(title, justify="left" if title == "contender" else "right")
    for cells in _cells(rows):
        table.add_row(*cells)
    Console(width=140).print(table)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    heads = ["contender", "chunk hit rate", "recompute fraction", "TTFT p50", "p99", "sooner than `prefix`", "p99"]
    return {"steady-state": markdown_table([*heads, "segments", "segments a chunk: chunks"], _cells(result["rows"]))}


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            row["contender"],
            f"{row['hit_rate']:.1%}",
            f"{row['recompute_fraction']:.3f}",
            f"{row['ttft_p50_s'] * 1e3:.1f} ms",
            f"{row['ttft_p99_s'] * 1e3:.1f} ms",
            f"{row['speedup_median']:.2f}x",
            f"{row['speedup_p99']:.2f}x",
            str(row["segments"]),
            _histogram({int(count): chunks for count, chunks in row["variants"].items()}),
        ]
        for row in rows
    ]


def _histogram(chunks_by_count: Mapping[int, int]) -> str:
    """Chunks by number of segments; larger numbers are summed. The JSON has all."""
    shown = {count: chunks for count, chunks in chunks_by_count.items() if count <= MOST_SHOWN}
    more = sum(chunks_by_count.values()) - sum(shown.values())
    texts = [f"{count}:{chunks}" for count, chunks in sorted(shown.items())]
    return "  ".join([*texts, f"{MOST_SHOWN + 1}-{max(chunks_by_count)}:{more}"] if more else texts)


if __name__ == "__main__":
    main()
