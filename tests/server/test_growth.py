"""What requests leave behind, over HTTP: corpora that grow, names that are kept, and ingests beside other requests."""

import gc
import http.client
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.server_thread import ServerThread

from chunkweave import StoreConfig
from chunkweave_server.backend import Stage
from chunkweave_server.service import Service
from tests.server.conftest import Client, Serve, toy_service, vllm_service, wait_until
from tests.server.fake_vllm import FakeVllm

FERRY = "The ferry leaves the northern pier at nine and again at noon. "
DOCUMENTS = "/v1/corpora/notes/documents"


def corpus_of(service: Service, name: str = "notes") -> Any:
    return service.require_ready().corpora.get(service.keys.tenant_of(None), name).corpus


def make(client: Client, **fields: Any) -> None:
    assert client.post("/v1/corpora", json={"name": "notes", **fields}).status_code == 201


class SlowEmbedder:
    """The corpus's own, which waits for a while, or until it may go on, before each batch."""

    def __init__(self, embedder: Any, *, seconds: float = 0.0, hold: threading.Event | None = None) -> None:
        self._embedder, self._seconds, self._hold = embedder, seconds, hold
        self.name, self.fingerprint, self.dimension = embedder.name, embedder.fingerprint, embedder.dimension
        self.batches = 0
        self.waits = threading.Event()

    def embed_documents(self, texts: list[str]) -> np.ndarray:
        self.batches += 1
        self.waits.set()
        time.sleep(self._seconds)
        assert self._hold is None or self._hold.wait(120)
        return self._embedder.embed_documents(texts)

    def embed_query(self, text: str) -> np.ndarray:
        return self._embedder.embed_query(text)


@pytest.mark.parametrize("overlap_tokens", [9, 15])
def test_chunks_overlap_by_half_at_most(client: Client, overlap_tokens: int):
    body = {"name": "notes", "chunk_tokens": 16, "overlap_tokens": overlap_tokens}
    refused = client.post("/v1/corpora", json=body)
    assert refused.status_code == 400
    assert "half" in refused.json()["error"]["message"]
    make(client, chunk_tokens=16, overlap_tokens=8)


@pytest.mark.parametrize("limit", [{"max_corpus_chunks": 300}, {"max_corpus_bytes": 1 << 20}], ids=["chunks", "bytes"])
@pytest.mark.parametrize("uploaded", [False, True], ids=["texts", "files"])
def test_a_corpus_stops_growing_within_a_document(serve: Serve, limit: dict[str, Any], uploaded: bool):
    client = serve(**limit)
    make(client, chunk_tokens=16, overlap_tokens=8)
    assert client.post(DOCUMENTS, json={"documents": [{"id": "small", "text": FERRY}]}).status_code == 200
    text = " ".join(f"Ferry {number} leaves at nine." for number in range(200_000))
    tracemalloc.start()
    begun_s = time.process_time()
    if uploaded:
        refused = client.post(f"{DOCUMENTS}/files", files=[("files", ("large.txt", text.encode()))])
    else:
        refused = client.post(DOCUMENTS, json={"documents": [{"id": "large.txt", "text": text}, FERRY * 2]})
    took_s, (_, peak_bytes) = time.process_time() - begun_s, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (413, "corpus_full")
    assert "large.txt" in error["message"]
    assert f"0 of the {1 if uploaded else 2} documents" in error["message"]
    corpus = corpus_of(client.service)
    assert [one.id for one in corpus.documents] == ["small"]
    assert len(corpus) <= 300
    assert corpus.nbytes <= 1 << 20
    assert took_s < 20, "cutting all of it takes minutes"
    assert peak_bytes < 12 * len(text), "the body, its form and its texts; all chunks would be 200 MB of vectors"


def test_what_was_added_before_there_was_no_room_stays_and_is_counted(serve: Serve):
    client = serve(max_corpus_chunks=20)
    make(client, chunk_tokens=64)
    documents = [{"id": f"d{number}", "text": f"{FERRY} {number}"} for number in range(40)]
    refused = client.post(DOCUMENTS, json={"documents": documents})
    assert refused.status_code == 413
    assert "20 of the 40 documents" in refused.json()["error"]["message"]
    assert client.get(DOCUMENTS).json()["total"] == 20
    again = client.post(DOCUMENTS, json={"documents": documents[:20]})
    assert (again.status_code, len(again.json()["unchanged"])) == (200, 20)


