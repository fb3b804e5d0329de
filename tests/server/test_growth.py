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

from chunkweave import StoreConfig
from tests.server.conftest import Asking, Client, Serve, error_of, later, listening, service_over, wait_until
from tests.toys import run_at_once

FERRY = "The ferry leaves the northern pier at nine and again at noon. "
DOCUMENTS = "/v1/corpora/notes/documents"


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
    client.make_corpus(chunk_tokens=16, overlap_tokens=8)


@pytest.mark.parametrize("limit", [{"max_corpus_chunks": 300}, {"max_corpus_bytes": 1 << 20}], ids=["chunks", "bytes"])
@pytest.mark.parametrize("uploaded", [False, True], ids=["texts", "files"])
def test_a_corpus_stops_growing_within_a_document(serve: Serve, limit: dict[str, Any], uploaded: bool):
    client = serve(**limit)
    corpus = client.make_corpus(documents=[{"id": "small", "text": FERRY}], chunk_tokens=16, overlap_tokens=8).corpus
    text = " ".join(f"Ferry {number} leaves at nine." for number in range(200_000))
    tracemalloc.start()
    begun_s = time.process_time()
    if uploaded:
        refused = client.post(f"{DOCUMENTS}/files", files=[("files", ("large.txt", text.encode()))])
    else:
        refused = client.add([{"id": "large.txt", "text": text}, FERRY * 2])
    took_s, (_, peak_bytes) = time.process_time() - begun_s, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = refused.json()["error"]["message"]
    assert error_of(refused) == (413, "corpus_full")
    assert "large.txt" in message
    assert f"0 of the {1 if uploaded else 2} documents" in message
    assert [one.id for one in corpus.documents] == ["small"]
    assert len(corpus) <= 300
    assert corpus.nbytes <= 1 << 20
    assert took_s < 20, "cutting all of it takes minutes"
    assert peak_bytes < 12 * len(text), "the body, its form and its texts; all chunks would be 200 MB of vectors"


def test_ingests_at_once_into_a_corpus_at_its_limit_do_not_exceed_it(serve: Serve):
    client = serve(max_corpus_chunks=50)
    corpus, statuses, seen = client.make_corpus(chunk_tokens=64).corpus, [], []

    def ingest(who: int) -> None:
        for start in range(0, 40, 4):
            documents = [f"{FERRY} {who} {number}" for number in range(start, start + 4)]
            statuses.append(client.add(documents).status_code)
            seen.append(len(corpus))

    run_at_once(3, ingest)
    assert set(statuses) == {200, 413}
    assert max(seen) == len(corpus) == 50


def test_everything_that_takes_long_counts_in_what_a_tenant_does_at_once(serve: Serve):
    client = serve(max_concurrent=1)
    corpus, hold = client.make_corpus(documents=[{"id": "a", "text": FERRY}]).corpus, threading.Event()
    corpus._embedder = slow = SlowEmbedder(corpus._embedder, hold=hold)
    first = later(client.add, [FERRY * 2])
    assert slow.waits.wait(120)
    others: list[Callable[[], Any]] = [
        lambda: client.add([FERRY * 3]),
        lambda: client.post(f"{DOCUMENTS}/files", files=[("files", ("x.txt", b"text"))]),
        lambda: client.search("ferry"),
        lambda: client.warm(corpus="notes"),
        lambda: client.delete(f"{DOCUMENTS}/a"),
        lambda: client.delete("/v1/corpora/notes"),
    ]
    for ask in others:
        assert error_of(ask()) == (429, "too_many_requests_at_once")
    hold.set()
    assert first.result().status_code == 200
    assert client.search("ferry").status_code == 200
    assert client.service.limits.running("") == 0


@pytest.fixture
def over_a_port(server_backend: str, tmp_path: Path) -> Iterator[Asking]:
    """A client over a port of a server over either backend, so that its clients can go."""
    with (
        service_over(server_backend, tmp_path) as (service, _),
        listening(service) as server,
        Asking(base_url=server.url, timeout=60) as client,
    ):
        client.service = service
        yield client


@pytest.mark.parametrize("one", [True, False], ids=["one document", "many documents"])
def test_an_ingest_ends_with_its_client_and_leaves_nothing_locked(over_a_port: Asking, one: bool):
    service, corpus = over_a_port.service, over_a_port.make_corpus(chunk_tokens=16).corpus
    corpus._embedder = slow = SlowEmbedder(corpus._embedder, seconds=0.02)
    texts = [" ".join(f"Ferry {number} of {text} leaves." for number in range(40)) for text in range(500)]
    connection = http.client.HTTPConnection(over_a_port.base_url.netloc.decode(), timeout=30)
    body = json.dumps({"documents": [" ".join(texts)] if one else texts})
    connection.request("POST", DOCUMENTS, body, {"content-type": "application/json"})
    assert slow.waits.wait(120)
    connection.close()
    wait_until(lambda: service.limits.running("") == 0, timeout_s=10)
    assert slow.batches < 60, "of some hundreds"
    batches, documents = slow.batches, corpus.num_documents
    assert documents == 0 if one else documents < 500
    slow._seconds = 0.0
    assert over_a_port.add([FERRY]).status_code == 200, "the lock is free"
    assert (corpus.num_documents, slow.batches) == (documents + 1, batches + 1)


@pytest.mark.backend("engine")
def test_what_was_replaced_before_an_ingest_ended_early_is_forgotten(serve: Serve):
    client = serve(max_corpus_chunks=20)
    client.make_corpus(documents=[{"id": "a", "text": FERRY}], chunk_tokens=64)
    assert client.warm(corpus="notes").json()["computed"] == 1
    refused = client.add([{"id": "a", "text": "Another text."}, {"id": "b", "text": f"{FERRY} " * 200}], update=True)
    assert error_of(refused) == (413, "corpus_full")
    assert client.clear(FERRY.strip()).json() == {"segments_removed": 0}
    assert "1 of the 2 documents" in refused.json()["error"]["message"]


def test_an_upload_with_long_lines_or_names_is_refused_by_name(notes: Client):
    wrong = {
        "a.jsonl": b'{"text": "one"}\n[' + b"1," * (2 << 20) + b"1]",
        "b.jsonl": json.dumps({"text": "one", "id": "x" * 513}).encode(),
        "c.jsonl": json.dumps({"text": "one", "title": "x" * 1025}).encode(),
        "d.jsonl": json.dumps({"text": "one", "metadata": {"x": "y" * 20_000}}).encode(),
        "e" * 600 + ".txt": b"one",
        "f.txt": b"one " * (3 << 20),
    }
    for name, data in wrong.items():
        refused = notes.post(f"{DOCUMENTS}/files?strict=true", files=[("files", (name, data))])
        assert refused.status_code == 400, name[:10]
        said = refused.json()["error"]["message"]
        assert any(
            field in said for field in ("line 2: it has", "the id of", "the title of", "the metadata of", "the text of")
        )
    refused = notes.add([FERRY, {"id": "long", "text": "one " * (3 << 20)}])
    assert (refused.status_code, "the text of document 'long'" in refused.json()["error"]["message"]) == (400, True)
    assert notes.get(DOCUMENTS).json()["total"] == 0


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
