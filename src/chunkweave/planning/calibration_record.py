"""What a calibration found out about one model: quality by method and parameter, and what each target means by it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from statistics import fmean
from typing import Any, Self

from chunkweave.config import Combine, DeviationFactor, QueryConfig, ReuseConfig, WatchedLayers
from chunkweave.errors import UsageError
from chunkweave.planning.method import parameter_of

_NO_METHODS = "capture"
"""The field of `ReuseConfig` that concerns no method: what an engine keeps of a prefill is its own affair."""


class Quality(StrEnum):
    """How close to full prefill's answers a request wants to be (DESIGN §5.6)."""

    EXACT = "exact"
    """Full prefill's KV: only exact prefixes are reused."""
    BALANCED = "balanced"
    FAST = "fast"

    @classmethod
    def parse(cls, text: "str | Quality") -> "Quality":
        """From its name.

        Raises:
            UsageError: there is no such target.
        """
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"unknown quality {text!r}; there are: {', '.join(cls)}") from None


SHARES: dict[Quality, float] = {Quality.BALANCED: 0.98, Quality.FAST: 0.95}
"""Share of full prefill's F1 that an approximate target keeps, unless the calibration was told otherwise."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One method at one value of its parameter, over all questions of a calibration.

    `share` is its mean F1 over that of full prefill on the same questions. The ends of `f1` and of `share` (paired by
    question) are bootstrap percentiles. `recompute_fraction` is a mean.
    """

    method: str
    value: float
    f1: float
    f1_low: float
    f1_high: float
    share: float
    share_low: float
    share_high: float
    recompute_fraction: float


@dataclass(frozen=True, slots=True)
class Target:
    """What one quality target means: the least value of each method's parameter that keeps `share` of full's F1.

    `method` is, of those that reach it, the one that recomputes least; None if none does.
    """

    share: float
    least: dict[str, float | None]
    method: str | None

    def __post_init__(self) -> None:
        if self.method is not None and self.least.get(self.method) is None:
            raise ValueError(f"{self.method} is to be used, but does not reach the target")


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """A finished calibration: what was measured, how, and what came out.

    It holds for the model of `fingerprint` (weights and dtype) and says something about questions like those of
    `dataset`. `reuse` is what every method was told beside its parameter. `warm` is how the store was filled.
    """

    fingerprint: str
    model: str
    dtype: str
    dataset: str
    dataset_digest: str
    questions: int
    warm: str
    max_new_tokens: int
    seed: int
    full_f1: float
    reuse: ReuseConfig
    points: tuple[CurvePoint, ...]
    targets: dict[Quality, Target]
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    created: str = ""
    command: str = ""

    def config(self, quality: Quality) -> tuple[str, ReuseConfig] | None:
        """Method and its settings for a target; None if no method reaches it (and for EXACT, which needs none)."""
        target = self.targets.get(quality)
        if target is None or target.method is None:
            return None
        parameter, value = parameter_of(target.method), target.least[target.method]
        changes: dict[str, Any] = {} if parameter is None else {parameter: value}
        return target.method, replace(self.reuse, **changes)

    def point(self, quality: Quality) -> CurvePoint | None:
        """The measured point that a target resolves to."""
        target = self.targets.get(quality)
        if target is None or target.method is None:
            return None
        wanted = (target.method, target.least[target.method])
        return next((point for point in self.points if (point.method, point.value) == wanted), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        data = asdict(self)
        del data["reuse"][_NO_METHODS]
        return data

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is no such thing, or what it says cannot be used.
        """
        record = cls(
            **{
                **data,
                "reuse": _reuse_of(data["reuse"]),
                "points": tuple(CurvePoint(**point) for point in data["points"]),
                "targets": {Quality(name): Target(**target) for name, target in data["targets"].items()},
            }
        )
        for quality in record.targets:
            record.config(quality)
        return record


def _reuse_of(data: Mapping[str, Any]) -> ReuseConfig:
    """What was written of a configuration; JSON's lists and texts become what the fields hold."""
    usual = ReuseConfig()
    values = {name: type(getattr(usual, name))(value) for name, value in data.items() if name != "query"}
    return replace(usual, **values, query=_query_of(data.get("query", {})))


def _query_of(data: Mapping[str, Any]) -> QueryConfig:
    """The same of the part that is the method `query`'s."""
    kinds: dict[str, Any] = {
        "layers": tuple if isinstance(data.get("layers"), list) else WatchedLayers,
        "over_heads": Combine,
        "over_tokens": Combine,
        "over_layers": Combine,
        "factor": DeviationFactor,
    }
    return replace(QueryConfig(), **{name: kinds[name](v) if name in kinds else v for name, v in data.items()})


def choose_target(points: Sequence[CurvePoint], share: float) -> Target:
    """What a target of `share` means, given the curves of some methods (Cache-Craft eq. 13, on a grid).

    A method's least value is the cheapest one whose *fitted* share reaches the target, so that one lucky point with
    dearer ones below the target beside it is not taken. Of the methods that reach it, the one that recomputes least
    is named; of equals, the first.
    """
    least: dict[str, float | None] = {}
    reached: list[CurvePoint] = []
    for method in dict.fromkeys(point.method for point in points):
        curve = sorted((point for point in points if point.method == method), key=lambda point: point.value)
        fitted = rising_fit([point.share for point in curve])
        found = next((point for point, fit in zip(curve, fitted, strict=True) if fit >= share), None)
        least[method] = found.value if found is not None else None
        reached += [found] if found is not None else []
    best = min(reached, key=lambda point: point.recompute_fraction, default=None)
    return Target(share, least, best.method if best is not None else None)


def rising_fit(values: Sequence[float]) -> list[float]:
    """The never-falling sequence closest to `values` in least squares (isotonic regression, by its min-max formula).

    More recomputation cannot truly make answers worse; where measured quality falls it is noise, and neighbours are
    averaged. The first value of an averaged run is never below its fit, so what the fit lets pass passed itself.

    >>> rising_fit([0.5, 0.75, 0.25, 1.0])
    [0.5, 0.5, 0.5, 1.0]
    """
    return [
        max(min(fmean(values[first : last + 1]) for last in range(place, len(values))) for first in range(place + 1))
        for place in range(len(values))
    ]