def test_ingests_at_once_into_a_corpus_at_its_limit_do_not_exceed_it(serve: Serve):
    client = serve(max_corpus_chunks=50)
    make(client, chunk_tokens=64)
    corpus, statuses, seen = corpus_of(client.service), [], []

    def ingest(who: int) -> None:
        for start in range(0, 40, 4):
            documents = [f"{FERRY} {who} {number}" for number in range(start, start + 4)]
            statuses.append(client.post(DOCUMENTS, json={"documents": documents}).status_code)
            seen.append(len(corpus))

    threads = [threading.Thread(target=ingest, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 413}
    assert max(seen) == len(corpus) == 50


def test_everything_that_takes_long_counts_in_what_a_tenant_does_at_once(serve: Serve):
    client = serve(max_concurrent=1)
    make(client)
    client.post(DOCUMENTS, json={"documents": [{"id": "a", "text": FERRY}]})
    corpus, hold = corpus_of(client.service), threading.Event()
    corpus._embedder = slow = SlowEmbedder(corpus._embedder, hold=hold)
    answers: list[int] = []
    first = threading.Thread(
        target=lambda: answers.append(client.post(DOCUMENTS, json={"documents": [FERRY * 2]}).status_code)
    )
    first.start()
    assert slow.waits.wait(120)
    others: list[Callable[[], Any]] = [
        lambda: client.post(DOCUMENTS, json={"documents": [FERRY * 3]}),
        lambda: client.post(f"{DOCUMENTS}/files", files=[("files", ("x.txt", b"text"))]),
        lambda: client.post("/v1/corpora/notes/search", json={"query": "ferry"}),
        lambda: client.post("/v1/cache/warm", json={"corpus": "notes"}),
        lambda: client.delete(f"{DOCUMENTS}/a"),
        lambda: client.delete("/v1/corpora/notes"),
    ]
    for ask in others:
        refused = ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests_at_once")
    hold.set()
    first.join()
    assert answers == [200]
    assert client.post("/v1/corpora/notes/search", json={"query": "ferry"}).status_code == 200
    assert client.service.limits.running("") == 0


@pytest.fixture
def listening(server_backend: str, tmp_path: Path) -> Iterator[tuple[Service, ServerThread]]:
    """A server over either backend that listens on a port, so that its clients can go."""
    with FakeVllm(str(tmp_path / "reports")) as vllm:
        service = toy_service() if server_backend == "engine" else vllm_service(vllm)
        with ServerThread(service) as server:
            wait_until(lambda: service.stage is Stage.READY)
            yield service, server


def sent(server: ServerThread, path: str, body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection


def answered(server: ServerThread, path: str, body: Any) -> int:
    connection = sent(server, path, body)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("one", [True, False], ids=["one document", "many documents"])
def test_an_ingest_ends_with_its_client_and_leaves_nothing_locked(listening: tuple[Service, ServerThread], one: bool):
    service, server = listening
    assert answered(server, "/v1/corpora", {"name": "notes", "chunk_tokens": 16}) == 201
    corpus = corpus_of(service)
    corpus._embedder = slow = SlowEmbedder(corpus._embedder, seconds=0.02)
    texts = [" ".join(f"Ferry {number} of {text} leaves." for number in range(40)) for text in range(500)]
    connection = sent(server, DOCUMENTS, {"documents": [" ".join(texts)] if one else texts})
    assert slow.waits.wait(120)
    connection.close()
    wait_until(lambda: service.limits.running("") == 0, timeout_s=10)
    assert slow.batches < 60, "of some hundreds"
    batches, documents = slow.batches, corpus.num_documents
    assert documents == 0 if one else documents < 500
    slow._seconds = 0.0
    assert answered(server, DOCUMENTS, {"documents": [FERRY]}) == 200, "the lock is free"
    assert (corpus.num_documents, slow.batches) == (documents + 1, batches + 1)


@pytest.mark.backend("engine")
def test_what_was_replaced_before_an_ingest_ended_early_is_forgotten(serve: Serve):
    client = serve(max_corpus_chunks=20)
    make(client, chunk_tokens=64)
    client.post(DOCUMENTS, json={"documents": [{"id": "a", "text": FERRY}]})
    assert client.post("/v1/cache/warm", json={"corpus": "notes"}).json()["computed"] == 1
    documents = [{"id": "a", "text": "Another text."}, {"id": "b", "text": f"{FERRY} " * 200}]
    refused = client.post(DOCUMENTS, json={"documents": documents, "update": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "corpus_full")
    assert client.post("/v1/cache/clear", json={"documents": [FERRY.strip()]}).json() == {"segments_removed": 0}
    assert "1 of the 2 documents" in refused.json()["error"]["message"]


def test_an_upload_with_long_lines_or_names_is_refused_by_name(client: Client):
    make(client)
    wrong = {
        "a.jsonl": b'{"text": "one"}\n[' + b"1," * (2 << 20) + b"1]",
        "b.jsonl": json.dumps({"text": "one", "id": "x" * 513}).encode(),
        "c.jsonl": json.dumps({"text": "one", "title": "x" * 1025}).encode(),
        "d.jsonl": json.dumps({"text": "one", "metadata": {"x": "y" * 20_000}}).encode(),
        "e" * 600 + ".txt": b"one",
        "f.txt": b"one " * (3 << 20),
    }
    for name, data in wrong.items():
        refused = client.post(f"{DOCUMENTS}/files?strict=true", files=[("files", (name, data))])
        assert refused.status_code == 400, name[:10]
        said = refused.json()["error"]["message"]
        assert any(
            field in said for field in ("line 2: it has", "the id of", "the title of", "the metadata of", "the text of")
        )
    refused = client.post(DOCUMENTS, json={"documents": [FERRY, {"id": "long", "text": "one " * (3 << 20)}]})
    assert (refused.status_code, "the text of document 'long'" in refused.json()["error"]["message"]) == (400, True)
    assert client.get(DOCUMENTS).json()["total"] == 0


@pytest.mark.parametrize("characters", [512, 3_900_000], ids=["largest", "far too long"])
def test_names_of_documents_take_no_more_room_than_their_bound(
    serve: Serve, server_backend: str, tmp_path: Path, characters: int
):
    """Forty requests, as in the attack: what is kept of their ids is bounded in memory and on disk."""
    options = {"store": StoreConfig(cache_dir=tmp_path / "cache")} if server_backend == "engine" else {}
    client = serve(**options)
    client.ask(documents=[{"text": FERRY}])
    tracemalloc.start()
    for number in range(40):
        name = f"{number}" + "漢" * (characters // 3 if characters > 512 else characters - 2)
        document = {"text": f"{FERRY} {number}", "id": name, "title": ""}
        assert client.ask(documents=[document], max_tokens=1).status_code in (200, 400)
    del name, document
    # The server's thread may still hold the last body when its answer is here.
    wait_until(lambda: (gc.collect(), tracemalloc.get_traced_memory()[0] < 12 << 20)[1], timeout_s=30)
    tracemalloc.stop()
    files = [file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert sum(files) < 8 << 20
