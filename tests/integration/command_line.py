"""Calls the command line inside the test's own process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from chunkweave.cli.app import app


def invoke(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def succeed(*arguments: object, stdin: str | None = None) -> Result:
    """The result of a command that has to succeed."""
    result = invoke(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def json_of(*arguments: object, code: int = 0) -> Any:
    """What a command that ends with `code` prints with `--json`."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def refusal(*arguments: object, code: int = 2, stdin: str | None = None) -> str:
    """What a command that has to end with `code` says on stderr, in one line."""
    result = invoke(*arguments, stdin=stdin)
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.split())


def text_files(folder: Path, texts: Mapping[str, str]) -> Path:
    """A folder with a file of each name and text."""
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
