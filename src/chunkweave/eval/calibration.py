"""Calibration: quality by method and parameter on one set of questions, and the record that follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from chunkweave.config import ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.errors import UsageError
from chunkweave.eval.contenders import label_of, make_contenders
from chunkweave.eval.datasets import Example, digest_of
from chunkweave.eval.quality import answer_questions
from chunkweave.eval.results import Measured, Measurements, commit, versions
from chunkweave.eval.scores import f1, mean_interval, ratio_interval
from chunkweave.eval.ttft import Progress, Warmth
from chunkweave.planning.calibration import (
    SHARES,
    CalibrationRecord,
    CurvePoint,
    Quality,
    choose_target,
)
from chunkweave.planning.method import ALPHA, ReuseMethod, parameter_of

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Values of alpha that are tried: Cache-Craft's Figure 20 has 0.5 to 3; 0 recomputes nothing."""

RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Recompute ratios that are tried: denser where CacheBlend's Figure 16 has its knee, up to where little is saved."""

REFERENCE = "full"


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """What is measured and demanded.

    Each method is measured at every value of its own parameter, from cheap to dear: a whole curve, because eq. 13 of
    Cache-Craft asks for its least acceptable point and noise makes the first one that passes a matter of luck.
    `reuse` has the other settings of all methods. `shares` are what the targets demand of full prefill's F1.

    Raises:
        UsageError: no methods, or one without a parameter; no values, or one out of range; shares outside (0, 1], or
            `fast` demanding more than `balanced`.
        UnknownMethodError: a method does not exist.
    """

    methods: tuple[str, ...] = ("cachecraft", "cacheblend", "query")
    alphas: tuple[float, ...] = ALPHAS
    ratios: tuple[float, ...] = RATIOS
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    shares: Mapping[Quality, float] = field(default_factory=lambda: dict(SHARES))
    warm: Warmth = field(default_factory=Warmth)
    max_new_tokens: int = 24
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.methods:
            raise UsageError("there is no method to calibrate")
        for method in self.methods:
            if parameter_of(method) is None:
                raise UsageError(f"{method} has no parameter to calibrate")
        self.contenders()
        if not all(0.0 < share <= 1.0 for share in self.shares.values()):
            raise UsageError("a target is a share of full prefill's F1: above 0 and at most 1")
        if self.shares[Quality.FAST] > self.shares[Quality.BALANCED]:
            raise UsageError("the target of fast must not be above that of balanced")

    def grid(self) -> tuple[tuple[str, float], ...]:
        """(method, value) of every point, a method's own from cheap to dear."""
        values = {method: self.alphas if parameter_of(method) == ALPHA else self.ratios for method in self.methods}
        return tuple((method, value) for method in values for value in sorted(set(values[method])))

    def contenders(self) -> dict[str, ReuseMethod]:
        """Full prefill and every point of the grid, by its label."""
        ratios, alphas = (sorted(set(values)) for values in (self.ratios, self.alphas))
        return make_contenders((REFERENCE, *self.methods), ratios, alphas, self.reuse)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a record says about where it comes from: the data set's name and the command."""

    dataset: str
    command: str = ""


def settings_of(engine: Engine, examples: Sequence[Example], config: CalibrationConfig) -> dict[str, Any]:
    """Everything that a measured point depends on beside its method and value.

    Points measured under equal settings can be taken over; the grid is not among them, so it may grow.
    """
    return {
        "fingerprint": engine.loaded.fingerprint,
        "device": str(engine.loaded.model.device),
        "examples": digest_of(examples),
        "warm": str(config.warm),
        "max_new_tokens": config.max_new_tokens,
        "reuse": asdict(config.reuse),
        "versions": versions(),
        "commit": commit(),
    }


def check_prompts(engine: Engine, examples: Sequence[Example]) -> None:
    """Find out before hours of measuring whether every question can be asked.

    Raises:
        PromptTooLongError: one does not fit the model's context.
    """
    for example in examples:
        engine.runner.room_for_new_tokens(engine.builder.build(example.question, example.chunks))


def measure(
    engine: Engine,
    examples: Sequence[Example],
    config: CalibrationConfig,
    measurements: Measurements[Measured],
    progress: Progress | None = None,
) -> None:
    """Answer every question with full prefill and at every point of the grid, where that was not done before.

    The same prompts, warm store and scoring as `bench quality`. Each question's results are kept at once, so that an
    interrupted run goes on with the next one.

    Raises:
        PromptTooLongError: a question's prompt does not fit the model's context.
    """
    contenders = config.contenders()
    count = len(examples) - config.warm.queries
    missing = [
        {name: method for name, method in contenders.items() if (question, name) not in measurements}
        for question in range(count)
    ]
    if not any(missing):
        return
    for answer in answer_questions(engine, examples, missing, config.warm, config.max_new_tokens, progress):
        answers = examples[config.warm.queries + answer.question].answers
        score = max(f1(answer.text, wanted) for wanted in answers)
        measurements.add(answer.question, answer.contender, Measured(score, answer.report.recompute_fraction))


def make_record(
    engine: Engine,
    examples: Sequence[Example],
    config: CalibrationConfig,
    measurements: Measurements[Measured],
    origin: Origin,
) -> CalibrationRecord:
    """The record of a finished measurement.

    Raises:
        UsageError: full prefill answers nothing right, so that a share of it means nothing.
    """
    full = measurements.of(REFERENCE)
    points = curve(full, {point: measurements.of(label_of(*point)) for point in config.grid()})
    return CalibrationRecord(
        fingerprint=engine.loaded.fingerprint,
        model=engine.loaded.name,
        dtype=str(engine.loaded.model.dtype).removeprefix("torch."),
        dataset=origin.dataset,
        dataset_digest=digest_of(examples),
        questions=len(full),
        warm=str(config.warm),
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        full_f1=fmean(one.f1 for one in full),
        reuse=config.reuse,
        points=points,
        targets={quality: choose_target(points, share) for quality, share in config.shares.items()},
        versions=versions(),
        commit=commit(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=origin.command,
    )


def curve(full: Sequence[Measured], measured: Mapping[tuple[str, float], Sequence[Measured]]) -> tuple[CurvePoint, ...]:
    """A point for each (method, value), from its results and full prefill's on the same questions, in one order.

    Raises:
        UsageError: full prefill answers nothing right.
    """
    wanted = [one.f1 for one in full]
    if not any(wanted):
        raise UsageError(
            "full prefill answers none of these questions right (F1 0): a share of that means nothing; "
            "take questions that the model can answer"
        )
    points = []
    for (method, value), found in measured.items():
        scores = [one.f1 for one in found]
        own, share = mean_interval(scores), ratio_interval(scores, wanted)
        fraction = fmean(one.recompute_fraction for one in found)
        points.append(
            CurvePoint(method, value, own.mean, own.low, own.high, share.mean, share.low, share.high, fraction)
        )
    return tuple(points)
