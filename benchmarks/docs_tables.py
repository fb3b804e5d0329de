"""Tables of documentation pages that are made from result files, between markers that name the table and its files.

    <!-- server-load: results/server-load.json -->
    <!-- /server-load -->

The table `command` of any result file is the command that it records, without where that puts what it finds.

Files stand relative to the page. The benchmark that wrote a file has `tables(result)`, which makes every table of it
by name; `bench_tables` has it for `chunkweave bench`. Of several files the first counts, with the rows of all. A table
that is computed without measuring names the script instead, which gets an empty result.
"""

import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkweave.errors import DocumentError, UsageError

BENCHMARKS = Path(__file__).resolve().parent
_WIDTH = 104
_PLACES = ("--out", "--update-docs", "--samples", "--plot", "--plot-deviations", "--html", "--docs")
"""Options that say where a benchmark puts what it finds, or from where it goes on."""
_MARKED = re.compile(r"(<!-- ([\w-]+)(?:: ([^>\n]+?))? -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class MarkedTable:
    """What stands between the markers of one table, and the files it is made from, relative to its page."""

    name: str
    sources: tuple[str, ...]
    text: str


def marked_tables(text: str) -> Iterator[MarkedTable]:
    """Every marked table of a page."""
    for found in _MARKED.finditer(text):
        yield MarkedTable(found[2], tuple((found[3] or "").split()), found[4])


def without_tables(text: str) -> str:
    """A page, or a part of one, without what is made from files."""
    return _MARKED.sub("", text)


def table_of(page: Path, marked: MarkedTable) -> str:
    """The table as its files have it, with the empty lines that stand around it.

    Raises:
        DocumentError: a file cannot be read, or whatever made it has no table of that name.
    """
    paths = [page.parent / source for source in marked.sources]
    if paths[0].suffix == ".py":
        made = _tables(paths[0].stem, {})
    else:
        results = [read_result(path) for path in paths]
        if marked.name == "command":
            blocks = dict.fromkeys(command_block(without_places(str(one.get("command", "")))) for one in results)
            return _between("\n".join(blocks))
        result = {**results[0], "rows": [row for one in results for row in one.get("rows", [])]}
        made = _tables(maker_of(str(result.get("command", ""))), result)
    if marked.name not in made:
        raise DocumentError(f"{paths[0].name} makes no table {marked.name!r}, only {', '.join(made) or 'none'}")
    return _between(made[marked.name])


def maker_of(command: str) -> str:
    """The module that makes tables of what `command` wrote."""
    script = re.search(r"(?:^|[ /])(\w+)\.py\b", command)
    return script[1] if script else "bench_tables"


def rewrite_page(page: Path, written: Path | None = None) -> bool:
    """Make every table of `page` that names files anew, or only those that name `written`; whether there are any.

    Raises:
        DocumentError: the page cannot be read, or as `table_of`.
    """
    try:
        before = page.read_text(encoding="utf-8")
    except OSError as error:
        raise DocumentError(f"cannot read {page}: {error.strerror or error}") from error
    made = 0

    def anew(found: re.Match[str]) -> str:
        nonlocal made
        marked = MarkedTable(found[2], tuple((found[3] or "").split()), found[4])
        paths = [(page.parent / source).resolve() for source in marked.sources]
        if not paths or (written is not None and written.resolve() not in paths):
            return found[0]
        made += 1
        return f"{found[1]}{table_of(page, marked)}{found[5]}"

    after = _MARKED.sub(anew, before)
    if after != before:
        page.write_text(after, encoding="utf-8")
    return bool(made)


def update_page(page: Path, written: Path | None) -> None:
    """Make those tables of `page` anew that are made from the file that a benchmark has just written.

    Raises:
        DocumentError: the page cannot be read, or no marker of it names the file.
        UsageError: no file was written.
    """
    if written is None:
        raise UsageError("--update-docs makes tables from the file that --out names: give both")
    if not rewrite_page(page, written):
        name = f"<!-- NAME: {os.path.relpath(written, page.parent)} -->"
        raise DocumentError(f"{page} has no place for tables of {written}: put {name} and <!-- /NAME --> into it")


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and the others numbers."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def without_places(command: str) -> str:
    """A command without options that say where its results go; `--docs` is one in benchmarks only.

    >>> without_places("python some.py --out a.json --top 3 --update-docs page.md table")
    'python some.py --top 3'
    """
    kept, dropping = [], False
    for word in shlex.split(command):
        if word.startswith("--"):
            dropping = word in _PLACES and not (word == "--docs" and "bench" in kept)
        if not dropping:
            kept.append(word)
    return shlex.join(kept)


def command_block(command: str) -> str:
    """A command as an indented block, broken before options where that keeps lines within 112 characters."""
    options: list[list[str]] = [[]]
    for word in (shlex.quote(one) for one in shlex.split(command)):
        if word.startswith("--"):
            options.append([])
        options[-1].append(word)
    lines = [""]
    for option in options:
        for part in [" ".join(option)] if len(" ".join(option)) <= _WIDTH else option:
            if lines[-1] and len(lines[-1]) + len(part) >= _WIDTH:
                lines.append("")
            lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(f"    {'    ' if number else ''}{line}" for number, line in enumerate(lines))


def _between(text: str) -> str:
    lines = text.strip("\n")  # a command that stands first keeps its indentation
    return f"\n{lines}\n\n"


def read_result(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        DocumentError: it cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DocumentError(f"{path} is no JSON: {error}") from error
    return found


def _tables(module: str, result: Mapping[str, Any]) -> Mapping[str, str]:
    for folder in (BENCHMARKS, BENCHMARKS / "gpu"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        maker = importlib.import_module(module)
    except ImportError as error:
        raise DocumentError(f"cannot load {module}.py, which makes the tables: {error}") from error
    if not hasattr(maker, "tables"):
        raise DocumentError(f"{module}.py makes no tables: give it `tables(result)`")
    made: Mapping[str, str] = maker.tables(result)
    return made
