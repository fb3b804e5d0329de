"""Fronts in threads of this process, before servers that look like vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from chunkweave_server.tenants import KeyRing
from tests.server.conftest import Asking, audit, events_of, listening, vllm_service
from tests.server.fake_vllm import FakeVllm

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]
MORE = "The harbour of Skerrow was founded in 1871."


class Front(Asking):
    """A client of a running front; short."""

    usual: ClassVar = {"max_tokens": 4}

    def events(self, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
        """The events of a stream."""
        whole = {"messages": [{"role": "user", "content": "When?"}], **self.usual, "stream": True, **body}
        return events_of(self.post(path, json=whole))


@contextmanager
def running_front(*fakes: FakeVllm, keys: KeyRing | None = None, **values: Any) -> Iterator[Front]:
    """A front before servers that run already."""
    service = vllm_service(*fakes, keys=keys, name="m", **{"graceful": 0.2, **values})
    with listening(service) as server, Front(base_url=server.url, timeout=120) as client:
        client.service = service
        yield client
        audit(service)
