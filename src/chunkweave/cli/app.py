"""The `chunkweave` command: its groups, its exit codes, and where its logs go."""

import logging
import os
from functools import cache as cache_results
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from rich.markup import escape

import chunkweave
from chunkweave.cli import bench, cache, corpus, running_server
from chunkweave.cli.ask import ask
from chunkweave.cli.calibrate import calibrate
from chunkweave.cli.chat import chat
from chunkweave.cli.console import stderr
from chunkweave.cli.corpus import ingest
from chunkweave.cli.demo import demo
from chunkweave.cli.models import models
from chunkweave.cli.options import how_to_set
from chunkweave.cli.vllm_check import vllm_check
from chunkweave.errors import ChunkweaveError, UsageError, install_extra

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_SHAPE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "192", "LRU_CACHE_CAPACITY": "192"}
"""Most entries in the caches of compiled CPU products, which oneDNN makes for each number of tokens in bfloat16.

oneDNN and PyTorch keep 1024 of them each by default: about 700 MB in a server with prompts of all lengths. 192 are
enough for a step's products, attention and decoding.
"""

_WAITING = {"GOMP_SPINCOUNT": "30000"}
"""How long a thread spins while it waits for the others of its product, before it sleeps.

By default ten times as long: where another process has a thread's core, decoding then takes up to twice as long. Where
no other process runs, sleeping at once makes decoding half as slow again.
"""


_COMMANDS = "chunkweave.commands"
"""Entry points of commands in other packages: `name = "module:function"`, or a Typer app."""


class _Commands(typer.core.TyperGroup):
    """Finds other packages' commands when they are called, and turns errors into a line on stderr and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Own commands, then those of other packages."""
        return [*super().list_commands(ctx), *_panels_elsewhere()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name. Its module is imported on this call."""
        command = super().get_command(ctx, cmd_name)
        return _command_elsewhere(cmd_name) if command is None and cmd_name in _panels_elsewhere() else command

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            Exit: the command failed or was interrupted.
        """
        try:
            return super().invoke(ctx)
        except ChunkweaveError as error:
            _print_error(str(error))
            raise typer.Exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except Exception as error:
            how = _how_to_set(error)
            if not how:
                raise
            _print_error(how)
            raise typer.Exit(EXIT_USAGE) from error


def _print_error(message: str) -> None:
    stderr().print(f"[bold red]error:[/bold red] {escape(message)}", soft_wrap=True)


def _how_to_set(error: Exception) -> str:
    """What to write instead of an unknown flag of a command that takes settings; "" for all other errors."""
    if type(error).__name__ != "NoSuchOption":  # of click, or of the copy of click that Typer has
        return ""
    command: Any = error.ctx.command  # type: ignore[attr-defined]
    return how_to_set(error.option_name, getattr(command.callback, "settings", {}))  # type: ignore[attr-defined]


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # inherited by every command
    pretty_exceptions_show_locals=False,
    help="RAG answers that start sooner: reuse the KV cache of every retrieved chunk, in any order and combination.",
)
_FLAGS_OF_OTHERS = {"allow_extra_args": True, "ignore_unknown_options": True}
_ASK = "Ask"
_SERVE = "Serve"
_KEEP = "Keep documents and KV"
_MEASURE = "Measure"
_MODELS = "Models"
for asking in (ask, chat, demo):
    app.command(rich_help_panel=_ASK, short_help=asking.summary)(asking)  # type: ignore[attr-defined]
app.command(rich_help_panel=_SERVE)(running_server.status)
app.command("vllm-check", rich_help_panel=_SERVE, context_settings=_FLAGS_OF_OTHERS)(vllm_check)
app.command(rich_help_panel=_KEEP)(ingest)
for about_models in (models, calibrate):
    app.command(rich_help_panel=_MODELS)(about_models)
app.add_typer(running_server.app, name="server", rich_help_panel=_SERVE)
app.add_typer(corpus.app, name="corpus", rich_help_panel=_KEEP)
app.add_typer(cache.app, name="cache", rich_help_panel=_KEEP)
app.add_typer(bench.app, name="bench", rich_help_panel=_MEASURE)

_OF_SERVER = ("serve", "vllm-serve", "config", "keys")


def _panels_elsewhere() -> dict[str, str]:
    """Commands of other packages with their group in the help: the server's always, others if they are installed."""
    installed = dict.fromkeys((entry.name for entry in entry_points(group=_COMMANDS)), _MEASURE)
    return installed | dict.fromkeys(_OF_SERVER, _SERVE)


@cache_results
def _command_elsewhere(name: str) -> Any:
    """The command of another package; for a command of the server that is missing, how to install it."""
    try:
        (entry,) = entry_points(group=_COMMANDS, name=name)
        loaded = entry.load()
    except (ImportError, ValueError) as error:
        loaded = _missing(name, error)
    if not isinstance(loaded, typer.Typer):
        alone = typer.Typer()
        alone.command(name)(loaded)
        loaded = alone
    loaded._add_completion = False  # `chunkweave` itself has it
    command = typer.main.get_command(loaded)
    command.name, command.rich_help_panel = name, _panels_elsewhere()[name]  # type: ignore[attr-defined]
    return command


def _missing(name: str, error: Exception) -> typer.Typer:
    """A command that accepts any arguments, and fails with the way to install it."""
    app = typer.Typer()

    how = f"not installed: {install_extra('server')}"

    @app.command(name, help=escape(how), context_settings=_FLAGS_OF_OTHERS)
    def fail() -> None:
        raise UsageError(f"`chunkweave {name}` is {how}") from error

    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chunkweave {chunkweave.__version__}")
        raise typer.Exit


@app.callback()
def _configure(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library does.")] = False,
) -> None:
    handler = RichHandler(console=stderr(), show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    for package in ("chunkweave", "chunkweave_server"):
        logging.getLogger(package).setLevel(logging.DEBUG if verbose else logging.WARNING)


def main() -> None:
    """Entry point: exits with 0, 1 (failure), 2 (usage) or 130 (Ctrl-C)."""
    for variable, value in {**_SHAPE_CACHES, **_WAITING}.items():  # read when PyTorch is loaded, or computes first
        os.environ.setdefault(variable, value)
    app()
