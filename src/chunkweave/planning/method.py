"""The contract of reuse methods, shared helpers, and lookup by name.

A method is a class with `name`, `budget` and `plan`. It is found by name in `plugins.METHODS`, in this package or
another one (docs/extending.md); no other registration is needed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from chunkweave.config import ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan
from chunkweave.plugins import METHODS, Plugins
from chunkweave.store.index import PartLookup, PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import Geometry, SegmentId, Span, joined, spans_of

RATIO = "recompute_ratio"
ALPHA = "alpha"


@dataclass(frozen=True, slots=True)
class Budget:
    """The one setting by which a method trades quality for time.

    `parameter` is its field of `ReuseConfig`; 0 recomputes nothing. `reaching(plan, share)` is the lowest value at
    which the method recomputes that share (0 to 1) of the tokens that `plan` reuses, or its maximum.
    """

    parameter: str
    reaching: Callable[[Plan, float], float]


def _ratio_reaching(_plan: Plan, share: float) -> float:
    return share


RATIO_BUDGET = Budget(RATIO, _ratio_reaching)
"""For methods whose parameter is that share itself."""


def _alpha_reaching(plan: Plan, share: float) -> float:
    """Lowest alpha with sum over parts of min(1, alpha impact) tokens = share of all (Cache-Craft eq. 12 for a prompt).

    The sum is piecewise linear in alpha; a piece ends where a part is recomputed whole, at alpha = 1/impact.
    """
    parts = [(part.score.impact, len(part.span)) for part in plan.parts if part.score is not None and part.score.impact]
    wanted = share * sum(len(part.span) for part in plan.parts if part.score is not None)
    whole = 0.0
    rise = sum(impact * tokens for impact, tokens in parts)
    for impact, tokens in sorted(parts, reverse=True):
        if whole + rise / impact >= wanted:
            return (wanted - whole) / rise
        whole += tokens
        rise -= impact * tokens
    return 1.0 / min(parts)[0] if parts else 0.0


ALPHA_BUDGET = Budget(ALPHA, _alpha_reaching)
"""For methods that score each part (`RecomputeScore.impact`) and scale the scores."""


MethodSettings = Mapping[str, Mapping[str, Any]]
"""Maps names of settings to the fields of `ReuseConfig` that they set: `{"no-focus": {"focus": False}}`.

For a field that is itself a configuration (`query`), the value maps its fields. A name ending in `=` takes a value; its
value here is then the function that parses the text.
"""


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers in a text such as `1+4`.

    Raises:
        ValueError: there are none.
    """
    return tuple(int(layer) for layer in text.split("+"))


_SETTINGS: Mapping[str, MethodSettings] = {
    RATIO: {"ratio=": {RATIO: float}},
    ALPHA: {"alpha=": {ALPHA: float}},
    "check_layers": {"layers=": {"check_layers": parse_layers}},
    "focus": {"focus": {"focus": True}, "no-focus": {"focus": False}},
}
"""The settings of a method that has a parameter, by the parameter."""


class ReuseMethod(Protocol):
    """Decides which parts of a prompt are read from the store, and which tokens are computed at which layers.

    A method may also have `needs_profiles`, `reuses_nothing` and `reads_question`, each as a class
    attribute or, if it depends on the configuration, as a property; the default is False. The functions of these names
    explain them.

    `parameters` are the fields of `ReuseConfig` that it reads besides its budget's (default: none). A request sets them
    by settings after the method's name, separated by colons: `ratio=0.3`, `alpha=2`, `layers=1+4`, `no-focus`, each
    only with a method that has the parameter. `settings` are the method's own ones (`MethodSettings`). The first line
    of the class's docstring is shown to people who choose a method.
    """

    @property
    def name(self) -> str:
        """The name on the command line and in requests."""

    @property
    def budget(self) -> Budget | None:
        """The setting of how much it recomputes; None if there is none."""

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """The plan for one prompt, given what is stored for it. Pure: equal inputs give equal plans."""


