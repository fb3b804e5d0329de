"""Servers forked from a process that has imported everything, on a disk that can fill up, become read-only or slow.

python -m tests.adversary.forks, then a line of JSON for each server: its arguments, environment, log, and the files
`control` and `root`. What `control` says (`full`, `readonly`, `slow`, or nothing) happens to files below `root`, from
the next call on. The answer is a process id. Servers end with this process.
"""

import ctypes
import errno
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SLOW_S = 0.02
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """Stands between the process and its files."""

    def __init__(self, control: Path, root: Path) -> None:
        self._control = control
        self._root = f"{root.resolve()}/"
        self._open_file = io.open

    def install(self) -> None:
        opened, written, read = os.open, os.pwrite, os.preadv

        def open_descriptor(path: Any, flags: int, *given: Any, **more: Any) -> int:
            self._meet(path, writes=bool(flags & _WRITING))
            return opened(path, flags, *given, **more)

        def open_file(file: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
            if not isinstance(file, int):
                self._meet(file, writes=any(letter in mode for letter in "wxa+"))
            return self._open_file(file, mode, *given, **more)

        def pwrite(file: int, data: Any, offset: int) -> int:
            self._meet(Path(f"/proc/self/fd/{file}").readlink(), writes=True)
            return written(file, data, offset)

        def preadv(file: int, buffers: Any, offset: int, *given: Any) -> int:
            self._meet(Path(f"/proc/self/fd/{file}").readlink(), writes=False)
            return read(file, buffers, offset, *given)

        os.open, os.pwrite, os.preadv, io.open = open_descriptor, pwrite, preadv, open_file
        for name in ("mkdir", "replace", "rename", "unlink", "rmdir", "link"):
            setattr(os, name, self._changing(name))

    def _changing(self, name: str) -> Callable[..., Any]:
        real, frees = getattr(os, name), name in ("unlink", "rmdir")

        def call(path: Any, *given: Any, **more: Any) -> Any:
            self._meet(path, writes=True, frees=frees)
            return real(path, *given, **more)

        return call

    def _meet(self, path: Any, *, writes: bool, frees: bool = False) -> None:
        if not str(path).startswith(self._root):
            return
        try:
            with self._open_file(self._control) as control:
                fault = control.read().strip()
        except FileNotFoundError:
            return
        if fault == "slow":
            time.sleep(_SLOW_S)
        elif fault == "readonly" and writes:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        elif fault == "full" and writes and not frees:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


_PARENT_DEATH_SIGNAL = 1


def serve(asked: dict[str, Any]) -> None:
    """Be a server, in a process that was forked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.environ.update(asked["environment"])
    Disk(Path(asked["control"]), Path(asked["root"])).install()
    sys.argv = ["chunkweave", *asked["arguments"]]
    from chunkweave.cli.app import main as chunkweave

    chunkweave()


def main() -> None:
    """Fork until nobody asks any more."""
    import chunkweave_server.app
    import chunkweave_server.engine_backend
    import chunkweave_server.vllm_backend.backend  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are killed
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                serve(asked)
            except BaseException:  # noqa: BLE001 - nobody else would say so
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
