"""Count what makes a code base hard to carry: files, lines, modules that serve one other module, rooms of one noun.

    python benchmarks/structure.py [--json] [--out FILE] [--list]

Imports are read from the code, not by importing it: any import counts, inside functions and under TYPE_CHECKING too,
and so does a module's dotted name in a string (lazy registries). `__init__` modules, registered plug-ins
(`planning/methods`, `ordering/orderings`, `store/policies`) and CLI commands are not counted among the modules with
one importer: a module of `cli` that only `cli/app.py` imports holds commands.
"""

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
PLUGINS = ("planning/methods", "ordering/orderings", "store/policies")
LONGEST = 600
SHORT = 40


def modules(source: Path) -> dict[str, Path]:
    """Path of every module below `source`, by dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """Which of the `known` modules a module names."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.partition(":")[0])
    return names & known.keys()


def measure(source: Path) -> dict[str, object]:
    """All counts, with the modules that stand behind them."""
    known = modules(source)
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in known.items()}
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in known.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for other in imported(tree, known) - {name}:
            importers[other].add(name)
    inits = {name for name, path in known.items() if path.name == "__init__.py"}
    exempt = {
        name
        for name, path in known.items()
        if any(f"/{folder}/" in path.as_posix() for folder in PLUGINS)
        or ("/cli/" in path.as_posix() and importers[name] == {"chunkweave.cli.app"})
    }
    rooms = known.keys() - inits
    single = sorted(name for name in rooms - exempt if len(importers[name]) == 1)
    basenames = Counter(name.rpartition(".")[2] for name in rooms)
    return {
        "modules": len(known),
        "lines": sum(lines.values()),
        "with_one_importer": len(single),
        "under_40_lines": sum(lines[name] < SHORT for name in rooms),
        "over_600_lines": sum(count > LONGEST for count in lines.values()),
        "longest": max(lines.values()),
        "names_used_twice": sum(count > 1 for count in basenames.values()),
        "lists": {
            "with_one_importer": {name: next(iter(importers[name])) for name in single},
            "over_600_lines": sorted(name for name in lines if lines[name] > LONGEST),
            "never_imported": sorted(name for name in rooms - exempt if not importers[name]),
            "names_used_twice": sorted(name for name, count in basenames.items() if count > 1),
        },
    }


def main() -> None:
    """Print the counts, as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder that holds the package")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="name the modules behind the counts")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    counts = measure(options.source)
    if options.out is not None:
        options.out.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    if options.json:
        json.dump(counts, sys.stdout, indent=1)
        print()
        return
    lists = counts.pop("lists")
    for name, count in counts.items():
        print(f"{name.replace('_', ' '):20}{count:>8}")
    if options.list:
        print(json.dumps(lists, indent=1))


if __name__ == "__main__":
    main()
