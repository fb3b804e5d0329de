"""Words and citations in code, documentation and help: fails if a text has a word that is not used here.

    python benchmarks/words.py [--root FOLDER] [--no-help]

It checks names, comments, docstrings and strings of `src` and `benchmarks`, the pages of `docs`, and the help of all
commands (`--no-help` skips that). It also checks that docstrings and comments cite only files of this repository and
sections of papers that docs/papers.md describes. Texts that models read are exempt.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

NOT_USED = (
    "nobody",
    "whoever",
    "told",
    "under way",
    "goes on",
    "stands",
    "is had",
    "a second time is harmless",
    "what it was made of",
    "nothing waits yet",
)
"""Words that are not used: plain English has another one, which readers know from other servers."""

MODEL_INPUTS = ("src/chunkweave/assets", "training/worlds/wording.py")
"""Texts that models read: their wording is data."""

_TEXTS = {".css", ".html", ".js", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
_PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md")
_WORDS = re.compile(
    "|".join(rf"(?<![a-z]){one}(?![a-z])".replace(" ", r"\s+(?:#\s*)?") for one in NOT_USED), re.IGNORECASE
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_FILE = re.compile(r"(?<![\w./:-])(?!https?:)[\w./-]*\w\.(?:md|rst)\b")
_SECTION = re.compile(r"([A-Z][\w-]*)(?:'s)?\s+(?:#\s*)?§")
_PLACEHOLDERS = {"page.md", "tower.md"}
"""File names in examples."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A word or a citation that must not be in a text."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def words_in(text: str) -> Iterator[tuple[int, str]]:
    """Words of a text that are not used, each with its line; parts of names count as words."""
    plain = _CAMEL.sub(" ", text.replace("_", " "))
    for found in _WORDS.finditer(plain):
        yield plain.count("\n", 0, found.start()) + 1, " ".join(found[0].replace("#", " ").split()).lower()


def citations_in(text: str, folder: Path, root: Path, papers: str) -> Iterator[tuple[int, str]]:
    """Files and sections that a text cites and that a reader cannot find, each with its line."""
    for found in _FILE.finditer(text):
        name = found[0]
        places = (root / name, folder / name, root / "docs" / name)
        if name not in _PLACEHOLDERS and not any(place.exists() for place in places):
            yield text.count("\n", 0, found.start()) + 1, f"cites {name}, which is not in the repository"
    for found in _SECTION.finditer(text):
        if found[1] not in papers:
            yield (
                text.count("\n", 0, found.start()) + 1,
                f"cites a section of {found[1]}, which is no paper of docs/papers.md",
            )


def texts(root: Path) -> Iterator[Path]:
    """Files that are checked, in order."""
    for folder in ("src", "benchmarks"):
        yield from (path for path in sorted((root / folder).rglob("*")) if path.suffix in _TEXTS and path.is_file())
    yield from sorted((root / "docs").glob("*.md"))
    yield from (root / name for name in _PAGES if (root / name).exists())


def is_below(path: str, places: tuple[str, ...]) -> bool:
    """Whether a path is one of `places`, or in one of them."""
    return any(path == place or path.startswith(f"{place}/") for place in places)


def findings_in_files(root: Path) -> Iterator[Finding]:
    """Everything that is wrong in files below `root`, except in `MODEL_INPUTS`."""
    papers_page = root / "docs" / "papers.md"
    papers = papers_page.read_text(encoding="utf-8") if papers_page.exists() else ""
    for path in texts(root):
        name = path.relative_to(root).as_posix()
        if path == Path(__file__).resolve() or is_below(name, MODEL_INPUTS):
            continue
        text = path.read_text(encoding="utf-8")
        yield from (Finding(name, line, f'"{word}" is not used') for line, word in words_in(text))
        if path.suffix == ".py":
            yield from (Finding(name, line, what) for line, what in citations_in(text, path.parent, root, papers))


def help_texts() -> Iterator[tuple[str, str]]:
    """The name of each command, and the text of its help."""
    import typer

    from chunkweave.cli.app import app

    def walk(command: Any, name: str) -> Iterator[tuple[str, str]]:
        yield name, "\n".join([command.help or "", *(getattr(one, "help", None) or "" for one in command.params)])
        if hasattr(command, "list_commands"):
            context = typer.Context(command, info_name=name)
            for below in command.list_commands(context):
                found = command.get_command(context, below)
                if found is not None:
                    yield from walk(found, f"{name} {below}")

    yield from walk(typer.main.get_command(app), "chunkweave")


def findings_in_help() -> Iterator[Finding]:
    """Words that are not used in the help of commands."""
    for name, text in help_texts():
        yield from (Finding(f"{name} --help", line, f'"{word}" is not used') for line, word in words_in(text))


def main() -> None:
    """Print the findings; exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    parser.add_argument("--no-help", action="store_true", help="skip the help of commands")
    options = parser.parse_args()
    found = [*findings_in_files(options.root.resolve()), *(() if options.no_help else findings_in_help())]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} words or citations to change")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
