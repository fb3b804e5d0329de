"""The front computes ahead of searches: what replicas are sent meanwhile, and what becomes of it."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse

from chunkweave.errors import CorpusError
from chunkweave.retrieval.retrievers import RetrievalStage, RetrievedChunk
from tests.server.conftest import wait_until
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import DOCUMENTS, MORE, Front, running_front

ASK = {"chunkweave": {"corpus": "sea", "top_k": 2, "method": "cacheblend"}}


class SlowCorpus:
    """Names `stages` of chunks, the last one once it is let go on."""

    def __init__(self, corpus: Any) -> None:
        self._corpus = corpus
        self.stages: list[tuple[int, ...]] = [(0, 1), (0, 1)]
        self.go_on = threading.Event()

    def __len__(self) -> int:
        return len(self._corpus)

    def embed_query(self, question: str) -> Any:
        return self._corpus.embed_query(question)

    def search(self, vector: Any, k: int) -> tuple[RetrievedChunk, ...]:
        return self._found(vector, self.stages[-1])

    def search_stages(self, vector: Any, k: int) -> Iterator[RetrievalStage]:
        for number, places in enumerate(self.stages, 1):
            last = number == len(self.stages)
            if last:
                assert self.go_on.wait(20)
            yield RetrievalStage(self._found(vector, places), number, last, 0.0, 0)

    def _found(self, vector: Any, places: tuple[int, ...]) -> tuple[RetrievedChunk, ...]:
        found = self._corpus.search(vector, 3)
        return tuple(found[place] for place in places)


@pytest.fixture
def vllm(tmp_path):
    with FakeVllm(str(tmp_path / "reports")) as fake:
        yield fake


def slow_corpus(front: Front) -> SlowCorpus:
    assert front.post("/v1/corpora", json={"name": "sea", "chunk_tokens": 32}).status_code == 201
    added = front.post("/v1/corpora/sea/documents", json={"documents": [*DOCUMENTS, MORE]})
    assert added.status_code == 200, added.text
    corpora = front.service.parts.corpora
    served = corpora.get(front.service.keys.tenant_of(None), "sea")
    served.corpus = SlowCorpus(served.corpus)
    return served.corpus


@pytest.fixture
def front(vllm):
    with running_front(vllm, order="fixed") as client:
        yield client


@pytest.fixture
def corpus(front):
    return slow_corpus(front)


def asked(front: Front, **body: Any) -> tuple[threading.Thread, list[Any]]:
    """A question on a thread of its own, and where its answer will be."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(front.ask(**{**ASK, **body})))
    thread.start()
    return thread, answers


def speculations(front: Front) -> dict[str, int]:
    counts = front.service.parts.answering.retriever.speculation.counts
    return {"started": counts.started, "matched": counts.matched, "terminated": counts.terminated}


def test_what_the_search_confirms_was_prefilled_under_the_same_salt(front, corpus, vllm):
    thread, answers = asked(front)
    wait_until(lambda: len(vllm.seen) == 1)  # before the search has ended
    corpus.go_on.set()
    thread.join()
    told = answers[0].json()
    ahead, own = vllm.seen
    assert (ahead["max_tokens"], own["max_tokens"]) == (1, 4)
    assert all(ahead[name] == own[name] for name in ("prompt", "model"))
    params, ahead_params = (body["kv_transfer_params"]["chunkweave"] for body in (own, ahead))
    assert ahead_params == {**params, "counts_as_request": False}, "it does not count twice"
    assert ahead.get("cache_salt") == own.get("cache_salt")
    assert told["choices"][0]["message"]["content"] == " w0 w1 w2 w3"
    pipelining = told["chunkweave"]["pipelining"]
    assert (pipelining["started"], pipelining["terminated"], pipelining["matched"]) == (1, 0, True)
    assert speculations(front) == {"started": 1, "matched": 1, "terminated": 0}
    assert 'event="matched"' in front.get("/metrics").text


