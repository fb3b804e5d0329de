"""What commands print: results on stdout, everything else on stderr, JSON where it is asked for."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport, parameter_text

RowT = TypeVar("RowT")

_PIPE_WIDTH = 150
"""Columns of a table that goes to a file or a pipe: wide enough that none is cut."""

_LINE_S = 30.0
"""Seconds between two lines of progress in a log."""

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the result as JSON to this file.")]

Report = Callable[[int, int], None]
"""Called with (done, total)."""


def stdout() -> Console:
    """Where results go."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, emoji=False)


def stderr() -> Console:
    """Where progress, warnings and errors go."""
    return Console(file=sys.stderr, highlight=False, emoji=False)


@dataclass(frozen=True, slots=True)
class Output:
    """How the result is shown and kept. Making one fails early if the file could never be written.

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
    """A bar with the time that remains, gone when it is done; where stderr is no terminal, a line each half minute."""
    console = stderr()
    if not console.is_terminal:
        yield _lines(description)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(description: str) -> Report:
    """For logs: how far it is, each `_LINE_S` seconds. What is done sooner leaves no line."""
    begun = said = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _LINE_S and done:
            said = now
            left = f", {_clock((now - begun) * (total - done) / done)} left" if total else ""
            stderr().print(f"{description}: {done} of {total or '?'}, {_clock(now - begun)} gone{left}", soft_wrap=True)

    return report


@contextmanager
def _still_going(description: str) -> Iterator[None]:
    """For logs: that it goes on, each `_LINE_S` seconds, said by a thread of its own."""
    ended, begun = Event(), time.monotonic()

    def say() -> None:
        while not ended.wait(_LINE_S):
            stderr().print(f"{description}: {_clock(time.monotonic() - begun)} gone", soft_wrap=True)

    saying = Thread(target=say, name="still-going", daemon=True)
    saying.start()
    try:
        yield
    finally:
        ended.set()
        saying.join()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def status(description: str) -> Iterator[None]:
    """A spinner while something of unknown length goes on; where stderr is no terminal, a line each half minute."""
    console = stderr()
    if not console.is_terminal:
        with _still_going(description):
            yield
        return
    with console.status(description):
        yield


def reuse_summary(report: ReuseReport) -> RenderableType:
    """What happened to the tokens and chunks of one prompt, and how long it took; reordered chunks with their rank."""
    rank = ("rank", lambda chunk: "" if chunk.rank is None else str(chunk.rank + 1))
    table = table_of(
        report.chunks,
        *([rank] if report.order != "original" else []),
        ("chunk", lambda chunk: escape(chunk.source)),
        ("KV source", lambda chunk: chunk.kv_source),
        ("tokens", lambda chunk: str(chunk.tokens)),
        ("recomputed", lambda chunk: str(chunk.recomputed_tokens)),
        ("tier", lambda chunk: chunk.tier or "-"),
    )
    return Group(token_line(report), table, times(report))


def token_line(report: ReuseReport) -> str:
    """One line: the method, why and how it was set, and tokens by KV source."""
    summary = [f"{name} {parameter_text(value)}" for name, value in report.parameters.items()]
    how = ", ".join([*summary, *([report.why] if report.why else [])])
    return (
        f"{report.method}{f' ({how})' if how else ''}: {report.prompt_tokens} tokens: "
        f"{report.prefix_exact_tokens} prefix-exact, {report.reused_tokens} reused, "
        f"{report.recomputed_tokens} recomputed, {report.computed_tokens} computed"
    )


def conversation_line(report: ReuseReport) -> str:
    """One line: what of a conversation was in the prompt already, and what was cut off it."""
    cut = f"; {report.turns_cut} turns cut off" if report.turns_cut else ""
    return (
        f"history {report.history_tokens} tokens; {report.chunks_not_sent} chunks ({report.tokens_not_sent} tokens) "
        f"not sent again{cut}"
    )


def times(report: ReuseReport) -> str:
    """One line: time to first token with its phases, and decoding."""
    return (
        f"first token after {seconds(report.ttft_s)} (lookup {seconds(report.lookup_s)}, "
        f"load {seconds(report.load_s)}, weave {seconds(report.weave_s)}); "
        f"{report.new_tokens} tokens, decoding {seconds(report.decode_s)}"
    )


def table_of(
    rows: Iterable[RowT],
    *columns: tuple[str, str | Callable[[RowT], str]],
    title: str | None = None,
    caption: str | None = None,
    left: int = 1,
    section: Callable[[RowT], object] = lambda _: None,
) -> Table:
    """One line a row, each column with its heading and what it says of a row, which is a text if it names a key.

    The first `left` columns are text, the others numbers. A rule ends rows that have a `section` in common.
    """
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for place, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="left" if place < left else "right", overflow="fold")
    for _, group in groupby(rows, key=section):
        for row in group:
            table.add_row(
                *(escape(str(cast(Any, row)[cell])) if isinstance(cell, str) else cell(row) for _, cell in columns)
            )
        table.add_section()
    return table


def seconds(value: float) -> str:
    """A duration with three significant digits: `1.23 s`, `45.6 ms`."""
    if value >= 1.0:
        return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"
    return f"{value * 1e3:.3g} ms"


def size(value: int | None) -> str:
    """Bytes in the unit that suits them: `1.2 GiB`."""
    if value is None:
        return "unknown"
    amount = float(value)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def check_writable(path: Path) -> None:
    """Find out before a long run whether its result can be written.

    Raises:
        UsageError: the folder does not exist or cannot be written to, or the path is a folder.
    """
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"cannot write to {path}: it is a folder")
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission")


def write_json(path: Path, data: object) -> None:
    """Write `data` as indented JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    write_text(path, to_json(data) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file; a reader sees the old one or the new one, never half of it.

    Raises:
        UsageError: the file cannot be written.
    """
    if path.exists() and not path.is_file():  # a pipe or /dev/stdout: nothing to replace
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def to_json(data: object) -> str:
    """JSON as the command line prints and writes it."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
