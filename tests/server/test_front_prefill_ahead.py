"""The front computes ahead of searches: what replicas are sent meanwhile, and what becomes of it."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from starlette.responses import JSONResponse

from chunkweave.errors import CorpusError
from chunkweave.retrieval.retrievers import RetrievalStage, RetrievedChunk
from tests.server.conftest import Asking, later, report_of, wait_until
from tests.server.fronts import DOCUMENTS, MORE, running_front

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


def slow_corpus(client: Asking) -> SlowCorpus:
    served = client.make_corpus("sea", [*DOCUMENTS, MORE], chunk_tokens=32)
    served.corpus = SlowCorpus(served.corpus)
    return served.corpus


@pytest.fixture
def front(vllm):
    with running_front(vllm, order="fixed") as client:
        yield client


@pytest.fixture
def corpus(front):
    return slow_corpus(front)


def asked(client: Asking, **body: Any) -> Future[Any]:
    """A question on a thread of its own."""
    return later(client.ask, **{**ASK, **body})


def confirmed(client: Asking, corpus: SlowCorpus, begun: Callable[[], bool], **body: Any) -> dict[str, Any]:
    """The report of a question whose search ends once what it has named first is computed ahead."""
    corpus.go_on.clear()
    answer = asked(client, **body)
    wait_until(begun)
    corpus.go_on.set()
    return report_of(answer.result())


def speculations(client: Asking) -> dict[str, int]:
    counts = client.parts.answering.retriever.speculation.counts
    return {"started": counts.started, "matched": counts.matched, "terminated": counts.terminated}


def test_what_the_search_confirms_was_prefilled_under_the_same_salt(front, corpus, vllm):
    answer = asked(front)
    wait_until(lambda: len(vllm.seen) == 1)  # before the search has ended
    corpus.go_on.set()
    told = answer.result().json()
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


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_what_is_computed_ahead_promotes_as_the_request_that_it_becomes(vllm, threshold):
    reuse = {"chunkweave": {**ASK["chunkweave"], "method": "prefix"}}
    with running_front(vllm, order="free", promotion_threshold=threshold) as front:
        corpus = slow_corpus(front)
        for number in range(1, 4):
            report = confirmed(front, corpus, lambda number=number: len(vllm.seen) == 2 * number - 1, **reuse)
            assert report["pipelining"]["matched"]
    told = [body["kv_transfer_params"]["chunkweave"]["promoted"] for body in vllm.seen]
    assert told == [[] if number // 2 + 1 < threshold else [0, 1] for number in range(6)]


def test_the_answer_waits_for_a_prefill_that_is_under_way(front, corpus, vllm):
    vllm.gate.clear()
    answer = asked(front)
    wait_until(lambda: len(vllm.seen) == 1)
    corpus.go_on.set()
    time.sleep(0.3)
    assert len(vllm.seen) == 1, "computed twice"
    vllm.gate.set()
    assert report_of(answer.result())["pipelining"]["matched"]
    assert len(vllm.seen) == 2


def test_a_list_that_changes_ends_what_was_computed_for_the_old_one(front, corpus, vllm):
    corpus.stages = [(0, 2), (0, 1)]
    vllm.gate.clear()
    answer = asked(front)
    wait_until(lambda: len(vllm.seen) == 1)
    corpus.go_on.set()
    wait_until(lambda: len(vllm.seen) == 2)
    vllm.gate.set()
    told = report_of(answer.result())
    wait_until(lambda: vllm.aborted == 1)
    assert (told["pipelining"]["terminated"], told["pipelining"]["matched"]) == (1, False)
    assert [chunk["rank"] for chunk in told["retrieved"]] == [1, 2]
    assert vllm.seen[0]["prompt"] != vllm.seen[1]["prompt"]


def test_one_that_fails_costs_no_answer(front, corpus, vllm):
    vllm.behave = lambda body: JSONResponse({"error": {"message": "no"}}, 400) if body["max_tokens"] == 1 else None
    report = confirmed(front, corpus, lambda: len(vllm.seen) == 1)
    assert not report["pipelining"]["matched"]


@pytest.mark.parametrize(("room", "ahead"), [({}, 0), ({"max_prefill_batch": 2}, 1)], ids=["by default", "two"])
def test_so_many_prefills_may_be_pending_as_the_server_is_told(vllm, room, ahead):
    """By default as many as there are replicas: here one."""
    with running_front(vllm, order="fixed", **room) as front:
        corpus = slow_corpus(front)
        vllm.gate.clear()
        other = later(front.ask, documents=DOCUMENTS)
        wait_until(lambda: len(vllm.seen) == 1)
        answer = asked(front)
        wait_until(lambda: front.parts.answering.retriever.speculation.counts.stages == 1)
        wait_until(lambda: len(vllm.seen) == 1 + ahead)
        vllm.gate.set()
        corpus.go_on.set()
        assert report_of(answer.result()).get("not_speculated") == (None if ahead else "other requests were pending")
        report_of(other.result())
        assert speculations(front)["started"] == ahead


def test_a_client_that_leaves_while_its_search_goes_on_ends_both(front, corpus, vllm):
    vllm.gate.clear()
    with pytest.raises(Exception, match="timed out"):
        front.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}], **ASK}, timeout=0.5)
    corpus.go_on.set()
    wait_until(lambda: not front.service.parts.answering.retriever.speculation.running)
    vllm.gate.set()
    wait_until(lambda: vllm.aborted == len(vllm.seen) == 1)


def test_a_search_that_fails_is_told_and_leaves_nothing_behind(front, corpus, vllm, caplog):
    def broken(_vector: Any, _k: int) -> Iterator[RetrievalStage]:
        yield RetrievalStage(corpus._found(corpus.embed_query("?"), (0, 1)), 1, False, 0.0, 0)
        wait_until(lambda: len(vllm.seen) == 1)
        raise CorpusError("the index is damaged")

    corpus.search_stages = broken
    assert front.ask(**ASK).status_code >= 400
    wait_until(lambda: not front.service.parts.answering.retriever.speculation.running)
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


def test_the_answer_comes_from_where_its_chunks_were_prefilled(fakes):
    one, other = fakes
    with running_front(one, other, routing="round-robin") as front:
        report = confirmed(front, slow_corpus(front), lambda: len(one.seen) + len(other.seen) == 1)
        assert report["pipelining"]["matched"]
        assert sorted((len(one.seen), len(other.seen))) == [0, 2]


def test_a_list_that_is_shorter_than_what_was_asked_for_is_not_computed_ahead(front, corpus, vllm):
    corpus.stages = [(0,), (0, 1)]
    answer = asked(front)
    time.sleep(0.3)
    assert not vllm.seen
    corpus.go_on.set()
    report_of(answer.result())
    assert len(vllm.seen) == 1
