"""Tables of documentation pages that are generated from result files, and all tables of a result on the terminal.

    python benchmarks/docs_tables.py docs/results/peers.json    # the command and all tables of a result

On a page a table is between markers that name the table and its files, relative to the page:

    <!-- server-load: results/server-load.json; table 1; columns 1 2 4; rows full | prefix -->
    <!-- /server-load -->

What follows the first semicolon is optional, and selects from what is generated: one of several tables, columns by
their numbers, rows by their first cells. The table `command` of any result file is its recorded command without output
options.

The benchmark that wrote a file has `tables(result)`, which makes all its tables by name; `bench_tables` has it for
`chunkweave bench`. Of several files the first is used, with the rows of all. A table that is computed without measuring
names the script instead, which gets an empty result. `python benchmarks/results_check.py --update` writes all tables of
all pages anew.
"""

import argparse
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkweave.errors import DocumentError

BENCHMARKS = Path(__file__).resolve().parent
_WIDTH = 104
_PLACES = ("--out", "--update-docs", "--samples", "--plot", "--plot-deviations", "--html", "--docs")
"""Options with paths of a benchmark's outputs, or of a file to continue from."""
_TABLE = re.compile(r"(?:^\|.*\|$\n?)+", re.MULTILINE)
_MARKED = re.compile(r"(<!-- ([\w-]+)(?:: ([^>\n]+?))? -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class MarkedTable:
    """The text between the markers of one table, and the files that it is made from, relative to its page."""

    name: str
    sources: tuple[str, ...]
    text: str
    selection: str = ""

    @staticmethod
    def of(found: re.Match[str]) -> "MarkedTable":
        """The table of a match of the markers."""
        sources, _, selection = (found[3] or "").partition(";")
        return MarkedTable(found[2], tuple(sources.split()), found[4], selection.strip())


def marked_tables(text: str) -> Iterator[MarkedTable]:
    """Every marked table of a page."""
    for found in _MARKED.finditer(text):
        yield MarkedTable.of(found)


def without_tables(text: str) -> str:
    """A page, or a part of one, without generated tables."""
    return _MARKED.sub("", text)


def table_of(page: Path, marked: MarkedTable) -> str:
    """The table generated from its files, with the surrounding empty lines.

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
    return _between(selected(made[marked.name], marked.selection))


def selected(text: str, selection: str) -> str:
    """What a selection (`table 1; columns 1 3; rows full | prefix`) leaves of generated text; all if it is empty.

    Raises:
        DocumentError: it cannot be read, or names a table, column or row that is not there.
    """
    kinds = [*_SELECTORS]  # rows are named by the first column, so that columns are selected last
    parts = [one.strip().partition(" ") for one in selection.split(";") if one.strip()]
    for kind, _, names in sorted(parts, key=lambda part: kinds.index(part[0]) if part[0] in kinds else -1):
        try:
            text = _SELECTORS[kind](text, names)
        except (LookupError, ValueError) as error:
            raise DocumentError(f"there is no {kind} {names} in {text.splitlines()[0]!r}: {error!r}") from error
    return text.rstrip("\n") if parts else text


def _only_table(text: str, number: str) -> str:
    return _TABLE.findall(text)[int(number) - 1].strip()


def _only_columns(text: str, numbers: str) -> str:
    wanted = [int(number) - 1 for number in numbers.split()]

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells[number] for number in wanted)} |"

    return _TABLE.sub(lambda table: "\n".join(line(_cells(row)) for row in table[0].splitlines()) + "\n", f"{text}\n")


def _only_rows(text: str, names: str) -> str:
    wanted = [name.strip() for name in names.split("|")]

    def rows(table: re.Match[str]) -> str:
        head, rule, *lines = table[0].splitlines()
        kept = [line for line in lines if _cells(line)[0].strip("`") in wanted]
        if missing := set(wanted) - {_cells(line)[0].strip("`") for line in kept}:
            raise LookupError(f"no row {', '.join(sorted(missing))}")
        return "\n".join([head, rule, *kept]) + "\n"

    return _TABLE.sub(rows, f"{text}\n")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


_SELECTORS = {"table": _only_table, "rows": _only_rows, "columns": _only_columns}


def maker_of(command: str) -> str:
    """The module that makes tables of what `command` wrote."""
    script = re.search(r"(?:^|[ /])(\w+)\.py\b", command)
    return script[1] if script else "bench_tables"


def rewrite_page(page: Path) -> None:
    """Regenerate every table of `page` that names files.

    Raises:
        DocumentError: the page cannot be read, or as `table_of`.
    """
    try:
        before = page.read_text(encoding="utf-8")
    except OSError as error:
        raise DocumentError(f"cannot read {page}: {error.strerror or error}") from error

    def anew(found: re.Match[str]) -> str:
        marked = MarkedTable.of(found)
        return f"{found[1]}{table_of(page, marked)}{found[5]}" if marked.sources else found[0]

    after = _MARKED.sub(anew, before)
    if after != before:
        page.write_text(after, encoding="utf-8")


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
    lines = text.strip("\n")  # a command at the beginning keeps its indentation
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


def main() -> None:
    """Print the command and all tables of each result file."""
    parser = argparse.ArgumentParser(description="Print the command and all tables of result files.")
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="such as docs/results/peers.json")
    for path in parser.parse_args().results:
        result = read_result(path)
        command = str(result.get("command", ""))
        print(f"{path}\n\n{command_block(without_places(command))}")
        for name, table in _tables(maker_of(command), result).items():
            print(f"\n{name}\n\n{table}")


if __name__ == "__main__":
    main()
