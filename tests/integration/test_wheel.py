"""What a wheel brings: the package as it is in git, the licence, and nothing else."""

import subprocess
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed: pip install -e '.[dev]'")

ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20
_ASSETS = "chunkweave/assets/"
_PAGE = "chunkweave/page/"
_MODEL = f"{_ASSETS}reader/model.safetensors"


@pytest.fixture(scope="module")
def brought(tmp_path_factory) -> zipfile.ZipFile:
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")))
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_a_wheel_has_the_package_and_the_licence_alone(brought: zipfile.ZipFile):
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "src/chunkweave"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    package = {line.removeprefix("src/") for line in listed.stdout.splitlines()}
    names = set(brought.namelist())
    about = {name for name in names if ".dist-info/" in name}
    assert names - about == package
    said = {name.partition(".dist-info/")[2] for name in about}
    assert said == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    top = {name.partition("/")[0] for name in names - about}
    assert top == {"chunkweave"}


def test_only_assets_are_no_code(brought: zipfile.ZipFile):
    known = (_ASSETS, _PAGE)
    names = [name for name in brought.namelist() if ".dist-info/" not in name and not name.startswith(known)]
    assert {Path(name).suffix for name in names if not name.endswith("/py.typed")} == {".py"}
    page = {name.removeprefix(_PAGE).partition("/")[0] for name in brought.namelist() if name.startswith(_PAGE)}
    assert page == {"__init__.py", "render.py", "views.py", "static", "templates"}
    kinds = {Path(name).suffix for name in brought.namelist() if name.startswith(_ASSETS)}
    assert kinds <= {".json", ".jsonl", ".md", ".safetensors", ".txt"}, "nothing that is executed by being loaded"


def test_sizes_are_what_they_are_meant_to_be(brought: zipfile.ZipFile):
    sizes = {one.filename: one.file_size for one in brought.infolist()}
    assert sizes.pop(_MODEL) < 8 * _MIB
    assert max(sizes.values()) < 512 << 10
    assert sum(sizes.values()) < 4 * _MIB
    assert Path(brought.filename).stat().st_size < 10 * _MIB


def test_a_wheel_says_what_the_project_says(brought: zipfile.ZipFile):
    (metadata,) = (name for name in brought.namelist() if name.endswith(".dist-info/METADATA"))
    said = Parser().parsestr(brought.read(metadata).decode())
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    unconditional = [one for one in said.get_all("Requires-Dist") if "extra ==" not in one]
    assert len(unconditional) == 8, "the base install stays small"
