"""Choice of a request's method: the one it names, the calibrated one, or the exact one."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypedDict

from chunkweave.config import QueryConfig, ReuseConfig
from chunkweave.errors import UnknownMethodError, UsageError, unknown_names
from chunkweave.planning.calibration import CalibrationRecord, Quality
from chunkweave.planning.method import (
    changed,
    method_named,
    needs_profiles,
    parameter_of,
    parameters_of,
    reuses_nothing,
    settings_changes,
)
from chunkweave.plugins import METHODS

logger = logging.getLogger(__name__)

_MOST_LAYERS = 1000
"""Far more than any model has; each number in a longer list would be checked one by one."""

EXACT_METHOD = "prefix"
"""The exact method, used unless another one is named or calibrated."""

EXACT_METHODS = ("full", EXACT_METHOD)
"""Methods that reuse exact prefixes at most."""


class Why(StrEnum):
    """Why a method was chosen."""

    EXACT = "exact"
    """No approximate method was requested."""
    OUT_OF_REACH = "target not reached"
    """At calibration no method met the bounds of the requested quality, so the answer is exact."""
    CALIBRATED = "calibrated"
    ASKED_FOR = "asked for"
    SWITCHED_OFF = "switched off"
    """An approximate method was chosen, but shadow checks found that it deviates too far (`scheduling.shadow`)."""


class MethodOptions(TypedDict, total=False):
    """Method options of every call that answers a question: the arguments of `MethodRequest.of`.

    `method` says how chunks are reused, with settings after colons if it has any (`query:whole:late:stored`); `quality`
    (`exact`, `balanced`, `fast`) says how close to full prefill the answer must be. Give at most one of the two; with
    neither, the engine's defaults apply. `recompute_ratio`, `check_layers`, `alpha` and `focus` override the configured
    values (`ReuseConfig`); the request is refused if the method does not take them.
    """

    method: str | None
    quality: str | None
    recompute_ratio: float | None
    check_layers: Sequence[int] | None
    alpha: float | None
    focus: bool | None


@dataclass(frozen=True, slots=True)
class MethodRequest:
    """A caller's request for a method; every field may be left out.

    `method` may have settings after colons. `recompute_ratio`, `check_layers`, `alpha` and `focus` are those of
    `ReuseConfig`: they override the configured values, and the method must take them.
    """

    method: str | None = None
    quality: Quality | None = None
    recompute_ratio: float | None = None
    check_layers: tuple[int, ...] | None = None
    alpha: float | None = None
    focus: bool | None = None

    @classmethod
    def of(
        cls,
        method: str | None = None,
        quality: str | None = None,
        recompute_ratio: float | None = None,
        check_layers: Sequence[int] | None = None,
        alpha: float | None = None,
        focus: bool | None = None,
    ) -> "MethodRequest":
        """Make a request; `quality` is given by name.

        Raises:
            UsageError: no such quality.
        """
        layers = None if check_layers is None else tuple(check_layers)
        return cls(method, None if quality is None else Quality.parse(quality), recompute_ratio, layers, alpha, focus)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "MethodRequest":
        """Make a request from the JSON fields of an HTTP request; other keys are ignored.

        Raises:
            UsageError: a value has the wrong type or is out of range.
        """
        return cls(**{name: read(fields[name]) for name, read in _FIELDS.items() if name in fields})

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields of `ReuseConfig` that are set."""
        names = ("recompute_ratio", "check_layers", "alpha", "focus")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def sets_budget(self) -> bool:
        """Whether it sets the budget, so that the loading controller must not raise it."""
        return self.recompute_ratio is not None or self.alpha is not None

    def refuse_layers_beyond(self, num_layers: int) -> None:
        """Refuse check layers that a model with `num_layers` layers does not have.

        Raises:
            UsageError: there is such a layer.
        """
        if self.check_layers and max(self.check_layers) >= num_layers:
            layer = max(self.check_layers)
            raise UsageError(f"check_layers has layer {layer}, but the model has {num_layers} layers")


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """A method, its configuration, and why it was chosen."""

    method: str
    reuse: ReuseConfig
    why: Why

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The method's parameters and values, JSON-compatible, the budget's first; empty if it has none."""
        return {name: _plain(getattr(self.reuse, name)) for name in parameters_of(self.method)}

    def parameters_raised(self, value: float | None) -> Mapping[str, Any]:
        """`parameters`, with the budget that the loading controller raised to `value` (None: not raised)."""
        parameter = parameter_of(self.method)
        return self.parameters if value is None or parameter is None else {**self.parameters, parameter: value}

    @property
    def recomputed_share(self) -> float | None:
        """Approximate share of reused chunks that is recomputed; None if only exact prefixes are reused.

        For a method without a ratio the share is known only from its plan; until then this is the default ratio.
        """
        if self.method in EXACT_METHODS:
            return None
        return 0.0 if parameter_of(self.method) is None else self.reuse.recompute_ratio

    def made_exact(self) -> "MethodChoice":
        """The choice while approximate reuse is switched off; unchanged if it is exact."""
        return self if self.method in EXACT_METHODS else MethodChoice(EXACT_METHOD, self.reuse, Why.SWITCHED_OFF)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a request's prefill keeps for later ones: what its own method or the default one can read, no more.

    `kv` is the KV of the parts that it computed, `profiles` what their tokens attended to. Both delay the first token,
    so no request pays for methods that were not chosen. As a consequence, chunks computed for another method have
    profiles only if the default method needs them; without, `cachecraft` falls back as documented there.
    """

    kv: bool = True
    profiles: bool = False

    @classmethod
    def by(cls, request_choice: MethodChoice, usual: MethodChoice, profiles: bool | None) -> "Kept":
        """What a request with this choice keeps; `profiles`, if set (`CaptureConfig.profile`), takes precedence."""
        choices = (request_choice, usual)
        kv = bool(profiles) or not all(reuses_nothing(choice.method, choice.reuse) for choice in choices)
        if profiles is None:
            profiles = any(needs_profiles(choice.method, choice.reuse) for choice in choices)
        return cls(kv, profiles)


