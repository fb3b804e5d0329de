"""Checks that result files state their origin, and that the documentation agrees with them.

    python benchmarks/results_check.py            # what `make results-check` runs
    python benchmarks/results_check.py --update   # first write all generated tables anew
    python benchmarks/results_check.py --changed weaving    # this code changed: its results are of an earlier state
    python benchmarks/results_check.py --same weaving       # it changed, and gives the same numbers
    python benchmarks/results_check.py --stamp "make prove-faults"     # the head of a result that is text

Each file in docs/results names its command, commit and machine (JSON: fields; text: its first lines; a picture: the
JSON file that it is drawn from). The commit is in the history, is clean, and has the script or command. Each file is
named on a page, and files named on pages exist. Tables on pages and in docs/results/tables-*.md equal those generated
from their files (docs_tables). The code that a result measured is unchanged, or the result is listed as one of an
earlier state (computations). Numbers in the text are those of the files that claims.toml names (docs_figures).

Exceptions are listed in `ALLOWED` with the reason and printed; an entry that is no longer needed is an error.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from computations import computation_problems, note_change
from docs_figures import Claims, FigureError, read_claims, sections
from docs_tables import marked_tables, read_result, rewrite_page, table_of

from chunkweave.calibration.results import commit, machine
from chunkweave.cli.console import to_json
from chunkweave.errors import DocumentError

ROOT = Path(__file__).resolve().parents[1]
FIELDS = ("command", "commit", "machine")

ALLOWED = {"soak.json": "a quarter of an hour, by make prove-soak"}
"""Result files with an incomplete origin, and why they are not measured again."""


@dataclass(frozen=True)
class Repository:
    """A checkout, with as much of its history as there is."""

    root: Path

    @cached_property
    def why_no_history(self) -> str:
        """Why commits cannot be looked up; empty if they can."""
        if self._git("rev-parse", "--is-inside-work-tree") != "true":
            return "this is no git checkout"
        return "the checkout is shallow" if self._git("rev-parse", "--is-shallow-repository") == "true" else ""

    @cache  # noqa: B019 - one object a process
    def is_in_history(self, name: str) -> bool:
        """Whether a commit is HEAD or before it."""
        return self._git("merge-base", "--is-ancestor", name, "HEAD") is not None

    @cache  # noqa: B019
    def has(self, name: str, path: str, pattern: str = "") -> bool:
        """Whether a commit (empty: the working tree) has a file, or folders with a file that matches."""
        if not name:
            found = sorted(self.root.glob(path))
            files = [file for one in found for file in ([one] if one.is_file() else one.rglob("*.py"))]
            return any(re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE) for file in files)
        if not pattern:
            return self._git("cat-file", "-e", f"{name}:{path}") is not None
        return self._git("grep", "-qE", pattern, name, "--", path) is not None

    def _git(self, *arguments: str) -> str | None:
        try:
            done = subprocess.run(  # noqa: S603 - fixed commands
                ["git", "-C", str(self.root), *arguments],  # noqa: S607 - git is looked up in PATH on purpose
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()


def origin_of(path: Path, results: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Command, commit and machine of one result file, as far as it states them; a picture has those of its data.

    Raises:
        DocumentError: the file cannot be read.
    """
    if path.suffix == ".json":
        return results[path.name]
    if path.suffix == ".txt":
        head = path.read_text(encoding="utf-8").splitlines()[: len(FIELDS)]
        return {name: text.partition(": ")[2] for name in FIELDS for text in head if text.startswith(f"{name}: ")}
    drawn = (one for name, one in results.items() if Path(name).stem == path.stem or _draws(one, path))
    return next(drawn, {})


def _draws(result: Mapping[str, Any], picture: Path) -> bool:
    """Whether the command names the picture, or the folder for all pictures of this benchmark."""
    command, benchmark = str(result.get("command", "")), str(result.get("benchmark", ""))
    return picture.name in command or ("--plots" in command and picture.stem.startswith(f"{benchmark}-"))


def program_of(command: str) -> tuple[str, str]:
    """The file (or folders by pattern) that a command needs, and an expression that it must match (empty: none)."""
    if script := re.search(r"\b(?:benchmarks|lab)/\S+\.py\b", command):
        return script[0], ""
    if target := re.match(r"make ([\w-]+)", command):
        return "Makefile", f"^{target[1]}:"
    if words := re.search(r"\bchunkweave ((?:bench )?[a-z]+)", command):
        name = words[1].split()[-1]
        return "src/*/cli*", rf"def {name}\(|[\"']{name}[\"']"
    raise DocumentError(f"no known program in the command {command!r}")


def origin_problems(origin: Mapping[str, Any], repository: Repository) -> Iterator[str]:
    """Problems of one file's origin."""
    missing = [name for name in FIELDS if not origin.get(name)]
    if missing:
        yield f"says no {' and no '.join(missing)}"
    if "command" in missing:
        return
    try:
        program, pattern = program_of(str(origin["command"]))
    except DocumentError as error:
        yield str(error)
        return
    if not repository.has("", program, pattern):
        yield f"{program} is not there any more, or has no such command"
    if "commit" in missing:
        return
    name = str(origin["commit"])
    if name.endswith("+"):
        yield "was measured with changed files (commit with +)"
    if repository.why_no_history:
        return
    if not repository.is_in_history(name.rstrip("+")):
        yield f"its commit {name[:8]} is not in the history"
    elif not repository.has(name.rstrip("+"), program, pattern):
        yield f"its commit {name[:8]} has no {program}{' with this command' if pattern else ''}"


