"""`chunkweave serve`, `vllm-serve`, `config` and `keys`: the servers, their settings and their API keys."""

import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from chunkweave.cli.console import Json, Out, Output, ProgressLines, counted, stderr, table_of
from chunkweave.cli.options import (
    SET,
    as_command,
    given_settings,
    heading,
    how_to_set,
    option_parameters,
    warn,
    with_blocks,
)
from chunkweave.config import Backend
from chunkweave.errors import UsageError, install_extra, unknown_names
from chunkweave.settings import settings_of
from chunkweave.store.shared_folder import require_writable
from chunkweave_server.settings import (
    FILE_VARIABLE,
    GROUPS,
    KEYS_VARIABLE,
    Resolved,
    Settings,
    resolve,
    server_settings,
    unused_variables,
)

if TYPE_CHECKING:
    from chunkweave_server.service import OnStage

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar=FILE_VARIABLE, help="TOML or YAML file of settings.", dir_okay=False),
]


FLAGS = frozenset(
    (
        *("model", "adapter", "shape", "device", "dtype", "weights", "threads", "backend", "served_model_name"),
        *("method_file", "method", "quality", "order", "find_chunks", "improve_share"),
        *("host_budget", "device_budget", "cache_dir", "disk_budget", "remote_url", "codec", "policy"),
        *("max_num_seqs", "max_num_batched_tokens", "kv_tokens", "replicas", "upstream", "replica_env"),
        *("host", "port", "keys_file", "allow_anonymous", "allowed_hosts", "corpus", "data_dir"),
        *("max_documents", "ordering"),
    )
)
"""Settings with a flag; the others are given by `--set`, in the environment or in the file."""


def with_settings(
    command: Callable[..., None],
    backend: Backend | None = None,
    *,
    without: Collection[str] = (),
    example: str = "",
) -> Callable[..., None]:
    """`command` for Typer, with `--config`, a flag for each of `FLAGS`, and `--set`; called with `resolved` settings.

    The command's own parameters follow and must be keyword-only. `backend` is the only backend of the command, if it
    has just one. Settings in `without` cannot be set: the command has its own parameters for them. The help begins with
    the `example`.
    """
    own_parameters = [
        parameter for name, parameter in inspect.signature(command).parameters.items() if name != "resolved"
    ]
    options = [inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)]
    settings = {name: setting for name, setting in server_settings(backend).items() if name not in without}
    for group in GROUPS.values():
        named = [settings[name] for name in settings_of(group) if name in FLAGS & settings.keys()]
        options += option_parameters(named, heading(group))

    def call(**values: Any) -> None:
        file = values.pop("config")
        resolved = resolve(given_settings(settings, values), os.environ, file, backend=backend)
        for variable in unused_variables(os.environ, resolved.settings.model.backend):
            warn(f"{variable} is not a setting here and is ignored.")
        command(**values, resolved=resolved)

    return as_command(call, command, [*options, SET, *own_parameters], settings, example)


_NEEDED = {
    Backend.ENGINE: ("fastapi", "uvicorn", "python_multipart", "prometheus_client"),
    Backend.VLLM: ("fastapi", "uvicorn", "httpx", "prometheus_client"),
}


def _serve(*, resolved: Resolved, ctx: typer.Context) -> None:
    """Serve answers over documents and corpora with an OpenAI-compatible API.

    Settings come from the command line, then the environment (CHUNKWEAVE_<NAME>), then the file, then defaults;
    `chunkweave config show` prints the sources. With --backend vllm, flags not listed here are passed to vLLM. Stop it
    with Ctrl-C or SIGTERM; running answers may finish.
    """
    model = resolved.settings.model
    if model.backend is Backend.ENGINE and ctx.args:
        options = [f"--{name.replace('_', '-')}" for name in FLAGS]
        _refuse_settings(ctx.args, Backend.ENGINE)
        raise UsageError(f"no such option: {unknown_names([ctx.args[0].partition('=')[0]], options)}")
    if model.model is None and (model.shape is None or model.backend is Backend.VLLM):
        raise UsageError("no model: give --model smollm2, FOLDER, FILE.gguf or a hub name")
    _run(resolved.settings, model.model or "", ctx.args)


def _vllm_serve(
    *,
    resolved: Resolved,
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder, GGUF file, hub name, `smollm2`, or `reader`, bundled for tests.")
    ],
) -> None:
    """Serve MODEL with vLLM behind a front for documents, chunk order, conversations and routing.

    The same as `serve --backend vllm`. Flags not listed here are passed to vLLM: chunkweave vllm-serve MODEL
    --max-model-len 8192.
    """
    _run(resolved.settings, model, ctx.args)


def _refuse_settings(arguments: Sequence[str], backend: Backend) -> None:
    """Refuse flags that would be settings; others may be vLLM's.

    Raises:
        UsageError: there is one; the message says how to set it.
    """
    for argument in arguments:
        if argument.startswith("--") and (how := how_to_set(argument, server_settings(backend))):
            raise UsageError(how)


