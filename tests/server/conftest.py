"""Servers in this process: around toy engines, and before servers that look like vLLM."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import torch
from benchmarks.server_thread import ServerThread
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from chunkweave import Engine, ReuseConfig, StoreConfig
from chunkweave.config import Backend as BackendName
from chunkweave.engine.runner import Runner
from chunkweave.models.loading import bundled_tokenizer
from chunkweave.planning.calibration import shipped_records
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave_server.app import create_app
from chunkweave_server.backend import Stage
from chunkweave_server.engine_backend import EngineBackend, engine_options
from chunkweave_server.service import Parts, Service
from chunkweave_server.settings import Settings, resolve
from chunkweave_server.tenants import KeyRing, StoredKey, Tenant
from chunkweave_server.vllm_backend.backend import VllmBackend
from chunkweave_server.vllm_backend.process import VllmFlags
from chunkweave_server.vllm_backend.upstream import Upstream
from tests.server.fake_vllm import FakeVllm
from tests.toys import toy_model

KEYS = {"acme": "acme-key-that-is-long-enough", "bolt": "bolt-key-that-is-long-enough"}
ADMIN_KEY = "admin-key-that-is-long-enough"


def toy_engine(store: StoreConfig | None = None, settings: Settings | None = None) -> Engine:
    options = engine_options(settings or settings_of())
    options["reuse"] = replace(options["reuse"] or ReuseConfig(), recompute_ratio=0.3)
    return Engine(toy_model("llama"), **{**options, "store": store or options["store"]})


CONSTANTS = {
    "capture": {
        "capture": "profile",
        **{name: name for name in ("variant_generations", "variant_fraction")},
        **{name: name for name in ("neutral_tokens", "context_count", "context_tokens")},
    },
    "listen": ("stalled_s",),
    "store": ("admission", "max_instances"),
    "ordering": {
        "ordering_window": "window",
        "path_chunks": "path_chunks",
        "continuation_threshold": "continuation_threshold",
    },
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


class Asking(httpx.Client):
    """A client of a server, with the service behind it."""

    service: Service
    usual: ClassVar[dict[str, Any]]
    """What is in every chat completion that says nothing else."""

    @property
    def parts(self) -> Parts:
        return self.service.require_ready()

    def ask(self, question: str = "When does the ferry leave?", *, key: str | None = None, **body: Any) -> Any:
        """A chat completion."""
        whole = {"messages": [{"role": "user", "content": question}], **self.usual, **body}
        return self.post("/v1/chat/completions", json=whole, headers=bearer(key))

    def metric(self, name: str, *, key: str | None = None, **labels: str) -> float:
        """A metric of the server's own: the sum of its samples with these labels, 0 if there are none."""
        text = self.get("/metrics", headers=bearer(key)).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        own = [sample for sample in samples if sample.name == f"chunkweave:{name}"]
        return sum(sample.value for sample in own if labels.items() <= sample.labels.items())

    def make_corpus(
        self, name: str = "notes", documents: Sequence[Any] = (), *, key: str | None = None, **fields: Any
    ) -> Any:
        """A corpus with these documents, as the server holds it."""
        made = self.post("/v1/corpora", json={"name": name, **fields}, headers=bearer(key))
        assert made.status_code == 201, made.text
        if documents:
            added = self.add(documents, name, key=key)
            assert added.status_code == 200, added.text
        return self.parts.corpora.get(self.service.keys.tenant_of(key), name)

    def add(self, documents: Sequence[Any], name: str = "notes", *, key: str | None = None, **more: Any) -> Any:
        """Add documents to a corpus."""
        body = {"documents": [*documents], **more}
        return self.post(f"/v1/corpora/{name}/documents", json=body, headers=bearer(key))

    def search(self, query: str, name: str = "notes", **more: Any) -> Any:
        """Search a corpus."""
        return self.post(f"/v1/corpora/{name}/search", json={"query": query, **more})

    def warm(self, *documents: str, key: str | None = None, **more: Any) -> Any:
        """Have documents computed ahead."""
        return self.post("/v1/cache/warm", json={"documents": [*documents], **more}, headers=bearer(key))

    def clear(self, *documents: str, key: str | None = None, **more: Any) -> Any:
        """Have documents removed from the cache, or what else is said."""
        named = {"documents": [*documents]} if documents else {}
        return self.post("/v1/cache/clear", json={**named, **more}, headers=bearer(key))


