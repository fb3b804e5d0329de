"""benchmarks/structure.py: what counts as a line of code and as a cycle, and that figures above a limit are found."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import structure
from structure import FileWatch, above, code_lines, import_cycle, imports, pronoun_names

LIMITS = """[tool.chunkweave.structure]
code_lines = {{ one = {one}, all = 12 }}
files_in_cycle = {cycle}
pronoun_names = {pronouns}
"""


@pytest.fixture
def tree(tmp_path):
    """A package with a cycle, by a type-checking import and a package."""
    package = tmp_path / "src" / "one"
    (package / "sub").mkdir(parents=True)
    files = {
        "__init__.py": '"""The package."""\n',
        "a.py": '"""A."""\n\nfrom one import b  # a comment\n\nx = """no\ndocstring"""\n',
        "b.py": "def late(other: int) -> None:\n    import json\n",
        "c.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from one.sub import name\n",
        "sub/__init__.py": "from one import a, c\n",
        "alone.py": "import one.a\n",
    }
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    return tmp_path


def checked(root: Path, **limits: int) -> tuple[int, str]:
    (root / "pyproject.toml").write_text(LIMITS.format(**limits), encoding="utf-8")
    command = [sys.executable, structure.__file__, "--no-rooms", "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_blank_lines_comments_and_docstrings_are_no_code(tree):
    path = tree / "src" / "one" / "a.py"
    assert code_lines(path) == 3
    path.write_text('class A:\n    """A."""\n\n    x: int  # one\n    """Its x."""\n', encoding="utf-8")
    assert code_lines(path) == 2


def test_cycles_are_found_where_types_functions_and_packages_import(tree):
    graph = imports(tree / "src")
    assert graph["one.a"] == {"one.b"}
    assert graph["one.sub"] == {"one.a", "one.c"}
    assert sorted(import_cycle(graph)) == ["one.c", "one.sub"]
    assert import_cycle({"a": {"b"}, "b": {"a"}}) in (["a", "b"], ["b", "a"]), "a function's import"
    assert import_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_names_that_say_nothing_are_counted_where_they_are_bound(tree):
    path = tree / "src" / "one" / "c.py"
    path.write_text("found = [one for one in (1, 2)]\nprint(found)\nx.given = lambda kept: kept\n", encoding="utf-8")
    assert pronoun_names(tree / "src") == 4, "found, one, kept, and b's parameter"


def test_it_fails_above_a_limit_and_says_by_how_much(tree):
    assert checked(tree, one=10, cycle=2, pronouns=1)[0] == 0
    code, said = checked(tree, one=8, cycle=1, pronouns=0)
    assert code == 1
    assert "code_lines of one: 10, 2 above the limit of 8" in said
    assert "pronoun_names: 1, 1 above the limit of 0" in said
    assert "files_in_cycle: 2, 1 above the limit of 1" in said
    assert "cycle of 2: one." in said


def test_a_figure_without_a_limit_is_found():
    assert list(above({"lines": {"a": 1, "b": 2}}, {"lines": {"a": 1}})) == [
        "lines of b: 2, and pyproject.toml has no limit"
    ]
    assert list(above({"lines": {"a": 1}}, {})) == ["lines of a: 1, and pyproject.toml has no limit"]


def test_kernels_are_not_counted_since_each_machine_takes_others(tmp_path):
    package = tmp_path / "src" / "chunkweave" / "models"
    (package / "kernels").mkdir(parents=True)
    for name in ("attention.py", "kernels/device_code.py", "onednn_attention.py", "triton_attention.py"):
        (package / name).write_text("def run():\n    return 1\n", encoding="utf-8")
    with FileWatch(tmp_path / "src") as watch:
        for path in sorted(package.rglob("*.py")):
            names: dict[str, Callable[[], int]] = {}
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
            names["run"]()
    assert watch.files == {"chunkweave/models/attention.py"}
