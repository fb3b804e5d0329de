"""A server with keys around a toy engine, or before servers that look like vLLM, as a process of its own.

    python -m tests.server.toy_server engine|vllm [URL of a server that looks like vLLM] [SETTING=JSON ...]

Its first line says where it listens. It ends with its standard input.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.server_thread import ServerThread

from chunkweave.server.backend import Stage
from tests.server.conftest import key_ring, toy_service, vllm_service, wait_until

ROOT = Path(__file__).resolve().parents[2]


class Elsewhere:
    """What stands for a server that looks like vLLM in another process."""

    report_to = None

    def __init__(self, url: str) -> None:
        self.url = url


@contextmanager
def toy_server(backend: str, upstream: str = "", **values: Any) -> Iterator[tuple[str, int]]:
    """A running one: its URL and its process's id."""
    command = [sys.executable, "-m", "tests.server.toy_server", backend, upstream]
    command += [f"{name}={json.dumps(value)}" for name, value in values.items()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http"), "the server did not start"
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield url, process.pid
        finally:
            process.stdin.close()
            process.wait(60)


def main(backend: str, upstream: str, *given: str) -> None:
    torch.set_num_threads(1)
    values = {name: json.loads(value) for name, _, value in (one.partition("=") for one in given)}
    if backend == "engine":
        service = toy_service(keys=key_ring(), **values)
    else:
        service = vllm_service(Elsewhere(upstream), keys=key_ring(), **values)  # type: ignore[arg-type]
    with ServerThread(service) as server:
        wait_until(lambda: service.stage in (Stage.READY, Stage.FAILED))
        assert service.failure is None, service.failure
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
