"""The operating system's cache of file contents, out of the way of whoever measures a disk."""

import os
from collections.abc import Iterable
from pathlib import Path


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Make the system read these files from their device next time, where it can be asked to.

    What was not written out yet is written first, or it would stay in memory.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
