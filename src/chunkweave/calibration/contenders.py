"""The contenders of a benchmark, from what one writes about them: `cacheblend`, `cachecraft:no-focus`, `query@0.05`.

A specification is a method, settings after colons, and after an @ a value of the one parameter that the method has
(its recompute ratio, or alpha). Without a value the method comes at every value that the benchmark measures.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from chunkweave.config import (
    DEFAULT_RECOMPUTE_RATIO,
    Combine,
    DeviationFactor,
    FocusReading,
    ReuseConfig,
    WatchedLayers,
)
from chunkweave.errors import UsageError
from chunkweave.planning.method import ALPHA, ReuseMethod, make_method, parameter_of

QUERY_SETTINGS: dict[str, dict[str, Any]] = {
    "last": {"tail": 1},
    "whole": {"tail": None},
    "all-layers": {"layers": WatchedLayers.ALL},
    "late": {"layers": WatchedLayers.LATE},
    "third": {"layers": WatchedLayers.FIRST_THIRD},
    "head-sum": {"over_heads": Combine.SUM},
    "head-max": {"over_heads": Combine.MAX},
    "token-sum": {"over_tokens": Combine.SUM},
    "token-max": {"over_tokens": Combine.MAX},
    "layer-sum": {"over_layers": Combine.SUM},
    "layer-max": {"over_layers": Combine.MAX},
    "no-factor": {"factor": DeviationFactor.NONE},
    "stored": {"factor": DeviationFactor.STORED},
    "measured": {"factor": DeviationFactor.MEASURED},
    "first-token": {"first_tokens": 1},
    "mixed": {"mixed_share": 0.25},
    "two-rounds": {"rounds": 2},
}

_NUMBERS: dict[str, Callable[[str], Any]] = {
    "layers": lambda text: tuple(int(layer) for layer in text.split("+")),
    "tail": int,
    "until": float,
}
PATTERNS = ("layers=1+2", "tail=4", "until=0.8")
"""Settings with numbers of one's own: the watched layers, how many of the question's last tokens are watched, and the
share of the layers above which chosen tokens keep their stored KV."""


def query_setting(name: str) -> dict[str, Any] | None:
    """The fields of `QueryConfig` that a setting stands for; None if it is no setting of `query`.

    Raises:
        UsageError: the numbers of a setting are none.
    """
    key, equals, text = name.partition("=")
    if not equals or key not in _NUMBERS:
        return QUERY_SETTINGS.get(name)
    try:
        return {key: _NUMBERS[key](text)}
    except ValueError as error:
        raise UsageError(f"not a setting: {name!r}; write for example {', '.join(PATTERNS)}") from error


SETTINGS: dict[str, dict[str, Any]] = {
    "no-focus": {"focus": False},
    "printed": {"focus_reading": FocusReading.AS_PRINTED},
    "no-cci": {"use_cci": False},
    "no-overlap": {"use_overlap": False},
    "coverage": {"use_coverage": True},
    "layer-2": {"check_layers": (2,)},
}
"""Settings that may follow a method after a colon, for ablations: `cachecraft:no-focus`, `cachecraft:no-cci:no-focus`.

Those of `query` are in `QUERY_SETTINGS`."""


def make_contenders(
    specs: Sequence[str],
    ratios: Sequence[float] = (DEFAULT_RECOMPUTE_RATIO,),
    alphas: Sequence[float] = (1.0,),
    reuse: ReuseConfig | None = None,
) -> dict[str, ReuseMethod]:
    """The methods that `specs` name, by the names of their rows, in order and each once.

    A row is named by its specification with the value: `cacheblend@0.15`, `cachecraft:no-focus@1`; methods without a
    parameter have none: `full`. So a row's name is a specification of that row alone. Methods take from `reuse` what
    neither a setting nor a value says: check layers, seed and all else.

    Raises:
        UnknownMethodError: a method does not exist.
        UsageError: a value is out of range or no number, a method that has no parameter is given one, or a setting is
            unknown.

    >>> list(make_contenders(("full", "cacheblend", "query:last@0.05"), ratios=(0.05, 0.15)))
    ['full', 'cacheblend@0.05', 'cacheblend@0.15', 'query:last@0.05']
    """
    made: dict[str, ReuseMethod] = {}
    for spec in specs:
        written, at, _ = spec.partition("@")
        name, *settings = written.split(":")
        parameter = parameter_of(name)
        configured = with_settings(reuse or ReuseConfig(), settings)
        if parameter is None:
            if at:
                raise UsageError(f"{name} has no value that could be set: write {written} instead of {spec}")
            made[written] = make_method(name, configured)
            continue
        values = (value_of(spec),) if at else alphas if parameter == ALPHA else ratios
        for one in values:
            changed: dict[str, Any] = {parameter: one}
            made[label_of(written, one)] = make_method(name, replace(configured, **changed))
    return made


def label_of(method: str, value: float) -> str:
    """The name of the row of a method, with its settings, at one value of its parameter.

    >>> label_of("cacheblend:layer-2", 0.15)
    'cacheblend:layer-2@0.15'
    """
    return f"{method}@{value:g}"


def with_settings(reuse: ReuseConfig, names: Sequence[str]) -> ReuseConfig:
    """`reuse` changed by the settings of these names.

    Raises:
        UsageError: there is no such setting.
    """
    changes: dict[str, Any] = {}
    of_query: dict[str, Any] = {}
    for name in names:
        query = query_setting(name)
        if query is None and name not in SETTINGS:
            there_are = ", ".join((*SETTINGS, *QUERY_SETTINGS, *PATTERNS))
            raise UsageError(f"unknown setting {name!r} of a method; there are: {there_are}")
        changes |= SETTINGS.get(name, {})
        of_query |= query or {}
    return replace(reuse, **changes, query=replace(reuse.query, **of_query))


def value_of(spec: str) -> float:
    """The value after a specification's @.

    Raises:
        UsageError: there is no number.
    """
    try:
        return float(spec.partition("@")[2])
    except ValueError as error:
        raise UsageError(f"not a number after the @ of {spec!r}; write for example cacheblend@0.15") from error
