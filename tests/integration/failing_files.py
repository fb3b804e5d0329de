"""A layer over the system's file calls that fails below one folder, for tests of tiers."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WRITES = ("mkdir", "unlink", "replace", "rename", "fsync", "write", "open for writing")
READS = ("open", "stat", "listdir", "scandir", "pread", "read")
_BY_DESCRIPTOR = ("fsync", "write", "pread", "read", "preadv", "readv", "posix_fallocate", "ftruncate")


@dataclass
class FailingFiles:
    """From call `first` on, `count` calls below `root` (or on descriptors opened there) of these `kinds` fail."""

    root: Path
    number: int
    kinds: tuple[str, ...]
    first: int = 0
    count: int = 1
    on: bool = True
    calls: int = 0
    failed: list[str] = field(default_factory=list)
    _descriptors: set[int] = field(default_factory=set)

    def check(self, kind: str, where: Any) -> None:
        """Count a call, and raise if it is one that fails."""
        if not self.on or kind not in self.kinds or not self._inside(where):
            return
        number, self.calls = self.calls, self.calls + 1
        if self.first <= number < self.first + self.count:
            self.failed.append(kind)
            raise OSError(self.number, os.strerror(self.number))

    def opened(self, path: Any, descriptor: int) -> None:
        """Note a descriptor, so that calls on it count when its path is below the root."""
        self._descriptors.discard(descriptor)
        if self._inside(path):
            self._descriptors.add(descriptor)

    def _inside(self, where: Any) -> bool:
        if isinstance(where, int):
            return where in self._descriptors
        return Path(os.fsdecode(where)).is_relative_to(self.root)


@contextmanager
def failing(files: FailingFiles) -> Iterator[FailingFiles]:
    """Put the layer over `os` while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "unlink", "replace", "rename", "stat", "lstat", "listdir", "scandir", *_BY_DESCRIPTOR):
            if hasattr(os, name):
                patch.setattr(os, name, _checked(files, name, getattr(os, name)))
        patch.setattr(os, "open", _checked_open(files, os.open))
        yield files


def _checked(files: FailingFiles, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    kind = {"lstat": "stat", "preadv": "pread", "readv": "read"}.get(name, name)

    def call(where: Any = ".", *more: Any, **options: Any) -> Any:
        files.check(kind, where)
        return real(where, *more, **options)

    return call


def _checked_open(files: FailingFiles, real: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, *more: Any, **options: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        files.check("open for writing" if writes else "open", path)
        descriptor = real(path, flags, *more, **options)
        files.opened(path, descriptor)
        return descriptor

    return call
