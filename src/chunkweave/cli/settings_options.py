"""Every setting of the server as an option of a command."""

import inspect
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union, get_origin

import typer

from chunkweave.cli.console import stderr
from chunkweave.server.settings import SettingField, Settings, setting_fields
from chunkweave.server.settings_sources import FILE_VARIABLE, resolve_as, unused_variables

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar=FILE_VARIABLE, help="TOML or YAML file of settings.", dir_okay=False),
]


def with_settings(command: Callable[..., None], whole: type[Any] = Settings) -> Callable[..., None]:
    """`command` as Typer is to see it: `--config` and an option for each setting; it is called with `resolved`.

    Its own parameters come after these, and must be keyword-only. `whole` is the class of the settings.
    """
    own = [one for name, one in inspect.signature(command).parameters.items() if name != "resolved"]
    shown = [inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)]
    names = [one.name for one in setting_fields(whole)]
    shown += [_parameter(one) for one in setting_fields(whole)]

    def call(**values: Any) -> None:
        file = values.pop("config")
        flags = {name: _given(values.pop(name)) for name in names}
        resolved = resolve_as(whole, flags, os.environ, file)
        for variable in unused_variables(os.environ, whole):
            stderr().print(f"[yellow]{variable} is no setting: it is not used.[/yellow]")
        command(**values, resolved=resolved)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature([*shown, *own])  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in (*shown, *own)}
    return call


def _given(value: Any) -> Any:
    """None for a repeatable option that was not given."""
    return None if value == [] else value


def _parameter(one: SettingField) -> inspect.Parameter:
    """An option that says nothing unless it is given: the default is that of the other sources."""
    default = " ".join(one.default) if isinstance(one.default, tuple) else one.default
    shown = str(default) if default not in (None, "", False) else False
    option = typer.Option(f"--{one.name.replace('_', '-')}", help=one.meaning, show_default=shown)
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[_option_kind(one.kind), option]
    )


def _option_kind(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return kind
    return (list[str] if get_origin(kind) is tuple else kind) | None
