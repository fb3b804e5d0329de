"""Savings of sliding windows in loading stored KV: bytes read, and time to the first token.

    python benchmarks/window_loading.py --model FILE.gguf --dataset musique.json --out window-loading.json

Chunks are fully reused, from memory and over a link that takes `--quotient` of full prefill's time to bring all their
KV: once without what no window reaches, and once with it. The two take turns.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_program import parse, settings, write
from docs_tables import command_block, markdown_table
from rich.console import Console

from chunkweave.calibration.prompts import alone_prompts
from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled, Runner
from chunkweave.kv.segment import SegmentSource
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import Prompt
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.testing import Link, ThrottledTier
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.ttft import TtftConfig, make_workload

REUSE = "full-reuse"
FAST = 1e15


class Bench:
    """One prompt whose segments are loaded over a link."""

    def __init__(self, engine: Engine, prompt: Prompt) -> None:
        self._link = Link(FAST)
        store: TieredStore[SegmentSource] = TieredStore(
            [Level("link", SegmentStore(ThrottledTier(self._link), budget_bytes=1 << 40))]
        )
        self._runner, self._prompt = Runner(engine.loaded.model, store), prompt
        for part in alone_prompts(prompt):
            self._runner.store_new(self._runner.prefill(part, make_method("full")))
        self.nbytes = sum(record.nbytes for record in store.records())

    def time(self, method: str, bytes_per_s: float = FAST, *, unseen: bool = False) -> float:
        """Seconds to the first token."""
        self._link.bytes_per_s = bytes_per_s
        started = time.perf_counter()
        self.weave(method, unseen=unseen).logits.argmax().item()
        return time.perf_counter() - started

    def weave(self, method: str, *, unseen: bool = False) -> Prefilled:
        """The prompt's cache by a method; `unseen` also loads KV that no window reaches."""
        return self._runner.prefill(self._prompt, make_method(method), capture=False, unseen=unseen)


def measure(engine: Engine, prompt: Prompt, quotient: float, repeats: int) -> list[dict[str, Any]]:
    """A row for memory and one for the link."""
    bench = Bench(engine, prompt)
    full_s = min(bench.time("full") for _ in range(2))
    rows = []
    for place, bytes_per_s in (("memory", FAST), ("link", bench.nbytes / (quotient * full_s))):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats):
            for unseen, own in seconds.items():
                own.append(bench.time(REUSE, bytes_per_s, unseen=unseen))
        fraction = bench.weave(REUSE).plan.loaded_fraction(engine.loaded.model.geometry.windows)
        rows.append(
            {
                "from": place,
                "prompt_tokens": len(prompt),
                "stored_bytes": bench.nbytes,
                "loaded_fraction": fraction,
                "full_s": full_s,
                "all_median_s": median(seconds[True]),
                "needed_median_s": median(seconds[False]),
                "all_over_needed": median(seconds[True]) / median(seconds[False]),
            }
        )
    return rows


def main() -> None:
    """Measure, print a table, write JSON and the page's table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--chunks", type=int, nargs="+", default=(6, 12))
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--quotient", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    arguments = parse(parser)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    rows = []
    with Engine.load(arguments.model) as engine:
        for chunks in arguments.chunks:
            config = TtftConfig((), chunks=chunks, chunk_tokens=arguments.chunk_tokens, questions=1)
            (prompt,) = make_workload(load_dataset(arguments.dataset), engine, config).measured
            rows += [
                {"chunks": chunks, **row} for row in measure(engine, prompt, arguments.quotient, arguments.repeats)
            ]
    Console(width=150).print(table(rows), highlight=False)
    config: dict[str, Any] = {name: str(value) for name, value in settings(arguments).items()}
    write("window-loading", arguments, config | {"threads": torch.get_num_threads()}, rows)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation, below its command."""
    return {"window-loading": f"{command_block(result['command'])}\n\n{table(result['rows'])}"}


def table(rows: list[dict[str, Any]]) -> str:
    """Bytes, and seconds to the first token."""
    heads = ["chunks", "tokens", "from", "KV stored", "of it brought", "full prefill", "all brought", "as is", "sooner"]
    cells = [
        [
            f"{row['chunks']}",
            f"{row['prompt_tokens']:,}",
            row["from"],
            f"{row['stored_bytes'] / 1e6:.0f} MB",
            f"{row['loaded_fraction']:.1%}",
            *(f"{row[name]:.3f} s" for name in ("full_s", "all_median_s", "needed_median_s")),
            f"{row['all_over_needed']:.2f}x",
        ]
        for row in rows
    ]
    return markdown_table(heads, cells)


if __name__ == "__main__":
    main()
