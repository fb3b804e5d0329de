"""Corpora over HTTP: made, filled, searched, answered from, removed with their KV; and the cache's own endpoints."""

import json
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest

from chunkweave import Corpus, CorpusDocument, StoreConfig
from chunkweave.retrieval import searcher
from chunkweave_server.observability import RequestMeta
from chunkweave_server.requests import ChatBody
from tests.server.conftest import Client, Serve, engine_of, error_of, later, report_of, wait_until
from tests.server.test_front_prefill_ahead import asked, confirmed, slow_corpus

FERRY = "The ferry leaves the northern pier at nine and again at noon. " * 3
CHOIR = "The choir sings on Sundays in the hall behind the church. " * 3
TOWER = "The tower has two hundred and thirty steps and a copper roof. " * 3
EXACT = {"corpus": "sea", "top_k": 2, "method": "prefix"}


@pytest.fixture
def notes(client: Client) -> Client:
    documents = [{"id": "ferry", "text": FERRY, "title": "The ferry"}, {"id": "a/choir", "text": CHOIR}]
    client.make_corpus(documents=documents, chunk_tokens=128)
    return client


def segments(client: Client) -> int:
    return len(client.engine.store)


def test_a_corpus_is_listed_and_searched(notes: Client):
    (listed,) = notes.get("/v1/corpora").json()["data"]
    assert (listed["name"], listed["documents"], listed["shared"]) == ("notes", 2, False)
    documents = notes.get("/v1/corpora/notes/documents", params={"limit": 1, "offset": 1}).json()
    assert [one["id"] for one in documents["data"]] == ["a/choir"]
    assert (documents["total"], documents["has_more"]) == (2, False)
    found = notes.search("When does the ferry leave?", top_k=1).json()
    assert found["data"][0]["document"] == "ferry"
    assert len(notes.search("ferry").json()["data"]) == 2
    assert notes.search("ferry", top_k=9).status_code == 400


def test_documents_of_langchain_are_documents(notes: Client):
    metadata = {"source": "tower.md", "title": "The tower", "page": 3}
    row = {"page_content": TOWER, "metadata": metadata, "type": "Document", "id": None}
    (added,) = notes.add([row]).json()["added"]
    held = {document["id"]: document for document in notes.get("/v1/corpora/notes/documents").json()["data"]}
    assert (held[added]["title"], held[added]["metadata"]) == ("The tower", metadata)
    assert notes.add([{"page_content": 3}]).status_code == 400
    files = [("files", ("lines.jsonl", json.dumps({**row, "id": "l1"}).encode()))]
    assert notes.post("/v1/corpora/notes/documents/files", files=files).json()["added"] == ["l1"]


def test_an_answer_from_a_corpus_names_what_was_retrieved(notes: Client):
    body = notes.ask("When does the ferry leave?", chunkweave={"corpus": "notes", "top_k": 1}).json()
    (found,) = body["chunkweave"]["retrieved"]
    assert (found["document"], found["rank"], found["title"]) == ("ferry", 1, "The ferry")
    assert "text" not in found
    assert body["chunkweave"]["chunks"][-1]["source"] == "ferry"
    with_documents = notes.ask("When does the ferry leave?", documents=[FERRY.strip()]).json()
    assert with_documents["choices"] == body["choices"]


def test_an_answer_takes_all_chunks_where_more_are_asked_for(notes: Client):
    body = notes.ask("When does the ferry leave?", chunkweave={"corpus": "notes", "top_k": 9}).json()
    assert len(body["chunkweave"]["retrieved"]) == 2