def page_problems(page: Path, results: Path, claims: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Problems of tables, numbers and file names on one page."""
    text = page.read_text(encoding="utf-8")
    for named in sorted(set(re.findall(r"\bresults/([\w.-]+\.(?:json|txt|png))", text))):
        if not (results / named).is_file():
            yield f"names results/{named}, which is not there"
    for marked in marked_tables(text):
        if not marked.sources:
            yield f"the table {marked.name!r} names no file that it is made from"
            continue
        try:
            if table_of(page, marked) != marked.text:
                yield f"the table {marked.name!r} is not what {' and '.join(marked.sources)} makes (--update writes it)"
        except (DocumentError, LookupError, TypeError, ValueError) as error:
            yield f"the table {marked.name!r} cannot be made from {' and '.join(marked.sources)}: {error!r}"
    try:
        for section in sections(page, results, claims):
            yield from (f"{section.title!r}: {problem}" for problem in section.problems())
    except (FigureError, DocumentError) as error:
        yield str(error)


def pages_of(root: Path) -> list[Path]:
    """The pages of a checkout, and the files in docs/results with their tables."""
    docs = root / "docs"
    return [root / "README.md", *sorted(docs.glob("*.md")), *sorted((docs / "results").glob("*.md"))]


@dataclass(frozen=True, slots=True)
class Found:
    """Problems, and allowed exceptions, one text each."""

    problems: list[str]
    allowed: list[str]


def check(root: Path, allowed: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Check everything below `root`, report findings with `say`, and return the number of problems."""
    repository, folder = Repository(root), root / "docs" / "results"
    pages = {page.relative_to(root).as_posix(): page for page in pages_of(root)}
    files = sorted(path for path in folder.iterdir() if path.name[0] != "." and path.suffix not in (".md", ".toml"))
    results, unreadable = read_results(files)
    found = check_files(files, results, allowed, repository)
    problems, notes = computation_problems(root, folder, results)
    found.problems.extend([*unreadable, *problems])
    try:
        claims = read_claims(folder / "claims.toml")
    except FigureError as error:
        claims = {}
        found.problems.append(str(error))
    texts = "\n".join([*(page.read_text(encoding="utf-8") for page in pages.values()), *_lines(claims)])
    found.problems.extend(f"{path.name}: is named on no page" for path in files if not _is_named(path, texts))
    found.problems.extend(f"claims.toml: there is no page {name}" for name in claims.keys() - pages.keys())
    for name, page in pages.items():
        found.problems.extend(f"{name}: {one}" for one in page_problems(page, folder, claims.get(name, {})))
    for one in (*found.allowed, *notes, *found.problems):
        say(one)
    if repository.why_no_history:
        say(f"{repository.why_no_history}: commits were not looked up")
    counts = f"{len(found.problems)} problems, {len(found.allowed)} files allowed"
    say(f"{len(files)} files, {len(pages)} pages: {counts}")
    return len(found.problems)


def read_results(files: Iterable[Path]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The JSON results among `files` by name, and the problems of those that cannot be read."""
    results, unreadable = {}, []
    for path in files:
        if path.suffix == ".json":
            try:
                results[path.name] = read_result(path)
            except DocumentError as error:
                unreadable.append(str(error))
    return results, unreadable


def check_files(
    files: Sequence[Path],
    results: Mapping[str, Mapping[str, Any]],
    allowed: Mapping[str, str],
    repository: Repository,
) -> Found:
    """Problems of the files' origins."""
    found = Found([f"{name}: is in ALLOWED, but not there" for name in allowed.keys() - {f.name for f in files}], [])
    for path in files:
        if path.suffix == ".json" and path.name not in results:
            continue
        origin = origin_of(path, results)
        orphan = path.suffix == ".png" and not origin
        own = ["no result file says that it draws it"] if orphan else list(origin_problems(origin, repository))
        if path.name not in allowed:
            found.problems.extend(f"{path.name}: {one}" for one in own)
        elif own:
            found.allowed.append(f"{path.name}: {'; '.join(own)}\n    allowed: {allowed[path.name]}")
        elif not repository.why_no_history:
            found.problems.append(f"{path.name}: is allowed what it does not need; take it out of ALLOWED")
    return found


def _is_named(path: Path, texts: str) -> bool:
    """Whether pages name a file, or a claim its stem."""
    return re.search(rf"\b{re.escape(path.name)}|[= ]{re.escape(path.stem)}: ", texts) is not None


def _lines(claims: Claims) -> Iterator[str]:
    for sections_of_page in claims.values():
        for lines in sections_of_page.values():
            yield from lines


def main() -> None:
    """Parse the command line, check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the tables of all pages anew first")
    parser.add_argument("--stamp", metavar="COMMAND", help="print the head of a text file that this command writes")
    parser.add_argument("--changed", metavar="FAMILY", help="list its results as of an earlier state of the code")
    parser.add_argument("--same", metavar="FAMILY", help="its changed code gives the same numbers")
    arguments = parser.parse_args()
    if name := arguments.changed or arguments.same:
        folder = ROOT / "docs" / "results"
        note_change(ROOT, folder, read_results(folder.glob("*.json"))[0], name, same=bool(arguments.same))
    if arguments.stamp:
        print(f"command: {arguments.stamp}\ncommit: {commit()}\nmachine: {' '.join(to_json(machine()).split())}\n")
        return
    if arguments.update:
        for page in pages_of(ROOT):
            rewrite_page(page)
    sys.exit(check(ROOT, ALLOWED, print) > 0)


if __name__ == "__main__":
    main()
