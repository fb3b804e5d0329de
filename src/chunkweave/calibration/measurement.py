"""Calibration: measures how close each method comes to full prefill by parameter value, and makes the record.

The model's own full prefill is the reference, so no answers are needed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime

from chunkweave.calibration.contenders import value_of
from chunkweave.calibration.fidelity import (
    FULL_REUSE,
    SLICED,
    Comparison,
    Task,
    beside,
    compare,
    warm_by_earlier,
    way_of,
)
from chunkweave.calibration.prompts import WarmBy, Warmth
from chunkweave.calibration.questions import Example, digest_of
from chunkweave.calibration.results import commit, computed_on, machine, versions
from chunkweave.calibration.summaries import FidelityRow, FidelitySample, summarize_fidelity
from chunkweave.config import StoreConfig
from chunkweave.engine.engine import Engine, Progress
from chunkweave.errors import UsageError
from chunkweave.planning.calibration import (
    BOUNDS,
    CANDIDATES,
    Bounds,
    CalibrationRecord,
    CurvePoint,
    Quality,
    choose_target,
)
from chunkweave.planning.method import ALPHA, method_named, parameter_of

ALPHAS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Measured values of alpha: Cache-Craft's Figure 20 has 0.5 to 3."""

RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Measured recompute ratios: from none to little saving, denser around the knee in CacheBlend's Figure 16."""

FLOOR = 10
"""Questions on which the noise floor is measured."""

Samples = Mapping[str, FidelitySample]
"""Each contender's sample of one question under one way of warming."""


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """What is measured and required.

    Each method is measured at every value of its parameter, from cheap to expensive. The whole curve is needed: eq. 13
    of Cache-Craft takes its least acceptable point, and with noise the first point that passes is random. `methods` are
    specifications as in benchmarks (`query:whole`); one with a value (`epic@0.3`) is measured only at that value.
    Every method is measured over chunks warmed in each way of `warm`; methods with
    alpha also over `alpha_warm`, since their scores compare a chunk's neighbours with its context.

    Raises:
        UsageError: no methods, or one without a parameter; no values, or one out of range; `fast` requires more than
            `balanced`.
        UnknownMethodError: a method does not exist.
    """

    methods: tuple[str, ...] = CANDIDATES
    alphas: tuple[float, ...] = ALPHAS
    ratios: tuple[float, ...] = RATIOS
    bounds: Mapping[Quality, Bounds] = field(default_factory=lambda: dict(BOUNDS))
    warm: tuple[Warmth, ...] = (Warmth(WarmBy.CORPUS),)
    alpha_warm: tuple[Warmth, ...] = (Warmth.parse("contexts:2"),)
    chunks: int = 6
    chunk_tokens: int = 0
    by_retrieval: bool = False
    new_tokens: int = 16
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.methods or not self.warm:
            raise UsageError("name at least one method to calibrate and one way to warm its chunks")
        for spec in self.methods:
            if parameter_of(_name(spec)) is None:
                raise UsageError(f"{spec} has no parameter to calibrate")
        self.groups()
        balanced = self.bounds[Quality.BALANCED]
        fast = self.bounds[Quality.FAST]
        if (fast.agreement or 0.0) > (balanced.agreement or 0.0) or (fast.kl or math.inf) < (balanced.kl or math.inf):
            raise UsageError(f"fast must not require more than balanced: {fast}; {balanced}")

    def groups(self) -> dict[str, Comparison]:
        """The measurements by way of warming. The first has all methods."""
        by_alpha = tuple(spec for spec in self.methods if parameter_of(_name(spec)) == ALPHA)
        groups = {str(warm): self._group(warm, self.methods) for warm in self.warm}
        for warm in self.alpha_warm if by_alpha else ():
            groups.setdefault(str(warm), self._group(warm, by_alpha))
        return groups

    def _group(self, warm: Warmth, methods: tuple[str, ...]) -> Comparison:
        return Comparison(
            methods=methods,
            ratios=tuple(sorted(set(self.ratios))),
            alphas=tuple(sorted(set(self.alphas))),
            warm=warm,
            chunks=self.chunks,
            chunk_tokens=self.chunk_tokens,
            by_retrieval=self.by_retrieval,
            new_tokens=self.new_tokens,
            free=0,
        )

    @property
    def earlier(self) -> int:
        """Number of additional questions that warm the store."""
        return max(config.warm.queries for config in self.groups().values())

    def grid(self) -> tuple[tuple[str, float], ...]:
        """(method with its settings, value) of every point, for each method from cheap to expensive."""
        labels = [label for label in next(iter(self.groups().values())).contenders() if "@" in label]
        points = [(label.partition("@")[0], value_of(label)) for label in labels]
        methods = list(dict.fromkeys(method for method, _ in points))
        return tuple(sorted(points, key=lambda point: (methods.index(point[0]), point[1])))


