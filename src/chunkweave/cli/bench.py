"""`chunkweave bench`: how close reuse methods come to full prefill, and how soon their first tokens come."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chunkweave.calibration.results import BenchmarkResult, QuestionLog, computed_on, peak_rss_bytes
from chunkweave.calibration.summaries import FidelityRow, FidelitySample, summarize_fidelity
from chunkweave.cli import options
from chunkweave.cli.calibrate import PromptOptions, computed_behind, measured_with, samples_of
from chunkweave.cli.console import Output, check_writable, counted, progress, seconds, size, stderr, table_of
from chunkweave.cli.options import Only, SeededModelOptions, ValueOptions, with_blocks
from chunkweave.config import PluginConfig, ReuseConfig, StoreConfig
from chunkweave.plugins import METHODS

if TYPE_CHECKING:
    from chunkweave.calibration.fidelity import Comparison
    from chunkweave.engine.engine import Engine

app = typer.Typer(no_args_is_help=True, help="Measure reuse methods against full prefill, without labels.")

Methods = Annotated[
    str,
    typer.Option(
        help="Reuse methods, separated by commas; `full` and `full-reuse` are always added. Settings follow a colon, "
        f"the value of a single method an @: `query:whole@0.05`. There are: {METHODS.listed}."
    ),
]
Free = Annotated[int, typer.Option(min=0, help="Questions that every method also answers freely, for `same` and F1.")]
Kept = Annotated[StoreConfig, Only("host_budget", "cache_dir", "codec")]

Question = Mapping[str, FidelitySample]
"""The samples of one question by contender."""


@app.command()
@with_blocks
def fidelity(
    *,
    model: SeededModelOptions,
    _plugins: PluginConfig,  # its files bring methods
    methods: Methods = "prefix,epic,cacheblend,query",
    values: ValueOptions,
    asked: PromptOptions,
    warm: options.Warm = "alone",
    new_tokens: options.NewTokens = 16,
    free: Free = 40,
    samples: options.Samples = None,
    store: Kept,
    output: Output,
) -> None:
    """Compare reuse methods with full prefill: closeness and speed, on your model and documents, without labels."""
    config = comparison_of(methods, values, asked, warm, model.seed, new_tokens=new_tokens, free=free)
    _measure("fidelity", fidelity_table, config, model, asked, store, samples, output)


@app.command()
@with_blocks
def ttft(
    *,
    model: SeededModelOptions,
    _plugins: PluginConfig,
    methods: Methods = "prefix,cacheblend",
    values: ValueOptions,
    asked: PromptOptions,
    warm: options.Warm = "alone",
    samples: options.Samples = None,
    store: Kept,
    output: Output,
) -> None:
    """Time to first token by reuse method: alternating contenders, one warm store, the same token ids for all."""
    config = comparison_of(methods, values, asked, warm, model.seed, new_tokens=1, free=0)
    _measure("ttft", ttft_table, config, model, asked, store, samples, output)


def comparison_of(
    methods: str,
    values: ValueOptions,
    asked: PromptOptions,
    warm: str,
    seed: int,
    *,
    new_tokens: int,
    free: int,
) -> "Comparison":
    """The comparison that the options describe.

    Raises:
        UsageError: a list, a value or a way to warm is invalid.
        UnknownMethodError: a method does not exist.
    """
    from chunkweave.calibration.fidelity import Comparison
    from chunkweave.calibration.prompts import Warmth

    return Comparison(
        methods=options.names(methods),
        ratios=values.ratios,
        alphas=values.alphas,
        reuse=ReuseConfig(seed=seed),
        warm=Warmth.parse(warm),
        chunks=asked.chunks,
        chunk_tokens=asked.cut_tokens,
        by_retrieval=asked.by_retrieval,
        new_tokens=new_tokens,
        free=free,
    )


def _measure(
    name: str,
    table: "TableOf",
    config: "Comparison",
    model: SeededModelOptions,
    asked: PromptOptions,
    store: StoreConfig,
    samples: Path | None,
    output: Output,
) -> None:
    """Measure all questions over one store, and show the result."""
    if samples is not None:
        check_writable(samples)
    model.named()
    from chunkweave.calibration.fidelity import compare, make_tasks, warm_by_earlier, way_of

    with model.open(store=store) as engine:
        earlier = config.warm.queries
        every, drawn = asked.examples(engine, model.seed, earlier)
        tasks = make_tasks(engine, every, drawn, config, asked.instruction)
        if name == "ttft":
            tasks = [replace(task, answer_ids=(), answers=()) for task in tasks]
        settings = settings_of(config, model, asked, store)
        log = QuestionLog(samples, {**settings, "seed": model.seed, **measured_with(engine, drawn)})
        benchmark = Benchmark(name, engine, settings, model.seed, log, table)
        with progress("warming") as report:
            warm_by_earlier(engine, tasks[:earlier], report)
        way = way_of(engine, tasks[earlier:], config.contenders(), config, sliced=name == "fidelity")
        with progress(f"measuring {counted(len(way.tasks), 'question')}, prefills") as report:
            exact = len(way.tasks) if name == "ttft" else None  # the time of `prefix` counts, not its closeness
            measured = compare([way], config, exact=exact, skip=log.__contains__, progress=report)
            benchmark.run(measured, len(way.tasks), output)


def settings_of(
    config: "Comparison",
    model: SeededModelOptions,
    asked: PromptOptions,
    store: StoreConfig,
) -> dict[str, Any]:
    """The settings of a measurement, for its result."""
    settings = asdict(config) | {"warm": str(config.warm), **computed_behind((config.warm,))}
    del settings["reuse"]["capture"]  # measured runs store nothing
    origin = {"model": model.name, "dataset": asked.about, "questions": asked.questions, **asked.asked_as}
    return {**settings, **origin, "weights": str(model.model.weights), **options.kept(store)}


TableOf = Callable[[Sequence[FidelityRow], Mapping[str, Any]], Table]
"""Makes a table of the rows and the settings of a result."""

Summary = Callable[[Sequence[Question]], list[FidelityRow]]
"""Makes a row for each contender from the questions measured so far."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A measurement that is running: each finished question is in the log, which a repeated command continues."""

    name: str
    engine: "Engine"
    settings: Mapping[str, Any]
    seed: int
    log: QuestionLog
    table: TableOf
    rows: Summary = field(default=lambda questions: summarize_fidelity(questions))

    def run(self, measured: Iterable[Question], count: int, output: Output) -> None:
        """Log the missing ones of `count` questions as they are measured, then print the table and write the result.

        If it ends early, the result has the questions measured so far, and `complete` is false.
        """
        if self.log.found is None:
            self.log.begin({})
        if len(self.log):
            stderr().print(f"continuing: {counted(len(self.log), 'question')} measured before")
        complete = False
        try:
            missing = [index for index in range(count) if index not in self.log]
            for index, question in zip(missing, measured, strict=True):
                self.log.add(index, {"contenders": {label: sample.as_dict() for label, sample in question.items()}})
            complete = True
        except KeyboardInterrupt:
            if len(self.log):
                stderr().print("interrupted: the result covers the questions measured so far")
            raise
        finally:
            if len(self.log):
                self._show(output, complete)

    def _show(self, output: Output, complete: bool) -> None:
        rows = self.rows([samples_of(line) for line in self.log.of("contenders")])
        settings = {**self.settings, **computed_on(self.engine.loaded.model)}
        output.show(self.table(rows, settings))
        store = self.engine.store
        more = {
            "commits": sorted({commit for commit in self.log.of("commit") if commit}),
            "store": {"bytes": store.stats.bytes, "budget_bytes": store.budget_bytes},
            "peak_rss_bytes": peak_rss_bytes(),
        }
        row_dicts = [row.as_dict() for row in rows]
        result = BenchmarkResult(self.name, options.command_line(), self.seed, settings, row_dicts, more, complete)
        output.finish(result.as_dict())


