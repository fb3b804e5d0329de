"""Files that several processes share: durable changes of a folder, and tombstones of removed segments."""

import errno
import fcntl
import json
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from chunkweave.errors import DocumentError, UsageError
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, SegmentId

logger = logging.getLogger(__name__)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def sync_folder(path: Path) -> None:
    """Make renames within a folder durable.

    Raises:
        OSError: the folder could not be synced.
    """
    folder = os.open(path, _FOLDER)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def require_writable(folder: Path) -> None:
    """Create the cache directory if it is missing, and test that it is writable.

    A full disk is accepted: stored segments can still be read and evicted.

    Raises:
        UsageError: nothing can be written there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            why = error.strerror or error
            raise UsageError(f"the cache directory {folder} cannot be written: {why}") from error


@contextmanager
def locked_folder(path: Path, refusal: type[Exception]) -> Iterator[None]:
    """Exclusive lock among processes. It is taken on the folder itself, so no lock file is left behind.

    Raises:
        refusal: the folder cannot be opened or locked.
    """
    try:
        folder = os.open(path, _FOLDER)
    except OSError as error:
        raise refusal(f"{path} cannot be opened: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            raise refusal(f"{path} cannot be locked: {error.strerror or error}") from error
        yield
    finally:
        os.close(folder)


REMOVED_FILE = "removed.json"
DTYPE_FILE = "auto-dtype.json"
_FORMAT = 1


_Paths = dict[SegmentId, tuple[ChunkId, ...]]
"""By segment, the chunks that its KV depends on, its own last: its path, plus `read` ids if it has any."""

_Removed = dict[str, dict[str, _Paths]]
"""By model fingerprint and level."""


def read_dtype(cache_dir: Path) -> str | None:
    """What `--dtype auto` was decided to be for this folder (`write_dtype`); None if nothing readable says it."""
    try:
        return str(json.loads((cache_dir / DTYPE_FILE).read_text(encoding="utf-8"))["dtype"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_dtype(cache_dir: Path, dtype: str) -> None:
    """Keep a decision for `read_dtype`. Raises `DocumentError` if it cannot be written."""
    _replace(cache_dir / DTYPE_FILE, {"dtype": dtype})


class Tombstones:
    """Segments that were removed from one level but whose copies could not be deleted yet.

    They are listed in `<cache-dir>/removed.json`, so that other processes, now or later, do not use the copies; if the
    file cannot be written, only in memory. Only ids are kept. Thread-safe.
    """

    def __init__(self, cache_dir: Path | None = None, fingerprint: str = "", level: str = "") -> None:
        """The tombstones of a model's `level`; without `cache_dir` only in memory. An unreadable file is logged."""
        self._path = None if cache_dir is None else cache_dir / REMOVED_FILE
        self._fingerprint, self._level = fingerprint, level
        self._lock = threading.Lock()
        self._unwritten: _Paths = {}
        self._written: _Paths = {}
        self._seen: tuple[int, int, int] | None = None

    def __contains__(self, segment: SegmentId) -> bool:
        return segment in self._unwritten or segment in self._read()

    @property
    def lasting(self) -> bool:
        """Whether all of them are written to the file."""
        return not self._unwritten

    def records(self) -> list[SegmentRecord]:
        """A record of each, without tokens and bytes; its context lists all ids that its KV depends on."""
        paths = {**self._read(), **self._unwritten}
        return [
            SegmentRecord(segment, path[-1], path[:-1], (), exact=False, nbytes=0) for segment, path in paths.items()
        ]

    def add(self, records: Iterable[SegmentRecord]) -> None:
        """Note records whose copies could not be deleted."""
        new = {record.id: _all_read(record) for record in records}
        if new and not self._update(lambda paths: {**paths, **new}):
            with self._lock:
                self._unwritten.update(new)

    def discard(self, segments: Iterable[SegmentId]) -> None:
        """Forget segments whose copies were deleted or replaced; unknown ids are ignored."""
        gone = {segment for segment in segments if segment in self}
        if not gone:
            return

        def without(paths: _Paths) -> _Paths:
            return {segment: path for segment, path in paths.items() if segment not in gone}

        if not self._update(without):
            with self._lock:  # this process knows; other processes keep ignoring the copies
                self._unwritten, self._written = without(self._unwritten), without(self._written)

    def _read(self) -> _Paths:
        """The file's current content; if it cannot be read, the last known one."""
        if self._path is None:
            return {}
        seen = _identity(self._path)
        with self._lock:
            if seen != self._seen:
                self._seen = seen
                try:
                    self._written = _removed(self._path).get(self._fingerprint, {}).get(self._level, {})
                except DocumentError as error:
                    logger.error("%s; removed segments may be used", error)
            return self._written

    def _update(self, change: Callable[[_Paths], _Paths]) -> bool:
        """Apply `change` to the file, with entries not yet written; logs and returns False on failure."""
        if self._path is None:
            return False
        try:
            with locked_folder(self._path.parent, DocumentError):
                removed = _removed(self._path)
                levels = removed.setdefault(self._fingerprint, {})
                with self._lock:
                    unwritten = self._unwritten
                levels[self._level] = change({**levels.get(self._level, {}), **unwritten})
                _replace(self._path, {"removed": removed})
        except DocumentError as error:
            logger.error("removed segments cannot be recorded: %s", error)
            return False
        with self._lock:
            self._unwritten = {segment: path for segment, path in self._unwritten.items() if segment not in unwritten}
        return True


def _all_read(record: SegmentRecord) -> tuple[ChunkId, ...]:
    more = record.contexts or record.read
    return (*sorted(record.sources), record.chunk_id) if more else record.path


def _removed(path: Path) -> _Removed:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}")
        return {
            str(model): {
                str(level): {
                    SegmentId(segment): tuple(ChunkId(str(i)) for i in path) for segment, path in paths.items() if path
                }
                for level, paths in levels.items()
            }
            for model, levels in data["removed"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DocumentError(f"{path} cannot be read ({error}); repair or remove it") from error


def replace_file(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file atomically and durably: a reader, also after a crash, sees the old content or the new one.

    `mode` limits who may read it, as the process's mask does.

    Raises:
        OSError: it cannot be written; the old content is there.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(file)
        partial.replace(path)
    except OSError:
        with suppress(OSError):  # a folder that has become read-only lets nothing be removed either
            partial.unlink(missing_ok=True)
        raise


def _replace(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file of this folder.

    Raises:
        DocumentError: it cannot be written.
    """
    try:
        replace_file(path, json.dumps({"format": _FORMAT, **data}) + "\n", 0o600)
    except OSError as error:
        raise DocumentError(f"{path} cannot be written: {error}") from error


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