def test_what_a_corpus_has_takes_no_salt_of_a_request(notes: Client):
    """Deleting a document has to find all KV of its chunks."""
    refused = notes.ask(chunkweave={"corpus": "notes"}, cache_salt="mine")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_files_are_documents(notes: Client):
    files = [
        ("files", ("tower.md", TOWER.encode(), "text/markdown")),
        ("files", ("../../etc/lines.jsonl", b'{"text": "one", "id": "l1"}\n{"text": "two"}\n')),
    ]
    added = notes.post("/v1/corpora/notes/documents/files", files=files).json()["added"]
    assert added == ["tower.md", "l1", "lines.jsonl:2"]
    bad = notes.post("/v1/corpora/notes/documents/files", files=[("files", ("x.txt", b"\xff\xfe"))])
    assert (bad.status_code, "empty" in bad.json()["error"]["message"]) == (400, True)
    assert notes.post("/v1/corpora/notes/documents/files", json={}).status_code == 400


@pytest.mark.backend("engine")
def test_a_changed_document_needs_update(notes: Client):
    changed = {"id": "ferry", "text": TOWER}
    assert error_of(notes.add([changed])) == (409, "document_exists")
    notes.ask(chunkweave={"corpus": "notes"})
    before = segments(notes)
    replaced = notes.add([changed], update=True).json()
    assert replaced["replaced"] == ["ferry"]
    assert replaced["segments_removed"] > 0
    assert segments(notes) < before
    assert notes.add([{"id": "x", "text": "a"}, {"id": "x", "text": "b"}]).status_code == 409


ALONE = {"contexts": "bundled", "neutral_tokens": 0}
"""Each document is computed alone: what is removed with one is its own segment. (Means: test_means.py.)"""


@pytest.mark.backend("engine")
def test_removing_a_document_removes_its_kv_from_every_tier(serve: Serve, tmp_path: Path):
    client = serve(store=StoreConfig(cache_dir=tmp_path / "cache"), data_dir=tmp_path / "data", **ALONE)
    client.make_corpus(documents=[{"id": "ferry", "text": FERRY}, {"id": "choir", "text": CHOIR}])
    assert client.warm(corpus="notes").json() == {"chunks": 2, "computed": 2}
    store = client.engine.store
    assert store.flush(10)
    assert {level.name: len(level.store) for level in store.levels} == {"host": 2, "disk": 2}
    removed = client.delete("/v1/corpora/notes/documents/ferry").json()
    assert removed == {"id": "ferry", "object": "document", "deleted": True, "segments_removed": 2}
    assert {level.name: len(level.store) for level in store.levels} == {"host": 1, "disk": 1}
    assert client.delete("/v1/corpora/notes/documents/ferry").status_code == 404
    assert client.delete("/v1/corpora/notes").json()["segments_removed"] == 2
    assert {level.name: len(level.store) for level in store.levels} == {"host": 0, "disk": 0}
    assert client.get("/v1/corpora/notes").status_code == 404
    assert list((tmp_path / "data").rglob("*.jsonl")) == []


@pytest.fixture
def undeletable(monkeypatch) -> list[Path]:
    """From now on no segment's file can be removed. What was tried; cleared, files can be removed again."""
    tried, unlink = [Path()], Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if tried and path.suffix == ".safetensors":
            tried.append(path)
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    return tried


@pytest.mark.backend("engine")
def test_what_cannot_be_cleared_is_told_and_not_served_after_a_restart(serve: Serve, tmp_path: Path, undeletable):
    store = StoreConfig(cache_dir=tmp_path)
    client = serve(store=store, neutral_tokens=0)
    client.warm(FERRY)
    assert client.engine.store.flush(10)
    [file] = tmp_path.rglob("*.safetensors")
    for removed in (1, 0):  # in memory the first time
        refused = client.clear(FERRY)
        assert error_of(refused) == (503, "not_removed")
        assert int(refused.headers["retry-after"]) == 30
        assert (refused.json()["segments_removed"], refused.json()["segments_left"]) == (removed, 1)
    assert client.clear(CHOIR).json() == {"segments_removed": 0}
    assert error_of(client.clear(everything=True)) == (503, "not_removed")

    restarted = serve(store=store, neutral_tokens=0)
    assert restarted.engine.store.stats.undeletable == 1
    assert restarted.clear(FERRY).json()["segments_left"] == 1
    answer = restarted.ask(documents=[FERRY], max_tokens=1).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert restarted.warm(FERRY).json()["computed"] == 1
    assert restarted.engine.store.flush(10)
    assert restarted.engine.store.stats.undeletable == 0, "what was computed since has replaced it"
    restarted.clear(FERRY)

    undeletable.clear()
    assert file.exists()
    assert serve(store=store).clear(FERRY).json() == {"segments_removed": 0}
    assert not file.exists(), "removed when the server started"


