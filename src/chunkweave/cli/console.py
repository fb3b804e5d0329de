"""Output of commands: results on stdout, everything else on stderr, JSON on request."""

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
from typing import Annotated, Any, Self, TypeVar, cast

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.store.shared_folder import replace_file

RowT = TypeVar("RowT")

_PIPE_WIDTH = 150
"""Width of a table that goes to a file or a pipe, in characters: wide enough that no cell is cut."""

_CELL_FRAME = 3
"""Characters that a cell takes besides its text: padding on both sides, and a border."""

_UNBOUNDED = 10_000

_FIRST_S = 5.0
_LINE_S = 30.0
"""Seconds until the first progress line in a log, and between later ones."""

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the result as JSON to this file.")]

Report = Callable[[int, int], None]
"""Called with (done, total)."""


def stdout() -> Console:
    """The console for results."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, emoji=False)


def stderr() -> Console:
    """The console for progress, warnings and errors."""
    return Console(file=sys.stderr, highlight=False, emoji=False)


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a command: text or JSON on stdout, and a file. The constructor fails early if it cannot be written.

    Raises:
        UsageError: the folder of `out` does not exist or cannot be written to.
    """

    json: Json = False
    out: Out = None

    def __post_init__(self) -> None:
        if self.out is not None:
            check_writable(self.out)

    def show(self, *renderables: RenderableType) -> None:
        """Print for people, unless `json` is set."""
        if not self.json:
            stdout().print(*renderables, sep="\n")

    def show_text(self, text: str) -> None:
        """Print a piece of running text unchanged and at once, unless `json` is set."""
        if not self.json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def finish(self, data: dict[str, Any]) -> None:
        """Write the whole result to the file, and print it as JSON if `json` is set."""
        self.save(data)
        if self.json:
            sys.stdout.write(to_json(data) + "\n")

    def save(self, data: dict[str, Any]) -> None:
        """Write a result, perhaps a partial one, to the file if there is one."""
        if self.out is not None:
            write_json(self.out, data)


@contextmanager
def progress(description: str) -> Iterator[Report]:
    """A bar with the remaining time, removed at the end; lines (`ProgressLines`) if stderr is not a terminal."""
    console = stderr()
    if not console.is_terminal:
        with ProgressLines(description) as lines:
            yield lines.report
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


class ProgressLines:
    """Lines of progress for logs: the first after `_FIRST_S` seconds, then one every `_LINE_S` seconds.

    A thread writes them, so that a long first step is not silent. Work that ends sooner writes no line.
    """

    def __init__(self, description: str) -> None:
        self._description = description
        self._done = self._total = 0
        self._begun_s = time.monotonic()
        self._ended = Event()
        self._writer = Thread(target=self._write, name="progress-lines", daemon=True)

    def __enter__(self) -> Self:
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._writer.join()

    def report(self, done: int, total: int) -> None:
        """Set the progress: `done` of `total`."""
        self._done, self._total = done, total

    def line(self, now_s: float) -> str:
        """The line for a log at `now_s`, by `time.monotonic`."""
        done = self._done
        total = self._total
        taken_s = now_s - self._begun_s
        words = [f"{done:,} of {total:,}"] if total else [f"{done:,}"] if done else []
        words.append(f"{_clock(taken_s)} so far")
        if done and total:
            words.append(f"about {_clock(taken_s * (total - done) / done)} left")
        return f"{self._description}: {', '.join(words)}"

    def _write(self) -> None:
        pause_s = _FIRST_S
        while not self._ended.wait(pause_s):
            stderr().print(self.line(time.monotonic()), soft_wrap=True, markup=False)
            pause_s = _LINE_S


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def status(description: str) -> Iterator[None]:
    """A spinner for work of unknown length; lines (`ProgressLines`) if stderr is not a terminal."""
    console = stderr()
    if console.is_terminal:
        with console.status(description):
            yield
    else:
        with ProgressLines(description):
            yield


