"""`chunkweave bench`: time to first token and loading. `bench quality` is in `quality`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeVar

import typer
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.console import Output, progress, seconds, size, status, stderr, ttft_table
from chunkweave.cli.options import Only, TimedModelOptions, with_blocks
from chunkweave.config import ReuseConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.eval.datasets import bundled_examples, load_dataset
from chunkweave.eval.results import BenchmarkResult, peak_rss_bytes
from chunkweave.eval.summaries import TimedSample, TtftRow, summarize

if TYPE_CHECKING:
    from chunkweave.chunking.prompt import Prompt
    from chunkweave.engine.engine import Engine
    from chunkweave.eval.loading import LoadingConfig, LoadingRow
    from chunkweave.eval.ttft import TtftConfig, Workload


app = typer.Typer(no_args_is_help=True, help="Measure reuse methods against each other.")


SampleT = TypeVar("SampleT")


class Row(Protocol):
    """One line of a result."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""


RowT = TypeVar("RowT", bound=Row)


class BenchmarkRun(ABC, Generic[SampleT, RowT]):
    """One measurement. `samples` grow while it goes on, by whole questions or steps: they are what a result covers."""

    def __init__(self, name: str, engine: "Engine", config: dict[str, Any], seed: int) -> None:
        self.engine = engine
        self.samples: list[SampleT] = []
        self._name = name
        self._config = config
        self._seed = seed

    @abstractmethod
    def summarize(self) -> list[RowT]:
        """The samples, summed up: one row a contender."""

    @abstractmethod
    def more(self) -> dict[str, Any]:
        """What this benchmark's result has beside its rows."""

    @abstractmethod
    def table(self, rows: Sequence[RowT], result: dict[str, Any]) -> Table:
        """The rows for people; `result` says how they came about."""

    def draw(self, rows: Sequence[RowT]) -> None:
        """Draw what was asked for beside the table."""

    def result(self, rows: Sequence[RowT], *, complete: bool = True) -> dict[str, Any]:
        """The JSON object that docs/benchmarks.md describes; what was "auto" is resolved in it."""
        import torch

        model = self.engine.loaded.model
        resolved = {
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
        return BenchmarkResult(
            benchmark=self._name,
            command=options.command_line(),
            seed=self._seed,
            config={**self._config, **resolved},
            rows=[row.as_dict() for row in rows],
            more=self.more(),
            complete=complete,
        ).as_dict()

    def show(self, output: Output, *, complete: bool = True) -> dict[str, Any]:
        """Print the table and draw what is to be drawn; the result is returned."""
        rows = self.summarize()
        result = self.result(rows, complete=complete)
        output.show(self.table(rows, result))
        self.draw(rows)
        return result

    @contextmanager
    def reported(self, output: Output) -> Iterator[None]:
        """Show the result when the block ends; if it ends early, what there is by then."""
        complete = False
        try:
            yield
            complete = True
        except KeyboardInterrupt:
            if self.samples:
                stderr().print("interrupted: the result covers what was measured so far")
            raise
        finally:
            if self.samples:
                output.finish(self.show(output, complete=complete))


@app.command()
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
    reuse: Annotated[ReuseConfig, Only("recompute_ratio")],
    chunks: Annotated[int, typer.Option(help="Chunks of a prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of every chunk; 0 leaves passages as they are.")] = 512,
    warm: options.Warm = "alone",
    questions: Annotated[int, typer.Option(help="Questions that are measured.")] = 10,
    hf_reference: Annotated[bool, typer.Option(help="Measure the Hugging Face forward too.")] = True,
    store: StoreConfig,
    output: Output,
) -> None:
    """Time to first token by reuse method: alternating contenders, one warm store, the same token ids for all."""
    model.named()
    model.bound_threads()
    from chunkweave.eval.ttft import TtftConfig, Warmth, make_workload

    names, warmth, seed = options.names(methods), Warmth.parse(warm), model.seed
    config = TtftConfig(names, reuse.recompute_ratio, chunks, chunk_tokens, warmth, questions, seed, hf_reference)
    examples = (
        load_dataset(dataset, seed=seed)
        if dataset is not None
        else bundled_examples(config.warm.queries + questions, seed=seed)
    )
    origin = {"model": model.name, "dataset": str(dataset or "bundled documents"), **options.kept(store)}
    with model.open(store=store) as engine:
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


@app.command()
@with_blocks
def loading(
    *,
    model: TimedModelOptions,
    chunks: Annotated[int, typer.Option(help="Chunks of the prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every chunk.")] = 512,
    reuse: Annotated[ReuseConfig, Only("recompute_ratio")],
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
    model.named()
    slowness = tuple(options.numbers(quotients, "--quotients"))
    if min(slowness) <= 0 or wait < 0:
        raise UsageError("--quotients must be positive and --wait not negative")
    if disk is not None and not disk.is_dir():
        raise UsageError(f"--disk names no folder: {disk}")
    model.bound_threads()
    from chunkweave.eval.loading import LoadingConfig

    config = LoadingConfig(reuse.recompute_ratio, slowness, repeats, wait)
    origin = {"model": model.name, "dataset": "bundled documents", "chunks": chunks, "chunk_tokens": chunk_tokens}
    with model.open() as engine:
        prompt = _prompt(engine, chunks, chunk_tokens, model.seed)
        run = LoadingRun(engine, config, origin, model.seed)
        with run.reported(output):
            run.measure(prompt, disk)


def _prompt(engine: "Engine", chunks: int, chunk_tokens: int, seed: int) -> "Prompt":
    """One bundled question over chunks of one size; refused if it does not fit the model."""
    from chunkweave.eval.datasets import PromptMaker

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
