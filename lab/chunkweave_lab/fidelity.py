"""Measures how close reuse methods come to full prefill, at equal recomputation, over chunks warmed in several ways.

The measurement is that of `chunkweave.calibration`. In addition, methods run at the parameter values for a given
recompute fraction, and a model with an adapter or rounded weights can be compared with the model without.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from statistics import fmean

from chunkweave.calibration.fidelity import (
    EXACT,
    FULL_REUSE,
    REFERENCE,
    Comparison,
    Task,
    Way,
    beside,
    compare,
    measured_report,
    prepare,
    way_of,
)
from chunkweave.calibration.prompts import Warming
from chunkweave.calibration.summaries import FidelitySample
from chunkweave.config import StoreConfig
from chunkweave.engine.engine import Engine, Progress
from chunkweave.errors import UsageError
from chunkweave.planning.method import ALPHA, ReuseMethod, parameter_of
from chunkweave.prompt.parts import Prompt
from chunkweave_lab.baselines import BENCH_METHODS, bench_contenders

OF_BASE = " of base"
"""Suffix of rows of the model without its adapter, if that is the reference."""


@dataclass(frozen=True, slots=True)
class FidelityConfig(Comparison):
    """The settings of a measurement, in addition to `Comparison`.

    With `fractions`, a method runs at the parameter values that give these mean recompute fractions, instead of
    `ratios` and `alphas`; the values are fitted on `fit_questions` prompts. The reuse methods run again over chunks
    computed in each way of `also_warm`.
    """

    fractions: tuple[float, ...] = ()
    also_warm: tuple[Warming, ...] = ()
    fit_questions: int = 4

    def __post_init__(self) -> None:
        if not all(0.0 < fraction <= 1.0 for fraction in self.fractions):
            raise UsageError("a recompute fraction must be above 0 and at most 1")
        if self.fit_questions < 1:
            raise UsageError(f"fit_questions must be at least 1, not {self.fit_questions}")
        if self.also_warm and any(parameter_of_spec(spec) == ALPHA for spec in self.fitted):
            raise UsageError("alpha can be fitted over only one way to compute chunks: name one --warm, or give alphas")
        if self.also_warm and any(warm.queries for warm in (self.warm, *self.also_warm)):
            raise UsageError("--warm queries:N warms only one store: it cannot be combined with another way")
        Comparison.__post_init__(self)

    @property
    def fitted(self) -> tuple[str, ...]:
        """The methods, with their settings, whose values `fitted_values` finds."""
        return tuple(spec for spec in self.methods if self.fractions and "@" not in spec and parameter_of_spec(spec))

    def contenders(self, values: Mapping[str, float | None] | None = None) -> dict[str, ReuseMethod]:
        """`Comparison.contenders`, with the `values` of the fitted methods."""
        fixed = [spec for spec in (REFERENCE, FULL_REUSE, *self.methods) if spec not in self.fitted]
        made = bench_contenders(tuple(dict.fromkeys(fixed)), self.ratios, self.alphas, self.reuse)
        found = {label: self.at(label.rpartition("@")[0], x) for label, x in (values or {}).items() if x is not None}
        return {**made, **found}

    def at(self, spec: str, value: float) -> ReuseMethod:
        """A method with its settings at one value of its parameter."""
        return next(iter(bench_contenders((f"{spec}@{value!r}",), reuse=self.reuse).values()))


def parameter_of_spec(spec: str) -> str | None:
    return parameter_of(spec.partition(":")[0], BENCH_METHODS)


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """The model without the measured model's adapter, and the same questions. Its full prefill is the reference."""

    engine: Engine
    tasks: Sequence[Task]


def judges_of(base: bool) -> dict[str, str]:
    """The reference rows for `summarize_fidelity`, with or without a base."""
    ending = OF_BASE if base else ""
    return {"reference": REFERENCE + ending, "reused": FULL_REUSE + ending}


def measure_fidelity(
    engine: Engine,
    tasks: Sequence[Task],
    methods: Mapping[str, ReuseMethod],
    config: FidelityConfig,
    *,
    base: Base | None = None,
    exact: int | None = None,
    skip: Callable[[int], bool] = lambda _: False,
    store: StoreConfig | None = None,
    progress: Progress | None = None,
) -> Iterator[dict[str, FidelitySample]]:
    """`compare` the methods in every way of warming.

    Each of `also_warm` has its own store in memory, with the codec and budget of `store`. With a `base`, all are
    compared with its full prefill. The base has its own rows: full prefill, also in slices, and full reuse in each way
    of warming.
    """
    assert base is None or all(a.prompt.token_ids == b.prompt.token_ids for a, b in zip(tasks, base.tasks, strict=True))
    with ExitStack() as stack:
        ways: list[Way] = []
        if base is not None:
            judges = {label: methods[label] for label in (REFERENCE, FULL_REUSE)}
            ways = [
                replace(way, runs={label + OF_BASE: run for label, run in way.runs.items()})
                for way in _ways(base.engine, base.tasks, judges, config, store, stack, sliced=True)
            ]
        ways += _ways(engine, tasks, methods, config, store, stack, sliced=base is None)
        reference = judges_of(base is not None)["reference"]
        yield from compare(ways, config, reference=reference, exact=exact, skip=skip, progress=progress)


