"""Plug-ins of other packages and of files: which are found, and what is said of one that is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from chunkweave import plugins
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.plugins import METHODS, ORDERINGS, POLICIES, load_plugin_files
from tests.outside import FILE, install, outside_environment


@pytest.fixture(autouse=True)
def _no_files(monkeypatch):
    monkeypatch.setattr(plugins, "_FILES", {})


def run(code: str, *folders: Path) -> str:
    """What a Python process prints that has the packages of these folders."""
    made = subprocess.run(
        [sys.executable, "-c", code], env=outside_environment(*folders), capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def refused(tmp_path: Path, code: str, groups: dict[str, dict[str, str]], source: str = "") -> str:
    """What is said of a package `odd-one` with these entry points."""
    install(tmp_path / "odd", "odd-one", groups, {"odd_one": source})
    said = f"from chunkweave.errors import ChunkweaveError\ntry:\n    {code}\nexcept ChunkweaveError as error:\n    "
    return run(
        f"from chunkweave.plugins import *\nfrom chunkweave.planning.method import make_method\n{said}"
        "print(type(error).__name__, error)",
        tmp_path / "odd",
    )


def test_the_bundled_ones_are_all_there():
    for kind in (METHODS, ORDERINGS, POLICIES):
        assert set(kind.names) >= set(kind.bundled)
        for name in kind.names:
            assert callable(kind.get(name))
    with pytest.raises(UnknownMethodError, match="unknown ordering 'best'; there are: frequency, original"):
        ORDERINGS.get("best")


def test_a_package_that_takes_the_name_of_a_bundled_one_is_named(tmp_path):
    entries = {"chunkweave.methods": {"prefix": "odd_one:Mine"}}
    said = refused(tmp_path, "METHODS.get('query')", entries, "class Mine: name = 'prefix'")
    assert said.startswith("UsageError two reuse methods are called 'prefix': one of chunkweave itself and one of")
    assert "the package odd-one" in said


def test_a_package_that_cannot_be_imported_is_named(tmp_path):
    entries = {"chunkweave.policies": {"mine": "odd_one:Mine"}}
    said = refused(tmp_path, "POLICIES.get('lru'); POLICIES.get('mine')", entries, "import no_such_module")
    assert "eviction policy 'mine' of the package odd-one cannot be loaded from odd_one:Mine: ModuleNotFound" in said
    entries = {"chunkweave.orderings": {"mine": "odd_one:Other"}}
    said = refused(tmp_path / "2", "ORDERINGS.get('mine')", entries, "class Mine: ...")
    assert "ordering 'mine' of the package odd-one cannot be loaded from odd_one:Other: AttributeError" in said


@pytest.mark.parametrize(
    ("has", "said"),
    [
        ("name, budget = 'prefix', None", "'mine' calls itself 'prefix': its `name` must be 'mine'"),
        ("name = 'mine'", "'mine' has no `budget`"),
        ("budget = None", "'mine' has no `name`"),
    ],
)
def test_a_method_that_lacks_what_is_needed_or_calls_itself_otherwise_is_refused(tmp_path, has, said):
    source = f"class Mine:\n    {has}\n    def __init__(self, config): ..."
    entries = {"chunkweave.methods": {"mine": "odd_one:Mine"}}
    assert f"the reuse method {said}" in refused(tmp_path, "make_method('mine')", entries, source)


def test_a_file_brings_what_its_constants_say(tmp_path):
    file = tmp_path / "chunk_ends.py"
    file.write_text(FILE)
    load_plugin_files([str(file), str(file)])
    assert "chunk-ends" in METHODS.names
    assert METHODS.get("chunk-ends").name == "chunk-ends"
    assert "chunk-ends" not in (*ORDERINGS.names, *POLICIES.names)
    load_plugin_files([str(file)])
    other = tmp_path / "other" / "chunk_ends.py"
    other.parent.mkdir()
    other.write_text(FILE)
    with pytest.raises(UsageError, match=f"{other} and {file} both define 'chunk-ends'"):
        load_plugin_files([str(other)])


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("query.py", "METHOD = dict", "query.py defines 'query', but another reuse method has that name"),
        ("lru.py", "POLICY = dict", "lru.py defines 'lru', but another eviction policy has that name"),
        ("empty.py", "", "empty.py has no plug-in: it defines none of METHOD, ORDERING, POLICY"),
        ("broken.py", "METHOD = 1 / 0", "broken.py cannot be loaded: ZeroDivisionError: division by zero"),
        ("odd.py", "METHOD = (", "odd.py cannot be loaded: SyntaxError"),
        ("notes.txt", "METHOD = dict", "notes.txt is not a Python file"),
        ("missing.py", None, "missing.py is not a Python file"),
    ],
)
def test_a_file_that_brings_nothing_is_named(tmp_path, name, source, said):
    names = METHODS.names
    if source is not None:
        (tmp_path / name).write_text(source)
    with pytest.raises(UsageError) as caught:
        load_plugin_files([str(tmp_path / name)])
    assert said in str(caught.value)
    assert METHODS.names == names
