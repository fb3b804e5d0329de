"""`chunkweave config`: what the server would be told."""

import os

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.cli.console import Json, Out, Output
from chunkweave.cli.settings_options import with_settings
from chunkweave.server.settings import Settings
from chunkweave.server.settings_sources import KEYS_VARIABLE, Resolved

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
