"""By which ratio or alpha a method recomputes a wanted share: what makes methods comparable at equal work."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from statistics import fmean

from chunkweave.conversation.report import Durations
from chunkweave.engine.decode import make_report
from chunkweave.engine.engine import Engine
from chunkweave.planning.method import ALPHA, ReuseMethod
from chunkweave.prompt.parts import Prompt
from chunkweave_lab.fidelity import FidelityConfig, Task, parameter_of_spec, prepare
from chunkweave_lab.ttft import Progress

MOST_ALPHA = 64.0
"""Where the search for an alpha ends: far beyond the 3 of Cache-Craft's Figure 20."""


def fitted_values(
    engine: Engine, tasks: Sequence[Task], config: FidelityConfig, progress: Progress | None = None
) -> dict[str, float | None]:
    """For each method and each of the config's fractions the value of its parameter, by its row's name.

    None where a method cannot recompute so little (CacheBlend's first layers are dense), or so much. Measured to within
    3 % of the fraction, or as near as eight trials come, on the first `fit_questions` prompts; on half of these where
    the parameter is a ratio, which does not depend on what the prompts say.
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
    prefilled = engine.runner.prefill(prompt, method, capture=False)
    return make_report(prefilled, engine.loaded.model.geometry, Durations(0.0, 0.0, 0.0), 0).recompute_fraction


def solved(rising: Callable[[float], float], wanted: float, *, most: float, tolerance: float = 0.03) -> float | None:
    """The x in [0, most] where a rising function is `wanted`, or nearly; None if it never comes within a quarter of it.

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
