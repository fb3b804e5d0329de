"""Changing a folder that other processes change too, so that what was changed lasts."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
