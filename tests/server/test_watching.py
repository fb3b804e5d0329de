"""What a running server tells of itself: metrics, log lines with request ids, shadow checks."""

import logging

import pytest

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
def test_woven_answers_are_checked_and_weaving_can_be_switched_on_again(serve: Serve):
    client = serve(shadow_every=1, shadow_window=1, shadow_max_divergence=1e-9)
    weave = {"method": "full-reuse"}
    client.warm(*DOCUMENTS)
    client.ask(documents=DOCUMENTS, chunkweave=weave)
    wait_until(lambda: client.get("/v1/shadow").json()["checked"] == 1)
    told = client.get("/v1/shadow").json()
    assert told["weaving"] is False
    answer = client.ask(documents=DOCUMENTS, chunkweave=weave).json()["chunkweave"]
    assert (answer["method"], answer["why"]) == ("prefix", "switched off")
    assert client.post("/v1/shadow/switch-on").json()["weaving"] is True
    assert client.ask(documents=DOCUMENTS, chunkweave=weave).json()["chunkweave"]["method"] == "full-reuse"


def test_without_checks_there_is_nothing_to_tell(client):
    assert client.get("/v1/shadow").status_code == 404


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
