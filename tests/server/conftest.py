"""Servers in this process: around toy engines, and before servers that look like vLLM."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from chunkweave import Engine, ReuseConfig, StoreConfig
from chunkweave.config import Backend as BackendName
from chunkweave.models.loading import bundled_tokenizer
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave_server.app import create_app
from chunkweave_server.backend import Stage
from chunkweave_server.engine_backend import EngineBackend, engine_options
from chunkweave_server.service import Parts, Service
from chunkweave_server.settings import Settings, resolve
from chunkweave_server.tenants import KeyRing, StoredKey, Tenant
from chunkweave_server.vllm_backend.backend import VllmBackend
from chunkweave_server.vllm_backend.process import VllmFlags
from tests.server.fake_vllm import FakeVllm
from tests.toys import toy_model

KEYS = {"acme": "acme-key-that-is-long-enough", "bolt": "bolt-key-that-is-long-enough"}
ADMIN_KEY = "admin-key-that-is-long-enough"


def toy_engine(store: StoreConfig | None = None, settings: Settings | None = None) -> Engine:
    options = engine_options(settings or settings_of())
    options["reuse"] = replace(options["reuse"] or ReuseConfig(), recompute_ratio=0.3)
    return Engine(toy_model("llama"), **{**options, "store": store or options["store"]})


CONSTANTS = {
    "shadow": {"shadow_window": "window", "shadow_max_divergence": "max_divergence"},
    "capture": {"variant_generations": "variant_generations", "capture": "profile"},
    "listen": ("stalled_s",),
    "store": ("admission", "max_instances"),
    "ordering": {"ordering_window": "window", "path_chunks": "path_chunks"},
    "batching": ("max_waiting",),
    "fleet": ("replica_requests", "max_prefill_batch"),
    "limits": ("default_answer_tokens", "burst", "max_corpora", "max_corpus_chunks", "max_corpus_bytes"),
    "corpora": ("corpus_flat_chunks",),
}
"""Fields of groups of settings that are no settings: tests set them, so as to reach their limits."""


def settings_of(backend: BackendName | None = None, **values: Any) -> Settings:
    """Settings with some values by name, the others as they are by default."""
    changes: dict[str, dict[str, Any]] = {}
    for group, names in CONSTANTS.items():
        fields = names if isinstance(names, dict) else {name: name for name in names}
        changes[group] = {fields[name]: values.pop(name) for name in fields.keys() & values.keys()}
    if backend is None:
        values = {"shape": "toy", "served_model_name": "toy", **values}
    settings = resolve(values, {}, backend=backend).settings
    groups = {group: replace(getattr(settings, group), **given) for group, given in changes.items() if given}
    return replace(settings, **groups)


def key_ring() -> KeyRing:
    keys = [StoredKey.of(Tenant(name), key) for name, key in KEYS.items()]
    return KeyRing([*keys, StoredKey.of(Tenant("ops", admin=True), ADMIN_KEY)])


def toy_service(*, keys: KeyRing | None = None, store: StoreConfig | None = None, **values: Any) -> Service:
    settings = settings_of(**values)
    backend = EngineBackend(settings, lambda settings: toy_engine(store, settings))
    return Service(settings, backend, keys or KeyRing())


def vllm_service(*fakes: FakeVllm, keys: KeyRing | None = None, name: str = "toy", **values: Any) -> Service:
    """A server before servers that run already."""
    if fakes and fakes[0].report_to:
        values["report_socket"] = fakes[0].report_to
    template, adapter = values.pop("chat_template", None), values.pop("lora", None)
    of_vllm = values.pop("of_vllm", ())
    flags = {"upstream": tuple(fake.url for fake in fakes), **values}
    settings = settings_of(BackendName.VLLM, **flags)
    tokenizer = bundled_tokenizer()
    if template is not None:
        tokenizer = HuggingFaceTokenizer(tokenizer._tokenizer)
        tokenizer._tokenizer.chat_template = template
    return Service(
        settings,
        VllmBackend(settings, VllmFlags(name, of_vllm, adapter=adapter), tokenizer=tokenizer),
        keys or KeyRing(),
    )


class Client(TestClient):
    """A client of an app in this process, with the service behind it, and what that takes for a vLLM server, if any."""

    service: Service
    fake: FakeVllm | None = None

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **{"base_url": "http://localhost", **options})

    @property
    def parts(self) -> Parts:
        return self.service.require_ready()

    @property
    def engine(self) -> Engine:
        return engine_of(self.service).engine

    def ask(self, question: str = "When does the ferry leave?", *, key: str | None = None, **body: Any) -> Any:
        """A chat completion, by default greedy and short."""
        whole = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 6, **body}
        return self.post("/v1/chat/completions", json=whole, headers=bearer(key))


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def engine_of(service: Service) -> EngineBackend:
    """The backend of a server that is ready and has our own engine."""
    service.require_ready()
    assert isinstance(service.backend, EngineBackend)
    return service.backend


def vllm_of(service: Service) -> VllmBackend:
    """The backend of a server that is ready and has vLLM."""
    service.require_ready()
    assert isinstance(service.backend, VllmBackend)
    return service.backend


Serve = Callable[..., Client]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that starts a server runs over both backends, unless it is marked as one backend's."""
    if "server_backend" in metafunc.fixturenames:
        only = [name for mark in metafunc.definition.iter_markers("backend") for name in mark.args]
        metafunc.parametrize("server_backend", only[:1] or ["engine", "vllm"])


@pytest.fixture
def serve(server_backend: str, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers that stop, audited, with the test."""
    with ExitStack() as stack:

        def start(**options: Any) -> Client:
            fake: FakeVllm | None = None
            if server_backend == "engine":
                service = toy_service(**options)
            else:
                socket = tmp_path.with_name(f"{tmp_path.name}-{len(started)}")
                fake = stack.enter_context(FakeVllm(str(socket)))
                service = vllm_service(fake, **options)
            started.append(service)
            client = Client(create_app(service), raise_server_exceptions=False)
            client.service, client.fake = service, fake
            stack.enter_context(client)
            wait_until(lambda: service.stage in (Stage.READY, Stage.FAILED))
            assert service.failure is None
            stack.callback(lambda: audit(service))
            return client

        started: list[Service] = []
        yield start


@pytest.fixture
def client(serve: Serve) -> Client:
    return serve()


def audit(service: Service) -> None:
    """Nothing is left under way, every count is back at zero, and engine and store are in order."""
    answering = service.require_ready().answering
    if isinstance(service.backend, VllmBackend):
        wait_until(lambda: not answering.running)
        fleet = vllm_of(service).fleet
        assert fleet is not None
        wait_until(lambda: fleet.running == fleet.waiting == 0)
        for replica in fleet.replicas:
            assert replica.outstanding_tokens == 0
            assert not replica.placed
            replica.contents.check()
        return
    batching = engine_of(service).batching
    wait_until(lambda: batching.stats.running == 0)
    assert answering.running == {}
    batching.check()
    assert batching.stats.blocks_reserved == 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.005)


async def started(service: Service) -> None:
    """Wait until a service is ready."""
    while service.stage not in (Stage.READY, Stage.FAILED):
        await asyncio.sleep(0.01)
    assert service.failure is None
