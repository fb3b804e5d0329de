"""`chunkweave bench loading`: how well loading hides behind computing."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.console import Output, progress, status, stderr
from chunkweave.cli.model_choice import ModelChoice
from chunkweave.cli.tables import seconds
from chunkweave.config import DEFAULT_RECOMPUTE_RATIO
from chunkweave.errors import UsageError
from chunkweave.eval.bundled import bundled_examples
from chunkweave.eval.results import BenchmarkResult, peak_rss_bytes

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.eval.loading import LoadingConfig, LoadingRow


def loading(
    model: options.Model = None,
    shape: options.Shape = None,
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
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of PyTorch; its own choice if left out.")] = None,
    json: options.Json = False,
    out: options.Out = None,
) -> None:
    """Time to first token when segments load slowly: all at once, in the background, layer by layer."""
    from chunkweave.cli.bench import set_threads

    output = Output(json, out)
    choice = ModelChoice(model, shape, device, dtype, seed)
    slowness = tuple(options.numbers(quotients, "--quotients"))
    if min(slowness) <= 0 or wait < 0:
        raise UsageError("--quotients must be positive and --wait not negative")
    if disk is not None and not disk.is_dir():
        raise UsageError(f"--disk names no folder: {disk}")
    set_threads(threads)
    from chunkweave.eval.loading import LoadingConfig

    config = LoadingConfig(recompute_ratio, slowness, repeats, wait)
    origin = {"model": choice.name, "dataset": "bundled documents", "chunks": chunks, "chunk_tokens": chunk_tokens}
    rows: list[LoadingRow] = []
    complete = False
    with choice.open() as engine:
        try:
            _measure(engine, config, origin, seed, rows, disk)
            complete = True
        except KeyboardInterrupt:
            if rows:
                stderr().print("interrupted: the result covers the quotients measured so far")
            raise
        finally:
            if rows:
                result = _result(engine, config, origin, seed, rows, complete=complete)
                output.show(loading_table(rows, result["config"]))
                output.finish(result)


def _measure(
    engine: "Engine",
    config: "LoadingConfig",
    origin: dict[str, Any],
    seed: int,
    rows: list["LoadingRow"],
    disk: Path | None,
) -> None:
    """Append to `rows` as quotients are done."""
    from chunkweave.eval.loading import measure_disk_loading, measure_loading
    from chunkweave.eval.prompts import PromptMaker

    examples = bundled_examples(1, seed=seed)
    maker = PromptMaker(
        examples,
        engine.builder,
        engine.loaded.fingerprint,
        chunks=origin["chunks"],
        chunk_tokens=origin["chunk_tokens"],
    )
    prompt = maker.prompt(examples[0])
    engine.runner.room_for_new_tokens(prompt)
    with progress("measuring loading") as report:
        for row in measure_loading(engine.loaded.model, prompt, config, report):
            rows.append(row)  # noqa: PERF402 - an interrupted run keeps what it has
    if disk is not None:
        with status("measuring the disk"), TemporaryDirectory(prefix=".loading-", dir=disk) as folder:
            rows += measure_disk_loading(engine.loaded.model, prompt, config, Path(folder))


def _result(
    engine: "Engine",
    config: "LoadingConfig",
    origin: dict[str, Any],
    seed: int,
    rows: Sequence["LoadingRow"],
    *,
    complete: bool,
) -> dict[str, Any]:
    import torch

    model = engine.loaded.model
    resolved = {
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    return BenchmarkResult(
        benchmark="loading",
        command=options.command_line(),
        seed=seed,
        config={**asdict(config), **origin, **resolved},
        rows=[row.as_dict() for row in rows],
        more={"peak_rss_bytes": peak_rss_bytes()},
        complete=complete,
    ).as_dict()


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
