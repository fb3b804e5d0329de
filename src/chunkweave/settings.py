"""Declaration of settings, and how each place that takes settings reads text and numbers.

A field of a frozen dataclass made by `setting(...)` is the declaration: default, help, unit, and the places where it
can be changed. Constructors, command line, server (flags, environment, file), vLLM's connector and the tables in docs
derive from it. A setting's name is its field's name without the unit: `ttl_s` is `ttl`, and takes 3600 as well as "1h".
No torch here; every module with settings imports this one.

Why not pydantic: it brings strict types and bounds, but places, units, `none`, errors and positional constructors would
still be our code, and importing a configuration would take 0.2 s longer.
"""

import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, wraps
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from chunkweave.errors import UsageError, unknown_names
from chunkweave.plugins import Plugins

GIB = 1 << 30
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB}
_DURATIONS_S = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
NO_LIMIT = "none"
"""The text for None, for settings whose default is not None too."""

ConfigT = TypeVar("ConfigT")


def parse_bytes(text: str) -> int:
    """Bytes in a text such as `2GiB`, `500 MB` or `4096`.

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
    """Seconds in a text such as `90m`, `100ms` or `30`.

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
    """The unit of a number that text may write with a unit."""

    BYTES = "bytes"
    SECONDS = "seconds"

    @property
    def suffix(self) -> str:
        """The suffix of field names in this unit."""
        return "_bytes" if self is Unit.BYTES else "_s"

    def parse(self, text: str) -> float:
        """Parse a number with an optional unit.

        Raises:
            UsageError: the text is not one.
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
        unit, size = next((step for step in steps if value and value % step[1] == 0), steps[-1])
        return f"{value / size:g}{unit}" if self is Unit.SECONDS else f"{int(value) // size}{unit}"


class Place(StrEnum):
    """Places where a setting can be changed, besides the constructor of its class."""

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
"""The operator's places: all but requests."""
REQUESTS = frozenset(Place)
SERVERS = frozenset({Place.ENGINE, Place.VLLM})
PROGRAMS = SERVERS | {Place.COMMANDS}
"""Commands and servers: everything outside vLLM's connector."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting.

    `name` is its name outside Python, `attribute` its field, `kind` its type. `defaults` maps places to a default that
    differs from `default`. A `secret` is shown without user, password and options. A number is finite, at least `least`
    or above `above`, and at most `most`. With `plugins`, the value is the name of one of them. The texts of a list with
    `choices` are some of them.
    """

    default: Any
    meaning: str
    name: str = ""
    attribute: str = ""
    kind: Any = None
    unit: Unit | None = None
    places: frozenset[Place] = frozenset()
    defaults: Mapping[Place, Any] = field(default_factory=dict)
    secret: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    plugins: Plugins | None = None
    choices: tuple[str, ...] = ()

    @property
    def plain(self) -> Any:
        """The type without None, and without the element type of a tuple."""
        kind = self.kind
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(argument for argument in get_args(kind) if argument is not type(None))
        return get_origin(kind) or kind

    @property
    def flag(self) -> str:
        """The command-line option."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def optional(self) -> bool:
        """Whether it may be None."""
        return type(None) in get_args(self.kind) or None in self.defaults.values()

    def default_at(self, place: Place | None) -> Any:
        """The default in one place."""
        return self.default if place is None else self.defaults.get(place, self.default)

    def text(self, value: Any) -> str:
        """A value as text, which `parse` reads back."""
        if value is None:
            return NO_LIMIT
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        if isinstance(value, bool):
            return str(value).lower()
        return self.unit.shown(value) if self.unit is not None else str(value)

    def parse(self, text: str, origin: str | None = None) -> Any:
        """The value in a text; an error message begins with `origin`.

        Raises:
            UsageError: the text is no value of this setting.
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
            return kind(text)
        except (ValueError, KeyError) as error:
            raise self._no_value(text, origin, str(error) if isinstance(error, UsageError) else "") from error

    def check(self, value: Any, origin: str | None = None) -> Any:
        """Check a value from JSON, TOML, YAML or Python; sizes and durations may be text.

        Raises:
            UsageError: wrong type, or text that is no value of this setting.
        """
        kind = self.plain
        if value is None and self.optional:
            return None
        if self.is_parsed(value):
            return self.parse(value, origin)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError as error:
                raise self._no_value(value, origin) from error
        if kind is tuple and isinstance(value, list | tuple):
            inner = get_args(self.kind)[0]
            if all(isinstance(part, inner) and not isinstance(part, bool) for part in value):
                return tuple(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._no_value(value, origin)
        return value

    def is_parsed(self, value: Any) -> bool:
        """Whether a value from Python or JSON is text that must be parsed."""
        kind = self.plain
        texts = self.unit is not None or (self.optional and value == NO_LIMIT and kind is not str)
        return isinstance(value, str) and (texts or issubclass(kind, Path | StrEnum))

    def refuse_out_of_range(self, value: Any) -> None:
        """Refuse numbers that are not finite or out of bounds, and values that are none of an enum or of the choices.

        Raises:
            UsageError: the value is refused; the message says what is allowed.
        """
        if issubclass(self.plain, StrEnum):
            self.parse(value)
        if self.choices and (wrong := [text for text in value if text not in self.choices]):
            raise UsageError(f"{self.attribute} takes {', '.join(self.choices)}, not {wrong[0]!r}")
        if not isinstance(value, int | float) or (self.least is None and self.above is None):
            return
        above_least = value > self.above if self.above is not None else value >= (self.least or 0)
        if above_least and isfinite(value) and (self.most is None or value <= self.most):
            return
        if self.above is not None:
            allowed = "positive" if self.most is None else f"above {self.above} and at most {self.most}"
        elif self.most is not None:
            allowed = f"between {self.least} and {self.most}"
        elif self.least:
            allowed = f"at least {self.least}"
        else:
            allowed = "a number from 0 on" if self.plain is float else "a number that is not negative"
        raise UsageError(f"{self.attribute} must be {allowed}, not {value}")

    def _no_value(self, value: Any, origin: str | None, why: str = "") -> UsageError:
        if issubclass(self.plain, StrEnum):
            message = f"no such {self.name}: {value!r}; there are: {', '.join(self.plain)}"
        else:
            message = f"{value!r} is not a valid {self.name}: {self.meaning}" + (f" ({why})" if why else "")
        return UsageError(f"{origin or self.name}: {message}")


def setting(default: Any, meaning: str, **more: Any) -> Any:
    """A field of a configuration class that is a setting; `more` are fields of `Setting`.

    Defaults: `name` is the field's name without its unit, `places` are those of the class. `attribute`, `kind` and
    `unit` always come from the field.
    """
    return field(default=default, metadata={"setting": Setting(default, meaning, **more)})


def settings_of(config: type[Any]) -> Mapping[str, Setting]:
    """The settings that a configuration class declares, by name."""
    return _declared(cast(Any, config))


@cache
def _declared(config: Any) -> Mapping[str, Setting]:
    hints = get_type_hints(config)
    declared_settings = {}
    for config_field in fields(config):
        declared: Setting | None = config_field.metadata.get("setting")
        if declared is None:
            continue
        unit = next((unit for unit in Unit if config_field.name.endswith(unit.suffix)), None)
        name = declared.name or (config_field.name.removesuffix(unit.suffix) if unit is not None else config_field.name)
        meaning = declared.meaning
        if declared.plugins is not None:
            meaning += f" There are: {declared.plugins.listed}."
        declared_settings[name] = replace(
            declared,
            name=name,
            attribute=config_field.name,
            kind=hints[config_field.name],
            unit=unit,
            meaning=meaning,
            places=declared.places or config.places,
        )
    return declared_settings


def settings_at(config: type[Any], place: Place) -> dict[str, Setting]:
    """The settings of a class that can be changed in one place, by name."""
    return {name: declared for name, declared in settings_of(config).items() if place in declared.places}


def by_name(values: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """`values`, keyed by the names of `settings`; a key may also be the field's name with its unit."""
    with_unit = {
        declared.name + declared.unit.suffix: name for name, declared in settings.items() if declared.unit is not None
    }
    return {with_unit.get(name, name): value for name, value in values.items()}


def refuse_unknown(values: Iterable[Any], settings: Collection[str], where: str = "") -> None:
    """Refuse names that are no settings.

    Raises:
        UsageError: there are unknown names; the message begins with `where` and suggests close names.
    """
    if unknown := unknown_names(values, settings):
        raise UsageError(f"{where}no such setting: {unknown}; `chunkweave config show` lists all")


def configuration(places: frozenset[Place] = EVERYWHERE) -> Callable[[type[ConfigT]], type[ConfigT]]:
    """Class decorator: the keyword arguments of a frozen dataclass are read as settings are elsewhere.

    The constructor then also takes names without unit, and sizes and durations as text. `places` applies to settings
    that declare none.
    """

    def configured(config: Any) -> Any:
        config.places = places
        plain = config.__init__

        @wraps(plain)
        def init(self: Any, *args: Any, **arguments: Any) -> None:
            declared_settings = settings_of(config)
            by_attribute = {declared.attribute: declared for declared in declared_settings.values()}
            values = {}
            for name, value in arguments.items():
                declared = by_attribute.get(name) or declared_settings.get(name)
                values[name if declared is None else declared.attribute] = (
                    declared.parse(value) if declared is not None and declared.is_parsed(value) else value
                )
            plain(self, *args, **values)
            for declared in declared_settings.values():
                declared.refuse_out_of_range(getattr(self, declared.attribute))
            for plain_field in fields(self):
                name, value = plain_field.name, getattr(self, plain_field.name)
                if name not in by_attribute and isinstance(value, int | float) and not value >= 0:
                    raise UsageError(f"{name} is at least 0, not {value}")

        config.__init__ = init
        return config

    return configured


def read(config: type[ConfigT], arguments: Mapping[str, Any], place: Place) -> ConfigT:
    """A configuration for one place, from the `arguments` that are its settings there, and defaults.

    Raises:
        UsageError: a value has the wrong type, or the configuration refuses it.
    """
    declared_settings = settings_at(config, place)
    values = {
        name: declared.check(arguments[name]) if name in arguments else declared.default_at(place)
        for name, declared in declared_settings.items()
    }
    return config(**{declared_settings[name].attribute: value for name, value in values.items()})
