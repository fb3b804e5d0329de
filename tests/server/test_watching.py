"""What a running server tells of itself: metrics, log lines with request ids, comparisons."""

import logging
import re
import time

import pytest

from chunkweave.planning.evidence import Compared
from tests.server.conftest import ADMIN_KEY, KEYS, Client, Serve, bearer, key_ring, wait_until

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]


def test_metrics_add_up_what_reports_say(client):
    reports = [client.ask(documents=DOCUMENTS).json()["chunkweave"] for _ in range(2)]
    client.ask("x", documents=["y"] * 65)
    assert client.metric("requests_total", outcome="finished") == 2
    assert client.metric("requests_total", outcome="rejected") == 1
    assert client.metric("prompt_tokens_total") == sum(report["prompt_tokens"] for report in reports)


@pytest.mark.parametrize("named", [False, True])
def test_tenants_are_named_if_the_operator_says_so(serve: Serve, named: bool):
    client = serve(keys=key_ring(), tenant_metrics=named)
    client.ask(key=KEYS["acme"], documents=DOCUMENTS)
    assert client.metric("requests_total", key=ADMIN_KEY, outcome="finished") == 1
    assert ('tenant="acme"' in client.get("/metrics", headers=bearer(ADMIN_KEY)).text) == named


def test_one_log_line_for_each_request_with_its_id_and_nothing_of_its_text(client, caplog):
    with caplog.at_level(logging.INFO, "chunkweave.requests"):
        response = client.ask("When does the secretive ferry leave?", documents=DOCUMENTS)
    (line,) = [record for record in caplog.records if record.name == "chunkweave.requests"]
    assert response.headers["x-request-id"]
    assert "ferry" not in caplog.text
    assert line.fields["outcome"] == "finished"


def test_a_stream_that_is_left_counts_as_aborted(client):
    messages = [{"role": "user", "content": "When?"}]
    body = {"messages": messages, "documents": DOCUMENTS, "stream": True, "max_tokens": 200, "temperature": 0}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: not client.parts.answering.running)
    assert sum(client.metric("requests_total", outcome=outcome) for outcome in ("aborted", "finished")) == 1


@pytest.mark.backend("engine")
def test_answers_are_compared_until_weaving_is_learned(serve: Serve):
    """A server without a record: exact answers with their documents in changing order, compared in idle time."""
    client = serve()
    texts = [f"Page {number} of the guide to the harbour: " + " ".join(DOCUMENTS) * 3 for number in range(4)]
    for number in range(4):
        report = client.ask(documents=texts[number:] + texts[:number]).json()["chunkweave"]
        assert report["method"] == "prefix"
        assert re.fullmatch(r"learning \d+ of about \d+", report["why"])
    wait_until(lambda: client.metric("comparisons_total", result="compared") > 0)
    assert client.metric("weaving_enabled") == 0
    evidence = client.service.backend.engine.comparisons.evidence
    [cheapest] = evidence.methods[-1:]
    for _ in range(400):
        evidence.take({method: Compared(0.99, 0.01) for method in evidence.methods})
    learned = client.get("/v1/cache").json()["learned"]
    assert (learned["balanced"]["method"], learned["balanced"]["rests_on"]) == (cheapest, "comparisons")
    assert client.metric("weaving_enabled") == 1
    assert client.ask(documents=texts[::-1]).json()["chunkweave"]["why"] in ("learned", "no gain", "path recurs")
    assert client.ask(documents=texts, chunkweave={"quality": "exact"}).json()["chunkweave"]["why"] == "exact"


def test_it_can_be_switched_off(serve: Serve):
    client = serve(compare=False)
    assert client.ask(documents=DOCUMENTS).json()["chunkweave"]["why"] == "exact"
    assert "learned" not in client.get("/v1/cache").json()
    refused = client.ask(documents=DOCUMENTS, chunkweave={"quality": "balanced"})
    assert (refused.status_code, "not calibrated" in refused.text) == (400, True)


@pytest.mark.backend("engine")
def test_a_removal_drops_what_waits_to_be_compared(serve: Serve):
    client = serve()
    comparisons = client.service.backend.engine.comparisons
    client.ask(documents=DOCUMENTS)
    comparisons.step = lambda *_: time.sleep(0.01)
    client.ask(documents=DOCUMENTS[::-1])
    for body in ({"documents": DOCUMENTS}, {"everything": True}):
        wait_until(lambda: comparisons.pending > 0)
        assert client.post("/v1/cache/clear", json=body).status_code == 200
        assert not comparisons.pending
        client.ask(documents=DOCUMENTS)


RANDOM_LETTERS = " ".join(["qzxvkjw", "pfqzgx", "wvxkqj", "zzqpxv"] * 5)


def test_the_reader_is_warned_of_once_when_it_is_asked_about_other_text(serve: Serve, server_backend: str, caplog):
    named = {"shape": None, "model": "reader"} if server_backend == "engine" else {"name": "reader"}
    client = serve(**named)
    assert client.ask(documents=["The choir sings in the tower. " * 5]).status_code == 200
    assert "reads only its own invented worlds" not in caplog.text
    for _ in range(2):
        assert client.ask(documents=[RANDOM_LETTERS]).status_code == 200
    assert caplog.text.count("reads only its own invented worlds") == 1
    assert "--model smollm2" in caplog.text


def test_other_models_are_not_warned_of(client: Client, caplog):
    assert client.ask(documents=[RANDOM_LETTERS]).status_code == 200
    assert "invented worlds" not in caplog.text
