"""Data that every measurement writes beside its rows: machine, versions, source commit and settings."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkweave.errors import UsageError

if TYPE_CHECKING:
    from chunkweave.models.huggingface import HuggingFaceModel

_PACKAGES = ("chunkweave", "torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """A finished or interrupted benchmark in the form that docs/evidence.md describes.

    `rows` are JSON-able, one per contender; `more` has the additional fields of this kind of benchmark. `complete` is
    False if it was interrupted; `rows` then cover only the questions measured so far.
    """

    benchmark: str
    command: str
    seed: int
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    more: dict[str, Any]
    complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The JSON object, with machine, versions and commit of this process."""
        return {
            "benchmark": self.benchmark,
            "complete": self.complete,
            "command": self.command,
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "seed": self.seed,
            "config": self.config,
            **self.more,
            "rows": self.rows,
        }


def machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, bytes of memory, system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def computed_on(model: "HuggingFaceModel") -> dict[str, Any]:
    """Device, dtype and threads that a model computes with."""
    import torch

    dtype = str(model.dtype).removeprefix("torch.")
    return {"device": str(model.device), "dtype": dtype, "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that times depend on."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def commit() -> str | None:
    """The commit of this source, with `+` if files were changed; None outside a repository.

    Changes in `docs`, where results are written, are ignored.
    """
    folder = Path(__file__).resolve().parent
    tracked = _git(folder, "ls-files", "--", __file__)
    head = _git(folder, "rev-parse", "HEAD") if tracked else None
    if not head:
        return None
    outside_docs = ("--", ":(top)", ":(top,exclude)docs")
    return f"{head}+" if _git(folder, "status", "--porcelain", "--untracked-files=no", *outside_docs) else head


def peak_rss_bytes() -> int | None:
    """Peak physical memory of this process; None if the system does not report it."""
    status = _proc_file("/proc/self/status")
    if "VmHWM" in status:
        # Not getrusage: on Linux its ru_maxrss starts at the size of the process that forked this one.
        return int(status["VmHWM"].split()[0]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def refuse_other_settings(path: Path, stored_settings: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue a measurement from a file with other settings; both are JSON objects.

    Raises:
        UsageError: they differ; the message names the settings.
    """
    differ = sorted(key for key in {*stored_settings, *now} if stored_settings.get(key) != now.get(key))
    if differ:
        named = ", ".join(differ)
        raise UsageError(f"{path} was measured under other settings ({named}); delete it, or name another file")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments
            ["git", "-C", str(folder), *arguments],  # noqa: S607 - git is looked up in PATH on purpose
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    return _proc_file("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    total = _proc_file("/proc/meminfo").get("MemTotal")
    return int(total.split()[0]) * 1024 if total else None


def _proc_file(path: str) -> dict[str, str]:
    """`name: value` lines of a Linux status file, the last of equal names; empty elsewhere."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


class QuestionLog:
    """The measurements of finished questions, in memory and, one line each, in a file if there is one.

    The first line has the settings and the data `found` before the first question; a run with the same settings
    continues from the file. Lines are only appended.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Load the finished questions in `path` for these `settings`; an incomplete last line is measured again.

        Raises:
            UsageError: the file cannot be read, or was measured under other settings; the message names them.
        """
        self.path = path
        self.found: dict[str, Any] | None = None
        self._settings = json.loads(json.dumps(settings))
        self._lines: dict[int, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, question: int) -> bool:
        return question in self._lines

    def of(self, key: str) -> list[Any]:
        """The value of each finished question under `key`, in the order of the questions."""
        return [self._lines[question][key] for question in sorted(self._lines)]

    def begin(self, found: dict[str, Any]) -> None:
        """Store the data found before the first question. Must be called only once."""
        assert self.found is None, "a measurement begins once"
        self.found = found
        self._write({"settings": self._settings, "found": found})

    def add(self, question: int, measured: dict[str, Any]) -> None:
        """Store a finished question; it is on disk before this returns.

        Raises:
            UsageError: the file cannot be written.
        """
        line = {"question": question, "commit": commit(), **measured}
        self._write(line)
        self._lines[question] = line

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _read(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
            whole, _, cut_off = text.rpartition("\n")
            first, *rest = [json.loads(line) for line in whole.split("\n") if line] or [None]
            lines = {int(line["question"]): line for line in rest}
            stored_settings, found = (first["settings"], first["found"]) if first else (self._settings, None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a file of finished questions ({error}); name another file") from error
        refuse_other_settings(path, stored_settings, self._settings)
        self.found, self._lines = found, lines
        if cut_off:
            path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
