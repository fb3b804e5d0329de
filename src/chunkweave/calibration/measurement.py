"""Calibration: how close each method comes to full prefill by its parameter, and the record that follows from it.

The model's own full prefill is the reference, so no answers have to be known.
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
from chunkweave.config import ReuseConfig, StoreConfig
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
from chunkweave.planning.method import ALPHA, changed, method_named, parameter_of, settings_changes

ALPHAS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Values of alpha that are tried: Cache-Craft's Figure 20 has 0.5 to 3."""

RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Recompute ratios that are tried: none, then denser where CacheBlend's Figure 16 has its knee, up to little saving."""

FLOOR = 10
"""Questions that say how far arithmetic alone strays."""

Samples = Mapping[str, FidelitySample]
"""One question under one way of warming: each contender's sample."""


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """What is measured and demanded.

    Each method is measured at every value of its own parameter, from cheap to dear: a whole curve, because eq. 13 of
    Cache-Craft asks for its least acceptable point and noise makes the first one that passes a matter of luck.
    `methods` are written as in benchmarks (`query:two-rounds`); one with a value (`epic@0.3`) is measured at that one.
    `reuse` has the other settings of all. Every method is measured over chunks warmed in each way of `warm`, and those
    set by alpha by `alpha_warm` too: their scores compare a chunk's neighbours with those that it was computed among.

    Raises:
        UsageError: no methods, or one without a parameter; no values, or one out of range; `fast` demands more than
            `balanced`.
        UnknownMethodError: a method does not exist.
    """

    methods: tuple[str, ...] = CANDIDATES
    alphas: tuple[float, ...] = ALPHAS
    ratios: tuple[float, ...] = RATIOS
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
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
            raise UsageError("there is no method to calibrate, or no way to warm its chunks")
        for spec in self.methods:
            if parameter_of(_name(spec)) is None:
                raise UsageError(f"{spec} has no parameter to calibrate")
        self.groups()
        balanced, fast = self.bounds[Quality.BALANCED], self.bounds[Quality.FAST]
        if (fast.agreement or 0.0) > (balanced.agreement or 0.0) or (fast.kl or math.inf) < (balanced.kl or math.inf):
            raise UsageError(f"fast must not demand more than balanced: {fast}; {balanced}")

    def groups(self) -> dict[str, Comparison]:
        """By how chunks are warmed: what is measured over them. The first has all methods."""
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
            reuse=self.reuse,
            warm=warm,
            chunks=self.chunks,
            chunk_tokens=self.chunk_tokens,
            by_retrieval=self.by_retrieval,
            new_tokens=self.new_tokens,
            free=0,
        )

    @property
    def earlier(self) -> int:
        """Questions that are drawn beside those that are measured, to warm the store."""
        return max(config.warm.queries for config in self.groups().values())

    def grid(self) -> tuple[tuple[str, float], ...]:
        """(method with its settings, value) of every point, a method's own from cheap to dear."""
        labels = [label for label in next(iter(self.groups().values())).contenders() if "@" in label]
        points = [(label.partition("@")[0], value_of(label)) for label in labels]
        methods = list(dict.fromkeys(method for method, _ in points))
        return tuple(sorted(points, key=lambda point: (methods.index(point[0]), point[1])))


def _name(spec: str) -> str:
    return method_named(spec.partition("@")[0])


@dataclass(frozen=True, slots=True)
class Origin:
    """What a record says about where it comes from: the data set's name, the command, and the sources' commits."""

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
    """Each question that is not to be left out, at every point of the grid: samples by way of warming and contender.

    Of `tasks` the first `config.earlier` only warm. Each way of warming has a store of its own, the first the engine's,
    the others `store`: no method finds what was computed for another way.
    """
    measured = tasks[config.earlier :]
    with ExitStack() as stack:
        groups = config.groups()
        runs = []
        for place, group in enumerate(groups.values()):
            own = engine if place == 0 else stack.enter_context(beside(engine, store))
            if not all(map(skip, range(len(measured)))):
                warm_by_earlier(own, tasks[config.earlier - group.warm.queries : config.earlier])
            report = progress if place == len(groups) - 1 else None
            way = way_of(own, measured, group.contenders(), group)
            runs.append(compare([way], group, exact=FLOOR, skip=skip, progress=report))
        for samples in zip(*runs, strict=True):
            yield dict(zip(groups, samples, strict=True))


def make_record(
    engine: Engine,
    examples: Sequence[Example],
    config: CalibrationConfig,
    found: Sequence[Mapping[str, Samples]],
    origin: Origin,
) -> CalibrationRecord:
    """The record of a finished measurement; `found` has at least one question."""
    rows = {warm: summarize_fidelity([one[warm] for one in found]) for warm in config.groups()}
    grid = config.grid()
    every = [_point(row, warm) for warm, own in rows.items() for row in own]
    measured = [point for point in every if (point.method, point.value) in grid]
    points = tuple(sorted(measured, key=lambda point: grid.index((point.method, point.value))))
    computed, quantized = computed_on(engine.loaded.model), engine.loaded.quantized
    return CalibrationRecord(
        fingerprint=engine.loaded.fingerprint,
        model=engine.loaded.name,
        dtype=f"{computed['dtype']} ({quantized} weights)" if quantized else computed["dtype"],
        dataset=origin.dataset,
        dataset_digest=digest_of(examples),
        questions=len(found),
        chunks=config.chunks,
        prompt_tokens=next(row.prompt_tokens or 0.0 for own in rows.values() for row in own),
        new_tokens=config.new_tokens,
        seed=config.seed,
        reuse={method: changed(config.reuse, settings_changes(method)) for method, _ in grid},
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
    """A row of the benchmark as a point of a curve."""
    method, at, _ = row.method.partition("@")
    numbers = {name: getattr(row, name) for name in CurvePoint.__dataclass_fields__ if name not in _SET}
    return CurvePoint(method, value_of(row.method) if at else 0.0, warm, **numbers)


_SET = ("method", "value", "warm")
"""The fields of a point that are not measured."""
