"""Asking the question about few layers lets recomputation overlap loading: `query` from links of chosen speed.

    python benchmarks/query_loading.py --shape smollm2-135m --out query-loading.json --update-docs docs/query.md

All segments come over one link whose speed makes loading take `--quotients` of the time of a full prefill. The question
is asked about all layers before the tokens are chosen (`query`), or about the first third (`query:third`), so that the
others load while the chosen tokens are recomputed. Expected: from the link's speed and the layers' FLOPs.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from docs_tables import command_block, markdown_table, update_page
from rich.console import Console

from chunkweave.chunking.prompt import Prompt
from chunkweave.cli.console import progress
from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled, Runner
from chunkweave.eval.contenders import make_contenders
from chunkweave.eval.datasets import alone_prompts, bundled_examples
from chunkweave.eval.results import BenchmarkResult, check_writable, write_json
from chunkweave.eval.ttft import TtftConfig, make_workload
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.cost import staged_s
from chunkweave.planning.method import make_method
from chunkweave.planning.outcome import layer_flops
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.testing import Link, ThrottledTier

CONTENDERS = ("query:third@{0}", "query@{0}", "cacheblend@{0}")
FAST = 1e15


class Bench:
    """One prompt whose segments come over a link."""

    def __init__(self, engine: Engine, prompt: Prompt, labels: list[str]) -> None:
        self.model: HuggingFaceModel = engine.loaded.model
        self.link = Link(FAST)
        store: TieredStore[SegmentSource] = TieredStore(
            [Level("link", SegmentStore(ThrottledTier(self.link), budget_bytes=1 << 40))]
        )
        self._runner, self._prompt = Runner(self.model, store), prompt
        for part in alone_prompts(prompt):
            self._runner.store_new(self._runner.prefill(part, make_method("full")))
        self.nbytes = sum(record.nbytes for record in store.records())
        self._methods = make_contenders(["full", *labels])

    def time(self, label: str, bytes_per_s: float = FAST, *, unseen: bool = False) -> float:
        """Seconds to the first token."""
        self.link.bytes_per_s = bytes_per_s
        started = time.perf_counter()
        self.weave(label, unseen=unseen).logits.argmax().item()
        return time.perf_counter() - started

    def weave(self, label: str, *, unseen: bool = False) -> Prefilled:
        """The prompt's cache by a contender; `unseen` brings even what no window reaches."""
        return self._runner.prefill(self._prompt, self._methods[label], capture=False, unseen=unseen)

    def expected_s(self, label: str, load_s: float, memory_s: float) -> float:
        """What the controller expects, if a weave from memory takes `memory_s` and time goes by FLOPs."""
        self.link.bytes_per_s = FAST
        woven, layers = self.weave(label), self.model.geometry.num_layers
        flops = [layer_flops(self.model.geometry, work) for work in woven.work]
        seconds = [memory_s * layer / sum(flops) for layer in flops]
        passes, start = [], 0
        for a_pass in woven.plan.passes:
            passes.append(seconds[start : start + (a_pass.depth or layers)])
            start += len(passes[-1])
        return staged_s([load_s / layers] * layers, passes)


def main() -> None:
    """Measure, print a table, write JSON and the page's table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--quotients", type=float, nargs="+", default=(0.1, 0.25, 0.5))
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--update-docs", type=Path)
    arguments = parser.parse_args()
    for path in (arguments.out, arguments.update_docs):
        if path is not None:
            check_writable(path)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    labels = [label.format(f"{arguments.ratio:g}") for label in CONTENDERS]
    config = TtftConfig((), chunks=arguments.chunks, chunk_tokens=arguments.chunk_tokens, questions=1)
    with Engine.load_shape(arguments.shape, dtype=arguments.dtype) as engine:
        (prompt,) = make_workload(bundled_examples(1, seed=arguments.seed), engine, config).measured
        rows = measure(Bench(engine, prompt, labels), labels, arguments.quotients, arguments.repeats)
    command = shlex.join(["python", *sys.argv])
    origin: dict[str, Any] = {name: str(value) for name, value in vars(arguments).items()}
    origin["threads"] = torch.get_num_threads()
    Console(width=150).print(table(rows), highlight=False)
    if arguments.out is not None:
        result = BenchmarkResult("query-loading", command, arguments.seed, origin, rows, {})
        write_json(arguments.out, result.as_dict())
    if arguments.update_docs is not None:
        update_page(arguments.update_docs, arguments.out)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation, below its command."""
    return {"query-loading": f"{command_block(result['command'])}\n\n{table(result['rows'])}"}


def measure(bench: Bench, labels: list[str], quotients: list[float], repeats: int) -> list[dict[str, Any]]:
    """A row for each contender at each quotient; contenders alternate, beside their own weave from memory."""
    for label in labels:
        bench.time(label)
    full_s = min(bench.time("full") for _ in range(2))
    rows = []
    with progress("measuring") as report:
        for number, quotient in enumerate(quotients):
            load_s = quotient * full_s
            slow: dict[str, list[float]] = {label: [] for label in labels}
            memory: dict[str, list[float]] = {label: [] for label in labels}
            for repeat in range(repeats):
                for label in labels:
                    memory[label].append(bench.time(label))
                    slow[label].append(bench.time(label, bench.nbytes / load_s))
                report(number * repeats + repeat + 1, len(quotients) * repeats)
            for label in labels:
                in_memory = median(memory[label])
                rows.append(
                    {
                        "method": label,
                        "quotient": quotient,
                        "load_s": load_s,
                        "ttft_median_s": median(slow[label]),
                        "memory_median_s": in_memory,
                        "expected_s": bench.expected_s(label, load_s, in_memory),
                    }
                )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """TTFT over the link, from memory, and as expected."""
    heads = ["method", "loading / full prefill", "loading", "TTFT", "from memory", "expected", "TTFT over both apart"]
    cells = []
    for row in rows:
        apart = row["ttft_median_s"] / (row["load_s"] + row["memory_median_s"])
        times = [f"{row[name]:.3f} s" for name in ("load_s", "ttft_median_s", "memory_median_s", "expected_s")]
        cells.append([f"`{row['method']}`", f"{row['quotient']:g}", *times, f"{apart:.2f}"])
    return markdown_table(heads, cells)


if __name__ == "__main__":
    main()
