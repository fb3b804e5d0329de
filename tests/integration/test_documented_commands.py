"""Commands in README and documentation: their names and options exist, and they run here.

A block of commands that cannot run here has a comment before it: `<!-- not run in CI: REASON -->`.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from shutil import copytree
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import typer
from starlette.testclient import TestClient

from chunkweave.cli.app import app
from chunkweave.models.gguf import checkpoint_folder
from chunkweave_server.app import create_app
from chunkweave_server.backend import Stage
from tests.integration.command_line import succeed
from tests.server.conftest import toy_service, wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(chunkweave|curl|docker|helm|kubectl|make|pip|python) +[\x21-\x7e]")
"""The beginning of a command; a figure that names one of these programs has none."""

SERVERS = {
    "serve": "tests/server/test_processes.py",
    "vllm-serve": "tests/vllm/fronts.py",
    "chat": "tests/integration/test_cli_chat.py",
}
"""Commands that do not end by themselves, and the tests that start them."""

PLACEHOLDERS = {"FOLDER": "reader", "MODEL": "reader", "smollm2": "reader", "CACHE_DIR": "cache", "DIR": "cache"}
QUICK = {
    "ask": ["--max-new-tokens", "2"],
    "bench": ["--questions", "1", "--chunk-tokens", "64"],
    "calibrate": ["--questions", "2"],
}
"""What keeps a command short here; a later value of an option counts."""

_WHY_NOT = re.compile(r"<!-- not run in CI: (.+?) -->")


@dataclass(frozen=True, slots=True)
class Documented:
    """A command of a page, by line, and why it does not run here, if it does not."""

    page: Path
    line: int
    words: tuple[str, ...]
    why_not: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def program(self) -> str:
        return self.words[0]


def commands_of(page: Path) -> Iterator[Documented]:
    """Commands in indented blocks and in fenced ones without a language; `&&` separates two."""
    why_not: str | None = None
    fenced: str | None = None
    pending, start = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = line[3:].strip() if fenced is None else None
            why_not = why_not if fenced is not None else None
            continue
        in_block = fenced in ("", "bash", "sh") or (fenced is None and line.startswith("    "))
        if not in_block and not pending:
            mark = _WHY_NOT.search(line)
            why_not = mark[1] if mark else why_not if not line.strip() else None
            continue
        text = line.strip().removeprefix("$ ")
        if not pending and not COMMAND.match(text):
            continue
        pending, start = (f"{pending}\n{text}", start) if pending else (text, number)
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that ends on a later line
            continue
        pending = ""
        for joined, some in groupby(words, lambda word: word == "&&"):
            if not joined:
                yield Documented(page, start, tuple(some), why_not)


COMMANDS = [command for page in PAGES for command in commands_of(page)]


def those_of(*programs: str) -> list[Documented]:
    return [one for one in COMMANDS if one.program in programs]


def found_command(words: tuple[str, ...]) -> tuple[click.Command, list[str]]:
    """The command that the words after `chunkweave` call, and its arguments."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "list_commands") and rest and not rest[0].startswith("-"):
        below = command.get_command(typer.Context(command), rest[0])
        assert below is not None, f"no command {rest[0]!r}"
        command, rest = below, rest[1:]
    return command, rest


def test_commands_are_found():
    assert {one.program for one in COMMANDS} >= {"chunkweave", "curl", "make", "pip"}
    assert len(those_of("chunkweave")) > 15


@pytest.mark.parametrize("documented", those_of("chunkweave"), ids=str)
def test_its_options_exist(documented):
    command, rest = found_command(documented.words[1:])
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    if not command.ignore_unknown_options and not command.context_settings.get("ignore_unknown_options"):
        for word in rest:
            if word.startswith("-") and not word.lstrip("-").replace(".", "").isdigit():
                assert word.partition("=")[0] in known


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(one.page == page for one in those_of("chunkweave"))],
    ids=lambda page: page.name,
)
def test_its_commands_run(page, tmp_path, monkeypatch):
    notes = tmp_path / "NOTES"
    notes.mkdir()
    for number in range(8):
        lofts = (f"Net loft {number}{letter} burned down after the great storm had come over it." for letter in "abcd")
        text = " ".join(lofts)
        (notes / f"{number}.md").write_text(text, encoding="utf-8")
    (tmp_path / "passages.jsonl").write_text(
        '{"text": "The Selmond Choir is led by Otto Gunmark."}\n', encoding="utf-8"
    )
    copytree(checkpoint_folder("reader"), tmp_path / "reader")  # it comes first: nothing is written to the bundled one
    monkeypatch.chdir(tmp_path)
    for documented in those_of("chunkweave"):
        if documented.page != page or documented.why_not:
            continue
        given = [PLACEHOLDERS.get(word, word) for word in documented.words[1:]]
        if given[0] in SERVERS:
            assert (ROOT / SERVERS[given[0]]).exists()
            continue
        succeed(*given, *QUICK.get(given[0], []))


@pytest.mark.parametrize("documented", those_of("make"), ids=str)
def test_its_targets_exist(documented):
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    runs = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    checked = {word for line in runs for word in line.split()}
    for target in [word for word in documented.words[1:] if "=" not in word]:
        assert target in targets
        assert documented.why_not or target in checked, "neither in .ci/run nor marked"


@pytest.mark.parametrize("documented", those_of("pip"), ids=str)
def test_its_extras_exist(documented):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {one for word in documented.words for group in re.findall(r"\[(.+)\]", word) for one in group.split(",")}
    assert wanted <= set(project["optional-dependencies"])


@pytest.mark.parametrize("documented", [one for one in those_of("curl") if not one.why_not], ids=str)
def test_its_requests_are_answered(documented):
    words = documented.words
    address = next(word for word in words if "localhost" in word or "127.0.0.1" in word)
    path = urlsplit(address if "://" in address else f"http://{address}").path
    service = toy_service()
    with TestClient(create_app(service), base_url="http://localhost") as client:
        wait_until(lambda: service.stage is Stage.READY)
        if "-d" in words:
            body = json.loads(words[words.index("-d") + 1])
            short = {"max_tokens": 2} if path.endswith("completions") else {}
            assert client.post(path, json={**body, **short}).is_success
        elif "-F" in words:
            assert client.post(path).status_code != 404
        else:
            assert client.get(path).status_code == 200
