"""The list of result files in docs/results/README.md, by what measured them (`results_check.py --update` writes it)."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs_tables import BENCHMARKS, markdown_table, read_result
from words import help_texts

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


def tables(_: Mapping[str, Any]) -> dict[str, str]:
    """Each program, what it measures, and links to its results."""
    found: dict[str, list[str]] = {}
    for path in sorted(RESULTS.iterdir()):
        if path.suffix in (".json", ".txt"):
            found.setdefault(_program(path), []).append(f"[{path.stem}]({path.name})")
    for picture in sorted(RESULTS.glob("*.png")):
        for links in found.values():
            if (link := f"[{picture.stem}]({picture.stem}.json)") in links:
                links[links.index(link)] += f" ([drawn]({picture.name}))"
    helps = dict(help_texts())
    rows = [[f"`{name}`", _about(name, helps), ", ".join(links)] for name, links in sorted(found.items())]
    return {"results": markdown_table(["measured by", "what", "results"], rows).replace("---:", "---")}


def _program(path: Path) -> str:
    """The script, `make` target or command that made a result."""
    if path.suffix == ".json":
        command = str(read_result(path).get("command", ""))
        if not command:  # an old result: the script of its name
            named = (one.name for one in BENCHMARKS.glob("*.py") if path.stem.replace("-", "_").startswith(one.stem))
            command = f"benchmarks/{max(named, key=len)}"
    else:
        command = path.read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2]
    found = re.search(r"benchmarks/\S+\.py|chunkweave (?:bench )?[a-z]+|make [\w-]+", command)
    return found[0] if found else command


def _about(name: str, helps: Mapping[str, str]) -> str:
    if name.startswith("benchmarks/"):
        text = ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))) or ""
    elif name.startswith("make "):
        target = re.search(rf"^{name.removeprefix('make ')}:.*## (.*?)(?:;.*)?$", (ROOT / "Makefile").read_text(), re.M)
        text = target[1] if target else ""
    else:
        text = helps[name]
    return re.split(r"[.:;(](?:\s|$)|\s\(|, and ", text.strip().partition("\n")[0], maxsplit=1)[0]
