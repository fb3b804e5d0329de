"""`chunkweave bench`: time to first token and loading. `bench quality` is in `quality`."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from chunkweave.calibration.questions import bundled_examples
from chunkweave.calibration.results import BenchmarkResult, computed_on, peak_rss_bytes
from chunkweave.cli import options
from chunkweave.cli.console import (
    Output,
    check_writable,
    counted,
    progress,
    seconds,
    size,
    status,
    stderr,
    table_of,
    write_text,
)
from chunkweave.cli.options import Only, SeededModelOptions, ValueOptions, with_blocks
from chunkweave.config import PluginConfig, ReuseConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.planning.cost import CostModel
from chunkweave_lab.baselines import BENCH_METHODS
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.plots import Picture, require_matplotlib, ttft_figure
from chunkweave_lab.summaries import TtftRow, TtftSample, summarize

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.prompt.parts import Prompt
    from chunkweave_lab.loading import LoadingConfig, LoadingRow
    from chunkweave_lab.ttft import TtftConfig, Workload


app = typer.Typer(no_args_is_help=True, help="Measure reuse methods against each other.")


Html = Annotated[
    Path | None,
    typer.Option("--html", help="Also write an HTML report to this file: table, pictures, settings."),
]


class Row(Protocol):
    """One line of a result."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""


RowT = TypeVar("RowT", bound=Row)


@dataclass(frozen=True, slots=True)
class BenchmarkRun(Generic[RowT]):
    """One measurement: makes a table and a file of the samples so far, even if it is interrupted.

    `summarize` makes one row per contender from the samples so far. `table` shows them, given the result's
    configuration with resolved "auto" values. `more` returns the result's fields beside the rows, `draw` the requested
    pictures. `html` is the path of the report.
    """

    name: str
    engine: "Engine"
    config: dict[str, Any]
    seed: int
    summarize: Callable[[], list[RowT]]
    table: Callable[[Sequence[RowT], dict[str, Any]], Table]
    more: Callable[[], dict[str, Any]] = dict
    draw: Callable[[Sequence[RowT]], Sequence[Picture]] = lambda _: ()
    html: Path | None = None

    def show(self, output: Output, *, complete: bool = True) -> dict[str, Any]:
        """Print the table and draw the pictures; returns the JSON object that docs/evidence.md describes."""
        rows = self.summarize()
        config = {**self.config, **computed_on(self.engine.loaded.model)}
        table, pictures = self.table(rows, config), self.draw(rows)
        output.show(table)
        for picture in pictures:
            picture.save()
        found = [row.as_dict() for row in rows]
        command, more = options.command_line(), self.more()
        result = BenchmarkResult(self.name, command, self.seed, config, found, more, complete=complete).as_dict()
        if self.html is not None:
            write_text(self.html, result_page(result, table, pictures))
        return result

    @contextmanager
    def reported(self, output: Output, samples: Sized) -> Iterator[None]:
        """Show the result when the block ends; if it ends early, the result of the `samples` so far."""
        complete = False
        try:
            yield
            complete = True
        except KeyboardInterrupt:
            if samples:
                stderr().print("interrupted: the result covers the questions measured so far")
            raise
        finally:
            if samples:
                output.finish(self.show(output, complete=complete))


def check_pictures(html: Path | None, *pngs: Path | None) -> None:
    """Check before a long run that its pictures can be drawn and written.

    Raises:
        UsageError: a file cannot be written, or matplotlib is not installed.
    """
    for path in (html, *pngs):
        if path is not None:
            check_writable(path)
            require_matplotlib()