def title_of(settings: Mapping[str, Any]) -> str:
    """Model, data set and prompts of a table."""
    each = f"{settings['chunk_tokens']} tokens" if settings["chunk_tokens"] else "whole passages"
    over = f"{settings['chunks']} x {each}, chunks computed: {settings['warm']}"
    return f"{settings['model']} on {settings['dataset']}: {over}"


def measured_on(rows: Sequence[FidelityRow], settings: Mapping[str, Any]) -> str:
    """Questions, tokens and threads, for the caption of a table."""
    most = max((row.questions for row in rows), default=0)
    tokens = next((row.prompt_tokens for row in rows if row.prompt_tokens is not None), 0.0)
    computed = f"{settings['device']}, {settings['dtype']}, threads: {settings['threads']}"
    return f"{most} questions, {tokens:.0f} tokens a prompt, {computed}."


def fidelity_table(rows: Sequence[FidelityRow], settings: Mapping[str, Any]) -> Table:
    """The contenders' closeness to full prefill, speed-up and recomputation."""
    return table_of(
        rows,
        ("method", lambda row: row.method),
        ("KL", lambda row: number(row.kl, ".4f")),
        ("95 %", lambda row: between(row.kl_low, row.kl_high, ".4f")),
        ("p90", lambda row: number(row.kl_p90, ".3f")),
        ("left", lambda row: number(row.kl_of_full_reuse, ".0%")),
        ("top-1", lambda row: number(row.agreement, ".1%")),
        ("same", lambda row: number(row.identical, ".0%")),
        ("NLL", lambda row: number(row.answer_nll_minus_full, "+.3f")),
        ("95 %", lambda row: between(row.answer_nll_minus_full_low, row.answer_nll_minus_full_high, "+.3f")),
        ("F1", lambda row: number(row.f1, ".3f")),
        ("TTFT", lambda row: "-" if row.ttft_s is None else seconds(row.ttft_s)),
        ("speed-up", lambda row: number(row.speedup, ".2f", "x")),
        ("limit", lambda row: number(row.flops_limit, ".2f", "x")),
        ("recomp.", lambda row: number(row.recompute_fraction, ".1%")),
        title=title_of(settings),
        caption=f"{measured_on(rows, settings)} KL: D(full || method) in nats over full prefill's own "
        f"{settings['new_tokens']} tokens, mean (95 % bootstrap by question) and 90th percentile; left: share of full "
        "reuse's KL.\nTop-1: both have the same most likely token. Same: greedy answers equal to full prefill's. NLL: "
        "of the first right answer, nats per token, minus full prefill's.\nSpeed-up: median of full / method; limit: "
        "the same if time were FLOPs.",
    )


