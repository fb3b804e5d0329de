"""A server that a benchmark starts, waits for and stops."""

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from chunkweave.errors import ChunkweaveError
from chunkweave_server.tenants import new_key

MAIN = "from chunkweave.cli.app import main; main()"
INDEXED_MAIN = (
    "from chunkweave_server.settings import CorpusSettings as C; init = C.__init__; "
    f"C.__init__ = lambda self, **given: init(self, corpus_flat_chunks=1, **given); {MAIN}"
)
"""The command line for `python -c`; `INDEXED_MAIN` searches also small corpora by their index."""


def api_keys(*tenants: str) -> dict[str, str]:
    """A new key for each tenant; servers started from now on accept only these."""
    keys = {tenant: new_key() for tenant in tenants}
    os.environ["CHUNKWEAVE_API_KEYS"] = ",".join(f"{tenant}={key}" for tenant, key in keys.items())
    return keys


@contextmanager
def serving(command: str, url: str, *, ready_path: str, log: Path, timeout_s: float = 600.0) -> Iterator[int]:
    """Run `command` until the end of the block; inside, `url` plus `ready_path` has answered with 200.

    Yields the process id. At the end the process is stopped, at first gracefully. Its output goes to `log`.

    Raises:
        ChunkweaveError: another server answers at `url`, or the process ended or timed out before it was ready.
    """
    if _answers(url + ready_path):
        raise ChunkweaveError(f"a server answers at {url} already: stop it, or leave --serve out")
    with log.open("ab") as output:
        process = subprocess.Popen(shlex.split(command), stdout=output, stderr=subprocess.STDOUT)  # noqa: S603 - the user's own
        try:
            _wait_until_ready(process, url + ready_path, log, timeout_s)
            yield process.pid
        finally:
            _stop(process)


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path, timeout_s: float) -> None:
    ends_s = time.monotonic() + timeout_s
    while not _answers(url):
        if process.poll() is not None:
            raise ChunkweaveError(f"the server ended with {process.returncode} before it was ready; see {log}")
        if time.monotonic() > ends_s:
            raise ChunkweaveError(f"the server was not ready within {timeout_s:.0f} s; see {log}")
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def resident_bytes(pid: int) -> int:
    """Current physical memory of a process (Linux)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def peak_rss_bytes(pid: int) -> int:
    """Sum of the peaks of physical memory of a process and its children (Linux)."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        child = int(status.parent.name)
        parents[child] = int(fields["PPid"])
        peaks[child] = int(fields.get("VmHWM", "0").split()[0]) * 1024
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(peaks.get(one, 0) for one in family)