def result_page(result: Mapping[str, Any], table: Table, pictures: Sequence[Picture]) -> str:
    """A benchmark's result as a self-contained HTML file: table, pictures, settings."""
    from chunkweave.page import asset, render

    def plain(text: object) -> str:
        return Text.from_markup(str(text or "")).plain

    columns = [list(map(plain, column.cells)) for column in table.columns]
    ran: dict[str, Any] = {"command": result["command"], "commit": result["commit"], "seed": result["seed"]}
    return render(
        "bench.html",
        css=asset("page.css"),
        name=result["benchmark"],
        complete=result["complete"],
        title=plain(table.title),
        caption=plain(table.caption),
        headings=[(plain(column.header), column.justify == "right") for column in table.columns],
        rows=list(zip(*columns, strict=True)),
        pictures=[(one.data_url, one.caption) for one in pictures],
        ran=[ran, result["machine"], result["versions"], result["config"]],
    )


@app.command()
@with_blocks
def ttft(
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="MuSiQue JSON, SQuAD 1.1 JSON, or JSONL of {question, chunks, answers}; default: bundled documents."
        ),
    ] = None,
    *,
    model: SeededModelOptions,
    _plugins: PluginConfig,  # its files bring methods
    methods: Annotated[
        str,
        typer.Option(
            help="Reuse methods, separated by commas; `full` is always added as the reference. Settings follow a "
            "colon, the value of a single method an @: `cacheblend:layer-2@0.05`. There are: "
            f"{BENCH_METHODS.listed}."
        ),
    ] = "prefix,full-reuse,cacheblend",
    values: ValueOptions,
    chunks: Annotated[int, typer.Option(help="Chunks per prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk; 0 keeps passages whole.")] = 512,
    warm: options.Warm = "alone",
    questions: Annotated[int, typer.Option(help="Number of measured questions.")] = 10,
    hf_reference: Annotated[bool, typer.Option(help="Measure the Hugging Face forward too.")] = True,
    store: StoreConfig,
    html: Html = None,
    output: Output,
) -> None:
    """Time to first token by reuse method: alternating contenders, one warm store, the same token ids for all."""
    check_pictures(html)
    model.named()
    from chunkweave.calibration.prompts import Warmth
    from chunkweave_lab.ttft import TtftConfig, make_workload

    seed = model.seed
    config = TtftConfig(
        methods=options.names(methods),
        ratios=values.ratios,
        alphas=values.alphas,
        check_layers=values.layers,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        warm=Warmth.parse(warm),
        questions=questions,
        seed=seed,
        hf_reference=hf_reference,
    )
    config.contenders()  # refuse bad specifications before the model is loaded
    examples = (
        load_dataset(dataset, seed=seed)
        if dataset is not None
        else bundled_examples(config.warm.queries + questions, seed=seed)
    )
    origin = {"model": model.name, "dataset": str(dataset or "bundled documents"), **options.kept(store)}
    with model.open(store=store) as engine:
        workload = make_workload(examples, engine, config)
        samples: list[TtftSample] = []
        with ttft_run(engine, config, origin, samples, html).reported(output, samples):
            measure_ttft(engine, workload, config, samples)


def ttft_run(
    engine: "Engine",
    config: "TtftConfig",
    origin: dict[str, Any],
    samples: list[TtftSample],
    html: Path | None = None,
) -> BenchmarkRun[TtftRow]:
    """The run that measures times of all contenders; the reference is first."""

    def more() -> dict[str, Any]:
        store, stats = engine.store, engine.store.stats
        held = {
            "bytes": stats.bytes,
            "budget_bytes": store.budget_bytes,
            "segments": stats.segments,
            "evictions": stats.evictions,
        }
        times = [{"question": one.question, "method": one.method, "ttft_s": one.ttft_s} for one in samples]
        return {"store": held, "peak_rss_bytes": peak_rss_bytes(), "samples": times}

    whole = {**asdict(config), "warm": str(config.warm), **origin}
    table = lambda rows, shown: _ttft_table(rows, shown, engine)  # noqa: E731

    def draw(rows: Sequence[TtftRow]) -> list[Picture]:
        about = "Left: times, and how many times sooner than full prefill. Right: where the prompt's tokens came from."
        return [] if html is None else [Picture(ttft_figure(rows, origin["model"]), about)]

    return BenchmarkRun("ttft", engine, whole, config.seed, lambda: summarize(samples), table, more, draw, html)


