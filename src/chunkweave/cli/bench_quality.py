"""`chunkweave bench quality`: answer quality by reuse method and recompute ratio."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.console import Output, progress, stderr
from chunkweave.cli.model_choice import ModelChoice
from chunkweave.cli.tables import seconds
from chunkweave.errors import UsageError
from chunkweave.eval.datasets import Example, load_dataset
from chunkweave.eval.quality_table import QualityRow, summarize_quality
from chunkweave.eval.results import BenchmarkResult, check_writable

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.eval.deviation import Deviation
    from chunkweave.eval.quality import QualityConfig, QualitySample

_Number = TypeVar("_Number", int, float)

WORLDS = "worlds"
"""The data set that is generated instead of read."""


def quality(
    dataset: Annotated[
        str, typer.Option(help="`worlds` (generated, held out), or a MuSiQue, SQuAD 1.1 or JSONL file.")
    ] = WORLDS,
    model: options.Model = None,
    shape: options.Shape = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Reuse methods, separated by commas; `full` and `full-reuse` are always added. Ablations follow a "
            "colon: `cachecraft:no-focus`."
        ),
    ] = "cacheblend,epic,random",
    recompute_ratio: Annotated[str, typer.Option(help="Ratios, separated by commas.")] = "0.15",
    alpha: Annotated[str, typer.Option(help="Cache-Craft's alphas, separated by commas.")] = "1",
    check_layers: Annotated[str, typer.Option(help="CacheBlend's check layers, separated by commas.")] = "1",
    questions: Annotated[int, typer.Option(help="Questions that are measured.")] = 200,
    chunks: Annotated[int, typer.Option(help="Passages of a question, with `worlds`.")] = 6,
    worlds: Annotated[
        int, typer.Option(help="How many worlds `worlds` asks about, so that passages come back; 0: ever new ones.")
    ] = 0,
    kinds: Annotated[str, typer.Option(help="Only these kinds of question, separated by commas; all if empty.")] = "",
    warm: Annotated[str, typer.Option(help="`alone`, or `queries:N` by N earlier requests.")] = "alone",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 24,
    deviations: Annotated[int, typer.Option(help="Questions on which KV and attention deviation are measured.")] = 20,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    store_budget: options.StoreBudget = options.DEFAULT_STORE_BUDGET,
    cache_dir: options.CacheDir = None,
    disk_budget: options.DiskBudget = options.DEFAULT_DISK_BUDGET,
    remote_url: options.RemoteUrl = None,
    codec: options.Codec = "raw",
    ttl: options.Ttl = None,
    plot: Annotated[Path | None, typer.Option(help="Draw F1 against recompute fraction into this PNG.")] = None,
    json: options.Json = False,
    out: options.Out = None,
) -> None:
    """Answer quality by reuse method: the same questions, the same warm store, paired intervals."""
    output = Output(json, out)
    if plot is not None:
        check_writable(plot)
    choice = ModelChoice(model, shape, device, dtype, seed)
    from chunkweave.eval.quality import QualityConfig
    from chunkweave.eval.ttft import Warmth

    config = QualityConfig(
        methods=names(methods),
        ratios=tuple(_numbers(recompute_ratio, float, "--recompute-ratio")),
        alphas=tuple(_numbers(alpha, float, "--alpha")),
        check_layers=tuple(_numbers(check_layers, int, "--check-layers")),
        warm=Warmth.parse(warm),
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    config.contenders()
    examples = draw_examples(dataset, questions + config.warm.queries, chunks, names(kinds), seed, worlds=worlds)
    store = options.store_config(
        store_budget=store_budget,
        cache_dir=cache_dir,
        disk_budget=disk_budget,
        remote_url=remote_url,
        codec=codec,
        ttl=ttl,
    )
    origin = {
        "model": choice.name,
        "dataset": dataset,
        "chunks": chunks,
        "worlds": worlds,
        "kinds": kinds,
        **options.kept(store),
    }
    with choice.open(store=store) as engine:
        run = QualityRun(engine, config, origin)
        try:
            run.measure(examples, deviations)
        except KeyboardInterrupt:
            if run.samples:
                stderr().print("interrupted: the result covers the questions measured so far")
                run.show(output, plot, complete=False)
            raise
        run.show(output, plot, complete=True)


class QualityRun:
    """One measurement on its way from samples to a table, a file and a plot."""

    def __init__(self, engine: "Engine", config: "QualityConfig", origin: dict[str, Any]) -> None:
        self._engine = engine
        self._config = config
        self._origin = origin
        self.samples: list[QualitySample] = []
        self._deviations: dict[str, list[Deviation]] = {}

    def measure(self, examples: Sequence[Example], deviations: int) -> None:
        """Answer every question with every contender, then measure deviations on the first `deviations` of them."""
        from chunkweave.eval.quality import measure_quality

        with progress("answering") as report:
            for sample in measure_quality(self._engine, examples, self._config, report):
                self.samples.append(sample)
        chosen = examples[self._config.warm.queries :][:deviations]
        with progress("measuring deviations") as report:
            for done, example in enumerate(chosen, start=1):
                self._measure_deviation(example)
                report(done, len(chosen))

    def _measure_deviation(self, example: Example) -> None:
        from chunkweave.eval.deviation import deviation_from

        prompt = self._engine.builder.build(example.question, example.chunks)
        caches = {
            label: self._engine.runner.prefill(prompt, method, capture=False)
            for label, method in self._config.contenders().items()
        }
        for label, woven in caches.items():
            measured = deviation_from(caches["full"], woven, self._engine.loaded.model)
            self._deviations.setdefault(label, []).append(measured)

    def show(self, output: Output, plot: Path | None, *, complete: bool) -> None:
        """Print the table, write the JSON, draw the plot."""
        from chunkweave.eval.deviation import mean_deviation

        rows = summarize_quality(self.samples)
        result = BenchmarkResult(
            benchmark="quality",
            command=options.command_line(),
            seed=self._config.seed,
            config={**asdict(self._config), **self._origin, "warm": str(self._config.warm)},
            rows=[row.as_dict() for row in rows],
            more={"deviation": {label: mean_deviation(found) for label, found in self._deviations.items()}},
            complete=complete,
        ).as_dict()
        output.show(quality_table(rows, f"{self._origin['model']} on {self._origin['dataset']}"))
        if plot is not None:
            from chunkweave.eval.plots import plot_quality

            plot_quality(rows, plot, f"{rows[0].questions} questions, warm {self._config.warm}")
        output.finish(result)


def quality_table(rows: Sequence[QualityRow], title: str) -> Table:
    """Contenders with intervals, the share of the gap closed, and what it cost."""
    caption = (
        f"{rows[0].questions} questions. Intervals: 95 % bootstrap, the difference paired by question. Gap closed: "
        "share of the way from full-reuse to full on the kinds that cross passages."
    )
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("method", no_wrap=True)
    for name in ("F1", "95 %", "EM", "minus full", "95 %", "crossing F1", "gap closed", "recomp. fraction", "TTFT"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.method,
            f"{row.f1:.3f}",
            f"{row.f1_low:.3f}..{row.f1_high:.3f}",
            f"{row.exact_match:.3f}",
            f"{row.f1_minus_full:+.3f}",
            f"{row.f1_minus_full_low:+.3f}..{row.f1_minus_full_high:+.3f}",
            "-" if row.crossing_f1 is None else f"{row.crossing_f1:.3f}",
            "-" if row.gap_closed is None else f"{row.gap_closed:.0%}",
            f"{row.recompute_fraction:.3f}",
            seconds(row.ttft_s),
        )
    return table


def draw_examples(
    dataset: str, count: int, chunks: int, kinds: Sequence[str], seed: int, *, worlds: int = 0
) -> list[Example]:
    """`count` questions that can be scored, drawn with `seed`: of a file, or generated over `chunks` passages each.

    Raises:
        DocumentError: the file cannot be read as a data set.
        UsageError: it has too few such questions, or no such kind of them.
    """
    if dataset == WORLDS:
        from chunkweave.eval.worlds.examples import world_examples
        from chunkweave.eval.worlds.records import QuestionKind

        known = {str(kind): kind for kind in QuestionKind}
        _refuse_unknown(kinds, known)
        try:
            return world_examples(count, chunks, seed=seed, kinds=tuple(known[kind] for kind in kinds), worlds=worlds)
        except ValueError as error:
            raise UsageError(f"no such questions over {chunks} passages: {error}") from error
    examples = load_dataset(Path(dataset), seed=seed)
    _refuse_unknown(kinds, {example.kind: None for example in examples})
    fitting = [example for example in examples if not kinds or example.kind in kinds]
    scored = [example for example in fitting if example.answers]
    if len(scored) < count:
        raise UsageError(f"{dataset} has {len(scored)} fitting questions with answers, but {count} are asked for")
    return Random(seed).sample(scored, count)


def _refuse_unknown(kinds: Sequence[str], known: dict[str, Any]) -> None:
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise UsageError(f"unknown kind of question {unknown[0]!r}; there are: {', '.join(sorted(known)) or 'none'}")


def names(text: str) -> tuple[str, ...]:
    """The names of a list such as `cacheblend,epic`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str, kind: type[_Number], option: str) -> list[_Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} takes numbers separated by commas, not {text!r}") from error