def ttft_table(rows: Sequence[FidelityRow], settings: Mapping[str, Any]) -> Table:
    """The contenders' first tokens, beside what the FLOPs allow."""
    return table_of(
        rows,
        ("method", lambda row: row.method),
        ("TTFT", lambda row: "-" if row.ttft_s is None else seconds(row.ttft_s)),
        ("speed-up", lambda row: number(row.speedup, ".2f", "x")),
        ("95 %", lambda row: between(row.speedup_low, row.speedup_high, ".2f")),
        ("limit", lambda row: number(row.flops_limit, ".2f", "x")),
        ("of limit", lambda row: number(row.limit_share, ".0%")),
        ("recomp.", lambda row: number(row.recompute_fraction, ".1%")),
        ("top-1", lambda row: number(row.agreement, ".0%")),
        title=title_of(settings),
        caption=f"{measured_on(rows, settings)} Speed-up: median over questions of full / method (95 %: bootstrap by "
        "question); limit: the same if time were FLOPs.\nTop-1: the first token is full prefill's. Peak memory "
        f"{size(peak_rss_bytes() or 0)}.",
    )


def number(value: float | None, form: str, unit: str = "") -> str:
    """A cell; `-` if the value is not known."""
    return "-" if value is None else f"{value:{form}}{unit}"


def between(low: float | None, high: float | None, form: str) -> str:
    """A cell with an interval; `-` if there is none."""
    return "-" if low is None or high is None else f"{low:{form}}..{high:{form}}"