def measure_ttft(engine: "Engine", workload: "Workload", config: "TtftConfig", samples: list[TtftSample]) -> None:
    """Measure all questions behind a progress bar."""
    from chunkweave_lab.ttft import measure

    with progress(f"measuring {counted(len(workload.measured), 'question')}, prefills") as report:
        for sample in measure(engine, workload, config, report):
            samples.append(sample)  # noqa: PERF402 - samples must be kept if it is interrupted


def _ttft_table(rows: Sequence[TtftRow], config: dict[str, Any], engine: "Engine") -> Table:
    store = engine.store
    size_of_one = f"{config['chunk_tokens']} tokens" if config["chunk_tokens"] else "whole passages"
    return table_of(
        rows,
        ("method", lambda row: row.method),
        ("TTFT", lambda row: seconds(row.ttft_median_s)),
        ("p10", lambda row: seconds(row.ttft_p10_s)),
        ("p90", lambda row: seconds(row.ttft_p90_s)),
        ("speed-up", lambda row: f"{row.speedup:.2f}x"),
        ("limit", lambda row: f"{row.flops_limit:.2f}x"),
        ("of limit", lambda row: f"{row.limit_share:.0%}"),
        ("exact", lambda row: f"{row.prefix_exact_tokens:.0f}"),
        ("reused", lambda row: f"{row.reused_tokens:.0f}"),
        ("recomp.", lambda row: f"{row.recomputed_tokens:.0f}"),
        ("computed", lambda row: f"{row.computed_tokens:.0f}"),
        ("recomp. fraction", lambda row: f"{row.recompute_fraction:.3f}"),
        title=f"{config['model']}, {config['chunks']} x {size_of_one}, warm {config['warm']}, check layers "
        f"{', '.join(map(str, config['check_layers']))}",
        caption=f"{rows[0].questions} questions, {config['device']}, {config['dtype']}, threads: "
        f"{config['threads']}. Speed-up: median over questions of full / method. Limit: the same if time were "
        f"FLOPs.\nStore {size(store.stats.bytes)} of {size(store.budget_bytes)}, {store.stats.evictions} evictions, "
        f"peak memory {size(peak_rss_bytes())}.",
    )


@app.command()
@with_blocks
def loading(
    *,
    model: SeededModelOptions,
    chunks: Annotated[int, typer.Option(help="Chunks in the prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens per chunk.")] = 512,
    reuse: Annotated[ReuseConfig, Only("recompute_ratio")],
    quotients: Annotated[
        str, typer.Option(help="Slowness of the link: loading time divided by recompute time, separated by commas.")
    ] = "0.25,0.5,1,2,4",
    repeats: Annotated[int, typer.Option(min=1, help="Runs per way of loading; the median is reported.")] = 5,
    wait: Annotated[float, typer.Option(help="Seconds that a prefetched request waits before its turn.")] = 0.3,
    disk: Annotated[
        Path | None, typer.Option(help="Also load from a real disk: a folder on it for temporary files.")
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(
            help="File of `chunkweave profile` for this model on this machine, used for predictions; measured if "
            "not given."
        ),
    ] = None,
    output: Output,
) -> None:
    """Measure time to first token when segments load slowly: all at once, in the background, layer by layer."""
    model.named()
    slowness = tuple(options.numbers(quotients, "--quotients"))
    if min(slowness) <= 0 or wait < 0:
        raise UsageError("--quotients must be positive and --wait not negative")
    if disk is not None and not disk.is_dir():
        raise UsageError(f"--disk is not a folder: {disk}")
    given = None if cost_model is None else CostModel.read(cost_model)
    from chunkweave_lab.loading import LoadingConfig

    config = LoadingConfig(reuse.recompute_ratio, slowness, repeats, wait)
    origin = {"model": model.name, "dataset": "bundled documents", "chunks": chunks, "chunk_tokens": chunk_tokens}
    with model.open() as engine:
        prompt = _prompt(engine, chunks, chunk_tokens, model.seed)
        cost = _cost_model(engine, given)
        rows: list[LoadingRow] = []
        more = lambda: {"peak_rss_bytes": peak_rss_bytes(), "cost_model": asdict(cost)}  # noqa: E731
        whole = {**asdict(config), **origin}
        run = BenchmarkRun("loading", engine, whole, model.seed, lambda: rows, _loading_table, more)
        with run.reported(output, rows):
            _measure_loading(engine, prompt, config, cost, disk, rows)


