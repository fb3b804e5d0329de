"""Requests beside others: they load from slow tiers in the queue, and compute the documents that they share once."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from chunkweave.planning.cost import CostModel, cost_model_path
from chunkweave.tiers.segment_file import DiskSegment
from tests.server.conftest import Client, engine_of, later, report_of, slowed, wait_until

pytestmark = pytest.mark.backend("engine")

FERRY = "The ferry leaves at seven, at noon and at six. " * 3
CHOIR = "The choir sings on Sundays behind the old wall. " * 3
TOWER = "The tower has two hundred and thirty steps and a copper roof. " * 3
DOCUMENTS = [TOWER, FERRY, CHOIR]
COMPUTE_S = 0.001
"""Seconds that computing a token takes, in the costs that the servers here are given."""


def server_with(serve, folder, share: float, **settings: Any) -> Client:
    """A server with these documents on its disk, where a token takes `share` of the time that computing it takes.

    Nothing is in its memory.
    """
    first = serve(cache_dir=folder)
    for document in DOCUMENTS:
        assert first.ask(documents=[document], chunkweave={"method": "prefix"}).status_code == 200
    first.engine.store.flush(10)
    loaded = first.engine.loaded
    token_bytes = loaded.model.geometry.kv_elements_per_token() * 4
    times = ((COMPUTE_S, 1000 * COMPUTE_S),) * 2
    speeds = {"disk": token_bytes / (share * COMPUTE_S)}
    cost = CostModel((0, 1000), (1, 1000), times, token_bytes, speeds, loaded.fingerprint)
    cost.save(cost_model_path(folder, loaded.fingerprint))
    return serve(cache_dir=folder, **settings)


@contextmanager
def occupied(client: Client, waiting: list[dict[str, Any]]) -> Iterator[list[Future[Any]]]:
    """While another request is answered, these wait, or run beside it; their answers come after the block."""
    stats = lambda: engine_of(client.service).batching.stats  # noqa: E731
    with slowed(client):
        first = later(client.ask, max_tokens=400)
        wait_until(lambda: stats().running == 1)
        answers = [later(client.ask, max_tokens=1, **body) for body in waiting]
        wait_until(lambda: stats().running + stats().waiting == 1 + len(waiting) or first.done())
        yield answers
    assert first.result().status_code == 200


def sources(report: dict[str, Any]) -> list[str]:
    return [chunk["kv_source"] for chunk in report["chunks"] if chunk["rank"] is not None]


def test_no_ratio_is_raised_while_others_wait_or_run(serve, tmp_path):
    """CacheBlend §5.1 raises the ratio of one request to what hides its loading; with others, they would pay for it."""
    client = server_with(serve, tmp_path / "kv", 0.9)
    body = {"documents": DOCUMENTS, "chunkweave": {"method": "cacheblend"}}
    with occupied(client, [{**body, "cache_salt": ""} for _ in range(4)]) as answers:
        pass
    reports = [report_of(answer.result()) for answer in answers]
    assert all("reused" in sources(report) for report in reports)
    assert [report["parameters"]["recompute_ratio"] for report in reports] == [0.3] * 4
    client.engine.store.levels[0].store.clear()
    alone = report_of(client.ask(max_tokens=1, **body))
    assert alone["parameters"]["recompute_ratio"] > 0.8, "alone, computing hides what loads"


def test_what_queues_reads_ahead_from_a_tier_that_is_slower_than_computing(serve, tmp_path):
    """Cache-Craft §3.5: loading is hidden in the queue. What was read there is in memory when the plan is made."""
    client = server_with(serve, tmp_path / "kv", 5.0, max_num_seqs=1)
    body = {"documents": DOCUMENTS, "chunkweave": {"method": "cacheblend"}}
    alone = report_of(client.ask(max_tokens=1, **{**body, "documents": [TOWER]}))
    assert sources(alone) == ["computed"], "computing is sooner than this disk"
    client.engine.store.levels[0].store.clear()
    with occupied(client, [body]) as answers:
        wait_until(lambda: engine_of(client.service).batching.stats.prefetched_bytes > 0)
        time.sleep(0.2)
    waited = report_of(answers[0].result())
    assert sources(waited) == ["prefix-exact", "reused", "reused"]
    assert waited["parameters"]["recompute_ratio"] == 0.3, "nothing of it was left to load"


def test_what_has_not_come_in_by_its_turn_is_computed(serve, tmp_path, monkeypatch):
    client = server_with(serve, tmp_path / "kv", 5.0, max_num_seqs=1)
    read, gate, layers = DiskSegment.layer, threading.Event(), []

    def layer(self, index, scratch=None):
        if len(layers) >= 6:  # the first segment, of four layers, and half of the second
            gate.wait(10)
        layers.append(index)
        return read(self, index, scratch)

    monkeypatch.setattr(DiskSegment, "layer", layer)
    body = {"documents": DOCUMENTS, "chunkweave": {"method": "full-reuse"}}
    with occupied(client, [body]) as answers:
        wait_until(lambda: len(layers) == 6)
    found = sources(report_of(answers[0].result()))
    gate.set()
    assert found == ["prefix-exact", "computed", "computed"]
    assert layers[:6] == [0, 1, 2, 3, 0, 1], "segment by segment: what has come in, has come in whole"


LONGER = [
    "The Selmond Choir is led by Otto Gunmark. It sings on Sundays. " * 6,
    "The Gerfern Tower has 230 steps and a copper roof. " * 6,
]


def reports(client, documents, **fields) -> list:
    """The reports of requests that come at once, each over its own of these lists of documents."""
    asked = []
    for number, texts in enumerate(documents):
        asked.append(later(client.ask, f"Who is number {number}?", documents=texts, max_tokens=2, chunkweave=fields))
    return [report_of(answer.result()) for answer in asked]


@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_six_requests_at_once_compute_their_documents_once(serve, method):
    """One after the other compute the documents and six questions."""
    apart, together = serve(), serve(max_num_batched_tokens=64)
    one_by_one = [reports(apart, [LONGER], method=method)[0] for _ in range(6)]
    at_once = reports(together, [LONGER] * 6, method=method)
    expected = sum(report["computed_tokens"] for report in one_by_one)
    assert sum(report["computed_tokens"] for report in at_once) <= 1.1 * expected
    assert "chunkweave:shared_prefills_total" in together.get("/metrics").text


def test_requests_over_other_documents_run_beside_each_other(serve):
    client = serve(max_num_seqs=4)
    client.ask(documents=["A short one."], max_tokens=1)  # the system part is stored
    reports(client, [[f"Document {number}. " + LONGER[number % 2]] for number in range(4)], method="prefix")
    wait_until(lambda: "chunkweave:num_requests_running" in client.get("/metrics").text)
    assert client.metric("shared_prefills_total") == 0
