"""Runs a command that gets SIGTERM when its parent process ends, even if that is killed.

`python -m chunkweave_server.vllm_backend.parent_death_signal COMMAND...`. Otherwise a vLLM server whose front was
killed would keep its GPU. Linux only: on other systems the command runs without the signal.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_SET_PARENT_DEATH_SIGNAL = 1


def follow_parent() -> None:
    """Ask for SIGTERM when the parent ends; this survives `exec`. Does nothing on systems other than Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def main(command: Sequence[str]) -> None:
    """Replace this process by `command`."""
    parent = os.getppid()
    follow_parent()
    if os.getppid() != parent:  # the parent ended before the call
        sys.exit(1)
    os.execvp(command[0], list(command))  # noqa: S606 - the command is the operator's own


if __name__ == "__main__":
    main(sys.argv[1:])
