"""`chunkweave bench loading`: how well loading hides behind computing."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.bench_run import BenchmarkRun
from chunkweave.cli.console import Output, progress, status
from chunkweave.cli.option_blocks import TimedModelOptions, with_blocks
from chunkweave.cli.tables import seconds
from chunkweave.config import DEFAULT_RECOMPUTE_RATIO
from chunkweave.errors import UsageError
from chunkweave.eval.bundled import bundled_examples
from chunkweave.eval.results import peak_rss_bytes

if TYPE_CHECKING:
    from chunkweave.chunking.prompt import Prompt
    from chunkweave.engine.engine import Engine
    from chunkweave.eval.loading import LoadingConfig, LoadingRow


@with_blocks
def loading(
    *,
    model: TimedModelOptions,
    chunks: Annotated[int, typer.Option(help="Chunks of the prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every chunk.")] = 512,
    recompute_ratio: options.RecomputeRatio = DEFAULT_RECOMPUTE_RATIO,
    quotients: Annotated[
        str, typer.Option(help="How slow the link is: loading time over recompute time, separated by commas.")
    ] = "0.25,0.5,1,2,4",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every way of loading; the median counts.")] = 5,
    wait: Annotated[float, typer.Option(help="Seconds that a prefetched request waits before its turn.")] = 0.3,
    disk: Annotated[
        Path | None, typer.Option(help="Also load from a real disk: a folder there, for files that are removed again.")
    ] = None,
    output: Output,
) -> None:
    """Time to first token when segments load slowly: all at once, in the background, layer by layer."""
    choice = model.choice()
    slowness = tuple(options.numbers(quotients, "--quotients"))
    if min(slowness) <= 0 or wait < 0:
        raise UsageError("--quotients must be positive and --wait not negative")
    if disk is not None and not disk.is_dir():
        raise UsageError(f"--disk names no folder: {disk}")
    model.bound_threads()
    from chunkweave.eval.loading import LoadingConfig

    config = LoadingConfig(recompute_ratio, slowness, repeats, wait)
    origin = {"model": choice.name, "dataset": "bundled documents", "chunks": chunks, "chunk_tokens": chunk_tokens}
    with choice.open() as engine:
        prompt = _prompt(engine, chunks, chunk_tokens, model.seed)
        run = LoadingRun(engine, config, origin, model.seed)
        with run.reported(output):
            run.measure(prompt, disk)


def _prompt(engine: "Engine", chunks: int, chunk_tokens: int, seed: int) -> "Prompt":
    """One bundled question over chunks of one size; refused if it does not fit the model."""
    from chunkweave.eval.prompts import PromptMaker

    examples = bundled_examples(1, seed=seed)
    maker = PromptMaker(examples, engine.builder, engine.loaded.fingerprint, chunks=chunks, chunk_tokens=chunk_tokens)
    prompt = maker.prompt(examples[0])
    engine.runner.room_for_new_tokens(prompt)
    return prompt


class LoadingRun(BenchmarkRun["LoadingRow", "LoadingRow"]):
    """Ways of loading, quotient by quotient."""

    def __init__(self, engine: "Engine", config: "LoadingConfig", origin: dict[str, Any], seed: int) -> None:
        super().__init__("loading", engine, {**asdict(config), **origin}, seed)
        self._measured = config

    def measure(self, prompt: "Prompt", disk: Path | None) -> None:
        """Measure every quotient behind a progress bar, then a real disk if there is to be one."""
        from chunkweave.eval.loading import measure_disk_loading, measure_loading

        model = self.engine.loaded.model
        with progress("measuring loading") as report:
            for row in measure_loading(model, prompt, self._measured, report):
                self.samples.append(row)
        if disk is not None:
            with status("measuring the disk"), TemporaryDirectory(prefix=".loading-", dir=disk) as folder:
                self.samples += measure_disk_loading(model, prompt, self._measured, Path(folder))

    def summarize(self) -> list["LoadingRow"]:
        """Each is a median already."""
        return self.samples

    def more(self) -> dict[str, Any]:
        """The most memory that was held."""
        return {"peak_rss_bytes": peak_rss_bytes()}

    def table(self, rows: Sequence["LoadingRow"], result: dict[str, Any]) -> Table:
        """One line for each way of loading at each quotient."""
        return loading_table(rows, result["config"])


def loading_table(rows: Sequence["LoadingRow"], config: dict[str, Any]) -> Table:
    """One line for each way of loading at each quotient."""
    title = (
        f"{config['model']}, {config['chunks']} x {config['chunk_tokens']} tokens, recompute ratio "
        f"{config['recompute_ratio']:g}"
    )
    caption = (
        f"Medians of {config['repeats']} runs, {config['device']}, {config['dtype']}, threads: {config['threads']}. "
        "Quotient: time to load over time to recompute.\nRatio: TTFT over that with everything in memory, in the same "
        f"repeat. A prefetched request waits {config['wait_s']:g} s, which do not count."
    )
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("from")
    table.add_column("quotient", justify="right")
    table.add_column("loading", no_wrap=True)
    for name in ("TTFT", "ratio to memory", "predicted", "prediction error"):
        table.add_column(name, justify="right")
    for number, row in enumerate(rows):
        table.add_row(
            row.source,
            f"{row.quotient:.2g}",
            row.mode,
            seconds(row.ttft_median_s),
            f"{row.ratio_to_memory:.2f}x",
            seconds(row.predicted_s),
            f"{row.prediction_error:+.0%}",
            end_section=number + 1 == len(rows) or rows[number + 1].quotient != row.quotient,
        )
    return table
