"""Fronts in threads of this process, before servers that look like vLLM."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from chunkweave.config import Backend
from chunkweave.models.loading import bundled_tokenizer
from chunkweave.server.auth import KeyRing
from chunkweave.server.run import Server, listening_socket
from chunkweave.server.service import Stage
from chunkweave.server.settings import ListenSettings, Settings, resolve
from chunkweave.server.vllm_backend.app import create_front
from chunkweave.server.vllm_backend.process import VllmFlags
from chunkweave.server.vllm_backend.service import FrontService
from tests.server.conftest import wait_until
from tests.server.fake_vllm import FakeVllm

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]
MORE = "The harbour of Skerrow was founded in 1871."


def front_settings(**values: Any) -> Settings:
    return resolve(values, {}, backend=Backend.VLLM).settings


class Front(httpx.Client):
    """A client of a running front, with the service behind it."""

    service: FrontService

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


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@contextmanager
def running_front(*fakes: FakeVllm, keys: KeyRing | None = None, **values: Any) -> Iterator[Front]:
    """A front before servers that run already."""
    if fakes and fakes[0].report_to:
        values["report_socket"] = fakes[0].report_to
    settings = front_settings(upstream=tuple(fake.url for fake in fakes), **values)
    service = FrontService(settings, VllmFlags("m"), keys or KeyRing(), tokenizer=bundled_tokenizer())
    server = Server(service, create_front(service), ListenSettings(port=0, graceful_s=0.2))
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


def audit(service: FrontService) -> None:
    """Nothing is left under way, and every count is back at zero."""
    parts = service.require_ready()
    wait_until(lambda: not parts.answering.running)
    assert parts.fleet.running == parts.fleet.waiting == 0
    for replica in parts.fleet.replicas:
        assert replica.outstanding_tokens == 0
        assert not replica.placed
        replica.contents.check()
