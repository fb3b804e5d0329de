"""What several integration tests start from."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chunkweave.engine.runner import Runner
from chunkweave.models.loading import LoadedModel
from tests.integration.redis_server import Server
from tests.integration.weaving import Bench, make_bench
from tests.toys import TOY_FAMILIES, toy_model


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Toy models are quickest on one thread, and `--threads` must not outlive a test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A toy Llama for tests that do not change it."""
    return toy_model("llama")


@pytest.fixture
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept in the user's own cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture(params=sorted(TOY_FAMILIES))
def bench(request: pytest.FixtureRequest) -> Bench:
    """A model of each family that most tests run with."""
    return make_bench(toy_model(request.param))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Redis-protocol server of one test."""
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No step ends before the gate is open."""
    gate, real = threading.Event(), Runner.step

    def step(self, decoding, prefilling, **how):
        gate.wait(10)
        return real(self, decoding, prefilling, **how)

    monkeypatch.setattr(Runner, "step", step)
    return gate
