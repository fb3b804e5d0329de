"""The papers' pages: an entry for every figure and table, and commands that the programs of this tree understand."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from chunkweave.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted((ROOT / "docs" / "results").glob("tables-papers-*.md"))

FIGURES = {"cacheblend": [*range(1, 18)], "cachecraft": [*range(1, 30)], "ragcache": [*range(1, 20)]}
FIGURES |= {"craft": [*range(1, 17)]}
TABLES = {"cacheblend": [1], "cachecraft": [1, 2, 3], "ragcache": [1, 2, 3, 4], "craft": []}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in an indented block of a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE):
        yield shlex.split(line)


def options_of(script: str) -> str:
    """The source of a benchmark and of those that it takes from."""
    source = (BENCHMARKS / f"{script}.py").read_text(encoding="utf-8")
    taken = re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
    return source + "".join(path.read_text() for name in taken if (path := BENCHMARKS / f"{name}.py").is_file())


def wrong(words: list[str]) -> str:
    """What the program of a command does not understand of it; empty if all."""
    asked = [word.split("=")[0] for word in words if word.startswith("--")]
    if words[0] == "chunkweave":
        command, rest = typer.main.get_command(app), words[1:]
        while hasattr(command, "commands"):
            command, rest = command.get_command(None, name := rest[0]), rest[1:]
            if command is None:
                return f"no command {name}"
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        return ", ".join(one for one in asked if one not in known)
    script = re.fullmatch(r"benchmarks/(\w+)\.py", words[1]) if words[0] == "python" else None
    if script is None or not (ROOT / script[0]).is_file():
        return f"no program {' '.join(words[:2])}"
    source = options_of(script[1])
    return ", ".join(one for one in asked if f'"{one}"' not in source)


def entries(kind: str, page: Path) -> set[int]:
    """The numbers of figures (or tables) that headings of a page name: `Figures 3, 5 and 7 to 9`."""
    numbers: set[int] = set()
    for heading in re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        for listed in re.findall(rf"{kind}s? ([\d, a-z]*\d)", heading):
            for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed):
                numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def test_there_is_a_page_a_paper():
    assert {page.stem.removeprefix("tables-papers-") for page in PAGES} == set(FIGURES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_figure_and_table_has_an_entry(page):
    paper = page.stem.removeprefix("tables-papers-")
    assert entries("Figure", page) == set(FIGURES[paper])
    assert entries("Table", page) == set(TABLES[paper])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_understand_every_command(page):
    found = [(" ".join(words), wrong(words)) for words in commands(page)]
    assert len(found) > 3
    assert [(command, what) for command, what in found if what] == []


def test_what_is_not_understood_is_found():
    assert wrong(shlex.split("chunkweave bench fidelity --model smollm2 --fraction 0.1"))
    assert wrong(shlex.split("chunkweave bench gone --model smollm2"))
    assert wrong(shlex.split("python benchmarks/oracles.py --model smollm2 --vectors 3")) == "--vectors"
    assert wrong(["python", "benchmarks/gone.py"])
    assert not wrong(shlex.split("python benchmarks/oracles.py --model smollm2 --groups heads"))
