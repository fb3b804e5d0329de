"""`chunkweave calibrate`: what each quality means for a model, measured against its own full prefill."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.console import Output, progress, stderr, table_of
from chunkweave.cli.options import Only, TimedModelOptions, with_blocks
from chunkweave.config import CaptureConfig, ModelConfig, PluginConfig, ReuseConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.planning.calibration import (
    BOUNDS,
    CANDIDATES,
    PARTIAL_FILE,
    Bounds,
    CalibrationRecord,
    CurvePoint,
    Quality,
    existing_records,
    method_named,
    record_path,
    save_record,
)
from chunkweave.planning.method import parameter_of
from chunkweave.plugins import METHODS
from chunkweave_lab.cli.bench import measured_with
from chunkweave_lab.cli.fidelity import PromptOptions, neutral_of, samples_of
from chunkweave_lab.results import QuestionLog, check_writable

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave_lab.calibration import CalibrationConfig
    from chunkweave_lab.fidelity import Task
    from chunkweave_lab.summaries import FidelitySample

_BALANCED, _FAST = BOUNDS[Quality.BALANCED], BOUNDS[Quality.FAST]


@dataclass(frozen=True, slots=True)
class _TargetOptions:
    """What is to be reached, and which points are measured for it."""

    plugins: PluginConfig
    methods: Annotated[
        str,
        typer.Option(
            help="Methods to choose from, separated by commas, with settings after a colon: `query:two-rounds`. "
            f"There are: {METHODS.listed}."
        ),
    ] = ",".join(CANDIDATES)
    target_agreement: Annotated[
        float | None,
        typer.Option(help="Least share of tokens on which `balanced` agrees with full prefill; 0 demands none."),
    ] = _BALANCED.agreement
    target_kl: Annotated[
        float | None,
        typer.Option(help="Most divergence of `balanced` from full prefill, nats a token; inf allows any."),
    ] = _BALANCED.kl
    fast_agreement: Annotated[float | None, typer.Option(help="The same agreement for `fast`.")] = _FAST.agreement
    fast_kl: Annotated[float | None, typer.Option(help="The same divergence for `fast`.")] = _FAST.kl
    alpha: Annotated[str | None, typer.Option(help="Values of cachecraft's alpha, instead of the usual grid.")] = None
    recompute_ratio: Annotated[
        str | None, typer.Option(help="Ratios of the other methods, instead of the usual grid.")
    ] = None
    check_layers: options.CheckLayers = "1"
    alpha_warm: Annotated[
        str,
        typer.Option(help="Ways to warm, beside --warm, over which methods set by alpha are measured; none if empty."),
    ] = "contexts:2"

    def config(self, asked: PromptOptions, warm: str, new_tokens: int, seed: int) -> "CalibrationConfig":
        """What the options ask for.

        Raises:
            UsageError: a list, a target or a way to warm the store is none, or a method has nothing to calibrate.
        """
        from chunkweave_lab.calibration import ALPHAS, RATIOS, CalibrationConfig
        from chunkweave_lab.warming import Warmth

        ratios = self.recompute_ratio
        return CalibrationConfig(
            methods=options.names(self.methods),
            alphas=ALPHAS if self.alpha is None else tuple(options.numbers(self.alpha, "--alpha")),
            ratios=RATIOS if ratios is None else tuple(options.numbers(ratios, "--recompute-ratio")),
            reuse=ReuseConfig(check_layers=options.whole_numbers(self.check_layers, "--check-layers")),
            bounds={
                Quality.BALANCED: _bounds(self.target_agreement, self.target_kl),
                Quality.FAST: _bounds(self.fast_agreement, self.fast_kl),
            },
            warm=tuple(map(Warmth.parse, options.names(warm))),
            alpha_warm=tuple(map(Warmth.parse, options.names(self.alpha_warm))),
            chunks=asked.chunks,
            chunk_tokens=asked.cut_tokens,
            new_tokens=new_tokens,
            seed=seed,
        )


def _bounds(agreement: float | None, kl: float | None) -> Bounds:
    return Bounds(agreement or None, None if kl == float("inf") else kl)


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
    asked: PromptOptions,
    warm: Annotated[str, typer.Option(help=f"{options.HOW_WARM} Several, separated by commas.")] = "neutral",
    new_tokens: options.NewTokens = 16,
    seed: Annotated[
        int, typer.Option(help="Draws the questions; not 0, so that `bench fidelity` asks others afterwards.")
    ] = 1,
    computed: Annotated[ModelConfig, Only("shape", "adapter", "device", "dtype", "weights")],
    threads: options.Threads = None,
    store: Annotated[StoreConfig, Only("host_budget")],
    capture: Annotated[CaptureConfig, Only("neutral_tokens", "neutral_file")],
    samples: options.Samples = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir", help="Write the record for this cache folder instead of beside the model.", file_okay=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, stop.")] = False,
    output: Output,
) -> None:
    """Find the least recomputation that stays close to full prefill, and remember it beside the model. Needs no labels.

    Interrupted, it goes on where it was when it is called again in the same way.
    """
    if (model is None) == (computed.shape is None):
        raise UsageError("give either MODEL, a checkpoint folder or GGUF file, or --shape NAME")
    if samples is not None:
        check_writable(samples)
    choice = TimedModelOptions(replace(computed, model=None if model is None else str(model)), threads=threads)
    config = targets.config(asked, warm, new_tokens, seed)
    choice.bound_threads()
    from chunkweave_lab import calibration
    from chunkweave_lab.fidelity import make_tasks

    with choice.open(store=store, method="full", reuse=ReuseConfig(capture=capture)) as engine:
        place = record_path(cache_dir, engine.loaded.record_folder, engine.loaded.fingerprint)
        existing_records(place)  # one of another version is refused now, not after hours of measuring
        every, drawn = asked.examples(engine, seed, config.earlier)
        tasks = make_tasks(engine, every, drawn, next(iter(config.groups().values())), asked.instruction)
        kept = samples or place.with_name(PARTIAL_FILE)
        log = QuestionLog(kept, {**_settings(config, capture), **asked.asked_as, **measured_with(engine, drawn)})
        if dry_run:
            _say_what_would_be_done(output, config, log, place, asked.questions)
            return
        _make_folders(place, cache_dir)
        if choice.random_weights:
            stderr().print(f"[yellow]{choice.name} has random weights: this says nothing about others.[/yellow]")
        found = _measure(engine, tasks, config, store, log)
        commits = tuple(sorted({commit for commit in log.of("commit") if commit}))
        origin = calibration.Origin(asked.about, options.command_line(), commits)
        record = calibration.make_record(engine, drawn, config, found, origin)
    save_record(place, record)
    if samples is None:
        kept.unlink(missing_ok=True)
    output.show(curve_table(record), *map(escape, meanings(record)), escape(f"written to {place}"))
    output.finish({"benchmark": "calibrate", "file": str(place), **record.as_dict()})


def _settings(config: "CalibrationConfig", capture: CaptureConfig) -> dict[str, Any]:
    """What a question's result depends on: all but what is demanded."""
    groups = {warm: {**asdict(group), "warm": warm} for warm, group in config.groups().items()}
    return {"groups": groups, "seed": config.seed, **neutral_of((*config.warm, *config.alpha_warm), capture)}