@dataclass(frozen=True, slots=True)
class MethodChooser:
    """Resolves method requests.

    `usual` applies to calls that name neither method nor quality, `reuse` holds the parameters of a named method,
    `record` is the calibration record (None: there is none, and `how_to_calibrate` is the command to make one).
    """

    usual: MethodRequest = field(default_factory=MethodRequest)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    record: CalibrationRecord | None = None
    how_to_calibrate: str = "chunkweave calibrate"

    def choose(self, request: MethodRequest) -> MethodChoice:
        """The choice for a request.

        A target resolves to the record's method and settings; if no method reached it, to the exact method. Without
        method and target, it is `balanced` if there is a record, else exact. Parameters override those of a named
        method. A calibrated method accepts only the calibrated parameter, and only if no target was named.

        Raises:
            UsageError: a target without a record; both a method and a quality; parameters that the method does not
                take, or together with a target; a parameter out of range.
        """
        method, quality = request.method, request.quality
        if method is None and quality is None:
            method, quality = self.usual.method, self.usual.quality
        parameters = request.parameters
        replace(self.reuse, **parameters)  # raises for a value out of range
        if method is not None:
            if quality is not None:
                raise UsageError(f"quality {quality.value!r} and method {method!r} are both given: give one of them")
            return self._named(method, parameters, of_request=request.method is not None)
        if quality is not None and parameters:
            raise UsageError(
                f"quality {quality.value!r} sets what is recomputed: give no {', '.join(parameters)} with it"
            )
        if quality is Quality.EXACT or (quality is None and self.record is None):
            return self._exact(Why.EXACT, parameters)
        calibrated_choice = self._calibrated(quality)
        if calibrated_choice is None:
            return self._exact(Why.OUT_OF_REACH, parameters)
        method, calibrated = calibrated_choice[0], replace(calibrated_choice[1], capture=self.reuse.capture)
        parameter = parameter_of(method)
        if untaken := parameters.keys() - {parameter}:
            raise UsageError(
                f"{', '.join(sorted(untaken))} can only be given with a method: what was calibrated is {method}, "
                f"and takes {parameter or 'no parameters'}"
            )
        if parameter in parameters:
            return MethodChoice(method, replace(calibrated, **{parameter: parameters[parameter]}), Why.ASKED_FOR)
        return MethodChoice(method, calibrated, Why.CALIBRATED)

    def _named(self, spec: str, parameters: Mapping[str, Any], *, of_request: bool) -> MethodChoice:
        """The choice of a named method, with settings after its name and the parameters `given`."""
        method, changes = method_named(spec), settings_changes(spec)
        refuse_untaken(method, parameters)
        if twice := sorted(parameters.keys() & changes.keys()) if of_request else []:
            raise UsageError(f"method {spec!r} sets {', '.join(twice)} already: leave out one of the two")
        return MethodChoice(method, replace(changed(self.reuse, changes), **parameters), Why.ASKED_FOR)

    def _exact(self, why: Why, parameters: Mapping[str, Any]) -> MethodChoice:
        """The choice of the exact method."""
        if parameters:
            raise UsageError(
                f"{', '.join(parameters)} can only be given with a method that takes it: {EXACT_METHOD!r}, which "
                "answers where none is named, takes no parameters"
            )
        return MethodChoice(EXACT_METHOD, self.reuse, why)

    def kept(self, choice: MethodChoice, profiles: bool | None = None) -> Kept:
        """What a request with this choice keeps; `profiles` overrides the configuration."""
        configured = self.reuse.capture.profile
        return Kept.by(choice, self.choose(MethodRequest()), configured if profiles is None else profiles)

    def choose_usual(self) -> MethodChoice:
        """The choice for requests that name nothing. Logs a warning if no method reaches the target.

        Raises:
            UsageError: as `choose`.
        """
        choice = self.choose(MethodRequest())
        if choice.why is Why.OUT_OF_REACH and self.record is not None:
            quality = self.usual.quality or Quality.BALANCED
            logger.warning(
                "no method met the bounds of %s (%s) when %s was calibrated: only exact prefixes are reused unless a "
                "request names a method",
                quality,
                self.record.targets[quality].bounds if quality in self.record.targets else "no such target",
                self.record.model,
            )
        return choice

    def _calibrated(self, quality: Quality | None) -> tuple[str, ReuseConfig] | None:
        if self.record is None:
            raise UsageError(
                f"quality {str(quality)!r} needs a calibration record of this model, and there is none: "
                f"make one with `{self.how_to_calibrate}`, or name a method"
            )
        return self.record.config(quality or Quality.BALANCED)