def _cost_model(engine: "Engine", given: CostModel | None) -> CostModel:
    """The cost model for predictions: from a file, or measured now as `chunkweave profile` does."""
    loaded = engine.loaded
    if given is not None:
        if given.fingerprint != loaded.fingerprint:
            raise UsageError(f"--cost-model was measured with another model than {loaded.name}, or another dtype")
        return given
    from chunkweave.engine.profiling import profile_prefill

    with progress("measuring the cost model") as report:
        return profile_prefill(loaded.model, loaded.fingerprint, progress=report)


def _prompt(engine: "Engine", chunks: int, chunk_tokens: int, seed: int) -> "Prompt":
    """One bundled question over chunks of equal size; refused if it does not fit into the model's context."""
    from chunkweave.calibration.prompts import PromptMaker

    examples = bundled_examples(1, seed=seed)
    maker = PromptMaker(examples, engine.builder, engine.loaded.fingerprint, chunks=chunks, chunk_tokens=chunk_tokens)
    prompt = maker.prompt(examples[0])
    engine.runner.room_for_new_tokens(prompt)
    return prompt


def _measure_loading(
    engine: "Engine",
    prompt: "Prompt",
    config: "LoadingConfig",
    cost: CostModel,
    disk: Path | None,
    rows: "list[LoadingRow]",
) -> None:
    """Measure every quotient with a progress bar, then a real disk if one is given."""
    from chunkweave_lab.loading import measure_disk_loading, measure_loading

    model = engine.loaded.model
    with progress("measuring loading") as report:
        for row in measure_loading(model, prompt, config, cost, report):
            rows.append(row)
    if disk is not None:
        with status("measuring the disk"), TemporaryDirectory(prefix=".loading-", dir=disk) as folder:
            rows += measure_disk_loading(model, prompt, config, Path(folder), cost)


def _loading_table(rows: Sequence["LoadingRow"], config: dict[str, Any]) -> Table:
    """One line for each way of loading at each quotient."""
    title = (
        f"{config['model']}, {config['chunks']} x {config['chunk_tokens']} tokens, recompute ratio "
        f"{config['recompute_ratio']:g}"
    )
    caption = (
        f"Medians of {config['repeats']} runs, {config['device']}, {config['dtype']}, threads: {config['threads']}. "
        "Quotient: time to load over time to recompute.\nRatio: TTFT over that with everything in memory, in the same "
        f"repeat. A prefetched request waits {config['wait_s']:g} s, which do not count. Predicted: from a cost model "
        "measured before,\nof other prefills and segments. Prediction error: predicted over measured, minus one."
    )
    return table_of(
        rows,
        ("from", lambda row: row.source),
        ("quotient", lambda row: f"{row.quotient:.2g}"),
        ("loading", lambda row: row.mode),
        ("TTFT", lambda row: seconds(row.ttft_median_s)),
        ("ratio to memory", lambda row: f"{row.ratio_to_memory:.2f}x"),
        ("predicted", lambda row: seconds(row.predicted_s)),
        ("prediction error", lambda row: f"{row.prediction_error:+.0%}"),
        title=title,
        caption=caption,
        section=lambda row: row.quotient,
    )
