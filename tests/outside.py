"""The package outside of the repository that docs/extending.md shows, installed into a folder for other processes."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"


def block(first: str) -> str:
    """The indented block of the page that begins with the line `first`."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip() == first)
    indent = lines[start].removesuffix(first)
    stop = next(n for n, line in enumerate(lines) if n > start and line and not line.startswith(indent))
    return dedent("\n".join(lines[start:stop])).strip() + "\n"


CODE = block("# our-weaving/our_weaving.py")
FILE = CODE + "\n\n" + block("METHOD = ChunkEnds")
"""What the page says of `chunk_ends.py`."""


def install(folder: Path, package: str, groups: Mapping[str, Mapping[str, str]], modules: Mapping[str, str]) -> None:
    """Put modules and what an installer writes of a package into a folder, which then belongs on Python's path."""
    notes = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    notes.mkdir(parents=True)
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    sections = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in one.items()) for group, one in groups.items()]
    (notes / "entry_points.txt").write_text("\n".join(sections))
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)


def install_our_weaving(folder: Path) -> Path:
    """The page's package; returns the folder."""
    project = tomllib.loads(block("# our-weaving/pyproject.toml"))["project"]
    install(folder, project["name"], project["entry-points"], {"our_weaving": CODE})
    return folder


def outside_environment(*folders: Path) -> dict[str, str]:
    """The environment of a process that has the packages of these folders."""
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT, *folders)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
