"""The contenders of a benchmark, from specifications: `cacheblend`, `cachecraft:no-focus`, `query@0.05`.

A specification is a method, settings after colons, and after an @ a value of the method's parameter (its recompute
ratio, or alpha). Without a value the method is measured at every value of the benchmark.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from chunkweave.config import DEFAULT_RECOMPUTE_RATIO, ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.planning.method import ALPHA, ReuseMethod, changed, make_method, settings_changes

MakeMethod = Callable[[str, Sequence[str], ReuseConfig], ReuseMethod]
"""Makes a method from its name, its settings, and the configuration that they change."""


def configured_method(name: str, settings: Sequence[str], reuse: ReuseConfig) -> ReuseMethod:
    """The method of that name, with its settings.

    Raises:
        UnknownMethodError: no such method.
        UsageError: no such setting.
    """
    return make_method(name, changed(reuse, settings_changes(":".join((name, *settings)))))


def make_contenders(
    specs: Sequence[str],
    ratios: Sequence[float] = (DEFAULT_RECOMPUTE_RATIO,),
    alphas: Sequence[float] = (1.0,),
    reuse: ReuseConfig | None = None,
    make: MakeMethod = configured_method,
) -> dict[str, ReuseMethod]:
    """The methods that `specs` name, by the names of their rows, in order and each once.

    A row's name is its specification with the value: `cacheblend@0.15`, `cachecraft:no-focus@1`; methods without a
    parameter have no value: `full`. So a row's name is a specification of only that row. `reuse` supplies everything
    that settings and value do not set: check layers, seed and others. `make` defines the known methods and settings.

    Raises:
        UnknownMethodError: a method does not exist.
        UsageError: a value is out of range or not a number, a method without a parameter has a value, or a setting is
            unknown.

    >>> list(make_contenders(("full", "cacheblend", "query:last@0.05"), ratios=(0.05, 0.15)))
    ['full', 'cacheblend@0.05', 'cacheblend@0.15', 'query:last@0.05']
    """
    made: dict[str, ReuseMethod] = {}
    for spec in specs:
        written, at, _ = spec.partition("@")
        name, *settings = written.split(":")
        usual = reuse or ReuseConfig()
        method = make(name, settings, usual)
        if method.budget is None:
            if at:
                raise UsageError(f"{name} takes no value: write {written} instead of {spec}")
            made[written] = method
            continue
        parameter = method.budget.parameter
        values = (value_of(spec),) if at else alphas if parameter == ALPHA else ratios
        for value in values:
            changed: dict[str, Any] = {parameter: value}
            made[label_of(written, value)] = make(name, settings, replace(usual, **changed))
    return made


def label_of(method: str, value: float) -> str:
    """The name of the row of a method with its settings at one value of its parameter.

    >>> label_of("cacheblend:layer-2", 0.15)
    'cacheblend:layer-2@0.15'
    """
    return f"{method}@{value:g}"


def value_of(spec: str) -> float:
    """The value after a specification's @.

    Raises:
        UsageError: it is not a number.
    """
    try:
        return float(spec.partition("@")[2])
    except ValueError as error:
        raise UsageError(f"not a number after the @ of {spec!r}; write for example cacheblend@0.15") from error