def _ways(
    engine: Engine,
    tasks: Sequence[Task],
    methods: Mapping[str, ReuseMethod],
    config: FidelityConfig,
    store: StoreConfig | None,
    stack: ExitStack,
    *,
    sliced: bool,
) -> list[Way]:
    """All methods, then the reuse methods in each further way of warming.

    With `sliced`, full prefill also runs in slices, as the noise floor.
    """
    ways = [way_of(engine, tasks, methods, config, sliced=sliced)]
    for warm in config.also_warm:
        other = stack.enter_context(beside(engine, store))
        own = way_of(other, tasks, _named_by_way(methods, warm), config, sliced=False)
        ways.append(replace(own, warm=warm))
    return ways


def _named_by_way(methods: Mapping[str, ReuseMethod], warm: Warming) -> dict[str, ReuseMethod]:
    """The reuse methods by name of their rows over chunks warmed this way: `query neutral@5%`."""
    named = {}
    for label, method in methods.items():
        if label not in (REFERENCE, *EXACT):
            name, at, value = label.partition("@")
            named[f"{name} {warm}{at}{value}"] = method
    return named


MOST_ALPHA = 64.0
"""Upper end of the search for an alpha: far above the 3 of Cache-Craft's Figure 20."""


def fitted_values(
    engine: Engine, tasks: Sequence[Task], config: FidelityConfig, progress: Progress | None = None
) -> dict[str, float | None]:
    """The parameter value of each method for each of the config's fractions, by row's name.

    None if a method cannot recompute so little (CacheBlend's first layers are dense) or so much. Fitted to within 3 %
    of the fraction, or as close as eight trials come, on the first `fit_questions` prompts. If the parameter is a
    ratio, which does not depend on the prompts' content, half of them are enough.
    """
    specs = config.fitted
    values: dict[str, float | None] = {}
    for index in range(min(config.fit_questions, len(tasks)) if config.fitted else 0):
        prepare(engine, tasks, index, config.warm)
    total, finished = len(specs) * len(config.fractions), count(1)
    for spec in specs:
        by_alpha = parameter_of_spec(spec) == ALPHA
        some = tasks[: config.fit_questions if by_alpha else (config.fit_questions + 1) // 2]
        most = MOST_ALPHA if by_alpha else 1.0

        @cache
        def fraction_at(value: float, spec: str = spec, some: Sequence[Task] = tuple(some)) -> float:
            method = config.at(spec, value)
            return fmean(_fraction(engine, task.prompt, method) for task in some)

        for fraction in sorted(config.fractions):
            values[f"{spec}@{100 * fraction:g}%"] = solved(fraction_at, fraction, most=most)
            if progress is not None:
                progress(next(finished), total)
    return values


def _fraction(engine: Engine, prompt: Prompt, method: ReuseMethod) -> float:
    return measured_report(engine, engine.runner.prefill(prompt, method, capture=False), 0.0).recompute_fraction


def solved(rising: Callable[[float], float], wanted: float, *, most: float, tolerance: float = 0.03) -> float | None:
    """The x in [0, most] where a rising function is about `wanted`; None if it is never within a quarter of it.

    Regula falsi (Illinois), at most eight steps.
    """
    tried: dict[float, float] = {}

    def off(x: float) -> float:
        tried[x] = rising(x) - wanted
        return tried[x]

    low, at_low = 0.0, off(0.0)
    high = min(most, 2.0 * wanted if most <= 1.0 else 1.0)
    while (at_high := off(high)) < 0.0 and high < most:
        low, at_low, high = high, at_high, min(most, 2.0 * high)
    for _ in range(8):
        if min(map(abs, tried.values())) <= tolerance * wanted or not at_low < 0.0 < at_high:
            break
        x = high - at_high * (high - low) / (at_high - at_low)
        if x in tried:
            x = (low + high) / 2
        if (found := off(x)) < 0.0:
            low, at_low, at_high = x, found, at_high / 2
        else:
            high, at_high, at_low = x, found, at_low / 2
    best = min(tried, key=lambda x: abs(tried[x]))
    return best if abs(tried[best]) <= wanted / 4 else None
