"""Reads files for commands, and makes a table of the results."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from chunkweave.cli.console import progress, stderr, table_of
from chunkweave.errors import DocumentError

if TYPE_CHECKING:
    from chunkweave.retrieval.conversion import FileRead
    from chunkweave.retrieval.documents import CorpusDocument

_SHOWN = 40
"""Maximum files that a table lists; of more files, it lists only those with a note."""


def read_all(paths: Sequence[Path], *, without: Path | None = None) -> "list[FileRead]":
    """Read files and folders with a progress bar; skips files in the folder `without`.

    Raises:
        DocumentError: a path does not exist.
    """
    from chunkweave.retrieval.reading import read_files

    with progress("reading files") as report:
        return read_files(paths, without=without, progress=report)


def documents_read(reads: "Sequence[FileRead]", *, strict: bool = False) -> "list[CorpusDocument]":
    """All documents that were read.

    Raises:
        DocumentError: there is none, or with `strict` something was left out. First, each reason is printed on stderr.
    """
    from chunkweave.retrieval.reading import documents_of

    try:
        return documents_of(reads, strict=strict)
    except DocumentError:
        say_what_was_left_out(reads)
        raise


def say_what_was_left_out(reads: "Iterable[FileRead]") -> None:
    """Print a line on stderr for each file that was left out, or whose encoding was assumed."""
    for read in reads:
        for note in filter(None, (read.reason, read.assumed)):
            stderr().print(f"[yellow]{escape(read.name)}: {escape(note)}[/yellow]", soft_wrap=True)


def file_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per file: its kind, its result, and why it was left out or what was assumed."""
    listed = rows if len(rows) <= _SHOWN else [row for row in rows if _note(row)]
    quiet = len(rows) - len(listed)
    return table_of(
        listed,
        ("file", "file"),
        ("kind", lambda row: row["kind"] or ""),
        ("result", _result),
        ("note", lambda row: escape(_note(row))),
        caption=f"and {quiet} files without a note" if quiet else None,
        left=4,
    )


def _result(row: Mapping[str, Any]) -> str:
    if row["left_out"]:
        return "left out"
    counts: Mapping[str, int] = row["result"]
    return ", ".join(name if len(counts) == number == 1 else f"{number} {name}" for name, number in counts.items())


def _note(row: Mapping[str, Any]) -> str:
    lines = row["lines_left_out"]
    notes = [
        row["left_out"],
        f"left out: {'; '.join(lines[:3])}{' ...' if len(lines) > 3 else ''}" if lines and not row["left_out"] else "",
        row["assumed"],
        "converted" if row["converted"] else "",
    ]
    return "; ".join(filter(None, notes))
