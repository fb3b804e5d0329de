"""The page on adding a reuse method: its method and its test work as they are printed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from textwrap import dedent

import pytest

from chunkweave.planning import methods
from chunkweave.plugins import plugin, plugin_names

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def block(first: str) -> str:
    """The indented block of the page that begins with the line `first`."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip() == first)
    indent = lines[start].removesuffix(first)
    stop = next(n for n, line in enumerate(lines) if n > start and line and not line.startswith(indent))
    return dedent("\n".join(lines[start:stop])).strip() + "\n"


@pytest.fixture
def added(tmp_path, monkeypatch) -> Iterator[None]:
    """The page's method among the others."""
    source = block("# src/chunkweave/planning/methods/chunk_ends.py")
    (tmp_path / "chunk_ends.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    plugin_names.cache_clear()
    yield
    for cached in (plugin_names, plugin):
        cached.cache_clear()
    if sys.modules.pop(f"{methods.__name__}.chunk_ends", None):
        del methods.chunk_ends


@pytest.mark.usefixtures("added")
def test_the_pages_test_of_the_pages_method_passes(tmp_path):
    file = tmp_path / "test_chunk_ends.py"
    file.write_text(block("from chunkweave.planning.plan import Pass"), encoding="utf-8")
    tests = [value for name, value in run_path(str(file)).items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()
