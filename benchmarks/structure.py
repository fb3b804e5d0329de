"""Measures the size of the code and its import cycles; fails above the limits in pyproject.toml.

    python benchmarks/structure.py [--no-rooms] [--list]

It prints, and compares with `[tool.chunkweave.structure]`:

- `code_lines` of each package and of `all`: lines without blank ones, comments and docstrings.
- `files_entered` by one warm `Engine.generate`, and by one answer of `chunkweave serve`: files of the packages in which
  a function runs, without kernels, of which each machine takes others (--no-rooms skips them: they take half a minute;
  --list names them).
- `files_in_cycle`: files of one cycle of imports. Type-checking and function-level imports count, and so do imports of
  packages (`__init__.py`).
- `pronoun_names`: bound names that do not say what they hold (`PRONOUNS`).
"""

import argparse
import ast
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "How many steps has the Sel Tower?"
PASSAGES = [f"The {name} Tower has {steps} steps." for name, steps in (("Ger", 200), ("Sel", 201), ("Mor", 202))]
KERNELS = ("chunkweave/models/kernels/", "chunkweave/models/onednn_", "chunkweave/models/triton_")
PRONOUNS = {
    *("one", "ones", "found", "own", "given", "kept", "known", "said", "there", "here", "before", "mine"),
    *("others", "other", "apart", "asked", "shown", "stays", "left", "a_pass"),
}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def modules(source: Path) -> dict[str, Path]:
    """Path of every module below `source`, by dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def code_lines(path: Path) -> int:
    """Lines of a file without blank ones, comments and docstrings (also those of attributes)."""
    used: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in _LAYOUT:
                used.update(range(token.start[0], token.end[0] + 1))
    for one in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
        used.difference_update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    return len(used)


def docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Strings that are statements: docstrings, and those that document attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement


def lines_by_package(source: Path) -> dict[str, int]:
    """Code lines of each package below `source`, and of `all`."""
    counts: Counter[str] = Counter()
    for path in modules(source).values():
        counts[path.relative_to(source).parts[0]] += code_lines(path)
    return {**counts, "all": counts.total()}


def imports(source: Path) -> dict[str, set[str]]:
    """Which modules each module below `source` imports, anywhere in its code."""
    known = modules(source)
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names.update(one if one in known else node.module for one in inside)
        found[name] = names & known.keys() - {name}
    return found


def import_cycle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of one cycle of imports, in order; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(name) for name in error.args[1][1:]]
    return []


def pronoun_names(source: Path) -> int:
    """How many assignments, loops and parameters bind a name in `PRONOUNS`."""
    count = 0
    for path in modules(source).values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", "")
            count += name in PRONOUNS and isinstance(getattr(node, "ctx", ast.Store()), ast.Store)
    return count


class FileWatch:
    """Files below `source` in which functions run, in this thread and in those that start later; kernels left out."""

    def __init__(self, source: Path) -> None:
        self.files: set[str] = set()
        self._kernels = tuple(str(source / kernel) for kernel in KERNELS)
        self._source = f"{source}{os.sep}"

    def __enter__(self) -> "FileWatch":
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>" or not code.co_filename.startswith(self._source):
            return
        if not code.co_filename.startswith(self._kernels):
            self.files.add(code.co_filename.removeprefix(self._source))


def files_of_generate(source: Path) -> list[str]:
    """Files that a warm `Engine.generate` enters until its first token."""
    from chunkweave import Chunk, Engine

    chunks = [Chunk(text, source=str(number)) for number, text in enumerate(PASSAGES)]
    engine = Engine.load("reader", method="query")
    engine.precompute(chunks)
    with FileWatch(source) as watch:
        engine.generate(QUESTION, chunks, max_new_tokens=1)
    return sorted(watch.files)


def serve_watched(source: Path, written: Path, port: str) -> None:
    """Run `chunkweave serve`; SIGUSR1 forgets the files entered so far, SIGUSR2 writes them to `written`."""
    from chunkweave.cli.app import main as command_line

    watch = FileWatch(source)
    signal.signal(signal.SIGUSR1, lambda *_: watch.files.clear())
    signal.signal(signal.SIGUSR2, lambda *_: written.write_text(json.dumps(sorted(watch.files)), encoding="utf-8"))
    sys.argv = ["chunkweave", "serve", "--model", "reader", "--port", port]
    with watch:
        command_line()


def files_of_serve(source: Path) -> list[str]:
    """Files that one answer of `chunkweave serve` enters, from the HTTP request to the end of its answer.

    Raises:
        ChunkweaveError: the server ended, or was not ready within ten minutes; the message has what it printed.
    """
    import httpx
    from server_process import serving

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    body = {"model": "reader", "max_tokens": 4, "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"documents": PASSAGES, "chunkweave": {"method": "query"}}
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "files.json")
        command = [sys.executable, __file__, "--root", str(source.parent), "--watch-server", str(written), port]
        with serving(shlex.join(command), url, ready_path="/ready", log=Path(folder, "log")) as server:
            for after in (signal.SIGUSR1, signal.SIGUSR2):  # only the second answer counts
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
                os.kill(server, after)
                time.sleep(1.0)
        files: list[str] = json.loads(written.read_text(encoding="utf-8"))
        return files


def above(found: Mapping[str, Any], limits: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """The figures of `found` above their limits, and by how much; a figure without a limit is an error, too."""
    for name, count in found.items():
        limit = limits.get(name)
        if isinstance(count, Mapping):
            yield from above(count, limit or {}, f"{place}{name} of ")
        elif limit is None:
            yield f"{place}{name}: {count}, and pyproject.toml has no limit"
        elif count > limit:
            yield f"{place}{name}: {count}, {count - limit} above the limit of {limit}"


def main() -> None:
    """Print the figures; end with 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-rooms", action="store_true", help="do not run the engine and the server")
    parser.add_argument("--list", action="store_true", help="name the files entered")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with pyproject.toml and src")
    parser.add_argument("--watch-server", nargs=2, metavar=("FILE", "PORT"), help="serve; SIGUSR2 writes what ran")
    options = parser.parse_args()
    source = options.root.resolve() / "src"
    sys.path.insert(0, str(source))
    if options.watch_server:
        serve_watched(source, Path(options.watch_server[0]), options.watch_server[1])
        return
    limits = tomllib.loads((options.root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["chunkweave"]
    cycle = import_cycle(imports(source))
    figures: dict[str, Any] = {
        "code_lines": lines_by_package(source),
        "files_in_cycle": len(cycle),
        "pronoun_names": pronoun_names(source),
    }
    if not options.no_rooms:
        entered = {"generate": files_of_generate(source), "serve": files_of_serve(source)}
        figures["files_entered"] = {name: len(files) for name, files in entered.items()}
        if options.list:
            print(json.dumps(entered, indent=1))
    for name, figure in figures.items():
        for part, count in figure.items() if isinstance(figure, Mapping) else [("", figure)]:
            print(f"{count:8}  {name.replace('_', ' ')} {part}")
    if cycle:
        print(f"cycle of {len(cycle)}: {', '.join(cycle)}")
    problems = list(above(figures, limits["structure"]))
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
