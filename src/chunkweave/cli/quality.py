"""`chunkweave bench quality` and `calibrate`: what answers are worth by reuse method and recompute ratio."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.bench import BenchmarkRun
from chunkweave.cli.console import Output, progress, seconds, stderr, table_of
from chunkweave.cli.options import ModelOptions, Only, SeededModelOptions, ValueOptions, with_blocks
from chunkweave.config import ModelConfig, ReuseConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.eval.contenders import PROMPT_BASELINES
from chunkweave.eval.datasets import Example, load_dataset
from chunkweave.eval.results import Measured, Measurements, check_writable
from chunkweave.eval.summaries import QualityRow, QualitySample, summarize_quality
from chunkweave.planning import methods as reuse_methods
from chunkweave.planning.calibration import (
    PARTIAL_FILE,
    SHARES,
    CalibrationRecord,
    CurvePoint,
    Quality,
    existing_records,
    record_path,
    save_record,
)
from chunkweave.planning.method import parameter_of

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.eval.calibration import CalibrationConfig
    from chunkweave.eval.quality import Deviation, QualityConfig


WORLDS = "worlds"
"""The data set that is generated instead of read."""


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """Questions of a data set that can be scored, and how long their answers may be."""

    dataset: Annotated[
        str, typer.Option(help="`worlds` (generated, held out), or a MuSiQue, SQuAD 1.1 or JSONL file.")
    ] = WORLDS
    questions: Annotated[int, typer.Option(min=1, help="Questions that are measured.")] = 200
    chunks: Annotated[int, typer.Option(min=1, help="Passages of a question, with `worlds`.")] = 6
    kinds: Annotated[str, typer.Option(help="Only these kinds of question, separated by commas; all if empty.")] = ""
    warm: options.Warm = "alone"
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 24

    def draw(self, seed: int, *, earlier: int = 0, worlds: int = 0) -> list[Example]:
        """The questions and `earlier` ones that warm the store, drawn with `seed`.

        `worlds` of the generated data set are asked about, ever new ones if 0.

        Raises:
            DocumentError: the file cannot be read as a data set.
            UsageError: it has too few questions with answers, or no such kind of them.
        """
        count, kinds = self.questions + earlier, options.names(self.kinds)
        if self.dataset == WORLDS:
            return self._generated(count, kinds, seed, worlds)
        examples = load_dataset(Path(self.dataset), seed=seed)
        _refuse_unknown(kinds, {example.kind for example in examples})
        scored = [one for one in examples if one.answers and (not kinds or one.kind in kinds)]
        if len(scored) < count:
            raise UsageError(
                f"{self.dataset} has {len(scored)} fitting questions with answers, but {count} are asked for"
            )
        return Random(seed).sample(scored, count)

    def _generated(self, count: int, kinds: tuple[str, ...], seed: int, worlds: int) -> list[Example]:
        from chunkweave.eval.worlds.records import QuestionKind
        from chunkweave.eval.worlds.world import world_examples

        known = {str(kind): kind for kind in QuestionKind}
        _refuse_unknown(kinds, known)
        wanted = tuple(known[kind] for kind in kinds)
        try:
            return world_examples(count, self.chunks, seed=seed, kinds=wanted, worlds=worlds)
        except ValueError as error:
            raise UsageError(f"no such questions over {self.chunks} passages: {error}") from error


def _refuse_unknown(kinds: tuple[str, ...], known: Collection[str]) -> None:
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise UsageError(f"unknown kind of question {unknown[0]!r}; there are: {', '.join(sorted(known)) or 'none'}")


@with_blocks
def quality(
    *,
    model: SeededModelOptions,
    methods: Annotated[
        str,
        typer.Option(
            help="Reuse methods, separated by commas; `full` and `full-reuse` are always added. Ablations follow a "
            "colon: `cachecraft:no-focus`; a value of one method alone an @: `cacheblend@0.3`. "
            f"There are: {options.listed(reuse_methods)}. Baselines that change the prompt: "
            f"{', '.join(PROMPT_BASELINES)}; `compress@0.5` keeps that share of every chunk's tokens."
        ),
    ] = "cacheblend,epic,random",
    values: ValueOptions,
    asked: QuestionOptions,
    worlds: Annotated[
        int, typer.Option(help="How many worlds `worlds` asks about, so that passages come back; 0: ever new ones.")
    ] = 0,
    deviations: Annotated[int, typer.Option(help="Questions on which KV and attention deviation are measured.")] = 20,
    store: StoreConfig,
    plot: Annotated[Path | None, typer.Option(help="Draw F1 against recompute fraction into this PNG.")] = None,
    output: Output,
) -> None:
    """Answer quality by reuse method: the same questions, the same warm store, paired intervals."""
    if plot is not None:
        check_writable(plot)
    model.named()
    from chunkweave.eval.quality import QualityConfig
    from chunkweave.eval.ttft import Warmth

    config = QualityConfig(
        methods=options.names(methods),
        ratios=values.ratios,
        alphas=values.alphas,
        check_layers=values.layers,
        warm=Warmth.parse(asked.warm),
        max_new_tokens=asked.max_new_tokens,
        seed=model.seed,
    )
    config.contenders()
    config.baselines()
    examples = asked.draw(model.seed, earlier=config.warm.queries, worlds=worlds)
    drawn = {"dataset": asked.dataset, "chunks": asked.chunks, "worlds": worlds, "kinds": asked.kinds}
    with model.open(store=store) as engine:
        from chunkweave.eval.quality import mean_deviation

        samples: list[QualitySample] = []
        strayed: dict[str, list[Deviation]] = {}
        title = f"{model.name} on {asked.dataset}"
        run = BenchmarkRun(
            "quality",
            engine,
            {**asdict(config), "warm": str(config.warm), "model": model.name, **drawn, **options.kept(store)},
            config.seed,
            summarize=lambda: summarize_quality(samples),
            table=lambda rows, _: _quality_table(rows, title),
            more=lambda: {"deviation": {label: mean_deviation(found) for label, found in strayed.items()}},
            draw=lambda rows: _draw(rows, plot, config),
        )
        with run.reported(output, samples):
            _measure_quality(engine, config, examples, samples)
            _measure_deviations(engine, config, examples[config.warm.queries :][:deviations], strayed)


def _measure_quality(
    engine: "Engine", config: "QualityConfig", examples: Sequence[Example], samples: list[QualitySample]
) -> None:
    from chunkweave.eval.quality import measure_quality

    with progress("answering") as report:
        for sample in measure_quality(engine, examples, config, report):
            samples.append(sample)  # noqa: PERF402 - what is there when it is interrupted stays


def _measure_deviations(
    engine: "Engine", config: "QualityConfig", examples: Sequence[Example], strayed: "dict[str, list[Deviation]]"
) -> None:
    from chunkweave.eval.quality import deviation_from

    with progress("measuring deviations") as report:
        for done, example in enumerate(examples, start=1):
            prompt = engine.builder.build(example.question, example.chunks)
            contenders = config.contenders().items()
            caches = {label: engine.runner.prefill(prompt, method, capture=False) for label, method in contenders}
            for label, woven in caches.items():
                found = deviation_from(caches["full"], woven, engine.loaded.model)
                strayed.setdefault(label, []).append(found)
            report(done, len(examples))


def _draw(rows: Sequence[QualityRow], plot: Path | None, config: "QualityConfig") -> None:
    """F1 against recompute fraction."""
    if plot is not None:
        from chunkweave.eval.summaries import plot_quality

        plot_quality(rows, plot, f"{rows[0].questions} questions, warm {config.warm}")


def _quality_table(rows: Sequence[QualityRow], title: str) -> Table:
    """Contenders with intervals, the share of the gap closed, and what it cost."""
    caption = (
        f"{rows[0].questions} questions. Intervals: 95 % bootstrap, the difference paired by question. Gap closed: "
        "share of the way from full-reuse to full on the kinds that cross passages."
    )
    return table_of(
        rows,
        ("method", lambda row: row.method),
        ("F1", lambda row: f"{row.f1:.3f}"),
        ("95 %", lambda row: f"{row.f1_low:.3f}..{row.f1_high:.3f}"),
        ("EM", lambda row: f"{row.exact_match:.3f}"),
        ("minus full", lambda row: f"{row.f1_minus_full:+.3f}"),
        ("95 %", lambda row: f"{row.f1_minus_full_low:+.3f}..{row.f1_minus_full_high:+.3f}"),
        ("crossing F1", lambda row: "-" if row.crossing_f1 is None else f"{row.crossing_f1:.3f}"),
        ("gap closed", lambda row: "-" if row.gap_closed is None else f"{row.gap_closed:.0%}"),
        ("recomp. fraction", lambda row: "-" if row.recompute_fraction is None else f"{row.recompute_fraction:.3f}"),
        ("TTFT", lambda row: seconds(row.ttft_s)),
        title=title,
        caption=caption,
    )


@dataclass(frozen=True, slots=True)
class _TargetOptions:
    """What is to be reached, and which points are measured for it."""

    methods: Annotated[
        str,
        typer.Option(help=f"Methods to choose from, separated by commas. There are: {options.listed(reuse_methods)}."),
    ] = "cachecraft,cacheblend,query"
    target: Annotated[float, typer.Option(help="Share of full prefill's F1 that `balanced` keeps.")] = SHARES[
        Quality.BALANCED
    ]
    fast_target: Annotated[float, typer.Option(help="Share of full prefill's F1 that `fast` keeps.")] = SHARES[
        Quality.FAST
    ]
    alpha: Annotated[str | None, typer.Option(help="Values of cachecraft's alpha, instead of the usual grid.")] = None
    recompute_ratio: Annotated[
        str | None, typer.Option(help="Ratios of the other methods, instead of the usual grid.")
    ] = None
    check_layers: options.CheckLayers = "1"

    def config(self, asked: QuestionOptions, seed: int) -> "CalibrationConfig":
        """What the options ask for.

        Raises:
            UsageError: a list, a target or a way to warm the store is none, or a method has nothing to calibrate.
        """
        from chunkweave.eval.calibration import ALPHAS, RATIOS, CalibrationConfig
        from chunkweave.eval.ttft import Warmth

        ratios = self.recompute_ratio
        return CalibrationConfig(
            methods=options.names(self.methods),
            alphas=ALPHAS if self.alpha is None else tuple(options.numbers(self.alpha, "--alpha")),
            ratios=RATIOS if ratios is None else tuple(options.numbers(ratios, "--recompute-ratio")),
            reuse=ReuseConfig(check_layers=options.whole_numbers(self.check_layers, "--check-layers")),
            shares={Quality.BALANCED: self.target, Quality.FAST: self.fast_target},
            warm=Warmth.parse(asked.warm),
            max_new_tokens=asked.max_new_tokens,
            seed=seed,
        )


@with_blocks
def calibrate(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoint folder, GGUF file, `smollm2` or `reader`.", show_default=False
        ),
    ] = None,
    *,
    targets: _TargetOptions,
    asked: QuestionOptions,
    seed: Annotated[
        int, typer.Option(help="Draws the questions; not 0, so that `bench quality` asks others afterwards.")
    ] = 1,
    computed: Annotated[ModelConfig, Only("shape", "device", "dtype")],
    store: Annotated[StoreConfig, Only("host_budget")],
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir", help="Write the record for this cache folder instead of beside the model.", file_okay=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, stop.")] = False,
    output: Output,
) -> None:
    """Find the least recomputation that keeps a share of full prefill's quality, and remember it beside the model.

    Interrupted, it goes on where it was when it is called again in the same way.
    """
    if (model is None) == (computed.shape is None):
        raise UsageError("give either MODEL, a checkpoint folder or GGUF file, or --shape NAME")
    choice = ModelOptions(replace(computed, model=None if model is None else str(model)))
    config = targets.config(asked, seed)
    examples = asked.draw(seed, earlier=config.warm.queries)
    from chunkweave.eval import calibration

    with choice.open(store=store, method="full") as engine:
        place = record_path(cache_dir, engine.loaded.folder, engine.loaded.fingerprint)
        existing_records(place)  # one of another version is refused now, not after hours of measuring
        calibration.check_prompts(engine, examples)
        if not dry_run:
            _make_folders(place, cache_dir)
        settings = calibration.settings_of(engine, examples, config)
        measurements = Measurements(place.with_name(PARTIAL_FILE), settings, Measured)
        if dry_run:
            _say_what_would_be_done(output, config, measurements, place, asked.questions)
            return
        if choice.random_weights:
            stderr().print(f"[yellow]{choice.name} has random weights: its answers mean nothing.[/yellow]")
        _measure(engine, examples, config, measurements)
        origin = calibration.Origin(asked.dataset, options.command_line())
        record = calibration.make_record(engine, examples, config, measurements, origin)
    save_record(place, record)
    measurements.discard()
    output.show(curve_table(record), *meanings(record), escape(f"written to {place}"))
    output.finish({"file": str(place), **record.as_dict()})


def curve_table(record: CalibrationRecord) -> Table:
    """Every measured point, and which of them the targets stand for."""
    caption = (
        f"{record.questions} questions, warm {record.warm}; full prefill's F1 is {record.full_f1:.3f}. Share: of that "
        "F1, on the same questions. Intervals: 95 % bootstrap, that of the share paired by question."
    )

    def least_for(point: CurvePoint) -> str:
        least = (str(name) for name, target in record.targets.items() if target.least.get(point.method) == point.value)
        return ", ".join(least)

    return table_of(
        record.points,
        ("method", lambda point: point.method),
        ("parameter", lambda point: f"{parameter_of(point.method)} {point.value:g}"),
        ("F1", lambda point: f"{point.f1:.3f}"),
        ("95 %", lambda point: f"{point.f1_low:.3f}..{point.f1_high:.3f}"),
        ("share", lambda point: f"{point.share:.3f}"),
        ("95 %", lambda point: f"{point.share_low:.3f}..{point.share_high:.3f}"),
        ("recomp. fraction", lambda point: f"{point.recompute_fraction:.3f}"),
        ("least for", least_for),
        title=escape(f"{record.model} on {record.dataset}"),
        caption=caption,
    )


def meanings(record: CalibrationRecord) -> list[str]:
    """What each target now means, one line each."""
    said = []
    for quality, target in record.targets.items():
        point = record.point(quality)
        if point is None:
            said.append(f"{quality} ({target.share:.0%} of full's F1): no method reaches it; the engine stays exact")
        else:
            said.append(
                f"{quality} ({target.share:.0%} of full's F1): {point.method} with {parameter_of(point.method)} "
                f"{point.value:g}, which keeps {point.share:.1%} and recomputes {point.recompute_fraction:.1%}"
            )
    return said


def _measure(
    engine: "Engine", examples: Sequence[Example], config: "CalibrationConfig", measurements: Measurements[Measured]
) -> None:
    from chunkweave.eval.calibration import measure

    if len(measurements):
        stderr().print(f"going on: {len(measurements)} answers are there already")
    try:
        with progress("answering") as report:
            measure(engine, examples, config, measurements, report)
    except KeyboardInterrupt:
        stderr().print("interrupted: the same command goes on from here")
        raise


def _say_what_would_be_done(
    output: Output, config: "CalibrationConfig", measurements: Measurements[Measured], place: Path, questions: int
) -> None:
    points = [{"method": method, "parameter": parameter_of(method), "value": value} for method, value in config.grid()]
    labels = config.contenders()
    done = sum((question, name) in measurements for question in range(questions) for name in labels)
    total = questions * len(labels)
    grids = [
        f"{method}: {parameter_of(method)} {', '.join(f'{value:g}' for name, value in config.grid() if name == method)}"
        for method in dict.fromkeys(config.methods)
    ]
    output.show(
        *grids,
        f"{questions} questions x {len(labels)} (with full prefill) = {total} answers, of which {done} are there",
        escape(f"the record would be written to {place}"),
    )
    summary: dict[str, Any] = {"file": str(place), "questions": questions, "points": points}
    output.finish({"dry_run": True, **summary, "answers": total, "answers_there": done})


def _make_folders(place: Path, cache_dir: Path | None) -> None:
    """Like the store's own folders: readable by their owner only."""
    if cache_dir is not None:
        for folder in (cache_dir, place.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_writable(place)
