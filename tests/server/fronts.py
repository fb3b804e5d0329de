"""Fronts in threads of this process, before servers that look like vLLM."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from chunkweave_server.app import Server, listening_socket
from chunkweave_server.backend import Stage
from chunkweave_server.service import Service
from chunkweave_server.settings import ListenSettings
from chunkweave_server.tenants import KeyRing
from tests.server.conftest import audit, bearer, vllm_service, wait_until
from tests.server.fake_vllm import FakeVllm

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]
MORE = "The harbour of Skerrow was founded in 1871."


class Front(httpx.Client):
    """A client of a running front, with the service behind it."""

    service: Service

    def ask(self, question: str = "When does the ferry leave?", *, key: str | None = None, **body: Any) -> Any:
        """A chat completion, by default short."""
        whole = {"messages": [{"role": "user", "content": question}], "max_tokens": 4, **body}
        return self.post("/v1/chat/completions", json=whole, headers=bearer(key))

    def events(self, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, without the mark of its end, which there must be."""
        whole = {"messages": [{"role": "user", "content": "When?"}], "max_tokens": 4, "stream": True, **body}
        with self.stream("POST", path, json=whole) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


@contextmanager
def running_front(*fakes: FakeVllm, keys: KeyRing | None = None, **values: Any) -> Iterator[Front]:
    """A front before servers that run already."""
    service = vllm_service(*fakes, keys=keys, name="m", **{"graceful_s": 0.2, **values})
    server = Server(service)
    sock = listening_socket(ListenSettings(port=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: service.stage in (Stage.READY, Stage.FAILED))
        assert service.failure is None, service.failure
        host, port = sock.getsockname()[:2]
        with Front(base_url=f"http://{host}:{port}", timeout=30) as client:
            client.service = service
            yield client
            audit(service)
    finally:
        server.should_exit = True
        thread.join()
