"""The papers' page: a line for every figure and table; and commands of results that the programs of this tree know."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from docs_tables import without_places  # noqa: E402

from chunkweave.cli.app import app  # noqa: E402

RESULTS = ROOT / "docs" / "results"
PAPERS = re.split(r"^## ", (RESULTS / "tables-papers.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]

FIGURES = {"CacheBlend": [*range(1, 18)], "Cache-Craft": [*range(1, 30)], "RAGCache": [*range(1, 20)]}
FIGURES |= {"CRAFT": [*range(1, 17)]}
TABLES = {"CacheBlend": [1], "Cache-Craft": [1, 2, 3], "RAGCache": [1, 2, 3, 4], "CRAFT": []}
VERDICTS = ("agree", "in part", "differ", "not measured")


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
    if words[0] == "make":
        return "" if f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8") else f"no target {words[1]}"
    script = re.fullmatch(r"benchmarks/((?:gpu/)?\w+)\.py", words[1]) if words[0] == "python" else None
    if script is None or not (ROOT / script[0]).is_file():
        return f"no program {' '.join(words[:2])}"
    source = options_of(script[1])
    return ", ".join(one for one in asked if f'"{one}"' not in source)


def entries(kind: str, text: str) -> set[int]:
    """The numbers of figures (or tables) that the first cells of a table, and the paragraph above it, name."""
    named = [*re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE), text.partition("\n| ")[0]]
    numbers: set[int] = set()
    for listed in re.findall(rf"\b{kind}s? ([\d, a-z]*\d)", "\n".join(named)):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed):
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def test_there_is_a_section_a_paper():
    assert [section.partition("\n")[0] for section in PAPERS] == [*FIGURES]


@pytest.mark.parametrize("section", PAPERS, ids=[*FIGURES])
def test_every_figure_and_table_has_a_line_with_a_verdict(section):
    paper = section.partition("\n")[0]
    assert entries("Figure", section) == set(FIGURES[paper])
    assert entries("Table", section) == set(TABLES[paper])
    for line in re.findall(r"^\| (?:Figure|Table|§).*\|$", section, re.MULTILINE):
        assert any(verdict in line.split("|")[-2] for verdict in VERDICTS), line


def test_programs_understand_the_command_of_every_result():
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        words = shlex.split(without_places(json.loads(path.read_text(encoding="utf-8")).get("command", "")))
        while words and "=" in words[0]:  # variables of the environment
            words = words[1:]
        if words:
            found[path.name] = wrong(words)
    assert len(found) > 100
    assert {name: what for name, what in found.items() if what} == {}


def test_what_is_not_understood_is_found():
    assert wrong(shlex.split("chunkweave bench fidelity --model smollm2 --fraction 0.1"))
    assert wrong(shlex.split("chunkweave bench gone --model smollm2"))
    assert wrong(shlex.split("python benchmarks/oracles.py --model smollm2 --vectors 3")) == "--vectors"
    assert wrong(["python", "benchmarks/gone.py"])
    assert wrong(["make", "gone", "PART=engine"])
    assert wrong(["python", "benchmarks/gpu/weave.py", "--gone"]) == "--gone"
    assert not wrong(shlex.split("python benchmarks/oracles.py --model smollm2 --groups heads"))
