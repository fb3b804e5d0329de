"""From a file, the environment and flags to settings: flags before environment before file before defaults."""

import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

from chunkweave.errors import UsageError
from chunkweave.server.settings import SettingField, Settings, groups_of, setting_fields
from chunkweave.tiers.blobs import without_secrets

PREFIX = "CHUNKWEAVE_"
KEYS_VARIABLE = "CHUNKWEAVE_API_KEYS"
FILE_VARIABLE = "CHUNKWEAVE_CONFIG"
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True, slots=True)
class Resolved(Generic[SettingsT]):
    """Settings, and for each by name where its value came from: `default`, the file, a variable or a flag."""

    settings: SettingsT
    origins: Mapping[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """One row a setting: `name`, `value` (secrets masked), `origin`, `meaning`."""
        rows = []
        for one in setting_fields(type(self.settings)):
            value = getattr(getattr(self.settings, one.group), one.name)
            rows.append(
                {
                    "name": one.name,
                    "value": shown(one, value),
                    "origin": self.origins[one.name],
                    "meaning": one.meaning,
                }
            )
        return rows


def shown(one: SettingField, value: Any) -> Any:
    """A value as it may be printed: of a secret URL only what names no user, password or option."""
    if one.secret and value is not None:
        return without_secrets(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> Resolved[Settings]:
    """The server's settings from all sources; see `resolve_as`."""
    return resolve_as(Settings, flags, environment, file)


def resolve_as(
    whole: type[SettingsT], flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Resolved[SettingsT]:
    """Settings of a class made like `Settings` from all sources.

    Args:
        whole: the class; its groups can be made without arguments.
        flags: values by name; None means not given.
        environment: `CHUNKWEAVE_<NAME>` for each setting.
        file: TOML, or YAML if it is called so; None = what `CHUNKWEAVE_CONFIG` names, if it is set.

    Raises:
        UsageError: a file that cannot be read, a setting that does not exist, or a value that is none; the message
            says which and where.
    """
    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE])
    written = {} if file is None else read_settings_file(file)
    known = {one.name: one for one in setting_fields(whole)}
    if unknown := sorted(set(written) - set(known)):
        raise UsageError(f"{file}: no such settings: {', '.join(unknown)}; there are {', '.join(known)}")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, one in known.items():
        variable = PREFIX + name.upper()
        value, origin = one.default, "default"
        if name in written:
            value, origin = _checked(one, written[name], str(file)), str(file)
        if environment.get(variable):
            value, origin = _parsed(one, environment[variable], variable), variable
        if flags.get(name) is not None:
            flag = f"--{name.replace('_', '-')}"
            value, origin = _checked(one, flags[name], flag), flag
        values[name], origins[name] = value, origin
    groups = {
        group: kind(**{one.name: values[one.name] for one in known.values() if one.group == group})
        for group, kind in groups_of(whole).items()
    }
    return Resolved(whole(**groups), origins)


def unused_variables(environment: Mapping[str, str], whole: type[Any] = Settings) -> list[str]:
    """Variables that look like settings of that class and are none: probably misspelt."""
    known = {PREFIX + one.name.upper() for one in setting_fields(whole)} | {KEYS_VARIABLE, FILE_VARIABLE}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


def read_settings_file(path: Path) -> dict[str, Any]:
    """The table that a TOML or YAML file holds.

    Raises:
        UsageError: it cannot be read, or is no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration file {path} cannot be read: {error}") from error
    try:
        data = _yaml(text) if path.suffix.lower() in (".yaml", ".yml") else tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not {'YAML' if path.suffix.lower() != '.toml' else 'TOML'}: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no table of settings")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _plain_kind(kind: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    if get_origin(kind) in (Union, types.UnionType):
        rest = [one for one in get_args(kind) if one is not type(None)]
        return rest[0], True
    return (tuple, False) if get_origin(kind) is tuple else (kind, False)


def _parsed(one: SettingField, text: str, origin: str) -> Any:
    """A value written as text."""
    kind, _ = _plain_kind(one.kind)
    try:
        if kind is bool:
            return _WORDS[text.strip().lower()]
        if kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return kind(text)
    except (ValueError, KeyError) as error:
        raise UsageError(f"{origin}: {text!r} is no value of {one.name}: {one.meaning}") from error


def _checked(one: SettingField, value: Any, origin: str) -> Any:
    """A value that has a type already."""
    kind, optional = _plain_kind(one.kind)
    if value is None and optional:
        return None
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is tuple and isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{origin}: {value!r} is no value of {one.name}: {one.meaning}")
    return value
