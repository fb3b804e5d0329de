"""Calls the command line inside the test's own process."""

from typer.testing import CliRunner, Result

from chunkweave.cli.app import app


def invoke(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
