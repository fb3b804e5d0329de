"""The examples with the OpenAI client, LangChain and LlamaIndex run as they are written, against the bundled reader."""

import runpy
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from chunkweave_server.engine_backend import EngineBackend
from chunkweave_server.service import Service
from tests.server.conftest import KEYS, key_ring, listening, settings_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = settings_of(shape=None, model="reader", served_model_name=None)
    with listening(Service(settings, EngineBackend(settings), key_ring())) as server:
        yield f"{server.url}/v1"


def run_example(name: str, url: str, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", [name, url, KEYS["acme"]])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


def test_the_openai_client(url: str, monkeypatch, capsys):
    first, counts, second, more = run_example("openai_client.py", url, monkeypatch, capsys).splitlines()
    assert first.strip() == second.strip() == "Otto Gunmark"
    assert counts.startswith("  0 of")
    assert not more.startswith("  0 of")


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="LangChain is not installed: make test-clients")
@pytest.mark.filterwarnings("default")
def test_langchain(url: str, monkeypatch, capsys):
    answer, counts, steps = run_example("langchain_client.py", url, monkeypatch, capsys).splitlines()
    assert (answer.strip(), steps.strip()) == ("Otto Gunmark", "230")
    assert int(counts.split()[2]) > 60, "the documents did not arrive"


@pytest.mark.skipif(find_spec("llama_index") is None, reason="LlamaIndex is not installed: make test-clients")
@pytest.mark.filterwarnings("default")
def test_llama_index(url: str, monkeypatch, capsys):
    answer, steps = run_example("llama_index_client.py", url, monkeypatch, capsys).splitlines()
    assert (answer.strip(), steps.strip()) == ("Otto Gunmark", "230")
