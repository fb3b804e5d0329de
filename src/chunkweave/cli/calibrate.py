"""`chunkweave calibrate`: what each quality means for a model, measured against its own full prefill."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.calibration.questions import (
    Example,
    bundled_examples,
    dataset_examples,
    digest_of,
    document_examples,
    read_text,
)
from chunkweave.calibration.results import QuestionLog, computed_on
from chunkweave.calibration.summaries import FidelitySample
from chunkweave.cli import options
from chunkweave.cli.console import Output, check_writable, counted, progress, stderr, table_of
from chunkweave.cli.options import Only, SeededModelOptions, with_blocks
from chunkweave.config import CaptureConfig, ModelConfig, PluginConfig, StoreConfig
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
    record_path,
    save_record,
)
from chunkweave.planning.method import method_named, parameter_of
from chunkweave.plugins import METHODS

if TYPE_CHECKING:
    from chunkweave.calibration.fidelity import Comparison, Task
    from chunkweave.calibration.measurement import CalibrationConfig
    from chunkweave.calibration.prompts import Warming
    from chunkweave.engine.engine import Engine

_DOCUMENT_CHUNK_TOKENS = 256
"""Maximum tokens of a chunk of `--docs` without `--chunk-tokens`."""

_BUNDLED_CHUNK_TOKENS = 512
"""Tokens of a chunk of the bundled documents without `--chunk-tokens`."""


_BALANCED = BOUNDS[Quality.BALANCED]
_FAST = BOUNDS[Quality.FAST]


class PromptsBy(StrEnum):
    """Where the chunks of a measured question come from."""

    GROUPING = "grouping"
    RETRIEVAL = "retrieval"


class Half(StrEnum):
    """Which questions of a data set may be drawn: to tune on one half and to report the other."""

    BOTH = "both"
    FIRST = "first"
    SECOND = "second"
    ODD = "odd"
    EVEN = "even"

    def of(self, count: int) -> slice:
        """The half's indexes among `count` questions. The first question, at index 0, is an odd one."""
        first, stop, step = {
            Half.BOTH: (0, count, 1),
            Half.FIRST: (0, count // 2, 1),
            Half.SECOND: (count // 2, count, 1),
            Half.ODD: (0, count, 2),
            Half.EVEN: (1, count, 2),
        }[self]
        return slice(first, stop, step)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Questions to measure, and their chunks."""

    docs: Annotated[
        list[Path] | None,
        typer.Option("--docs", help="Your own documents: file or folder, as `ingest` reads them; repeatable."),
    ] = None
    questions_file: Annotated[
        Path | None,
        typer.Option(
            help="With --docs: your questions, one per line. Without it, questions ask for the documents' own "
            "sentences."
        ),
    ] = None
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines of {question, chunks, answers}; published data sets with chunkweave-lab installed. "
            "Without it and --docs: bundled documents."
        ),
    ] = None
    questions: Annotated[int, typer.Option(min=1, help="Number of measured questions.")] = 40
    chunks: Annotated[int, typer.Option(min=1, help="Chunks per prompt.")] = 6
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens per chunk; 0: leave passages as they are.",
            show_default=f"{_BUNDLED_CHUNK_TOKENS} for bundled documents, else 0",
        ),
    ] = None
    prompts: Annotated[
        PromptsBy,
        typer.Option(
            help="Chunks of a question: those that the data set groups with it, or those that a search in all "
            "passages finds, best first."
        ),
    ] = PromptsBy.GROUPING
    half: Annotated[
        Half,
        typer.Option(help="Use only this half of the questions, by position; contexts and searches use all passages."),
    ] = Half.BOTH
    instruction: Annotated[
        str | None, typer.Option(help="Instruction before the chunks.", show_default="the model's own")
    ] = None

    def examples(self, engine: "Engine", seed: int, earlier: int) -> tuple[list[Example], list[Example]]:
        """All examples, and a sample drawn with `seed`: `earlier` examples that warm the store, then the questions.

        Raises:
            DocumentError: a file cannot be read.
            UsageError: options do not go together, or there are too few questions.
        """
        if self.docs and self.dataset is not None:
            raise UsageError("give either --docs or --dataset")
        if self.questions_file is not None and not self.docs:
            raise UsageError("--questions-file needs --docs, the documents that the questions are about")
        count = self.questions + earlier
        if self.docs:
            every = self._over_documents(engine, count, seed)
        elif self.dataset is not None:
            every = dataset_examples(self.dataset, count=count, chunks=self.chunks, seed=seed)
        else:
            every = bundled_examples(count, seed=seed)
        candidates = every[self.half.of(len(every))]
        if len(candidates) < count:
            raise UsageError(f"there are {len(candidates)} questions, but {count} are asked for (--questions, --warm)")
        return every, Random(seed).sample(candidates, count)

    @property
    def cut_tokens(self) -> int:
        """Tokens to which passages are cut; 0: not cut. Documents of `--docs` are cut already."""
        if self.docs:
            return 0
        usual = _BUNDLED_CHUNK_TOKENS if self.dataset is None else 0
        return usual if self.chunk_tokens is None else self.chunk_tokens

    @property
    def by_retrieval(self) -> bool:
        """Whether a search finds the chunks."""
        return self.prompts is PromptsBy.RETRIEVAL

    def _over_documents(self, engine: "Engine", count: int, seed: int) -> list[Example]:
        cut = options.DocumentOptions(split=options.SplitSettings(self.chunk_tokens or _DOCUMENT_CHUNK_TOKENS))
        chunks = cut.chunks(engine, cut.read(self.docs or []))
        if self.questions_file is None:
            return document_examples(chunks, chunks_each=self.chunks, count=count, seed=seed)
        text = read_text(self.questions_file, "list of questions")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return document_examples(chunks, chunks_each=self.chunks, count=count, seed=seed, questions=lines)

    @property
    def asked_as(self) -> dict[str, str]:
        """Instruction and half, if given, for records of the measurement."""
        fields = {} if self.instruction is None else {"instruction": self.instruction}
        return fields if self.half is Half.BOTH else {**fields, "half": str(self.half)}

    @property
    def about(self) -> str:
        """Names of the documents, or of the data set."""
        if self.docs:
            return ", ".join(path.name for path in self.docs)
        return self.dataset.name if self.dataset is not None else "bundled documents"


@dataclass(frozen=True, slots=True)
class _TargetOptions:
    """Targets, and the points that are measured for them."""

    plugins: PluginConfig
    methods: Annotated[
        str,
        typer.Option(
            help="Methods to choose from, separated by commas, with settings after a colon: `query:whole`. "
            f"There are: {METHODS.listed}."
        ),
    ] = ",".join(CANDIDATES)
    target_agreement: Annotated[
        float | None,
        typer.Option(help="Minimum share of tokens on which `balanced` agrees with full prefill; 0: no minimum."),
    ] = _BALANCED.agreement
    target_kl: Annotated[
        float | None,
        typer.Option(help="Maximum divergence of `balanced` from full prefill, in nats per token; inf: no maximum."),
    ] = _BALANCED.kl
    fast_agreement: Annotated[float | None, typer.Option(help="Minimum agreement for `fast`.")] = _FAST.agreement
    fast_kl: Annotated[float | None, typer.Option(help="Maximum divergence for `fast`.")] = _FAST.kl
    alpha: Annotated[str | None, typer.Option(help="Values of cachecraft's alpha, instead of the default grid.")] = None
    recompute_ratio: Annotated[
        str | None, typer.Option(help="Ratios of the other methods, instead of the default grid.")
    ] = None
    alpha_warm: Annotated[
        str,
        typer.Option(help="Further ways to warm, as in --warm, for methods that have alpha; empty: none."),
    ] = "contexts:2"

    def config(self, asked: PromptOptions, warm: str, new_tokens: int, seed: int) -> "CalibrationConfig":
        """The configuration that the options describe.

        Raises:
            UsageError: a list, a target or a way to warm is invalid, or a method has nothing to calibrate.
        """
        from chunkweave.calibration.measurement import ALPHAS, RATIOS, CalibrationConfig
        from chunkweave.calibration.prompts import Warmth

        ratios = self.recompute_ratio
        return CalibrationConfig(
            methods=options.names(self.methods),
            alphas=ALPHAS if self.alpha is None else tuple(options.numbers(self.alpha, "--alpha")),
            ratios=RATIOS if ratios is None else tuple(options.numbers(ratios, "--recompute-ratio")),
            bounds={
                Quality.BALANCED: _bounds(self.target_agreement, self.target_kl),
                Quality.FAST: _bounds(self.fast_agreement, self.fast_kl),
            },
            warm=tuple(map(Warmth.parse, options.names(warm))),
            alpha_warm=tuple(map(Warmth.parse, options.names(self.alpha_warm))),
            chunks=asked.chunks,
            chunk_tokens=asked.cut_tokens,
            by_retrieval=asked.by_retrieval,
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
            metavar="MODEL", help="Checkpoint folder, hub name, GGUF file, or `smollm2`.", show_default=False
        ),
    ] = None,
    *,
    targets: _TargetOptions,
    asked: PromptOptions,
    warm: Annotated[str, typer.Option(help=f"{options.HOW_WARM} Several, separated by commas.")] = "corpus",
    new_tokens: options.NewTokens = 16,
    seed: Annotated[
        int,
        typer.Option(help="Seed that draws the questions; not 0 by default, so that `bench fidelity` draws others."),
    ] = 1,
    computed: Annotated[ModelConfig, Only("shape", "adapter", "device", "dtype", "weights", "threads")],
    store: Annotated[StoreConfig, Only("host_budget")],
    samples: options.Samples = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir", help="Write the record for this cache folder instead of beside the model.", file_okay=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and print what would be done.")] = False,
    output: Output,
) -> None:
    """Find the least recomputation that stays close to full prefill, and store it beside the model. Needs no labels.

    After an interruption, the same command continues.
    """
    if (model is None) == (computed.shape is None):
        raise UsageError("give either MODEL, a checkpoint folder or GGUF file, or --shape NAME")
    if samples is not None:
        check_writable(samples)
    choice = SeededModelOptions(replace(computed, model=None if model is None else str(model)))
    config = targets.config(asked, warm, new_tokens, seed)
    from chunkweave.calibration import measurement
    from chunkweave.calibration.fidelity import make_tasks

    with choice.open(store=store, method="full") as engine:
        place = record_path(cache_dir, engine.loaded.record_folder, engine.loaded.fingerprint)
        existing_records(place)  # a record of another version is refused now, not after hours of measuring
        every, drawn = asked.examples(engine, seed, config.earlier)
        tasks = make_tasks(engine, every, drawn, next(iter(config.groups().values())), asked.instruction)
        samples_file = samples or place.with_name(PARTIAL_FILE)
        log = QuestionLog(samples_file, {**_settings(config), **asked.asked_as, **measured_with(engine, drawn)})
        if dry_run:
            _say_what_would_be_done(output, config, log, place, asked.questions)
            return
        _make_folders(place, cache_dir)
        if choice.random_weights:
            stderr().print(
                f"[yellow]{choice.name} has random weights: the result says nothing about other models.[/yellow]"
            )
        measured = _measure(engine, tasks, config, store, log)
        commits = tuple(sorted({commit for commit in log.of("commit") if commit}))
        origin = measurement.Origin(asked.about, options.command_line(), commits)
        record = measurement.make_record(engine, drawn, config, measured, origin)
    save_record(place, record)
    if samples is None:
        samples_file.unlink(missing_ok=True)
    output.show(curve_table(record), *map(escape, meanings(record)), escape(f"written to {place}"))
    output.finish({"benchmark": "calibrate", "file": str(place), **record.as_dict()})


def _settings(config: "CalibrationConfig") -> dict[str, Any]:
    """Settings that a question's result depends on: all but the targets."""
    groups = {warm: {**asdict(group), "warm": warm} for warm, group in config.groups().items()}
    return {"groups": groups, "seed": config.seed, **computed_behind((*config.warm, *config.alpha_warm))}


def _measure(
    engine: "Engine", tasks: "list[Task]", config: "CalibrationConfig", store: StoreConfig, log: QuestionLog
) -> list[dict[str, Mapping[str, FidelitySample]]]:
    """Samples of every question, measured now or before."""
    from chunkweave.calibration.measurement import measure

    if log.found is None:
        log.begin({})
    if len(log):
        stderr().print(f"measured before: {counted(len(log), 'question')}")
    missing = [index for index in range(len(tasks) - config.earlier) if index not in log]
    if missing:
        prefills = len(missing) * sum(len(_contenders(group)) for group in config.groups().values())
        stderr().print(
            f"measuring {counted(len(missing), 'question')} in {counted(prefills, 'prefill')} of about "
            f"{counted(len(tasks[-1].prompt), 'token')}; after an interruption, the same command continues",
            soft_wrap=True,
        )
    try:
        with progress("measuring, prefills") as report:
            measured = measure(engine, tasks, config, store, skip=log.__contains__, progress=report)
            for index, groups in zip(missing, measured, strict=True):
                samples = {
                    warm: {label: sample.as_dict() for label, sample in contenders.items()}
                    for warm, contenders in groups.items()
                }
                log.add(index, {"contenders": samples})
    except KeyboardInterrupt:
        stderr().print("interrupted: the same command continues from here")
        raise
    return [{warm: samples_of(contenders) for warm, contenders in groups.items()} for groups in log.of("contenders")]


def curve_table(record: CalibrationRecord) -> Table:
    """Full prefill in slices and full reuse, then every measured point, with the targets that it is the least for."""
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
    """One line per target: its points, or that no method reaches it and which point comes nearest."""
    lines = []
    for quality, target in record.targets.items():
        if target.method is None:
            nearest = record.nearest(quality)
            near = "" if nearest is None else f" Nearest comes {_described(nearest)}."
            lines.append(
                f"{quality} ({target.bounds}): NO METHOD REACHES IT at any value measured. Such requests are answered "
                f"exactly (prefix).{near}"
            )
        lines += [f"{quality} ({target.bounds}): {_described(point)}" for point in record.chosen(quality)]
    for point in record.references:
        if point.method == "full-in-slices":
            lines += [
                f"{quality} is stricter than rounding allows: full prefill in slices deviates by KL {point.kl:.4f}, "
                f"top-1 {point.agreement:.1%}"
                for quality, target in record.targets.items()
                if target.bounds.excess(point) > 1.0
            ]
    return lines


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
    groups = {warm: _contenders(group) for warm, group in config.groups().items()}
    prefills = questions * sum(map(len, groups.values()))
    output.show(
        *grids,
        *(escape(f"chunks computed {warm}: {len(labels)} contenders") for warm, labels in groups.items()),
        f"{questions} questions, {prefills} prefills; already measured: {len(log)} questions",
        *(f"{quality}: {bounds}" for quality, bounds in config.bounds.items()),
        escape(f"the record would be written to {place}"),
    )
    summary: dict[str, Any] = {"file": str(place), "questions": questions, "questions_there": len(log)}
    bounds = {str(quality): asdict(bound) for quality, bound in config.bounds.items()}
    output.finish({"dry_run": True, **summary, "points": points, "groups": groups, "bounds": bounds})


def _contenders(group: "Comparison") -> list[str]:
    return ["full-in-slices", *group.contenders()]


def _budget(method: str) -> str | None:
    return parameter_of(method_named(method))


def _make_folders(place: Path, cache_dir: Path | None) -> None:
    """Create the record's folders, readable by their owner only, as the store creates its own."""
    if cache_dir is not None:
        for folder in (cache_dir, place.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_writable(place)


def samples_of(contenders: dict[str, Any]) -> dict[str, FidelitySample]:
    """A question's samples, from their JSON in a `QuestionLog`."""
    return {label: FidelitySample.from_dict(sample) for label, sample in contenders.items()}


def computed_behind(ways: "Sequence[Warming]") -> dict[str, Any]:
    """Settings of the contexts of chunks, if any of `ways` computes chunks as ahead of requests."""
    kinds = {warm.by for warm in ways}
    if not kinds & {"neutral", "corpus"}:
        return {}
    capture = CaptureConfig()
    contexts = {"context_count": capture.context_count, "context_tokens": capture.context_tokens}
    neutral = {"neutral_tokens": capture.neutral_tokens, "neutral_file": None}
    return neutral if "corpus" not in kinds else {**neutral, **contexts}


def measured_with(engine: "Engine", drawn: Sequence[Example]) -> dict[str, Any]:
    """What a question's result depends on besides the options: model, device, threads and examples."""
    computed = computed_on(engine.loaded.model)
    return {
        "fingerprint": engine.loaded.fingerprint,
        "device": computed["device"],
        "threads": computed["threads"],
        "examples": digest_of(drawn),
    }