class Client(TestClient, Asking):
    """A client of an app in this process, with what that takes for a vLLM server, if any; greedy and short."""

    fake: FakeVllm | None = None
    usual: ClassVar = {"temperature": 0, "max_tokens": 6}

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **{"base_url": "http://localhost", **options})

    @property
    def engine(self) -> Engine:
        return engine_of(self.service).engine


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def report_of(reply: Any) -> dict[str, Any]:
    """The report of an answer."""
    assert reply.status_code == 200, reply.text
    return reply.json()["chunkweave"]


def error_of(reply: Any) -> tuple[int, str | None]:
    """The status and the code of what was refused."""
    return reply.status_code, reply.json()["error"]["code"]


def events_of(reply: Any) -> list[dict[str, Any]]:
    """The events of a stream, without the mark of its end, which there must be."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, end, rest = reply.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def later(work: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
    """Begins some work on a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *arguments, **options)
    pool.shutdown(wait=False)
    return future


@contextmanager
def slowed(client: Client, step_s: float = 0.02) -> Iterator[None]:
    """Each step of the engine takes longer, so that what runs still runs at the end, however fast the machine is."""
    runner = client.engine.runner
    step = runner.step

    def slow(*arguments: Any, **options: Any) -> torch.Tensor:
        time.sleep(step_s)
        return step(*arguments, **options)

    runner.step = slow
    try:
        yield
    finally:
        runner.step = step


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
NUMBERS = count()


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
            client = stack.enter_context(serving(server_backend, tmp_path, **options))
            stack.callback(lambda: audit(client.service))
            return client

        yield start


@contextmanager
def serving(backend: str, folder: Path, **options: Any) -> Iterator[Client]:
    """A server over that backend, once it is ready; what looks like vLLM reports to a socket beside the folder."""
    with service_over(backend, folder, **options) as (service, fake):
        client = Client(create_app(service), raise_server_exceptions=False)
        client.service, client.fake = service, fake
        with client:
            until_ready(service)
            yield client


@contextmanager
def service_over(backend: str, folder: Path, **options: Any) -> Iterator[tuple[Service, FakeVllm | None]]:
    """A service over that backend, and what looks like vLLM behind it, if any."""
    if backend == "engine":
        yield toy_service(**options), None
        return
    socket = folder.with_name(f"{folder.name}-{next(NUMBERS)}")
    with FakeVllm(str(socket)) as fake:
        yield vllm_service(fake, **options), fake


@contextmanager
def listening(service: Service) -> Iterator[ServerThread]:
    """A server that listens on a port, once it is ready."""
    with ServerThread(service) as server:
        until_ready(service)
        yield server


def until_ready(service: Service) -> None:
    wait_until(lambda: service.stage in (Stage.READY, Stage.FAILED), 120)
    assert service.failure is None, service.failure


@pytest.fixture
def client(serve: Serve) -> Client:
    return serve()


@pytest.fixture
def notes(client: Client) -> Client:
    """A server with an empty corpus."""
    client.make_corpus()
    return client


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[FakeVllm]:
    with FakeVllm(str(tmp_path / "reports")) as fake:
        yield fake


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[tuple[FakeVllm, FakeVllm]]:
    """Two servers that look like vLLM."""
    path = str(tmp_path / "reports")
    with FakeVllm(path) as one, FakeVllm(path) as other:
        yield one, other


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The token ids of every prompt from now on, as our engine computes it or as vLLM is sent it."""
    seen: list[list[int]] = []
    start, complete = Runner.start, Upstream.complete

    def started(self: Runner, prompt: Any, *arguments: Any) -> Any:
        if arguments[-1].capture or arguments[-1].plan is None:  # not of a comparison
            seen.append(list(prompt.token_ids))
        return start(self, prompt, *arguments)

    def sent(self: Upstream, body: dict[str, Any], request_id: str) -> Any:
        seen.append(body["prompt"])
        return complete(self, body, request_id)

    monkeypatch.setattr(Runner, "start", started)
    monkeypatch.setattr(Upstream, "complete", sent)
    return seen


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
            replica.sent.check()
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


@pytest.fixture
def compared(monkeypatch) -> None:
    """The model has a record, so that requests of no method weave, and one in two of them is compared."""
    record = next(record for record in shipped_records() if record.model == "reader")
    monkeypatch.setattr("chunkweave_server.vllm_backend.prepare._calibration", lambda *_: record)
    monkeypatch.setattr("chunkweave_server.vllm_backend.comparisons.WOVEN_EVERY", 2)
