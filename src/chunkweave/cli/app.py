"""The `chunkweave` command: its groups, its exit codes, and where its logs go."""

import logging
import os
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from rich.markup import escape

import chunkweave
from chunkweave.cli import bench, cache, corpus, running_server
from chunkweave.cli.adapt import adapt
from chunkweave.cli.ask import ask
from chunkweave.cli.cache_changes import clear, export, pin, unpin, warm
from chunkweave.cli.calibrate import calibrate
from chunkweave.cli.chat import chat
from chunkweave.cli.console import stderr
from chunkweave.cli.corpus import ingest
from chunkweave.cli.demo import demo
from chunkweave.cli.fidelity import fidelity
from chunkweave.cli.models import models
from chunkweave.cli.profile import advise, profile
from chunkweave.cli.quality import quality
from chunkweave.cli.serve import config_app, keys_app, serve, vllm_serve
from chunkweave.cli.traces import analyze, simulate
from chunkweave.errors import ChunkweaveError, UsageError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_SHAPE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "192", "LRU_CACHE_CAPACITY": "192"}
"""On CPUs oneDNN compiles each bfloat16 product anew for every number of tokens, and it and PyTorch keep 1024 of them
each: some 700 MB of a server whose prompts are of all lengths. So many are those of a step, attention and decoding.
"""


class _Commands(typer.core.TyperGroup):
    """Turns the library's errors into a line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            Exit: it failed in a way that has an exit code.
        """
        try:
            return super().invoke(ctx)
        except ChunkweaveError as error:
            stderr().print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="RAG answers that start sooner: reuse the KV cache of every retrieved chunk, in any order and combination.",
)
_ASK, _SERVE, _KEEP, _MEASURE, _MODELS = "Ask", "Serve", "Keep documents and KV", "Measure", "Models"
_FOR_VLLM = {"allow_extra_args": True, "ignore_unknown_options": True}
for asking in (ask, chat, demo):
    app.command(rich_help_panel=_ASK)(asking)
app.command("serve", context_settings=_FOR_VLLM, rich_help_panel=_SERVE)(serve)
app.command("vllm-serve", context_settings=_FOR_VLLM, rich_help_panel=_SERVE)(vllm_serve)
app.command(rich_help_panel=_SERVE)(running_server.status)
app.command(rich_help_panel=_KEEP)(ingest)
for measuring in (profile, advise, simulate, analyze):
    app.command(rich_help_panel=_MEASURE)(measuring)
for about_models in (models, calibrate, adapt):
    app.command(rich_help_panel=_MODELS)(about_models)
bench.app.command()(quality)
bench.app.command()(fidelity)
for change in (clear, warm, pin, unpin, export):
    cache.app.command()(change)
app.add_typer(running_server.app, name="server", rich_help_panel=_SERVE)
app.add_typer(config_app, name="config", rich_help_panel=_SERVE)
app.add_typer(keys_app, name="keys", rich_help_panel=_SERVE)
app.add_typer(corpus.app, name="corpus", rich_help_panel=_KEEP)
app.add_typer(cache.app, name="cache", rich_help_panel=_KEEP)
app.add_typer(bench.app, name="bench", rich_help_panel=_MEASURE)


def _show_version(asked: bool) -> None:
    if asked:
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
    logging.getLogger("chunkweave").setLevel(logging.DEBUG if verbose else logging.WARNING)


def main() -> None:
    """Entry point: exits with 0, 1 (failure), 2 (usage) or 130 (Ctrl-C)."""
    for variable, entries in _SHAPE_CACHES.items():  # read when the first product is computed
        os.environ.setdefault(variable, entries)
    app()
