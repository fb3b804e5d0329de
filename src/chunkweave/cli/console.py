"""Results on stdout, everything else on stderr, and JSON where it is asked for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from chunkweave.eval.results import check_writable, to_json, write_json

_PIPE_WIDTH = 150
"""Columns of a table that goes to a file or a pipe: wide enough that none is cut."""

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the result as JSON to this file.")]

Report = Callable[[int, int], None]
"""Called with (done, total)."""


def stdout() -> Console:
    """Where results go."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def stderr() -> Console:
    """Where progress, warnings and errors go."""
    return Console(file=sys.stderr, highlight=False)


@dataclass(frozen=True, slots=True)
class Output:
    """What `--json` and `--out` ask for. Making one fails early if the file could never be written.

    Raises:
        UsageError: the folder of `out` does not exist or cannot be written to.
    """

    json: Json = False
    out: Out = None

    def __post_init__(self) -> None:
        if self.out is not None:
            check_writable(self.out)

    def show(self, *renderables: RenderableType) -> None:
        """Print for people, unless JSON is asked for."""
        if not self.json:
            stdout().print(*renderables, sep="\n")

    def show_text(self, text: str) -> None:
        """Print a piece of running text exactly as it is, at once, unless JSON is asked for."""
        if not self.json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def finish(self, data: dict[str, Any]) -> None:
        """Write the whole result to the file, and print it if JSON is asked for."""
        self.save(data)
        if self.json:
            sys.stdout.write(to_json(data) + "\n")

    def save(self, data: dict[str, Any]) -> None:
        """Write what there is so far to the file, if there is one."""
        if self.out is not None:
            write_json(self.out, data)


@contextmanager
def progress(description: str) -> Iterator[Report]:
    """A bar with the time that remains, gone when it is done; nothing where stderr is no terminal."""
    console = stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def status(description: str) -> Iterator[None]:
    """A spinner while something of unknown length goes on; nothing where stderr is no terminal."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(description):
        yield