def _plain(value: Any) -> Any:
    """A parameter's value, JSON-compatible."""
    if isinstance(value, QueryConfig):
        return {
            name: str(field_value) if isinstance(field_value, StrEnum) else field_value
            for name, field_value in asdict(value).items()
        }
    return list(value) if isinstance(value, tuple) else value


def refuse_untaken(method: str, names: Iterable[str]) -> None:
    """Refuse parameters that a method does not take.

    Raises:
        UsageError: the method does not take one of `names`; the message lists those it takes.
    """
    taken = parameters_of(method)
    if untaken := sorted({*names} - {*taken}):
        raise UsageError(f"method {method!r} takes no {', '.join(untaken)}: it takes {', '.join(taken) or 'none'}")


FIELD = "chunkweave"
"""The key of our fields in a request, and of the report in its answer."""


def refuse_unknown_keys(names: Iterable[Any], known_names: Collection[str]) -> None:
    """Refuse unknown keys of a field.

    Raises:
        UsageError: there are unknown keys; the message lists them and the known ones.
    """
    if unknown := unknown_names(names, known_names):
        raise UsageError(f"unknown fields of {FIELD}: {unknown}; there are {', '.join(sorted(known_names))}")


def checked_method(value: Any) -> str:
    """Parse a reuse method's name, with settings after colons if there are any.

    Raises:
        UnknownMethodError: no such method.
        UsageError: the method has no such setting.
    """
    if not isinstance(value, str) or method_named(value) not in METHODS.names:
        raise UnknownMethodError(f"unknown reuse method {value!r}; there are: {METHODS.listed}")
    changed(ReuseConfig(), settings_changes(value))
    return value


def checked_ratio(value: Any) -> float:
    """Parse a recompute ratio.

    Raises:
        UsageError: no number between 0 and 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UsageError(f"recompute_ratio must be a number between 0 and 1, not {value!r}")
    return float(value)


def checked_alpha(value: Any) -> float:
    """Parse Cache-Craft's alpha.

    Raises:
        UsageError: no number, or a negative one.
    """
    return ReuseConfig(alpha=checked_number(value, "alpha")).alpha


def checked_layers(value: Any) -> tuple[int, ...]:
    """Parse CacheBlend's check layers.

    Raises:
        UsageError: no list of ascending layer numbers from 1 on.
    """
    if not isinstance(value, list | tuple):
        raise UsageError("check_layers must be a list of layer numbers")
    if len(value) > _MOST_LAYERS:
        raise UsageError(f"check_layers may have {_MOST_LAYERS} layer numbers, not {len(value)}")
    return ReuseConfig(check_layers=tuple(checked_whole(layer, "check_layers") for layer in value)).check_layers


def checked_flag(value: Any, name: str) -> bool:
    """Parse a boolean.

    Raises:
        UsageError: not true or false; the message calls it `name`.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, not {value!r}")
    return value


def checked_whole(value: Any, name: str) -> int:
    """Parse a whole number.

    Raises:
        UsageError: no whole number; the message calls it `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    return value


def checked_number(value: Any, name: str) -> float:
    """Parse a number.

    Raises:
        UsageError: no number, or too large; the message calls it `name`.
    """
    try:
        if not isinstance(value, bool) and isinstance(value, int | float):
            return float(value)
    except OverflowError:
        pass
    raise UsageError(f"{name} must be a number, not {value!r}")


_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "method": checked_method,
    "quality": Quality.parse,
    "recompute_ratio": checked_ratio,
    "check_layers": checked_layers,
    "alpha": checked_alpha,
    "focus": partial(checked_flag, name="focus"),
}
"""The parser of each field of `MethodRequest`."""