def make_method(name: str, config: ReuseConfig | None = None, plugins: Plugins = METHODS) -> ReuseMethod:
    """The method with this name among the `plugins`, constructed with `config`.

    Raises:
        UnknownMethodError: no such method; the message lists the known ones.
        UsageError: it cannot be imported, has another `name`, lacks `name` or `budget`, or lists unknown parameters.
    """
    method: ReuseMethod = plugins.get(name)(config or ReuseConfig())
    for needed, what in (("name", f"{name!r}"), ("budget", "RATIO_BUDGET, or None")):
        if not hasattr(method, needed):
            raise UsageError(f"the reuse method {name!r} has no `{needed}`: set it to {what}")
    if method.name != name:
        raise UsageError(f"the reuse method {name!r} calls itself {method.name!r}: its `name` must be {name!r}")
    if unknown := sorted({*getattr(method, "parameters", ())} - _PARAMETERS):
        raise UsageError(f"the reuse method {name!r} names parameters that ReuseConfig lacks: {', '.join(unknown)}")
    return method


_PARAMETERS = {parameter.name for parameter in fields(ReuseConfig)} - {"capture", "choice"}


def parameter_of(name: str, plugins: Plugins = METHODS) -> str | None:
    """The field of `ReuseConfig` that sets how much a method recomputes; None if there is none.

    Raises:
        UnknownMethodError: no such method.

    >>> parameter_of("cachecraft"), parameter_of("cacheblend"), parameter_of("prefix")
    ('alpha', 'recompute_ratio', None)
    """
    budget = make_method(name, plugins=plugins).budget
    return None if budget is None else budget.parameter


def parameters_of(name: str, plugins: Plugins = METHODS) -> tuple[str, ...]:
    """The fields of `ReuseConfig` that a method reads, its budget's first.

    Raises:
        UnknownMethodError: no such method.

    >>> parameters_of("cacheblend"), parameters_of("cachecraft"), parameters_of("prefix")
    (('recompute_ratio', 'check_layers'), ('alpha', 'focus'), ())
    """
    return parameters_read(make_method(name, plugins=plugins))


def parameters_read(method: ReuseMethod) -> tuple[str, ...]:
    """The fields of `ReuseConfig` that a method reads, its budget's first."""
    budget = () if method.budget is None else (method.budget.parameter,)
    return tuple(dict.fromkeys((*budget, *getattr(method, "parameters", ()))))


def settings_of_method(name: str, plugins: Plugins = METHODS) -> MethodSettings:
    """The settings that may stand after a method's name.

    Raises:
        UnknownMethodError: no such method.

    >>> list(settings_of_method("cachecraft"))
    ['alpha=', 'focus', 'no-focus']
    """
    method = make_method(name, plugins=plugins)
    settings: dict[str, Mapping[str, Any]] = {}
    for parameter in parameters_read(method):
        settings.update(_SETTINGS.get(parameter, {}))
    return settings | dict(getattr(method, "settings", {}))


def with_budget(spec: str, value: float) -> str:
    """A method's text with a value of its budget; unchanged if it has none.

    >>> with_budget("query:whole", 0.05), with_budget("cachecraft", 2.0), with_budget("prefix", 0.0)
    ('query:whole:ratio=0.05', 'cachecraft:alpha=2.0', 'prefix')
    """
    parameter = parameter_of(method_named(spec))
    return spec if parameter is None else f"{spec}:{next(iter(_SETTINGS[parameter]))}{value!r}"


def about_method(name: str, plugins: Plugins = METHODS) -> str:
    """What a method does, for people who choose one: the first line of its docstring.

    Raises:
        UnknownMethodError: no such method.

    >>> about_method("full")
    'Computes the whole prompt and reuses nothing: the answer that others are compared with.'
    """
    return (type(make_method(name, plugins=plugins)).__doc__ or "").strip().partition("\n")[0]


