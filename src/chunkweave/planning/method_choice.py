"""Choice of a request's method: the one it names, the calibrated one, or the exact one."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, TypedDict

from chunkweave.config import QueryConfig, ReuseConfig
from chunkweave.errors import UnknownMethodError, UsageError, unknown_names
from chunkweave.planning.calibration import CalibrationRecord, Quality
from chunkweave.planning.evidence import LEARNED, Evidence, Progress
from chunkweave.planning.method import (
    ALPHA,
    RATIO,
    ReuseMethod,
    changed,
    make_method,
    method_named,
    needs_profiles,
    parameters_read,
    reuses_nothing,
    settings_changes,
)
from chunkweave.plugins import METHODS

logger = logging.getLogger(__name__)

_MOST_SPEC = 200
"""Most characters of a method with its settings: each setting is read one by one."""

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
    NO_GAIN = "no gain"
    """An approximate method was chosen, but it was expected to be no sooner than the exact one."""
    RECURS = "path recurs"
    """An approximate method was chosen, but the same path recurs: it is computed exactly once, and stored."""
    LEARNED = "learned"
    """Comparisons with full prefill found it within the bounds of the requested quality (`planning.evidence`)."""
    LEARNING = "learning"
    """Not enough answers were compared yet, so the answer is exact."""
    SWITCHED_OFF = "switched off"
    """Comparisons found answers of this kind outside the bounds, so the answer is exact."""


class MethodOptions(TypedDict, total=False):
    """Method options of every call that answers a question: the arguments of `MethodRequest.of`.

    `method` says how chunks are reused, with settings after colons (`cacheblend:ratio=0.3`,
    `query:whole:late:stored`); `quality` (`exact`, `balanced`, `fast`) says how close to full prefill the answer must
    be. Give at most one of the two; with neither, the engine's defaults apply.
    """

    method: str | None
    quality: str | None


@dataclass(frozen=True, slots=True)
class MethodRequest:
    """A caller's request for a method, with settings after colons, or for a quality. Both may be left out."""

    method: str | None = None
    quality: Quality | None = None

    @classmethod
    def of(cls, method: str | None = None, quality: str | None = None) -> "MethodRequest":
        """Make a request; `quality` is given by name.

        Raises:
            UsageError: no such quality.
        """
        return cls(method, None if quality is None else Quality.parse(quality))

    @property
    def sets_budget(self) -> bool:
        """Whether it sets the budget, so that the loading controller must not raise it."""
        return self.method is not None and not settings_changes(self.method).keys().isdisjoint((RATIO, ALPHA))


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """A method with its settings, its configuration, and why it was chosen.

    `spec` is the text that names it, `reuse` the configuration with the text's settings, `made` the method itself.
    `progress` says how far comparisons are, if the answer is exact until they end.

    Raises:
        UnknownMethodError: no such method.
        UsageError: it cannot be made.
    """

    spec: str
    reuse: ReuseConfig
    why: Why
    progress: Progress | None = field(default=None, compare=False)
    made: ReuseMethod = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", make_method(self.method, self.reuse))

    @property
    def method(self) -> str:
        """The method's name, without settings."""
        return method_named(self.spec)

    @property
    def reason(self) -> str:
        """Why it was chosen, for reports."""
        if self.why is not Why.LEARNING or self.progress is None:
            return str(self.why)
        return f"{self.why} {self.progress.answers} of about {self.progress.expected}"

    @property
    def learns(self) -> bool:
        """Whether comparisons of the answer may decide for other requests: no method and no exactness was asked for."""
        return self.why in (Why.CALIBRATED, Why.LEARNED, Why.LEARNING, Why.SWITCHED_OFF)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The method's parameters and values, JSON-compatible, the budget's first; empty if it has none."""
        return {name: _plain(getattr(self.reuse, name)) for name in parameters_read(self.made)}

    def parameters_raised(self, value: float | None) -> Mapping[str, Any]:
        """`parameters`, with the budget that the loading controller raised to `value` (None: not raised)."""
        if value is None or self.made.budget is None:
            return self.parameters
        return {**self.parameters, self.made.budget.parameter: value}

    @property
    def recomputed_share(self) -> float | None:
        """Approximate share of reused chunks that is recomputed; None if only exact prefixes are reused.

        For a method without a ratio the share is known only from its plan; until then this is the default ratio.
        """
        if self.method in EXACT_METHODS:
            return None
        return 0.0 if self.made.budget is None else self.reuse.recompute_ratio


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
        kv = bool(profiles) or not all(reuses_nothing(choice.made) for choice in choices)
        if profiles is None:
            profiles = any(needs_profiles(choice.made) for choice in choices)
        return cls(kv, profiles)


@dataclass(frozen=True, slots=True)
class MethodChooser:
    """Resolves method requests.

    `usual` applies to calls that name neither method nor quality, `reuse` holds what the settings of a named method
    change, `record` is the calibration record (None: there is none, and `how_to_calibrate` is the command to make one).
    `evidence`, if answers are compared, decides for requests of a quality.
    Layers that a method names are checked against the model's `num_layers`, if known.
    """

    usual: MethodRequest = field(default_factory=MethodRequest)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    record: CalibrationRecord | None = None
    how_to_calibrate: str = "chunkweave calibrate"
    num_layers: int | None = None
    evidence: Evidence | None = None

    def choose(self, request: MethodRequest, tenant: str = "") -> MethodChoice:
        """The choice for a tenant's request.

        A target resolves to the method that comparisons found to reach it, or to the record's; if there is none, to the
        exact method. Without method and target, it is `balanced` if there is a record or answers are compared, else
        exact.

        Raises:
            UsageError: a target without either; both a method and a quality; settings that the method does not have;
                a value out of range; a layer that the model does not have.
        """
        method = request.method
        quality = request.quality
        if method is None and quality is None:
            method = self.usual.method
            quality = self.usual.quality
        if method is not None:
            if quality is not None:
                raise UsageError(f"quality {quality.value!r} and method {method!r} are both given: give one of them")
            return self._named(method, Why.ASKED_FOR)
        if quality is Quality.EXACT or (quality is None and self.record is None and self.evidence is None):
            return MethodChoice(EXACT_METHOD, self.reuse, Why.EXACT)
        if self.evidence is not None:
            return self._by_evidence(self.evidence, quality or Quality.BALANCED, tenant)
        calibrated = self._calibrated(quality)
        if calibrated is None:
            return MethodChoice(EXACT_METHOD, self.reuse, Why.OUT_OF_REACH)
        return self._named(calibrated, Why.CALIBRATED)

    def comparing(self, methods: Sequence[str] = LEARNED) -> "MethodChooser":
        """The same, with evidence on `methods` and on those of the record, which may serve until it speaks against
        them.
        """
        priors = {} if self.record is None else {quality: self.record.spec(quality) for quality in self.record.targets}
        specs = {*methods, *filter(None, priors.values())}
        shares = {spec: self._named(spec, Why.LEARNED).recomputed_share or 0.0 for spec in sorted(specs)}
        return replace(self, evidence=Evidence(sorted(shares, key=lambda spec: -shares[spec]), priors))

    def _by_evidence(self, evidence: Evidence, quality: Quality, tenant: str) -> MethodChoice:
        decision = evidence.decision(quality, tenant)
        if decision is not None:
            return self._named(decision.method, Why.CALIBRATED if decision.prior else Why.LEARNED)
        vetoed = evidence.drifted(quality) or evidence.decision(quality) is not None
        unproven = Why.LEARNING if evidence.learns else Why.OUT_OF_REACH
        why = Why.SWITCHED_OFF if vetoed else unproven
        return MethodChoice(EXACT_METHOD, self.reuse, why, evidence.progress_for(quality, tenant))

    def _named(self, spec: str, why: Why) -> MethodChoice:
        """The choice of a named method, with settings after its name."""
        choice = MethodChoice(spec, changed(self.reuse, settings_changes(spec)), why)
        layer = choice.reuse.check_layers[-1]
        if self.num_layers is not None and layer >= self.num_layers and "check_layers" in parameters_read(choice.made):
            raise UsageError(f"{spec} checks layer {layer}, but the model has {self.num_layers} layers")
        return choice

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

    def _calibrated(self, quality: Quality | None) -> str | None:
        if self.record is None:
            raise UsageError(
                f"quality {str(quality)!r} needs a calibration record of this model, and there is none: "
                f"make one with `{self.how_to_calibrate}`, or name a method"
            )
        return self.record.spec(quality or Quality.BALANCED)


def _plain(value: Any) -> Any:
    """A parameter's value, JSON-compatible."""
    if isinstance(value, QueryConfig):
        return {
            name: str(field_value) if isinstance(field_value, StrEnum) else field_value
            for name, field_value in asdict(value).items()
        }
    return list(value) if isinstance(value, tuple) else value


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
        UsageError: the method has no such setting, or a value is out of range.
    """
    if not isinstance(value, str) or method_named(value) not in METHODS.names:
        raise UnknownMethodError(f"unknown reuse method {str(value)[:_MOST_SPEC]!r}; there are: {METHODS.listed}")
    if len(value) > _MOST_SPEC:
        raise UsageError(f"a method with its settings has at most {_MOST_SPEC} characters, not {len(value)}")
    changed(ReuseConfig(), settings_changes(value))
    return value


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