@pytest.mark.backend("engine")
def test_documents_and_corpora_whose_kv_cannot_be_removed(serve: Serve, tmp_path: Path, undeletable):
    client = serve(store=StoreConfig(cache_dir=tmp_path / "cache"), data_dir=tmp_path / "data", **ALONE)
    documents = [{"id": "ferry", "text": FERRY}, {"id": "choir", "text": CHOIR}, {"id": "tower", "text": TOWER}]
    client.make_corpus(documents=documents)
    client.warm(corpus="notes")
    assert client.engine.store.flush(10)
    replaced = client.add([{"id": "tower", "text": "The tower has no steps."}], update=True)
    assert replaced.status_code == 200
    assert (replaced.json()["segments_removed"], replaced.json()["segments_left"]) == (1, 1)
    for path in ("notes/documents/choir", "notes"):
        refused = client.delete(f"/v1/corpora/{path}")
        assert error_of(refused) == (503, "not_removed")
        assert (refused.json()["segments_removed"], refused.json()["segments_left"]) == (1, 1)
        assert client.get(f"/v1/corpora/{path.partition('/doc')[0]}").status_code == (200 if "/" in path else 404)
    undeletable.clear()
    for text in (FERRY, CHOIR, TOWER):
        assert client.clear(text.strip()).json() == {"segments_removed": 1}
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.backend("engine")
def test_what_a_request_computes_while_its_document_is_removed_is_removed_too(notes: Client, monkeypatch):
    forgotten = []
    store = notes.engine.store
    real = store.forget_chunks

    def forget(*removed):
        forgotten.append(real(*removed))
        return forgotten[-1]

    monkeypatch.setattr(store, "forget_chunks", forget)
    running = notes.portal.start_task_soon(
        lambda: notes.parts.answering.start(
            notes.service.keys.tenant_of(None), *_asked(chunkweave={"corpus": "notes", "top_k": 1}, max_tokens=200)
        )
    ).result()
    notes.delete("/v1/corpora/notes/documents/ferry")
    assert len(forgotten) == 1
    notes.portal.call(running.aclose)
    wait_until(lambda: len(forgotten) == 2)
    notes.portal.call(notes.parts.answering.swept)
    assert notes.ask("ferry?", documents=[FERRY.strip()]).json()["chunkweave"]["chunks"][1]["kv_source"] == "computed"


def _asked(**body):
    made = ChatBody.model_validate({"messages": [{"role": "user", "content": "ferry?"}], **body})
    return made, RequestMeta("id", "")


def counts(client: Client) -> tuple[float, ...]:
    """Speculations that were started, matched and terminated, as /metrics has them."""
    return tuple(client.metric("speculations_total", event=event) for event in ("started", "matched", "terminated"))


@pytest.mark.parametrize(("order", "expected"), [("free", (1, 1, 0)), ("fixed", (1, 0, 1))])
def test_a_set_in_another_sequence_is_a_match_where_the_order_is_free(client: Client, order: str, expected):
    corpus = slow_corpus(client)
    corpus.stages = [(1, 0), (0, 1)]
    report = confirmed(client, corpus, lambda: counts(client)[0] == 1, chunkweave={**EXACT, "order": order})
    assert counts(client) == expected
    assert (report["pipelining"]["started"], report["pipelining"]["matched"]) == (1, order == "free")
    assert [one["rank"] for one in report["retrieved"]] == [1, 2]
    chunks = [one for one in report["chunks"] if one["rank"] is not None]
    assert sorted(one["rank"] for one in chunks) == [0, 1]
    for one in chunks:
        assert report["retrieved"][one["rank"]]["document"] == one["source"].split("#")[0]