@pytest.mark.parametrize("threshold", [1, 2])
def test_what_is_computed_ahead_promotes_as_the_request_that_it_becomes(vllm, threshold):
    reuse = {"chunkweave": {**ASK["chunkweave"], "method": "prefix"}}
    with running_front(vllm, order="free", promotion_threshold=threshold) as front:
        corpus = slow_corpus(front)
        for number in range(1, 4):
            corpus.go_on.clear()
            thread, answers = asked(front, **reuse)
            wait_until(lambda number=number: len(vllm.seen) == 2 * number - 1)
            corpus.go_on.set()
            thread.join()
            assert answers[0].json()["chunkweave"]["pipelining"]["matched"]
    told = [body["kv_transfer_params"]["chunkweave"]["promoted"] for body in vllm.seen]
    assert told == [[] if number // 2 + 1 < threshold else [0, 1] for number in range(6)]


def test_the_answer_waits_for_a_prefill_that_is_under_way(front, corpus, vllm):
    vllm.gate.clear()
    thread, answers = asked(front)
    wait_until(lambda: len(vllm.seen) == 1)
    corpus.go_on.set()
    thread.join(0.3)
    assert len(vllm.seen) == 1, "computed twice"
    vllm.gate.set()
    thread.join()
    assert answers[0].json()["chunkweave"]["pipelining"]["matched"]
    assert len(vllm.seen) == 2


def test_a_list_that_changes_ends_what_was_computed_for_the_old_one(front, corpus, vllm):
    corpus.stages = [(0, 2), (0, 1)]
    vllm.gate.clear()
    thread, answers = asked(front)
    wait_until(lambda: len(vllm.seen) == 1)
    corpus.go_on.set()
    wait_until(lambda: len(vllm.seen) == 2)
    vllm.gate.set()
    thread.join()
    wait_until(lambda: vllm.aborted == 1)
    told = answers[0].json()["chunkweave"]
    assert (told["pipelining"]["terminated"], told["pipelining"]["matched"]) == (1, False)
    assert [chunk["rank"] for chunk in told["retrieved"]] == [1, 2]
    assert vllm.seen[0]["prompt"] != vllm.seen[1]["prompt"]


def test_one_that_fails_costs_no_answer(front, corpus, vllm):
    vllm.behave = lambda body: JSONResponse({"error": {"message": "no"}}, 400) if body["max_tokens"] == 1 else None
    thread, answers = asked(front)
    wait_until(lambda: len(vllm.seen) == 1)
    corpus.go_on.set()
    thread.join()
    assert answers[0].status_code == 200
    assert not answers[0].json()["chunkweave"]["pipelining"]["matched"]


def test_nothing_is_computed_ahead_while_others_wait_for_their_first_token(front, corpus, vllm):
    vllm.gate.clear()
    others = [threading.Thread(target=lambda: front.ask(documents=DOCUMENTS)) for _ in range(2)]
    for other in others:
        other.start()
    wait_until(lambda: len(vllm.seen) == 2)
    corpus.go_on.set()
    thread, answers = asked(front)
    wait_until(lambda: len(vllm.seen) == 3)
    vllm.gate.set()
    for one in (thread, *others):
        one.join()
    assert "pipelining" not in answers[0].json()["chunkweave"]
    assert answers[0].json()["chunkweave"]["not_speculated"] == "other requests were pending"
    assert speculations(front)["started"] == 0


@pytest.mark.parametrize(("room", "ahead"), [(1, 0), (2, 1)])
def test_so_many_prefills_may_be_pending_as_the_server_is_told(vllm, room, ahead):
    """`max_prefill_batch`, by default the number of replicas."""
    with running_front(vllm, order="fixed", max_prefill_batch=room) as front:
        corpus = slow_corpus(front)
        vllm.gate.clear()
        other = threading.Thread(target=lambda: front.ask(documents=DOCUMENTS))
        other.start()
        wait_until(lambda: len(vllm.seen) == 1)
        thread, _ = asked(front)
        wait_until(lambda: front.service.parts.answering.retriever.speculation.counts.stages == 1)
        wait_until(lambda: len(vllm.seen) == 1 + ahead)
        vllm.gate.set()
        corpus.go_on.set()
        thread.join()
        other.join()
        assert speculations(front)["started"] == ahead


def test_a_client_that_leaves_while_its_search_goes_on_ends_both(front, corpus, vllm):
    vllm.gate.clear()
    with pytest.raises(Exception, match="timed out"):
        front.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}], **ASK}, timeout=0.5)
    corpus.go_on.set()
    wait_until(lambda: not front.service.parts.answering.retriever.speculation.running)
    vllm.gate.set()
    wait_until(lambda: vllm.aborted == len(vllm.seen) == 1)


def test_it_can_be_left_out(vllm):
    with running_front(vllm, order="fixed", speculate=False) as front:
        slow_corpus(front).go_on.set()
        assert front.ask(chunkweave=ASK["chunkweave"]).status_code == 200
        assert len(vllm.seen) == 1


def test_an_ordering_counts_the_question_once(vllm):
    with running_front(vllm) as front:
        corpus = slow_corpus(front)
        for number in range(2):
            corpus.go_on.clear()
            thread, _ = asked(front)
            wait_until(lambda seen=2 * number + 1: len(vllm.seen) == seen)
            corpus.go_on.set()
            thread.join()
        (replica,) = front.service.backend.fleet.replicas
        assert replica.arranger.table().requests == 2
        assert len(vllm.seen) == 4


def test_a_search_that_fails_is_told_and_leaves_nothing_behind(front, corpus, vllm, caplog):
    def broken(_vector: Any, _k: int) -> Iterator[RetrievalStage]:
        yield RetrievalStage(corpus._found(corpus.embed_query("?"), (0, 1)), 1, False, 0.0, 0)
        wait_until(lambda: len(vllm.seen) == 1)
        raise CorpusError("the index is damaged")

    corpus.search_stages = broken
    assert front.ask(**ASK).status_code >= 400
    wait_until(lambda: not front.service.parts.answering.retriever.speculation.running)
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


def test_the_answer_comes_from_where_its_chunks_were_prefilled(tmp_path):
    path = str(tmp_path / "reports")
    with FakeVllm(path) as one, FakeVllm(path) as other, running_front(one, other, routing="round-robin") as front:
        corpus = slow_corpus(front)
        thread, answers = asked(front)
        wait_until(lambda: len(one.seen) + len(other.seen) == 1)
        corpus.go_on.set()
        thread.join()
        assert answers[0].json()["chunkweave"]["pipelining"]["matched"]
        assert sorted((len(one.seen), len(other.seen))) == [0, 2]


def test_a_list_that_is_shorter_than_what_was_asked_for_is_not_computed_ahead(front, corpus, vllm):
    corpus.stages = [(0,), (0, 1)]
    thread, _ = asked(front)
    thread.join(0.3)
    assert not vllm.seen
    corpus.go_on.set()
    thread.join()
    assert len(vllm.seen) == 1
