"""What the programs of this folder share: where their result goes, what is kept with it, and tables on the terminal."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs_tables import update_page
from rich.console import Console
from rich.table import Table

from chunkweave_lab.results import BenchmarkResult, check_writable, write_json

_PLACES = ("out", "update_docs")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line, with `--out` and `--update-docs` beside what the program takes.

    Raises:
        UsageError: the result could not be written; better before measuring than after it.
    """
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument("--update-docs", type=Path, metavar="PAGE", help="make the page's tables of the result anew")
    arguments = parser.parse_args(argv)
    if arguments.out is not None:
        check_writable(arguments.out)
    return arguments


def settings(arguments: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """What was asked for, without where the result goes, and without what is `left_out`."""
    return {name: value for name, value in vars(arguments).items() if name not in (*_PLACES, *left_out)}


def write(
    benchmark: str,
    arguments: argparse.Namespace,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    more: dict[str, Any] | None = None,
    *,
    complete: bool = True,
) -> None:
    """Write the result of a program to `--out`, if that is given; a complete one also makes its page's tables anew.

    Raises:
        UsageError: the file cannot be written, or there is none for the page.
        DocumentError: the page has no place for the tables.
    """
    if arguments.out is not None:
        command = shlex.join(["python", *sys.argv])
        seed = getattr(arguments, "seed", 0)  # some draw nothing
        result = BenchmarkResult(benchmark, command, seed, config, rows, more or {}, complete)
        write_json(arguments.out, result.as_dict())
    if complete and arguments.update_docs is not None:
        update_page(arguments.update_docs, arguments.out)


def show(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a table whose first column is text and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)