def topics(count: int, notes: int) -> list[str]:
    """`notes` texts about each topic, in the words of that topic."""
    random, texts = Random(3), []
    words = ["".join(random.choices("abcdefghiklmnoprstu", k=6)) for _ in range(20 * count)]
    for topic in range(count):
        texts += [" ".join(random.sample(words[20 * topic : 20 * topic + 20], 12)) for _ in range(notes)]
    random.shuffle(texts)
    return texts


def test_half_of_the_speculations_of_bursts_over_an_index_match(serve: Serve):
    client, random, texts = serve(corpus_flat_chunks=100), Random(4), topics(100, 12)
    served = client.make_corpus("big", texts)
    wait_until(lambda: state(client)["searched_by"] == "ivf")
    stages = served.corpus.search_stages

    def paced(vector, k: int):
        """As those of a large corpus, they come one after the other."""
        for stage in stages(vector, k):
            time.sleep(0.05)
            yield stage

    served.corpus.search_stages = paced
    reports, reuse = [], {"corpus": "big", "top_k": 3, "method": "prefix"}
    for _ in range(8):
        questions = [" ".join(random.sample(random.choice(texts).split(), 8)) for _ in range(3)]
        burst = [later(client.ask, question, max_tokens=1, chunkweave=reuse) for question in questions]
        reports += [report_of(answer.result()) for answer in burst]
    started, matched, _ = counts(client)
    assert started >= 8, "one of each burst at least"
    assert matched >= started / 2
    assert sum(report.get("pipelining", {}).get("matched", False) for report in reports) == matched


@pytest.mark.backend("engine")
@pytest.mark.parametrize("room", [1, 2])
def test_so_many_prefills_may_be_pending_as_the_server_is_told(serve: Serve, room: int):
    client = serve(max_prefill_batch=room)
    slow, go_on = slow_corpus(client), threading.Event()
    held = engine_of(client.service).batching.between_steps(lambda: go_on.wait(20))
    answers, speculation = [], client.parts.answering.retriever.speculation
    for number in range(2):
        answers.append(asked(client, chunkweave=EXACT))
        wait_until(lambda number=number: speculation.counts.stages == number + 1)
        wait_until(lambda number=number: len(client.parts.answering._submitted) >= min(room, number + 1))
    assert counts(client)[0] == room
    go_on.set()
    slow.go_on.set()
    for answer in answers:
        report_of(answer.result())
    assert held.result() is True


@pytest.mark.parametrize(
    ("values", "why"), [({}, "the search has one stage"), ({"speculate": False}, "speculate is off")]
)
def test_a_report_says_why_nothing_was_computed_ahead(serve: Serve, values, why):
    client = serve(**values)
    client.make_corpus(documents=[FERRY, CHOIR])
    report = report_of(client.ask(chunkweave={"corpus": "notes"}))
    assert report["not_speculated"] == why
    assert "pipelining" not in report
    assert client.fake is None or len(client.fake.seen) == 1


def test_corpora_outlive_the_server(serve: Serve, tmp_path: Path):
    serve(data_dir=tmp_path).make_corpus(documents=[FERRY])
    second = serve(data_dir=tmp_path)
    assert second.get("/v1/corpora/notes").json()["documents"] == 1
    assert second.ask(chunkweave={"corpus": "notes"}).status_code == 200


def test_a_shared_corpus_is_for_reading(serve: Serve, tmp_path: Path):
    Corpus.create(tmp_path / "Help").add([CorpusDocument("tower", TOWER)])
    client = serve(corpus=(str(tmp_path / "Help"), f"other={tmp_path / 'Help'}"))
    assert [one["name"] for one in client.get("/v1/corpora").json()["data"]] == ["help", "other"]
    assert client.ask(chunkweave={"corpus": "help"}).status_code == 200
    assert client.delete("/v1/corpora/help").status_code == 403
    assert client.delete("/v1/corpora/help/documents/tower").status_code == 403
    assert client.add(["x"], "help").status_code == 403
    assert client.post("/v1/corpora", json={"name": "help"}).status_code == 409


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "A", "a.b", "-a", "a" * 64, "a\0", "ä", "con:"])
def test_names_that_could_be_paths_are_refused(serve: Serve, tmp_path: Path, name: str):
    client = serve(data_dir=tmp_path / "data")
    assert client.post("/v1/corpora", json={"name": name}).status_code == 400
    assert client.ask(chunkweave={"corpus": name}).status_code in (400, 404)
    assert not (tmp_path / "data").exists()
    assert sorted(tmp_path.iterdir()) == []


