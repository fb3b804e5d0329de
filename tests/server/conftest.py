"""Servers around toy engines, in this process."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from chunkweave import Engine, ReuseConfig, StoreConfig
from chunkweave.server.app import create_app
from chunkweave.server.auth import KeyRing, StoredKey, Tenant
from chunkweave.server.service import Parts, Service, Stage
from chunkweave.server.settings import Settings, resolve
from chunkweave.testing import toy_model

KEYS = {"acme": "acme-key-that-is-long-enough", "bolt": "bolt-key-that-is-long-enough"}
ADMIN_KEY = "admin-key-that-is-long-enough"


def toy_engine(store: StoreConfig | None = None, settings: Settings | None = None) -> Engine:
    settings = settings or settings_of()
    return Engine(
        toy_model("llama"),
        store=store,
        reuse=ReuseConfig(recompute_ratio=0.3),
        order=settings.requests.order or "",
        shadow=settings.shadow,
    )


def settings_of(**values: Any) -> Settings:
    """Settings with some values by name, the others as they are by default."""
    return resolve({"shape": "toy", "served_model_name": "toy", **values}, {}).settings


def key_ring() -> KeyRing:
    keys = [StoredKey.of(Tenant(name), key) for name, key in KEYS.items()]
    return KeyRing([*keys, StoredKey.of(Tenant("ops", admin=True), ADMIN_KEY)])


def toy_service(*, keys: KeyRing | None = None, store: StoreConfig | None = None, **values: Any) -> Service:
    return Service(settings_of(**values), keys or KeyRing(), make_engine=lambda settings: toy_engine(store, settings))


class Client(TestClient):
    """A client of an app in this process, with the service behind it."""

    service: Service

    @property
    def parts(self) -> Parts:
        return self.service.require_ready()

    def ask(self, question: str = "When does the ferry leave?", *, key: str | None = None, **body: Any) -> Any:
        """A chat completion, by default greedy and short."""
        whole = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 6, **body}
        return self.post("/v1/chat/completions", json=whole, headers=bearer(key))


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


Serve = Callable[..., Client]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that stop, audited, with the test."""
    with ExitStack() as stack:

        def start(**options: Any) -> Client:
            service = toy_service(**options)
            client = Client(create_app(service), raise_server_exceptions=False)
            client.service = service
            stack.enter_context(client)
            wait_until(lambda: service.stage in (Stage.READY, Stage.FAILED))
            assert service.failure is None
            stack.callback(lambda: audit(service))
            return client

        yield start


@pytest.fixture
def client(serve: Serve) -> Client:
    return serve()


def audit(service: Service) -> None:
    """Nothing is left under way, and engine and store are in order."""
    parts = service.require_ready()
    wait_until(lambda: parts.batching.stats.running == 0)
    assert parts.answering.running == {}
    parts.batching.check()
    assert parts.batching.stats.blocks_reserved == 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.005)


async def started(service: Service) -> None:
    """Wait until a service is ready."""
    while service.stage not in (Stage.READY, Stage.FAILED):
        await asyncio.sleep(0.01)
    assert service.failure is None