def _name(spec: str) -> str:
    return method_named(spec.partition("@")[0])


@dataclass(frozen=True, slots=True)
class Origin:
    """A record's origin: the data set's name, the command, and the commits of the source."""

    dataset: str
    command: str = ""
    commits: tuple[str, ...] = ()


def measure(
    engine: Engine,
    tasks: Sequence[Task],
    config: CalibrationConfig,
    store: StoreConfig,
    *,
    skip: Callable[[int], bool] = lambda _: False,
    progress: Progress | None = None,
) -> Iterator[dict[str, Samples]]:
    """Measure each question that is not skipped at every point of the grid; yields samples by way of warming and
    contender.

    The first `config.earlier` of `tasks` only warm the store. Each way of warming has its own store (the first way the
    engine's, the others `store`), so no method finds chunks computed for another way.
    """
    measured = tasks[config.earlier :]
    with ExitStack() as stack:
        groups = config.groups()
        sums = _Sums(progress)
        runs = []
        for place, group in enumerate(groups.values()):
            group_engine = engine if place == 0 else stack.enter_context(beside(engine, store))
            if not all(map(skip, range(len(measured)))):
                warm_by_earlier(group_engine, tasks[config.earlier - group.warm.queries : config.earlier])
            way = way_of(group_engine, measured, group.contenders(), group)
            runs.append(
                compare([way], group, exact=FLOOR, skip=skip, progress=sums.part(len(measured) * len(way.labels)))
            )
        for samples_of_question in zip(*runs, strict=True):
            yield dict(zip(groups, samples_of_question, strict=True))


class _Sums:
    """Several comparisons that take turns, as one progress."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done: list[int] = []
        self._total = 0

    def part(self, total: int) -> Progress:
        """Where one more comparison reports; it counts up to `total`."""
        place = len(self._done)
        self._done.append(0)
        self._total += total

        def report(done: int, _: int) -> None:
            self._done[place] = done
            if self._progress is not None:
                self._progress(sum(self._done), self._total)

        return report


def make_record(
    engine: Engine,
    examples: Sequence[Example],
    config: CalibrationConfig,
    samples: Sequence[Mapping[str, Samples]],
    origin: Origin,
) -> CalibrationRecord:
    """The record of a finished measurement; `samples` has at least one question."""
    rows = {
        warm: summarize_fidelity([question_samples[warm] for question_samples in samples]) for warm in config.groups()
    }
    grid = config.grid()
    every = [_point(row, warm) for warm, warm_rows in rows.items() for row in warm_rows]
    measured = [point for point in every if (point.method, point.value) in grid]
    points = tuple(sorted(measured, key=lambda point: grid.index((point.method, point.value))))
    computed = computed_on(engine.loaded.model)
    quantized = engine.loaded.quantized
    return CalibrationRecord(
        fingerprint=engine.loaded.fingerprint,
        model=engine.loaded.name,
        dtype=f"{computed['dtype']} ({quantized} weights)" if quantized else computed["dtype"],
        dataset=origin.dataset,
        dataset_digest=digest_of(examples),
        questions=len(samples),
        chunks=config.chunks,
        prompt_tokens=next(row.prompt_tokens or 0.0 for warm_rows in rows.values() for row in warm_rows),
        new_tokens=config.new_tokens,
        seed=config.seed,
        references=tuple(point for point in every if point.method in (SLICED, FULL_REUSE)),
        points=points,
        targets={quality: choose_target(points, bounds) for quality, bounds in config.bounds.items()},
        device=computed["device"],
        threads=computed["threads"],
        machine=machine(),
        versions=versions(),
        commit=commit(),
        commits=origin.commits,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=origin.command,
    )


def _point(row: FidelityRow, warm: str) -> CurvePoint:
    """A benchmark row as a point of a curve."""
    method, at, _ = row.method.partition("@")
    numbers = {name: getattr(row, name) for name in CurvePoint.__dataclass_fields__ if name not in _SET}
    return CurvePoint(method, value_of(row.method) if at else 0.0, warm, **numbers)


_SET = ("method", "value", "warm")
"""The fields of a point that are set, not measured."""