def _measure(
    engine: "Engine", tasks: "list[Task]", config: "CalibrationConfig", store: StoreConfig, log: QuestionLog
) -> "list[dict[str, Mapping[str, FidelitySample]]]":
    """What was measured of every question, now and before."""
    from chunkweave_lab.calibration import measure

    if log.found is None:
        log.begin({})
    if len(log):
        stderr().print(f"going on: {len(log)} questions are there already")
    missing = [index for index in range(len(tasks) - config.earlier) if index not in log]
    try:
        with progress("measuring") as report:
            measured = measure(engine, tasks, config, store, skip=log.__contains__, progress=report)
            for index, groups in zip(missing, measured, strict=True):
                shown = {
                    warm: {label: one.as_dict() for label, one in contenders.items()}
                    for warm, contenders in groups.items()
                }
                log.add(index, {"contenders": shown})
    except KeyboardInterrupt:
        stderr().print("interrupted: the same command goes on from here")
        raise
    return [{warm: samples_of(own) for warm, own in groups.items()} for groups in log.of("contenders")]


def curve_table(record: CalibrationRecord) -> Table:
    """Every measured point behind full prefill in slices and full reuse, and which of them the targets stand for."""
    caption = (
        f"{record.questions} questions, {record.prompt_tokens:.0f} tokens a prompt, {record.device}, {record.dtype}, "
        f"threads: {record.threads}. KL: D(full || method) in nats over full prefill's own {record.new_tokens} tokens, "
        "top-1: both expect the same token; means, with 95 % bootstrap intervals by question.\nA target is decided by "
        "the upper end of KL and the lower end of top-1. Speed-up: median of full / method in this run."
    )

    def least_for(point: CurvePoint) -> str:
        least = (str(name) for name, target in record.targets.items() if target.least.get(point.method) == point.value)
        return ", ".join(least) if point in record.points else ""

    return table_of(
        (*record.references, *record.points),
        ("method", lambda point: point.method),
        ("parameter", _parameter),
        ("chunks", lambda point: point.warm),
        ("KL", lambda point: f"{point.kl:.4f}"),
        ("95 %", lambda point: f"{point.kl_low:.4f}..{point.kl_high:.4f}"),
        ("top-1", lambda point: f"{point.agreement:.1%}"),
        ("95 %", lambda point: f"{point.agreement_low:.1%}..{point.agreement_high:.1%}"),
        ("speed-up", lambda point: f"{point.speedup:.2f}x"),
        ("recomp.", lambda point: f"{point.recompute_fraction:.1%}"),
        ("least for", least_for),
        title=escape(f"{record.model} on {record.dataset}"),
        caption=caption,
    )