def reuse_summary(report: ReuseReport) -> RenderableType:
    """Tokens, chunks and times of a report; reordered chunks with their rank."""
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
    """One line: what the method amounted to, why it was chosen, and tokens by KV source."""
    note = f"`{report.method}` found nothing to reuse" if report.effective_method != report.method else ""
    how = ", ".join(filter(None, (note, report.why)))
    return (
        f"{report.effective_method}{f' ({how})' if how else ''}: {report.prompt_tokens} tokens: "
        f"{report.prefix_exact_tokens} prefix-exact, {report.reused_tokens} reused, "
        f"{report.recomputed_tokens} recomputed, {report.computed_tokens} computed"
    )


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "segment"), counted(0, "segment"), counted(2933, "chunk")
    ('1 segment', '0 segments', '2,933 chunks')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def conversation_line(report: ReuseReport) -> str:
    """One line: history of a conversation, and chunks that were not sent again."""
    return (
        f"history {counted(report.history_tokens, 'token')}; {counted(report.chunks_not_sent, 'chunk')} "
        f"({counted(report.tokens_not_sent, 'token')}) not sent again"
    )


def times(report: ReuseReport) -> str:
    """One line: time to first token with its phases, and decoding."""
    return (
        f"first token after {seconds(report.ttft_s)} (lookup {seconds(report.lookup_s)}, "
        f"load {seconds(report.load_s)}, weave {seconds(report.weave_s)}); "
        f"{counted(report.new_tokens, 'token')}, decoding {seconds(report.decode_s)}"
    )


class _WordTable(Table):
    """A table whose columns fit their longest words; if these do not fit side by side, a block of lines per row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """At most as wide as the console, and no wider than the longest cells need."""
        unbounded = options.update_width(_UNBOUNDED)
        sizes = [
            [Measurement.get(console, unbounded, cell) for cell in (column.header, *column.cells)]
            for column in self.columns
        ]
        least = [max(cell.minimum for cell in cells) for cells in sizes]
        most = [max(cell.maximum for cell in cells) for cells in sizes]
        spare = options.max_width - sum(least) - _CELL_FRAME * len(least) - 1
        if spare < 0:
            yield from self._blocks().__rich_console__(console, options)
            return
        for column, low, high in sorted(
            zip(self.columns, least, most, strict=True), key=lambda widths: widths[2] - widths[1]
        ):
            column.width = low + min(high - low, spare)
            spare -= column.width - low
        yield from super().__rich_console__(console, options)

    def _blocks(self) -> Table:
        """The same table with one line per cell."""
        table = Table(title=self.title, title_justify="left", caption=self.caption, caption_justify="left")
        table.show_header = False
        for _ in range(2):
            table.add_column(overflow="fold")
        for row in zip(*(column.cells for column in self.columns), strict=True):
            for column, cell in zip(self.columns, row, strict=True):
                table.add_row(column.header, cell)
            table.add_section()
        return table


def table_of(
    rows: Iterable[RowT],
    *columns: tuple[str, str | Callable[[RowT], str]],
    title: str | None = None,
    caption: str | None = None,
    left: int = 1,
    section: Callable[[RowT], object] = lambda _: None,
) -> Table:
    """A table with one line per row. A column is its heading and a key of the row, or a function from a row to text.

    The first `left` columns are text, the others numbers. A rule follows each group of rows with equal `section`. Cells
    wrap between words; if the longest words do not fit side by side, each row becomes a block of lines.
    """
    table = _WordTable(title=title, title_justify="left", caption=caption, caption_justify="left")
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
    """Bytes in a readable unit: `1.2 GiB`."""
    if value is None:
        return "unknown"
    amount = float(value)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def check_writable(path: Path) -> None:
    """Check before a long run that its result can be written.

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
    """Write a file. A reader sees the old content or the new one, never a part of it.

    Raises:
        UsageError: the file cannot be written.
    """
    if path.exists() and not path.is_file():  # a pipe or /dev/stdout: nothing to replace
        path.write_text(text, encoding="utf-8")
        return
    try:
        replace_file(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def to_json(data: object) -> str:
    """JSON as the command line prints and writes it."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