def method_named(spec: str) -> str:
    """The method name in a specification such as `query:whole`."""
    return spec.partition(":")[0]


def settings_changes(spec: str, plugins: Plugins = METHODS, other_names: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of `ReuseConfig` that a specification's settings change; empty for a name alone.

    Error messages also list `other_names`, the caller's additional settings.

    Raises:
        UnknownMethodError: no such method.
        UsageError: the method has no such setting, or two settings change the same field.

    >>> settings_changes("query:whole:late")
    {'query': {'tail': None, 'layers': <WatchedLayers.LATE: 'late'>}}
    """
    name, *names = spec.split(":")
    settings = settings_of_method(name, plugins) if names else {}
    changes: dict[str, Any] = {}
    for setting_text in names:
        for field, value in _setting_changes(name, setting_text, settings, other_names).items():
            earlier_value = changes.get(field)
            if earlier_value is not None and not (
                isinstance(value, Mapping) and value.keys().isdisjoint(earlier_value)
            ):
                raise UsageError(f"{spec!r} sets twice what {setting_text!r} sets: leave out one of the two")
            changes[field] = {**(earlier_value or {}), **value} if isinstance(value, Mapping) else value
    return changes


def _setting_changes(name: str, word: str, settings: MethodSettings, other_names: Sequence[str]) -> Mapping[str, Any]:
    """The fields that one setting of a method changes."""
    key, equals, text = word.partition("=")
    declared = settings.get(key + equals)
    if declared is None or (equals and not text):
        choices = [f"{key_text}VALUE" if key_text.endswith("=") else key_text for key_text in settings]
        there_are = ", ".join((*choices, *other_names)) or "none"
        raise UsageError(f"unknown setting {word!r} of {name}; there are: {there_are}")
    return _with_value(word, text, declared)


def _with_value(word: str, text: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    with_value: dict[str, Any] = {}
    for field, value in changes.items():
        if isinstance(value, Mapping):
            with_value[field] = _with_value(word, text, value)
        elif callable(value):
            try:
                with_value[field] = value(text)
            except ValueError as error:
                example = "numbers after =, such as 1+4" if value is parse_layers else "a number after =, such as 4"
                raise UsageError(f"{word!r} needs {example}") from error
        else:
            with_value[field] = value
    return with_value


def changed(reuse: ReuseConfig, changes: Mapping[str, Any]) -> ReuseConfig:
    """A configuration with the result of `settings_changes` applied.

    Raises:
        UsageError: a value out of range.
    """
    values = {
        field: replace(getattr(reuse, field), **value) if isinstance(value, Mapping) else value
        for field, value in changes.items()
    }
    return replace(reuse, **values)


def exact_part(entry: PartLookup) -> PartPlan | None:
    """The plan of a part in the longest exact prefix; None for other parts."""
    return PartPlan(entry.part, entry.span, KVSource.EXACT, entry.exact.id) if entry.exact else None


def reuse_nothing(lookup: PromptLookup) -> tuple[PartPlan, ...]:
    """Compute every part."""
    return tuple(PartPlan(entry.part, entry.span, KVSource.COMPUTED) for entry in lookup.parts)


def reuse_exact_prefix(lookup: PromptLookup) -> tuple[PartPlan, ...]:
    """Reuse the longest exact prefix and compute the rest."""
    return tuple(exact_part(entry) or PartPlan(entry.part, entry.span, KVSource.COMPUTED) for entry in lookup.parts)


def reuse_every_hit(
    lookup: PromptLookup, choose: Callable[[Sequence[SegmentRecord]], SegmentRecord | None]
) -> tuple[PartPlan, ...]:
    """Reuse the exact prefix, and for each other part the variant that `choose` picks.

    Parts without a variant are computed.
    """
    parts: list[PartPlan] = []
    for entry in lookup.parts:
        exact = exact_part(entry)
        variant = None if exact or entry.part.id is None else choose(entry.variants)
        if exact is not None:
            parts.append(exact)
        elif variant is not None:
            contexts = len(variant.contexts)
            parts.append(PartPlan(entry.part, entry.span, KVSource.REUSED, variant.id, contexts=contexts))
        else:
            parts.append(PartPlan(entry.part, entry.span, KVSource.COMPUTED))
    return tuple(parts)


def prefer_mean(variants: Sequence[SegmentRecord]) -> SegmentRecord | None:
    """The mean over most contexts, else the variant after neutral passages, else the last used one with a context.

    Among equals, an earlier generation wins (`SegmentRecord`). A variant that was computed alone comes last: it is like
    the beginning of a prompt, and deviates most from full prefill (docs/methods.md).
    """

    def general(record: SegmentRecord) -> tuple[int, bool, bool, int]:
        return len(record.contexts), record.neutral, not record.alone, -record.generation

    return max(variants, key=general, default=None)


def prefer_least_read(variants: Sequence[SegmentRecord]) -> SegmentRecord | None:
    """The variant to weave a mean's contexts from: after neutral passages, else the mean that has read least.

    No others, except, last, one that was computed alone. What a mean has read is removed together with the mean, so it
    should be little.
    """
    fitting = [record for record in variants if record.serves_contexts or record.alone]
    return min(fitting, key=lambda record: (record.alone, not record.neutral, len(record.sources)), default=None)


def required_spans(parts: Sequence[PartPlan], also: Sequence[int] = ()) -> tuple[Span, ...]:
    """Positions of all computed parts and of `also`, as the fewest spans."""
    return joined([*(part.span for part in parts if part.kv_source is KVSource.COMPUTED), *spans_of(also)])


def one_pass(name: str, parts: Sequence[PartPlan], also: Sequence[int] = ()) -> Plan:
    """The plan that computes all computed parts and the positions `also` in one pass, at every layer."""
    return Plan(name, tuple(parts), (Pass(required_spans(parts, also)),))


def reused_spans(parts: Sequence[PartPlan]) -> tuple[Span, ...]:
    """Spans of reused (not exact) parts: there recomputation can help. Never joined across parts."""
    return tuple(part.span for part in parts if part.kv_source is KVSource.REUSED)


def reads_question(method: ReuseMethod) -> bool:
    """Whether the choice of recomputed tokens depends on the question.

    >>> reads_question(make_method("query")), reads_question(make_method("cacheblend"))
    (True, False)
    """
    return bool(getattr(method, "reads_question", False))


def needs_profiles(method: ReuseMethod) -> bool:
    """Whether segments are scored by what their tokens attended to when computed (`AttentionProfile`).

    >>> needs_profiles(make_method("cachecraft")), needs_profiles(make_method("query"))
    (True, False)
    """
    return bool(getattr(method, "needs_profiles", False))


def reuses_nothing(method: ReuseMethod) -> bool:
    """Whether every part is computed, whatever is stored; if no other method is in use, nothing needs storing.

    >>> reuses_nothing(make_method("full")), reuses_nothing(make_method("prefix"))
    (True, False)
    """
    return bool(getattr(method, "reuses_nothing", False))


def without(lookup: PromptLookup, segments: Collection[SegmentId]) -> PromptLookup:
    """The lookup with `segments` as not stored; the exact prefix ends before the first of them."""
    if not segments:
        return lookup
    parts = []
    unbroken = True
    for entry in lookup.parts:
        variants = tuple(record for record in entry.variants if record.id not in segments)
        exact = entry.exact if entry.exact is not None and entry.exact.id not in segments and unbroken else None
        unbroken = unbroken and (entry.part.id is None or exact is not None)
        parts.append(replace(entry, exact=exact, variants=variants))
    return PromptLookup(tuple(parts))
