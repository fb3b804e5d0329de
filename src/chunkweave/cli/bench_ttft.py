"""`chunkweave bench ttft`: time to first token by reuse method."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.bench_run import BenchmarkRun
from chunkweave.cli.console import Output, progress
from chunkweave.cli.option_blocks import StoreOptions, TimedModelOptions, with_blocks
from chunkweave.cli.tables import size, ttft_table
from chunkweave.config import DEFAULT_RECOMPUTE_RATIO
from chunkweave.eval.bundled import bundled_examples
from chunkweave.eval.datasets import load_dataset
from chunkweave.eval.results import peak_rss_bytes
from chunkweave.eval.ttft_table import TimedSample, TtftRow, summarize

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.eval.ttft import TtftConfig, Workload


@with_blocks
def ttft(
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="MuSiQue JSON, SQuAD 1.1 JSON, or JSONL of {question, chunks, answers}; bundled documents if left out."
        ),
    ] = None,
    *,
    model: TimedModelOptions,
    methods: Annotated[
        str, typer.Option(help="Reuse methods, separated by commas; `full` is always added as the reference.")
    ] = "prefix,full-reuse,cacheblend",
    recompute_ratio: options.RecomputeRatio = DEFAULT_RECOMPUTE_RATIO,
    chunks: Annotated[int, typer.Option(help="Chunks of a prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of every chunk; 0 leaves passages as they are.")] = 512,
    warm: options.Warm = "alone",
    questions: Annotated[int, typer.Option(help="Questions that are measured.")] = 10,
    hf_reference: Annotated[bool, typer.Option(help="Measure the Hugging Face forward too.")] = True,
    store: StoreOptions,
    output: Output,
) -> None:
    """Time to first token by reuse method: alternating contenders, one warm store, the same token ids for all."""
    choice, kept = model.choice(), store.config()
    model.bound_threads()
    from chunkweave.eval.ttft import TtftConfig, Warmth, make_workload

    names, warmth, seed = options.names(methods), Warmth.parse(warm), model.seed
    config = TtftConfig(names, recompute_ratio, chunks, chunk_tokens, warmth, questions, seed, hf_reference)
    examples = (
        load_dataset(dataset, seed=seed)
        if dataset is not None
        else bundled_examples(config.warm.queries + questions, seed=seed)
    )
    origin = {"model": choice.name, "dataset": str(dataset or "bundled documents"), **options.kept(kept)}
    with choice.open(store=kept) as engine:
        workload = make_workload(examples, engine, config)
        run = TtftRun(engine, config, origin)
        with run.reported(output):
            run.measure(workload)


class TtftRun(BenchmarkRun[TimedSample, TtftRow]):
    """Times of all contenders, question by question."""

    def __init__(self, engine: "Engine", config: "TtftConfig", origin: dict[str, Any]) -> None:
        super().__init__("ttft", engine, {**asdict(config), "warm": str(config.warm), **origin}, config.seed)
        self._measured = config

    def measure(self, workload: "Workload") -> None:
        """Measure all questions behind a progress bar."""
        from chunkweave.eval.ttft import measure

        with progress("measuring") as report:
            for sample in measure(self.engine, workload, self._measured, report):
                self.samples.append(sample)

    def summarize(self) -> list[TtftRow]:
        """Contenders, the reference first."""
        return summarize(self.samples)

    def more(self) -> dict[str, Any]:
        """What the store held, memory, and every single time."""
        store = self.engine.store
        stats = store.stats
        held = {
            "bytes": stats.bytes,
            "budget_bytes": store.budget_bytes,
            "segments": stats.segments,
            "evictions": stats.evictions,
        }
        times = [{"question": one.question, "method": one.method, "ttft_s": one.ttft_s} for one in self.samples]
        return {"store": held, "peak_rss_bytes": peak_rss_bytes(), "samples": times}

    def table(self, rows: Sequence[TtftRow], result: dict[str, Any]) -> Table:
        """Contenders against the reference and their limit."""
        config, store = result["config"], result["store"]
        size_of_one = f"{config['chunk_tokens']} tokens" if config["chunk_tokens"] else "whole passages"
        title = (
            f"{config['model']}, {config['chunks']} x {size_of_one}, recompute ratio "
            f"{config['recompute_ratio']:g}, warm {config['warm']}"
        )
        caption = (
            f"{rows[0].questions} questions, {config['device']}, {config['dtype']}, threads: "
            f"{config['threads']}. Speed-up: median over questions of full / method. Limit: the same if time were "
            f"FLOPs.\nStore {size(store['bytes'])} of {size(store['budget_bytes'])}, {store['evictions']} evictions, "
            f"peak memory {size(result['peak_rss_bytes'])}."
        )
        return ttft_table(rows, title, caption)
