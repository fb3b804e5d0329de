"""`chunkweave keys`: API keys for the server."""

from pathlib import Path
from typing import Annotated

import typer

from chunkweave.cli.console import Json, Out, Output

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
    from chunkweave.server.keys import StoredKey, Tenant, add_to_file, new_key

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
