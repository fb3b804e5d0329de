"""Starts a command that gets SIGTERM when the process that started it is gone, however that ended.

`python -m chunkweave_server.vllm_backend.parent_death_signal COMMAND...`. A vLLM server without its proxy would keep
its GPU. Linux only: elsewhere the command is started all the same, and outlives a killed parent.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_SET_PARENT_DEATH_SIGNAL = 1


def follow_parent() -> None:
    """Get SIGTERM when the parent dies; an `exec` keeps that. A no-op where the system has no such thing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def main(command: Sequence[str]) -> None:
    """Become `command`."""
    parent = os.getppid()
    follow_parent()
    if os.getppid() != parent:  # it died before it could be followed
        sys.exit(1)
    os.execvp(command[0], list(command))  # noqa: S606 - the command is the operator's own


if __name__ == "__main__":
    main(sys.argv[1:])