def test_there_are_so_many_corpora_and_chunks(serve: Serve):
    client = serve(max_corpora=1, max_corpus_chunks=2)
    client.make_corpus(documents=["one", "two"])
    assert error_of(client.post("/v1/corpora", json={"name": "b"})) == (403, "too_many_corpora")
    assert error_of(client.add(["three"])) == (413, "corpus_full")


def test_an_empty_corpus_answers_nothing(client: Client):
    client.make_corpus()
    assert client.search("x").json()["data"] == []
    assert client.ask(chunkweave={"corpus": "notes", "top_k": 1}).status_code == 400


@pytest.mark.backend("engine")
@pytest.mark.parametrize("neutral_tokens", [0, 400])
def test_what_is_warmed_is_computed_behind_neutral_passages_and_woven_from_there(serve: Serve, neutral_tokens: int):
    client = serve(contexts="bundled", neutral_tokens=neutral_tokens, method="full-reuse")
    assert client.warm(FERRY, CHOIR).json()["computed"] == 2
    answer = client.ask(documents=[CHOIR, FERRY], max_tokens=1).json()
    taken = {chunk["variant"] for chunk in answer["chunkweave"]["chunks"] if chunk["kv_source"] == "reused"}
    records = [record for record in client.engine.store.records() if record.id in taken]
    assert len(records) == 2
    assert all((record.neutral, record.alone) == (neutral_tokens > 0, not neutral_tokens) for record in records)


@pytest.mark.backend("engine")
def test_cache_commands_want_to_know_what(client: Client):
    for command in ("warm", "clear"):
        assert client.post(f"/v1/cache/{command}", json={}).status_code == 400
        both = {"documents": ["x"], "corpus": "y"}
        assert client.post(f"/v1/cache/{command}", json=both).status_code == 400
        assert client.post(f"/v1/cache/{command}", json={"corpus": "y"}).status_code == 404
        assert client.post(f"/v1/cache/{command}", json={"documents": ["x"] * 65}).status_code == 400


def test_searches_of_a_corpus_go_on_side_by_side_and_changes_alone(notes: Client):
    """Two searches that each wait for the other one to have begun; a document that is added waits for both."""
    served = notes.parts.corpora.get(notes.service.keys.tenant_of(None), "notes")
    search, together, go_on = served.corpus.search, threading.Barrier(2), threading.Event()

    def slow(question, k):
        together.wait(20)
        assert go_on.wait(20)
        return search(question, k)

    served.corpus.search = slow
    found = [later(notes.search, "ferry") for _ in range(2)]
    wait_until(lambda: together.n_waiting == 0 and served.lock._looking == 2)
    added = later(notes.add, [TOWER])
    time.sleep(0.2)
    assert not added.done()
    go_on.set()
    assert [len(one.result(20).json()["data"]) for one in found] == [2, 2], "what is added comes after them"
    assert added.result(20).status_code == 200


def notes_about(numbers: range) -> list[dict[str, str]]:
    return [{"id": f"n{number}", "text": f"Vessel {number} brings {number * 7} barrels of tar."} for number in numbers]


def state(client: Client, name: str = "big") -> dict:
    return client.get(f"/v1/corpora/{name}").json()


def found(client: Client, number: int) -> list[str]:
    reply = client.search(f"Vessel {number} brings {number * 7} barrels of tar.", "big", top_k=3)
    assert reply.status_code == 200, reply.text
    return [one["document"] for one in reply.json()["data"]]


