"""A server with keys around a toy engine, or before servers that look like vLLM, as a process of its own.

    python -m tests.server.toy_server engine|vllm [URL of a server that looks like vLLM] [SETTING=JSON ...]

Its first line says where it listens, once it is ready.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from chunkweave_server.app import listening_socket, run
from chunkweave_server.backend import Stage
from chunkweave_server.settings import ListenSettings
from tests.server.conftest import key_ring, toy_service, vllm_service

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
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http"), "the server did not start"
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(60)


def main(backend: str, upstream: str, *given: str) -> None:
    torch.set_num_threads(1)
    values = {name: json.loads(value) for name, _, value in (one.partition("=") for one in given)}
    if backend == "engine":
        service = toy_service(keys=key_ring(), **values)
    else:
        service = vllm_service(Elsewhere(upstream), keys=key_ring(), **values)  # type: ignore[arg-type]
    sock = listening_socket(ListenSettings(port=0))

    def on_stage(stage: Stage, _: float) -> None:
        if stage is Stage.READY:
            sys.stdout.write("http://{}:{}\n".format(*sock.getsockname()))
            sys.stdout.flush()

    service.on_stage = on_stage
    run(service, sock)


if __name__ == "__main__":
    main(*sys.argv[1:])