def _parameter(point: CurvePoint) -> str:
    name = method_named(point.method)
    parameter = parameter_of(name) if name in METHODS.names else None
    return "" if parameter is None else f"{parameter} {point.value:g}"


def meanings(record: CalibrationRecord) -> list[str]:
    """What each target now means, a line each; what none reaches says so, and what comes nearest."""
    said = []
    for quality, target in record.targets.items():
        if target.method is None:
            nearest = record.nearest(quality)
            near = "" if nearest is None else f" Nearest comes {_described(nearest)}."
            said.append(
                f"{quality} ({target.bounds}): NO METHOD REACHES IT at any value measured. Such requests are answered "
                f"exactly (prefix).{near}"
            )
        said += [f"{quality} ({target.bounds}): {_described(point)}" for point in record.chosen(quality)]
    for point in record.references:
        if point.method == "full-in-slices":
            said += [
                f"{quality} demands more than arithmetic gives: full prefill in slices strays by KL {point.kl:.4f}, "
                f"top-1 {point.agreement:.1%}"
                for quality, target in record.targets.items()
                if target.bounds.excess(point) > 1.0
            ]
    return said


def _described(point: CurvePoint) -> str:
    return (
        f"{point.method} with {_parameter(point)} over chunks computed {point.warm}: KL {point.kl:.4f} (up to "
        f"{point.kl_high:.4f}), top-1 {point.agreement:.1%} (from {point.agreement_low:.1%}), first token "
        f"{point.speedup:.2f}x sooner, {point.recompute_fraction:.1%} recomputed"
    )


def _say_what_would_be_done(
    output: Output, config: "CalibrationConfig", log: QuestionLog, place: Path, questions: int
) -> None:
    points = [{"method": method, "parameter": _budget(method), "value": value} for method, value in config.grid()]
    grids = [
        f"{method}: {_budget(method)} {', '.join(f'{value:g}' for name, value in config.grid() if name == method)}"
        for method in dict.fromkeys(method for method, _ in config.grid())
    ]
    groups = {warm: ["full-in-slices", *group.contenders({})] for warm, group in config.groups().items()}
    prefills = questions * sum(map(len, groups.values()))
    output.show(
        *grids,
        *(escape(f"chunks computed {warm}: {len(labels)} contenders") for warm, labels in groups.items()),
        f"{questions} questions, {prefills} prefills, of which {len(log)} questions are there",
        *(f"{quality}: {bounds}" for quality, bounds in config.bounds.items()),
        escape(f"the record would be written to {place}"),
    )
    summary: dict[str, Any] = {"file": str(place), "questions": questions, "questions_there": len(log)}
    bounds = {str(quality): asdict(one) for quality, one in config.bounds.items()}
    output.finish({"dry_run": True, **summary, "points": points, "groups": groups, "bounds": bounds})


def _budget(method: str) -> str | None:
    return parameter_of(method_named(method))


def _make_folders(place: Path, cache_dir: Path | None) -> None:
    """Like the store's own folders: readable by their owner only."""
    if cache_dir is not None:
        for folder in (cache_dir, place.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_writable(place)