def _run(settings: Settings, model: str, vllm_flags: Sequence[str]) -> None:
    vllm = settings.model.backend is Backend.VLLM
    _refuse_settings(vllm_flags, settings.model.backend)
    if (folder := settings.store.cache_dir) is not None and not settings.fleet.upstream:
        require_writable(folder.expanduser() if vllm else folder)
    if missing := [name for name in _NEEDED[settings.model.backend] if find_spec(name) is None]:
        extras = "server,vllm" if vllm else "server"
        raise UsageError(f"{', '.join(missing)} is not installed: {install_extra(extras)}")
    if vllm and not settings.fleet.upstream and find_spec("vllm") is None:
        raise UsageError(f"vLLM is not installed here: {install_extra('vllm')}, or give --upstream URL")
    from chunkweave_server.app import listening_socket, run
    from chunkweave_server.observability import configure_logging
    from chunkweave_server.service import Service, make_backend
    from chunkweave_server.tenants import read_keys

    console = stderr()
    keys = read_keys(settings.listen.keys_file, os.environ.get(KEYS_VARIABLE, ""))
    os.environ.pop(KEYS_VARIABLE, None)
    service = Service(settings, make_backend(settings, model, vllm_flags), keys)
    name = f"[bold]{escape(service.backend.name)}[/bold]" + (" with vLLM" if vllm else "")
    sock = listening_socket(settings.listen)
    host, port = sock.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    access = counted(len(keys), "API key") if len(keys) else "without API keys: anyone who can reach it can use it"
    starting = "" if settings.fleet.upstream else ": this takes a minute or more; its own log lines follow"
    service.on_stage = _stage_lines(f"chunkweave serves {name} on {where}, {access}", where, starting)
    configure_logging(settings.watch.log_form, settings.watch.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    run(service, sock)
    console.print("stopped")


def _stage_lines(serves: str, where: str, starting_vllm: str) -> "OnStage":
    """A callback that prints a line for each stage, and the elapsed time of stages that take long without output.

    It prints `serves` when the model is loaded, and appends `starting_vllm` to the stage in which vLLM's servers start.
    """
    from chunkweave_server.backend import Stage

    console = stderr()
    waiting = ExitStack()
    more = {Stage.STARTING_VLLM: starting_vllm, Stage.READY: f": {where}/v1 for clients, {where}/ for a browser"}

    def show(stage: Stage, seconds: float) -> None:
        waiting.close()
        if stage is Stage.OPENING_CORPORA:
            console.print(serves, soft_wrap=True)
        console.print(f"{seconds:7.2f} s  {stage}{more.get(stage, '')}", soft_wrap=True)
        if stage in (Stage.LOADING_MODEL, Stage.OPENING_CORPORA):
            waiting.enter_context(ProgressLines(str(stage)))

    return show


serve = with_settings(_serve, example="chunkweave serve --model smollm2")
vllm_serve = with_settings(
    _vllm_serve,
    Backend.VLLM,
    without=("model", "backend"),
    example="chunkweave vllm-serve MODEL --host-budget 16GiB --method cacheblend",
)

serve_app = typer.Typer()
vllm_serve_app = typer.Typer()
_FOR_VLLM = {"allow_extra_args": True, "ignore_unknown_options": True}
serve_app.command("serve", context_settings=_FOR_VLLM, short_help=serve.summary)(serve)  # type: ignore[attr-defined]
vllm_serve_app.command("vllm-serve", context_settings=_FOR_VLLM, short_help=vllm_serve.summary)(vllm_serve)  # type: ignore[attr-defined]


config_app = typer.Typer(no_args_is_help=True, help="Show the settings of `chunkweave serve` and their sources.")


@config_app.command("show")
@with_settings
def show(*, resolved: Resolved, json: Json = False, out: Out = None) -> None:
    """Show every setting with its value and the value's source; secrets are masked."""
    output = Output(json, out)
    rows = resolved.rows()
    keys = os.environ.get(KEYS_VARIABLE)
    rows.append(
        {
            "name": "api_keys",
            "value": "***" if keys else None,
            "origin": KEYS_VARIABLE if keys else "default",
            "meaning": "API keys in plain text, TENANT=KEY separated by commas; only from the environment.",
        }
    )
    output.show(table_of(rows, ("setting", "name"), ("value", _shown_value), ("from", _shown_origin), left=3))
    output.finish({"settings": rows})


def _shown_value(row: Mapping[str, Any]) -> str:
    value = row["value"]
    return escape("" if value in (None, []) else ", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _shown_origin(row: Mapping[str, Any]) -> str:
    origin = str(row["origin"])
    return origin if origin == "default" else f"[bold]{escape(origin)}[/bold]"


@config_app.callback()
def _config_group() -> None:
    """Make this a command group, although it has only one command."""


keys_app = typer.Typer(no_args_is_help=True, help="Make API keys for `chunkweave serve`.")


@keys_app.command()
@with_blocks
def new(
    tenant: Annotated[str, typer.Argument(help="Tenant of the key: letters, digits, - and _.")],
    file: Annotated[
        Path | None, typer.Option("--file", help="Append the hash to this keys file; else print it.", dir_okay=False)
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="The tenant may see and clear data of all tenants.")] = False,
    *,
    output: Output,
) -> None:
    """Make a key. It is shown once; the keys file has only its hash."""
    from chunkweave_server.tenants import StoredKey, Tenant, add_to_file, new_key

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
    """Make this a command group, although it has only one command."""
