"""Declaration of settings, and how each source's text and numbers are read.

A setting is a field, made by `setting(...)`, of a `SettingsGroup`, which is a frozen dataclass. Commands, servers
(command line, environment, file), vLLM's connector and the tables in docs derive from it. A setting's name is its
field's name without the unit: `ttl_s` is `ttl`, and takes 3600 as well as "1h". A constructor takes fields, not text.
No torch here; every module with settings imports this one.

Why not pydantic: it brings strict types and bounds, but places, units, `none` and errors would still be our code, and
importing a configuration would take 0.2 s longer.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from math import inf, isfinite
from types import NoneType
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from chunkweave.errors import UsageError, unknown_names
from chunkweave.plugins import Plugins

GIB = 1 << 30
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB}
_DURATIONS_S = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
NO_LIMIT = "none"
"""The text for None, for settings whose default is not None too."""


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
    """The unit of a number, by the suffix of its field's name. Text may write it with a unit."""

    BYTES = "_bytes"
    SECONDS = "_s"

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
    """Places where a setting can be changed, besides the constructor of its group."""

    COMMANDS = "commands"
    """Command line of `ask`, `chat` and the other commands that load a model."""
    ENGINE = "engine"
    """`chunkweave serve` on this engine: command line, environment, file."""
    VLLM = "vllm"
    """`chunkweave vllm-serve`: command line, environment, file."""
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

    `name` is its name outside Python, `attribute` its field. `kind` is its type without None; of a tuple, `element` is
    the type of its elements. A number is at least 0, `positive` if so declared, and at most `most`. A `secret` is shown
    without user, password and options.
    """

    name: str
    attribute: str
    kind: Any
    element: Any
    optional: bool
    unit: Unit | None
    default: Any
    meaning: str
    places: frozenset[Place]
    positive: bool = False
    most: float = inf
    secret: bool = False

    @property
    def flag(self) -> str:
        """The command-line option, where it has one."""
        return f"--{self.name.replace('_', '-')}"

    def text(self, value: Any) -> str:
        """A value as text, which `read` reads back."""
        if value is None:
            return NO_LIMIT
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        if isinstance(value, bool):
            return str(value).lower()
        return self.unit.shown(value) if self.unit is not None else str(value)

    def read(self, value: Any, origin: str = "") -> Any:
        """The value in a text, or a checked value from JSON, TOML, YAML or Python. Errors begin with `origin`.

        Raises:
            UsageError: wrong type, or text that is no value of this setting.
        """
        try:
            if isinstance(value, str):
                return self._parse(value)
            if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
                return float(value)
        except (ValueError, KeyError, OverflowError) as error:
            reason = f" ({error})" if isinstance(error, UsageError) else ""
            raise self._no_value(value, origin, reason) from error
        if self.kind is tuple and isinstance(value, list):
            value = tuple(value)
        if not self._has_type(value):
            raise self._no_value(value, origin)
        return value

    def check(self, value: Any) -> None:
        """Check the value of a field.

        Raises:
            UsageError: wrong type or out of bounds; the message says what is allowed.
        """
        if not self._has_type(value):
            raise self._no_value(value, self.attribute)
        if not isinstance(value, int | float):
            return
        enough = value > 0 if self.positive else value >= 0
        if not (enough and isfinite(value) and value <= self.most):
            positive, least = ("at least 1", "not negative") if self.kind is int else ("positive", "a number from 0 on")
            allowed = positive if self.positive else least
            if self.most != inf:
                allowed = f"{allowed} and at most {self.most}" if self.positive else f"between 0 and {self.most}"
            raise UsageError(f"{self.attribute} must be {allowed}, not {value}")

    def _parse(self, text: str) -> Any:
        if self.optional and text.strip().lower() == NO_LIMIT:
            return None
        if self.unit is not None:
            return self.kind(self.unit.parse(text))
        if self.kind is bool:
            return _FLAGS[text.strip().lower()]
        if self.kind is tuple:
            return tuple(self.element(part.strip()) for part in text.split(",") if part.strip())
        return self.kind(text)

    def _has_type(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.kind is tuple:
            return isinstance(value, tuple) and all(isinstance(part, self.element) for part in value)
        if issubclass(self.kind, StrEnum):
            return value in list(self.kind)
        number = self.kind in (int, float)
        return isinstance(value, int | float if self.kind is float else self.kind) and not (
            number and isinstance(value, bool)
        )

    def _no_value(self, value: Any, origin: str, reason: str = "") -> UsageError:
        if issubclass(self.kind, StrEnum):
            message = f"no such {self.name}: {value!r}; there are: {', '.join(self.kind)}"
        else:
            message = f"{value!r} is not a valid {self.name}: {self.meaning}{reason}"
        return UsageError(f"{origin or self.name}: {message}")


def setting(default: Any, meaning: str, *, plugins: Plugins | None = None, **more: Any) -> Any:
    """A field that is a setting. `more` are fields of `Setting`; `places` are the group's if it declares none.

    With `plugins`, the value is the name of one of them, and the meaning lists them.
    """
    return field(default=default, metadata={"setting": (meaning, plugins, more)})


class SettingsGroup:
    """Base of groups of settings, which are frozen dataclasses. Values are checked when a group is made."""

    __slots__ = ()
    places: ClassVar[frozenset[Place]] = EVERYWHERE

    def __init_subclass__(cls, places: frozenset[Place] | None = None) -> None:
        """Places of the settings that declare none."""
        if places is not None:
            cls.places = places

    def __post_init__(self) -> None:
        """Check every setting; other numbers must not be negative.

        Raises:
            UsageError: a value is refused; the message says what is allowed.
        """
        checks = {declared.attribute: declared.check for declared in settings_of(type(self)).values()}
        for name in (group_field.name for group_field in fields(cast(Any, self))):
            value = getattr(self, name)
            if name in checks:
                checks[name](value)
            elif isinstance(value, int | float) and not value >= 0:
                raise UsageError(f"{name} must not be negative, not {value}")


GroupT = TypeVar("GroupT", bound=SettingsGroup)


def settings_of(group: type[SettingsGroup]) -> Mapping[str, Setting]:
    """The settings that a group declares, by name."""
    return _declared(cast(Any, group))


@cache
def _declared(group: Any) -> Mapping[str, Setting]:
    hints = get_type_hints(group)
    declared_settings = {}
    for group_field in fields(group):
        if "setting" not in group_field.metadata:
            continue
        meaning, plugins, more = group_field.metadata["setting"]
        attribute = group_field.name
        hint = hints[group_field.name]
        optional = NoneType in get_args(hint)
        if optional:
            hint = next(choice for choice in get_args(hint) if choice is not NoneType)
        unit = next((unit for unit in Unit if attribute.endswith(unit)), None)
        values = {
            "name": attribute.removesuffix(unit or ""),
            "attribute": attribute,
            "kind": get_origin(hint) or hint,
            "element": next(iter(get_args(hint)), None),
            "optional": optional,
            "unit": unit,
            "default": group_field.default,
            "meaning": meaning if plugins is None else f"{meaning} There are: {plugins.listed}.",
            "places": group.places,
            **more,
        }
        declared_settings[values["name"]] = Setting(**values)
    return declared_settings


def settings_at(group: type[SettingsGroup], place: Place) -> dict[str, Setting]:
    """The settings of a group that can be changed in one place, by name."""
    return {name: declared for name, declared in settings_of(group).items() if place in declared.places}


def refuse_unknown(values: Iterable[Any], settings: Collection[str], where: str = "") -> None:
    """Refuse names that are no settings.

    Raises:
        UsageError: there are unknown names; the message begins with `where` and suggests close names.
    """
    if unknown := unknown_names(values, settings):
        raise UsageError(f"{where}no such setting: {unknown}; `chunkweave config show` lists all")


def from_mapping(group: type[GroupT], values: Mapping[str, Any]) -> GroupT:
    """A group from those of `values` that are its settings, by name; other settings have their default.

    Raises:
        UsageError: a value has the wrong type, or the group refuses it.
    """
    declared_settings = settings_of(group)
    names = declared_settings.keys() & values.keys()
    return group(**{declared_settings[name].attribute: declared_settings[name].read(values[name]) for name in names})
