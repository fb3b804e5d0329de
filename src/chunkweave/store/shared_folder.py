"""Files that several processes share: changing a folder so that it lasts, and pins that outlive the process."""

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from chunkweave.errors import DocumentError
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def sync_folder(path: Path) -> None:
    """Make renames within a folder last.

    Raises:
        OSError: the folder could not be synced.
    """
    folder = os.open(path, _FOLDER)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def locked_folder(path: Path, refusal: type[Exception]) -> Iterator[None]:
    """One writer at a time among processes: the lock is on the folder, so that no lock file is left behind.

    Raises:
        refusal: the folder cannot be opened.
    """
    try:
        folder = os.open(path, _FOLDER)
    except OSError as error:
        raise refusal(f"{path} cannot be opened: {error.strerror or error}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


PIN_FILE = "pins.json"
_FORMAT = 1

_Pins = dict[str, frozenset[SegmentId]]


class PinFile:
    """`<cache-dir>/pins.json`: segment ids by model fingerprint. Replaced whole, one writer at a time.

    A pin names an id, whether a segment of that id is there or not; who withdraws a segment unpins it.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir
        self._path = cache_dir / PIN_FILE

    def read(self) -> _Pins:
        """All pins; none if there is no file.

        Raises:
            DocumentError: the file cannot be read or is no pin file.
        """
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']!r}")
            return {str(name): frozenset(SegmentId(str(i)) for i in ids) for name, ids in data["pins"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DocumentError(f"{self._path} is no pin file ({error}); repair or remove it") from error

    def add(self, fingerprint: str, segments: Iterable[SegmentId]) -> int:
        """Pin segments of a model; returns how many were not pinned before.

        Raises:
            DocumentError: the file is no pin file, or cannot be written.
        """
        added = frozenset(segments)
        return self._update(fingerprint, lambda pinned: pinned | added)

    def discard(self, fingerprint: str, segments: Iterable[SegmentId]) -> int:
        """Unpin segments of a model; returns how many were pinned.

        Raises:
            DocumentError: the file is no pin file, or cannot be written.
        """
        dropped = frozenset(segments)
        if not self._path.exists():
            return 0
        return self._update(fingerprint, lambda pinned: pinned - dropped)

    def _update(self, fingerprint: str, change: Callable[[frozenset[SegmentId]], frozenset[SegmentId]]) -> int:
        with locked_folder(self._folder, DocumentError):
            pins = self.read()
            before = pins.get(fingerprint, frozenset())
            after = change(before)
            if after != before:
                self._write({name: ids for name, ids in {**pins, fingerprint: after}.items() if ids})
        return len(after ^ before)

    def _write(self, pins: _Pins) -> None:
        text = json.dumps({"format": _FORMAT, "pins": {name: sorted(ids) for name, ids in sorted(pins.items())}})
        partial = self._path.with_name(f".{PIN_FILE}.{secrets.token_hex(8)}.partial")
        try:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as stream:
                stream.write(text + "\n")
                stream.flush()
                os.fsync(file)
            partial.replace(self._path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise DocumentError(f"{self._path} cannot be written: {error}") from error


def pinned_segments(cache_dir: Path, fingerprint: str) -> frozenset[SegmentId]:
    """Pins of one model, for a store that opens: a file that cannot be read is logged and pins nothing."""
    try:
        return PinFile(cache_dir).read().get(fingerprint, frozenset())
    except DocumentError as error:
        logger.warning("%s; nothing is pinned", error)
        return frozenset()
