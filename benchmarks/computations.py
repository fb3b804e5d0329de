"""Which code a result measured, and whether that code has changed since: docs/results/computations.toml.

A result names a computation, not a commit of the whole tree: its command belongs to one family, and the family lists
the few files whose content counts. Every function, class and assignment of these files counts, in any order and in any
of them. Moves, new file or module names, format, docstrings, comments, annotations, imports, and private names made
public do not count. All other changes do.

    [weaving]
    about = "what methods compute, and how far it is from full prefill"
    digest = "1f0c..."
    commands = ["bench fidelity", "benchmarks/oracles.py"]
    files = ["src/chunkweave/fusion/loop.py", "src/chunkweave/fusion/rows.py"]
    earlier = ["fidelity-a.json"]

`digest` is that of the files when the results were measured, except those in `earlier`, which were measured before the
last change. If files no longer have the digest, either the results move to `earlier` (`--changed`), or they stay
because the numbers are the same (`--same`; the commit message says how that was checked).
"""

import ast
import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chunkweave.errors import DocumentError

NAME = "computations.toml"
_HEAD = """\
# Which code each family of results measured, and which results are of an earlier state of it (`earlier`).
# benchmarks/computations.py says what counts. `make results-check` applies it; when code has changed,
# `python benchmarks/results_check.py --changed FAMILY` (or `--same FAMILY`) writes it anew.
"""
_NOT_COUNTED = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind", "type_ignores"}
_NAMES = {"name", "id", "attr", "arg"}


@dataclass(frozen=True, slots=True)
class Computation:
    """A family of results: the commands that measure it, and the files whose content counts, relative to the root."""

    name: str
    about: str
    commands: Sequence[str]
    files: Sequence[str]
    digest: str
    earlier: Sequence[str]

    def measures(self, command: str) -> bool:
        """Whether a result of this command belongs to it."""
        return any(re.search(rf"(?<![\w/]){re.escape(one)}(?![\w.])", command) for one in self.commands)


def read_computations(results: Path) -> list[Computation]:
    """The families of a folder of results, in the order in which commands are looked up.

    Raises:
        DocumentError: they cannot be read.
    """
    try:
        tables = tomllib.loads((results / NAME).read_text(encoding="utf-8"))
        return [Computation(name, **table) for name, table in tables.items()]
    except (OSError, ValueError, TypeError) as error:
        raise DocumentError(f"cannot read {NAME}: {error}") from error


def write_computations(results: Path, families: Iterable[Computation]) -> None:
    """Write the families of a folder of results."""
    parts = [_HEAD]
    for one in families:
        parts += [f"\n[{one.name}]\n", f'about = "{one.about}"\n', f'digest = "{one.digest}"\n']
        for key, items in (("commands", one.commands), ("files", one.files), ("earlier", sorted(one.earlier))):
            parts += [f"{key} = [\n", *(f'    "{item}",\n' for item in items), "]\n"]
    (results / NAME).write_text("".join(parts), encoding="utf-8")


def note_change(root: Path, results: Path, origins: Mapping[str, Mapping[str, Any]], name: str, same: bool) -> None:
    """Accept a family's current files; unless the numbers are the `same`, mark its results as of an earlier state.

    Raises:
        DocumentError: there is no such family, or one of its files is missing.
    """
    families = read_computations(results)
    if name not in {one.name for one in families}:
        raise DocumentError(f"{NAME} has no family {name}, only {', '.join(one.name for one in families)}")
    commands = {file: str(origin.get("command", "")) for file, origin in origins.items()}
    changed = []
    for one in families:
        if one.name == name:
            measured = [file for file, command in commands.items() if _family(command, families) == one]
            earlier = one.earlier if same else measured
            one = replace(one, digest=digest_of(root, one.files), earlier=earlier)
        changed.append(one)
    write_computations(results, changed)


def computation_problems(
    root: Path, results: Path, origins: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Problems of the families of results, and notes on how many results are of an earlier state of each."""
    try:
        families = read_computations(results)
    except DocumentError as error:
        return [str(error)], []
    problems, notes = [], []
    commands = {file: str(origin["command"]) for file, origin in origins.items() if origin.get("command")}
    for file, command in commands.items():
        if _family(command, families) is None:
            problems.append(f"{file}: its command belongs to no family in {NAME}")
    for one in families:
        measured = [file for file, command in commands.items() if _family(command, families) == one]
        problems += [f"{NAME}: {one.name} has no result {file}" for file in one.earlier if file not in measured]
        try:
            if digest_of(root, one.files) != one.digest and len(one.earlier) < len(measured):
                problems.append(
                    f"{NAME}: the code of {one.name} is not what it was ({', '.join(one.files)}): "
                    f"results_check.py --changed {one.name}, or --same {one.name} if it gives the same numbers"
                )
        except DocumentError as error:
            problems.append(f"{NAME}: {one.name}: {error}")
        if one.earlier:
            notes.append(f"{one.name}: {len(one.earlier)} of {len(measured)} results are of earlier code")
    return problems, notes


def _family(command: str, families: Iterable[Computation]) -> Computation | None:
    return next((one for one in families if one.measures(command)), None)


def definitions(source: str) -> frozenset[str]:
    """A digest of each statement of a module that counts."""
    shapes = (_shape(statement) for statement in ast.parse(source).body)
    return frozenset(hashlib.sha256(shape.encode()).hexdigest() for shape in shapes if shape)


def digest_of(root: Path, files: Sequence[str]) -> str:
    """One digest of everything that counts in `files`.

    Raises:
        DocumentError: a file is missing.
    """
    found: set[str] = set()
    for file in files:
        try:
            found |= definitions((root / file).read_text(encoding="utf-8"))
        except OSError as error:
            raise DocumentError(f"cannot read {file}: {error.strerror or error}; name where it is now") from error
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()[:16]


def _shape(node: object) -> str:
    """A node of the syntax tree as text, the same for every version of Python; empty if it does not count."""
    if isinstance(node, list):
        return f"[{','.join(filter(None, map(_shape, node)))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node) or _is_type_checking(node):
        return ""
    parts = []
    for field, value in sorted(ast.iter_fields(node)):
        if field in _NOT_COUNTED or value is None or value == []:
            continue
        if field in _NAMES and isinstance(value, str) and not value.startswith("__"):
            value = value.lstrip("_")
        parts.append(f"{field}={_shape(value)}")
    return f"{type(node).__name__}({' '.join(parts)})"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
