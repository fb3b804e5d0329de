"""The examples with the OpenAI client, LangChain and LlamaIndex run as they are written, against the bundled reader."""

import asyncio
import runpy
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from benchmarks.server_thread import ServerThread

from chunkweave_server.backend import Stage
from chunkweave_server.engine_backend import EngineBackend
from chunkweave_server.service import Service
from tests.server.conftest import KEYS, key_ring, settings_of, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = settings_of(shape=None, model="reader", served_model_name=None)
    service = Service(settings, EngineBackend(settings), key_ring())
    with ServerThread(service) as server:
        wait_until(lambda: service.stage in (Stage.READY, Stage.FAILED), 120)
        assert service.failure is None
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
    assert int(counts.split()[0]) > 60, "the documents did not arrive"


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="LangChain is not installed: make test-clients")
@pytest.mark.filterwarnings("default")
def test_langchains_retriever_and_the_report_of_a_stream(url: str):
    from chunkweave.integrations.langchain import ChatChunkweave, CorpusRetriever

    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEYS['acme']}"}) as http:
        http.post("/corpora", json={"name": "towns"}).raise_for_status()
        texts = ["The Selmond Choir is led by Otto Gunmark.", "The Gerfern Tower has 230 steps."]
        documents = [{"id": f"d{place}", "text": text, "metadata": {"place": 7}} for place, text in enumerate(texts)]
        http.post("/corpora/towns/documents", json={"documents": documents}).raise_for_status()
    retriever = CorpusRetriever(base_url=url, corpus="towns", api_key=KEYS["acme"], top_k=1)
    (found,) = retriever.invoke("How many steps has the Gerfern Tower?")
    assert (found.page_content, found.metadata["source"]) == (texts[1], "d1")
    assert [one.page_content for one in asyncio.run(retriever.ainvoke("Who leads the Selmond Choir?"))] == texts[:1]
    llm = ChatChunkweave(base_url=url, api_key=KEYS["acme"], model="reader", max_tokens=4, reuse={"method": "full"})
    pieces = list(llm.stream("How many steps has the Gerfern Tower?", documents=[found, "The ferry leaves at nine."]))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    report = whole.response_metadata["chunkweave"]
    assert report["method"] == "full"
    assert {"d1", "document 1"} <= {chunk["source"] for chunk in report["chunks"]}
    with pytest.raises(httpx.HTTPStatusError):
        CorpusRetriever(base_url=url, corpus="none", api_key=KEYS["acme"]).invoke("When?")


@pytest.mark.skipif(find_spec("llama_index") is None, reason="LlamaIndex is not installed: make test-clients")
@pytest.mark.filterwarnings("default")
def test_llama_index(url: str, monkeypatch, capsys):
    answer, steps = run_example("llama_index_client.py", url, monkeypatch, capsys).splitlines()
    assert (answer.strip(), steps.strip()) == ("Otto Gunmark", "230")
