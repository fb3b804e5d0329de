"""How a setting is declared, once, and how every place that takes settings reads it: text, numbers, old spellings.

A field of a frozen dataclass that is made by `setting(...)` is the declaration: its default, help, unit, and where it
may be changed. Constructors, command line, server (flags, environment, file), vLLM's connector and the tables of the
docs derive from it. A setting is called what its field is called, without the unit: `ttl_s` is `ttl`, and takes 3600
as well as "1h". Torch-free, and below all that has settings.
"""

import logging
import re
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache, wraps
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from chunkweave.errors import UsageError
from chunkweave.plugins import Plugins

logger = logging.getLogger(__name__)

GIB = 1 << 30
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB}
_DURATIONS_S = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
NO_LIMIT = "none"
"""What text says for None, where that is not the default."""

ConfigT = TypeVar("ConfigT")


def parse_bytes(text: str) -> int:
    """Bytes named by a text such as `2GiB`, `500 MB` or `4096`.

    Raises:
        UsageError: the text is no size.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SIZES:
        raise UsageError(f"not a size in bytes: {text!r}; write for example 2GiB, 500MB or 4096")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def parse_duration(text: str) -> float:
    """Seconds named by a text such as `90m`, `100ms` or `30`.

    Raises:
        UsageError: the text is no duration.

    >>> parse_duration("1.5h")
    5400.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|[smhd])?\s*", text)
    if match is None:
        raise UsageError(f"not a duration: {text!r}; write for example 100ms, 30s, 90m, 12h or 7d")
    return float(match[1]) * _DURATIONS_S[match[2] or "s"]


