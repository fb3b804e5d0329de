"""`chunkweave serve`, `vllm-serve`, `config` and `keys`: the servers, their settings and their API keys."""

import inspect
import logging
import os
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Union, get_origin

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.cli.console import Json, Out, Output, stderr
from chunkweave.errors import UsageError
from chunkweave.server.settings import (
    FILE_VARIABLE,
    KEYS_VARIABLE,
    FrontSettings,
    LogForm,
    Resolved,
    SettingField,
    Settings,
    resolve_as,
    setting_fields,
    unused_variables,
)

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


_NEEDED = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")


@with_settings
def serve(*, resolved: Resolved[Settings]) -> None:
    """Serve answers over documents and corpora, as OpenAI's clients ask for them.

    Settings come from flags, else the environment (CHUNKWEAVE_<NAME>), else the file, else their defaults;
    `chunkweave config show` says which. Stop it with Ctrl-C or SIGTERM: answers that run get to end.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UsageError(f"{', '.join(missing)} is not installed: pip install 'chunkweave[server]'")
    settings = resolved.settings
    if settings.model.model is None and settings.model.shape is None:
        raise UsageError("which model? give --model FOLDER, or --model reader for the bundled one")
    from chunkweave.server.auth import read_keys
    from chunkweave.server.observability import configure_logging
    from chunkweave.server.run import listening_socket, run
    from chunkweave.server.service import Service, Stage

    console = stderr()
    keys = read_keys(settings.listen.keys_file, os.environ.get(KEYS_VARIABLE, ""))
    os.environ.pop(KEYS_VARIABLE, None)
    service = Service(settings, keys)
    sock = listening_socket(settings.listen)
    host, port = sock.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def show(stage: Stage, seconds: float) -> None:
        console.print(f"{seconds:7.2f} s  {stage}" + (f": {where}/v1" if stage is Stage.READY else ""), soft_wrap=True)

    service.on_stage = show
    access = f"{len(keys)} API keys" if len(keys) else "no API keys: everybody who reaches it may use it"
    console.print(f"chunkweave serves [bold]{settings.model.name}[/bold] on {where}, {access}", soft_wrap=True)
    configure_logging(LogForm(settings.watch.log_form), settings.watch.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    run(service, sock)
    console.print("stopped")


_NEEDED_FOR_VLLM = ("fastapi", "uvicorn", "httpx", "prometheus_client")


def _vllm_serve(
    *,
    resolved: Resolved[FrontSettings],
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint folder, hub name, or `reader`, the bundled model.")],
) -> None:
    """Serve MODEL with vLLM, and documents, orders, conversations and routes before it.

    Every flag that is not listed here goes to vLLM as it is: chunkweave vllm-serve MODEL --max-model-len 8192.
    """
    settings = resolved.settings
    if missing := [name for name in _NEEDED_FOR_VLLM if find_spec(name) is None]:
        raise UsageError(f"{', '.join(missing)} is not installed: pip install 'chunkweave[server,vllm]'")
    if not settings.fleet.upstream and find_spec("vllm") is None:
        raise UsageError("vLLM is not installed here: pip install 'chunkweave[vllm]', or give --upstream URL")
    from chunkweave.server.auth import read_keys
    from chunkweave.server.observability import configure_logging
    from chunkweave.server.run import listening_socket, run_app
    from chunkweave.server.service import Stage
    from chunkweave.server.vllm_backend.app import create_front
    from chunkweave.server.vllm_backend.process import VllmFlags
    from chunkweave.server.vllm_backend.service import FrontService

    console = stderr()
    keys = read_keys(settings.listen.keys_file, os.environ.get(KEYS_VARIABLE, ""))
    os.environ.pop(KEYS_VARIABLE, None)
    flags = VllmFlags(model, tuple(ctx.args))
    service = FrontService(settings, flags, keys)
    sock = listening_socket(settings.listen)
    host, port = sock.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def show(stage: Stage, seconds: float) -> None:
        console.print(f"{seconds:7.2f} s  {stage}" + (f": {where}/v1" if stage is Stage.READY else ""), soft_wrap=True)

    service.on_stage = show
    access = f"{len(keys)} API keys" if len(keys) else "no API keys: everybody who reaches it may use it"
    console.print(f"chunkweave serves [bold]{flags.name}[/bold] with vLLM on {where}, {access}", soft_wrap=True)
    configure_logging(LogForm(settings.watch.log_form), settings.watch.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    run_app(service, create_front(service), settings.listen, sock)
    console.print("stopped")


vllm_serve = with_settings(_vllm_serve, FrontSettings)


config_app = typer.Typer(no_args_is_help=True, help="Show what `chunkweave serve` would be told, and by what.")


@config_app.command("show")
@with_settings
def show(*, resolved: Resolved[Settings], json: Json = False, out: Out = None) -> None:
    """Show every setting, its value and where that comes from; secrets are masked."""
    output = Output(json, out)
    rows = resolved.rows()
    keys = os.environ.get(KEYS_VARIABLE)
    rows.append(
        {
            "name": "api_keys",
            "value": "***" if keys else None,
            "origin": KEYS_VARIABLE if keys else "default",
            "meaning": "API keys as they are, TENANT=KEY separated by commas; only from the environment.",
        }
    )
    table = Table(title_justify="left")
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for row in rows:
        value = row["value"]
        told = "" if value in (None, []) else ", ".join(value) if isinstance(value, list) else str(value)
        origin = str(row["origin"])
        table.add_row(
            str(row["name"]), escape(told), origin if origin == "default" else f"[bold]{escape(origin)}[/bold]"
        )
    output.show(table)
    output.finish({"settings": rows})


@config_app.callback()
def _config_group() -> None:
    """A group, though it has one command."""


keys_app = typer.Typer(no_args_is_help=True, help="Make API keys for `chunkweave serve`.")


@keys_app.command()
def new(
    tenant: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, - and _.")],
    file: Annotated[
        Path | None, typer.Option("--file", help="Add the hash to this keys file; printed if left out.", dir_okay=False)
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May look at and empty what all tenants share.")] = False,
    json: Json = False,
    out: Out = None,
) -> None:
    """Make a key. It is shown once: the keys file has its hash only."""
    output = Output(json, out)
    from chunkweave.server.auth import StoredKey, Tenant, add_to_file, new_key

    key = new_key()
    stored = StoredKey.of(Tenant(tenant, admin), key)
    if file is not None:
        add_to_file(file, stored)
        output.show(f"key of {tenant}, shown only now: {key}")
    else:
        output.show(f"key of {tenant}, shown only now: {key}", f"line for the keys file: {stored.line}")
    output.finish({"tenant": tenant, "admin": admin, "key": key, "line": stored.line})


@keys_app.callback()
def _keys_group() -> None:
    """A group, though it has one command."""