def test_a_corpus_that_grows_past_its_size_gets_an_index_and_keeps_it(serve: Serve, tmp_path: Path):
    values = {"data_dir": tmp_path, "corpus_flat_chunks": 40}
    client = serve(**values)
    served = client.make_corpus("big", notes_about(range(40)))
    assert (state(client)["chunks"], state(client)["searched_by"]) == (40, "flat")
    client.add(notes_about(range(40, 90)), "big")
    wait_until(lambda: state(client)["searched_by"] == "ivf")
    assert found(client, 77)[0] == "n77"
    client.add(notes_about(range(90, 95)), "big")
    assert found(client, 93)[0] == "n93"
    assert client.delete("/v1/corpora/big/documents/n77").status_code == 200
    assert "n77" not in found(client, 77)
    wait_until(lambda: state(client)["searched_by"] == "ivf")
    assert "n77" not in found(client, 77)
    wait_until(lambda: served.indexing is None)
    (file,) = tmp_path.rglob("corpus.sqlite")
    written = file.stat().st_mtime_ns
    again = serve(**values)
    wait_until(lambda: state(again)["searched_by"] == "ivf")
    assert found(again, 93)[0] == "n93"
    served = again.parts.corpora.get(again.service.keys.tenant_of(None), "big")
    wait_until(lambda: served.indexing is None)
    assert file.stat().st_mtime_ns == written, "it was read, not made again"


def test_a_corpus_names_its_index_and_what_cannot_be_is_refused(serve: Serve, monkeypatch):
    client = serve(corpus_flat_chunks=5)
    assert client.post("/v1/corpora", json={"name": "usual"}).json()["index"] == "ivf"
    client.make_corpus("exact", notes_about(range(9)), index="flat")
    assert (state(client, "exact")["index"], state(client, "exact")["searched_by"]) == ("flat", "flat")
    assert client.post("/v1/corpora", json={"name": "odd", "index": "hnsw"}).status_code == 400
    monkeypatch.setitem(sys.modules, "faiss", None)
    refused = client.post("/v1/corpora", json={"name": "lists", "index": "ivf"})
    assert refused.status_code == 400
    assert "retrieval" in refused.json()["error"]["message"]
    assert client.post("/v1/corpora", json={"name": "plain"}).json()["index"] == "flat"


def test_neither_searches_nor_documents_wait_for_an_index_that_is_made(serve: Serve, monkeypatch):
    begun, go_on, real = threading.Event(), threading.Event(), searcher.build_index

    def slow(*args):
        begun.set()
        assert go_on.wait(20)
        return real(*args)

    monkeypatch.setattr(searcher, "build_index", slow)
    client = serve(corpus_flat_chunks=20)
    client.make_corpus("big", notes_about(range(60)))
    assert begun.wait(20)
    assert found(client, 50)[0] == "n50"
    client.add(notes_about(range(60, 64)), "big")
    assert client.delete("/v1/corpora/big/documents/n50").status_code == 200
    assert "n50" not in found(client, 50)
    assert state(client)["searched_by"] == "flat"
    go_on.set()
    wait_until(lambda: state(client)["searched_by"] == "ivf")
    assert (found(client, 62)[0], "n50" in found(client, 50)) == ("n62", False)


def test_documents_that_come_beside_searches_are_found(serve: Serve):
    client = serve(corpus_flat_chunks=30)
    client.make_corpus("big", notes_about(range(10)))
    known, wrong = [9], []

    def look(seed: int) -> None:
        numbers = Random(seed)
        while known[0] < 199:
            number = numbers.randrange(known[0] + 1)
            hits = found(client, number)
            if hits[0] != f"n{number}" or len(set(hits)) != 3:
                wrong.append((number, hits))

    looking = [later(look, seed) for seed in range(3)]
    for start in range(10, 200, 10):
        assert client.add(notes_about(range(start, start + 10)), "big").status_code == 200
        known[0] = start + 9
    for one in looking:
        one.result()
    assert not wrong
    wait_until(lambda: state(client)["searched_by"] == "ivf")
    assert state(client)["chunks"] == 200
