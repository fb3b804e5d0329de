"""Which method answers a request: what was asked for, what a calibration found, or the exact one."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from chunkweave.config import ReuseConfig
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.planning.calibration import CalibrationRecord, Quality
from chunkweave.planning.method import RATIO, parameter_of

EXACT_METHOD = "prefix"
"""What answers unless something else was asked for or calibrated: nothing can go wrong with it."""

EXACT_METHODS = ("full", EXACT_METHOD)
"""Methods that reuse nothing but exact prefixes."""


class Why(StrEnum):
    """What a method was chosen for."""

    EXACT = "exact"
    """Nothing approximate was asked for, or none reaches the quality that was."""
    CALIBRATED = "calibrated"
    ASKED_FOR = "asked for"
    SWITCHED_OFF = "switched off"
    """Something approximate was to answer, but shadow checks found that it strays too far (`scheduling.shadow`)."""


@dataclass(frozen=True, slots=True)
class MethodRequest:
    """What a caller says about the method; every part may be left open."""

    method: str | None = None
    quality: Quality | None = None
    recompute_ratio: float | None = None

    @classmethod
    def of(cls, method: str | None, quality: str | None, recompute_ratio: float | None = None) -> "MethodRequest":
        """With the quality by its name.

        Raises:
            UsageError: there is no such quality.
        """
        return cls(method, None if quality is None else Quality.parse(quality), recompute_ratio)


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """A method, what it is told, and why it was chosen."""

    method: str
    reuse: ReuseConfig
    why: Why

    @property
    def parameters(self) -> Mapping[str, float]:
        """The parameter that the method takes and its value; empty if it takes none."""
        parameter = parameter_of(self.method)
        return {} if parameter is None else {parameter: getattr(self.reuse, parameter)}

    def made_exact(self) -> "MethodChoice":
        """What answers instead while approximate reuse is switched off; itself, if it is exact."""
        return self if self.method in EXACT_METHODS else MethodChoice(EXACT_METHOD, self.reuse, Why.SWITCHED_OFF)


@dataclass(frozen=True, slots=True)
class MethodChooser:
    """What an engine knows when it is asked for an answer (DESIGN §3.9).

    `usual` is for calls that name neither method nor quality, `reuse` holds the parameters of a named method, `record`
    is what a calibration found (None: there was none, and `how_to_calibrate` is the command).
    """

    usual: MethodRequest = field(default_factory=MethodRequest)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    record: CalibrationRecord | None = None
    how_to_calibrate: str = "chunkweave calibrate"

    def choose(self, method_request: MethodRequest) -> MethodChoice:
        """What answers a request.

        A named method wins over a target. A target resolves to what the record says, with the settings that were
        calibrated; where no method reached it, to the exact one. With nothing named at all it is `balanced` if there
        is a record, else exact. A ratio replaces the one that the chosen method would get, if it takes one.

        Raises:
            UsageError: a target without a record; quality `exact` with an approximate method; a target with a ratio;
                a ratio outside [0, 1].
        """
        if method_request.method is None and method_request.quality is None:
            method_request = replace(self.usual, recompute_ratio=method_request.recompute_ratio)
        ratio = method_request.recompute_ratio
        reuse = self.reuse if ratio is None else replace(self.reuse, recompute_ratio=ratio)
        if method_request.method is not None:
            if method_request.quality is Quality.EXACT and method_request.method not in EXACT_METHODS:
                raise UsageError(
                    f"quality 'exact' and method {method_request.method!r} contradict each other: give one of them"
                )
            return MethodChoice(method_request.method, reuse, Why.ASKED_FOR)
        if method_request.quality is Quality.EXACT or (method_request.quality is None and self.record is None):
            return MethodChoice(EXACT_METHOD, reuse, Why.EXACT)
        if method_request.quality is not None and ratio is not None:
            raise UsageError(
                f"quality {method_request.quality.value!r} sets what is recomputed: give no recompute_ratio with it"
            )
        found = self._calibrated(method_request.quality)
        if found is None:
            return MethodChoice(EXACT_METHOD, reuse, Why.EXACT)
        method, told = found
        if ratio is not None and parameter_of(method) == RATIO:
            return MethodChoice(method, replace(told, recompute_ratio=ratio), Why.ASKED_FOR)
        return MethodChoice(method, told, Why.CALIBRATED)

    def _calibrated(self, quality: Quality | None) -> tuple[str, ReuseConfig] | None:
        if self.record is None:
            raise UsageError(
                f"quality {str(quality)!r} needs a calibration record of this model, and there is none: "
                f"make one with `{self.how_to_calibrate}`, or name a method"
            )
        return self.record.config(quality or Quality.BALANCED)


FIELD = "chunkweave"
"""The key in a request, and of the report in its answer."""

ORDERS = ("free", "fixed")
"""Who says in which order chunks stand in the prompt: chunkweave, or the request."""


def refuse_unknown_keys(given: Iterable[Any], known: Collection[str]) -> None:
    """Refuse a field with keys that mean nothing.

    Raises:
        UsageError: there are such keys; the message names them, and those there are.
    """
    unknown = sorted(str(key) for key in given if key not in known)
    if unknown:
        raise UsageError(f"unknown fields of {FIELD}: {', '.join(unknown)}; there are {', '.join(sorted(known))}")


def checked_method(value: Any, methods: Collection[str]) -> str:
    """A reuse method's name, if it is one of `methods`.

    Raises:
        UnknownMethodError: there is no such method.
    """
    if not isinstance(value, str) or value not in methods:
        raise UnknownMethodError(f"unknown reuse method {value!r}; there are: {', '.join(methods)}")
    return value


def checked_ratio(value: Any) -> float:
    """A recompute ratio.

    Raises:
        UsageError: it is no number between 0 and 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UsageError(f"recompute_ratio must be a number between 0 and 1, not {value!r}")
    return float(value)


def checked_whole(value: Any, name: str) -> int:
    """A whole number.

    Raises:
        UsageError: it is none; the message calls it `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    return value
