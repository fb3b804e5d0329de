"""`chunkweave calibrate`: measures how much has to be recomputed for a quality target, and writes the record."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.console import Output, progress, stderr
from chunkweave.cli.model_choice import ModelChoice
from chunkweave.cli.option_blocks import StoreOptions, with_blocks
from chunkweave.cli.question_options import QuestionOptions
from chunkweave.config import ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.eval.datasets import Example
from chunkweave.eval.measurements import Measured, Measurements
from chunkweave.eval.results import check_writable
from chunkweave.planning.calibration_file import PARTIAL_FILE, existing_records, record_path, save_record
from chunkweave.planning.calibration_record import SHARES, CalibrationRecord, Quality
from chunkweave.planning.method import parameter_of

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.eval.calibration import CalibrationConfig


@dataclass(frozen=True, slots=True)
class _TargetOptions:
    """What is to be reached, and which points are measured for it."""

    methods: Annotated[str, typer.Option(help="Methods to choose from, separated by commas.")] = (
        "cachecraft,cacheblend,query"
    )
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
        Path | None, typer.Argument(metavar="MODEL", help="Checkpoint folder.", show_default=False)
    ] = None,
    *,
    shape: options.Shape = None,
    targets: _TargetOptions,
    asked: QuestionOptions,
    seed: Annotated[
        int, typer.Option(help="Draws the questions; not 0, so that `bench quality` asks others afterwards.")
    ] = 1,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    store_budget: options.StoreBudget = options.DEFAULT_STORE_BUDGET,
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
    if (model is None) == (shape is None):
        raise UsageError("give either MODEL, a checkpoint folder, or --shape NAME")
    choice = ModelChoice(model, shape, device, dtype)
    config = targets.config(asked, seed)
    examples = asked.draw(seed, earlier=config.warm.queries)
    from chunkweave.eval import calibration

    with choice.open(store=StoreOptions(store_budget).config(), method="full") as engine:
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
    table = Table(
        title=escape(f"{record.model} on {record.dataset}"),
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    table.add_column("method", no_wrap=True)
    for name in ("parameter", "F1", "95 %", "share", "95 %", "recomp. fraction"):
        table.add_column(name, justify="right")
    table.add_column("least for")
    for point in record.points:
        least = [str(name) for name, target in record.targets.items() if target.least.get(point.method) == point.value]
        table.add_row(
            point.method,
            f"{parameter_of(point.method)} {point.value:g}",
            f"{point.f1:.3f}",
            f"{point.f1_low:.3f}..{point.f1_high:.3f}",
            f"{point.share:.3f}",
            f"{point.share_low:.3f}..{point.share_high:.3f}",
            f"{point.recompute_fraction:.3f}",
            ", ".join(least),
        )
    return table


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
    told: dict[str, Any] = {"file": str(place), "questions": questions, "points": points}
    output.finish({"dry_run": True, **told, "answers": total, "answers_there": done})


def _make_folders(place: Path, cache_dir: Path | None) -> None:
    """Like the store's own folders: readable by their owner only."""
    if cache_dir is not None:
        for folder in (cache_dir, place.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_writable(place)
