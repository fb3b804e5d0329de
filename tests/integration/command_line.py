"""Calls the command line inside the test's own process."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from chunkweave.cli.app import app


def invoke(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def json_of(*arguments: object) -> Any:
    """What a command that succeeds prints with `--json`."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