class Unit(StrEnum):
    """What a number counts, where text may say it with a unit."""

    BYTES = "bytes"
    SECONDS = "seconds"

    @property
    def suffix(self) -> str:
        """How the name of a field in this unit ends."""
        return "_bytes" if self is Unit.BYTES else "_s"

    def parse(self, text: str) -> float:
        """The number that a text says.

        Raises:
            UsageError: it says none.
        """
        return parse_bytes(text) if self is Unit.BYTES else parse_duration(text)

    def shown(self, value: float) -> str:
        """The shortest text for a number, which `parse` reads back.

        >>> Unit.BYTES.shown(4 << 30), Unit.SECONDS.shown(5400.0)
        ('4GiB', '90m')
        """
        if self is Unit.BYTES:
            steps = [("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10), ("", 1)]
        else:
            steps = [("d", 86400), ("h", 3600), ("m", 60), ("s", 1)]
        unit, size = next((one for one in steps if value and value % one[1] == 0), steps[-1])
        return f"{value / size:g}{unit}" if self is Unit.SECONDS else f"{int(value) // size}{unit}"


class Place(StrEnum):
    """Where a setting can be changed, beside the constructor of its class."""

    COMMANDS = "commands"
    """Flags of `ask`, `chat` and the other commands that load a model."""
    ENGINE = "engine"
    """`chunkweave serve` on this engine: flags, environment, file."""
    VLLM = "vllm"
    """`chunkweave vllm-serve`: flags, environment, file."""
    CONNECTOR = "connector"
    """vLLM's `kv_connector_extra_config`."""
    REQUEST = "request"
    """The `chunkweave` object of one request, over HTTP."""


EVERYWHERE = frozenset(Place) - {Place.REQUEST}
"""Where whoever runs things sets them."""
REQUESTS = frozenset(Place)
SERVERS = frozenset({Place.ENGINE, Place.VLLM})


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting.

    `name` is what it is called outside of Python, `attribute` its field; `kind` its type. `defaults` has the places
    where another default than `default` holds. `old` are spellings that still work, with a warning. A `secret` is
    shown without user, password and options. A number is finite, at least `least` or above `above`, and at most `most`.
    """

    name: str
    attribute: str
    kind: Any
    default: Any
    meaning: str
    unit: Unit | None
    places: frozenset[Place]
    defaults: Mapping[Place, Any]
    old: tuple[str, ...]
    secret: bool
    least: float | None
    above: float | None
    most: float | None

    @property
    def plain(self) -> Any:
        """Its type without None, and without what a tuple holds."""
        kind = self.kind
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(one for one in get_args(kind) if one is not type(None))
        return get_origin(kind) or kind

    @property
    def spellings(self) -> tuple[str, ...]:
        """What it may be called beside its name: its field, where that is the name with the unit."""
        return (self.attribute,) if self.unit is not None and self.attribute == self.name + self.unit.suffix else ()

    @property
    def optional(self) -> bool:
        """Whether it may be None."""
        return type(None) in get_args(self.kind) or None in self.defaults.values()

    def default_at(self, place: Place | None) -> Any:
        """What holds in a place where nothing is said."""
        return self.defaults.get(place, self.default) if place is not None else self.default

    def text(self, value: Any) -> str:
        """A value as it is written in text."""
        if value is None:
            return NO_LIMIT
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        if isinstance(value, bool):
            return str(value).lower()
        return self.unit.shown(value) if self.unit is not None else str(value)

    def parse(self, text: str, origin: str | None = None) -> Any:
        """The value that a text says; `origin` is named where it says none.

        Raises:
            UsageError: it says none.
        """
        kind = self.plain
        if self.optional and text.strip().lower() == NO_LIMIT:
            return None
        try:
            if self.unit is not None:
                return kind(self.unit.parse(text))
            if kind is bool:
                return _FLAGS[text.strip().lower()]
            if kind is tuple:
                inner = get_args(self.kind)[0]
                return tuple(inner(part.strip()) for part in text.split(",") if part.strip())
            return getattr(kind, "parse", kind)(text)
        except (ValueError, KeyError) as error:
            why = f" ({error})" if isinstance(error, UsageError) else ""
            raise UsageError(
                f"{origin or self.name}: {text!r} is no value of {self.name}: {self.meaning}{why}"
            ) from error

    def check(self, value: Any, origin: str | None = None) -> Any:
        """A value of JSON, TOML, YAML or Python as the field has it; sizes and durations may be text.

        Raises:
            UsageError: it has another type, or is text that says no value.
        """
        kind = self.plain
        if value is None and self.optional:
            return None
        if _is_text_of(self, value):
            return self.parse(value, origin)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError as error:
                raise UsageError(f"{origin or self.name}: {value!r} is no value of {self.name}") from error
        if kind is tuple and isinstance(value, list | tuple):
            inner = get_args(self.kind)[0]
            if all(isinstance(part, inner) and not isinstance(part, bool) for part in value):
                return tuple(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{origin or self.name}: {value!r} is no value of {self.name}: {self.meaning}")
        return value


def setting(
    default: Any,
    meaning: str,
    *,
    unit: Unit | None = None,
    name: str | None = None,
    places: frozenset[Place] | None = None,
    defaults: Mapping[Place, Any] | None = None,
    old: tuple[str, ...] = (),
    secret: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    plugins: Plugins | None = None,
) -> Any:
    """A field of a configuration class that is a setting; see `Setting`.

    Left out, `name` is the field's own without its unit, and `places` are those of the class. With `plugins` it names
    one of these, and `meaning` is completed by the names there are.
    """
    declared = locals()
    return field(default=declared.pop("default"), metadata={"setting": declared})


def settings_of(config: type[Any]) -> Mapping[str, Setting]:
    """The settings that a configuration class declares, by name."""
    return _declared(cast(Any, config))


@cache
def _declared(config: Any) -> Mapping[str, Setting]:
    hints = get_type_hints(config)
    found = {}
    for one in fields(config):
        if "setting" not in one.metadata:
            continue
        declared = dict(one.metadata["setting"])
        declared["places"] = declared["places"] or config.places
        declared["defaults"] = declared["defaults"] or {}
        if plugins := declared.pop("plugins"):
            declared["meaning"] += f" There are: {plugins.listed}."
        unit = declared["unit"]
        name = declared.pop("name") or (one.name.removesuffix(unit.suffix) if unit is not None else one.name)
        found[name] = Setting(name=name, attribute=one.name, kind=hints[one.name], default=one.default, **declared)
    return found


def settings_at(config: type[Any], place: Place) -> dict[str, Setting]:
    """The settings of a class that can be changed in a place, by name."""
    return {name: one for name, one in settings_of(config).items() if place in one.places}


def spelled(given: Mapping[str, Any], known: Mapping[str, Setting], warn: Callable[[str], None]) -> dict[str, Any]:
    """`given` by the names of `known` settings. Old spellings are told to `warn`; what is no setting stays as it is."""
    names: dict[str, str] = {}
    for name, one in known.items():  # of two with one old spelling the first has it
        names = dict.fromkeys((name, *one.spellings, *one.old), name) | names
    found = {}
    for spelling, value in given.items():
        name = names.get(spelling, spelling)
        if name in known and spelling in known[name].old:
            warn(f"{spelling} is now called {name}: the old name goes with the next version")
        found[name] = value
    return found


def configuration(places: frozenset[Place] = EVERYWHERE) -> Callable[[type[ConfigT]], type[ConfigT]]:
    """Make a frozen dataclass take settings as every other place does, when they are given by keyword.

    Beside its fields its constructor then takes names without unit, sizes and durations as text, and old spellings
    with a warning. `places` is where those of its settings can be changed that do not say.
    """

    def configured(config: type[ConfigT]) -> type[ConfigT]:
        config.places = places  # type: ignore[attr-defined]
        return _taking_settings(config)

    return configured


def _taking_settings(config: type[ConfigT]) -> type[ConfigT]:
    plain = config.__init__

    @wraps(plain)
    def init(self: Any, *args: Any, **given: Any) -> None:
        known = settings_of(config)
        values = {one.attribute: given.pop(one.attribute) for one in known.values() if one.attribute in given}
        renamed = spelled(given, known, lambda told: warnings.warn(told, DeprecationWarning, stacklevel=4))
        values |= {known[name].attribute if name in known else name: value for name, value in renamed.items()}
        for one in known.values():
            if _is_text_of(one, values.get(one.attribute)):
                values[one.attribute] = one.parse(values[one.attribute])
        plain(self, *args, **values)
        for one in known.values():
            _refuse_out_of_range(one, getattr(self, one.attribute))

    def renamed(self: Any, attribute: str) -> Any:
        for one in settings_of(config).values():
            if attribute in one.old:
                warnings.warn(f"{attribute} is now called {one.attribute}", DeprecationWarning, stacklevel=2)
                return getattr(self, one.attribute)
        raise AttributeError(f"{config.__name__} has no {attribute!r}")

    config.__init__ = init  # type: ignore[method-assign]
    config.__getattr__ = renamed  # type: ignore[attr-defined]
    return config


def read(
    config: type[ConfigT],
    given: Mapping[str, Any],
    place: Place | None = None,
    *,
    warn: Callable[[str], None] = logger.warning,
) -> ConfigT:
    """A configuration from values by name, and in a place from the defaults that hold there.

    Raises:
        UsageError: an unknown name, a value of a wrong type, or what the configuration refuses.
    """
    known = settings_of(config) if place is None else settings_at(config, place)
    found = spelled(given, known, warn)
    if unknown := sorted(found.keys() - known.keys()):
        raise UsageError(f"no such settings: {', '.join(unknown)}; there are: {', '.join(known)}")
    values = {name: one.check(found[name]) if name in found else one.default_at(place) for name, one in known.items()}
    return config(**{known[name].attribute: value for name, value in values.items()})


def _refuse_out_of_range(one: Setting, value: Any) -> None:
    if not isinstance(value, int | float):
        return
    if one.least is not None and one.most is not None:
        fits, told = one.least <= value <= one.most, f"between {one.least} and {one.most}"
    elif one.least is not None:
        from_zero = "a number from 0 on" if one.plain is float else "a number that is not negative"
        fits, told = value >= one.least, f"at least {one.least}" if one.least else from_zero
    elif one.above is not None:
        fits = value > one.above and (one.most is None or value <= one.most)
        told = f"above {one.above} and at most {one.most}" if one.most is not None else "positive"
    else:
        return
    if not (fits and isfinite(value)):
        raise UsageError(f"{one.attribute} must be {told}, not {value}")


def _is_text_of(one: Setting, value: Any) -> bool:
    """Whether a value has to be parsed although it came from Python or JSON."""
    kind = one.plain
    texts = one.unit is not None or (one.optional and value == NO_LIMIT and kind is not str)
    return isinstance(value, str) and (texts or issubclass(kind, Path | StrEnum))
