"""Conversations and free order over HTTP."""

import pytest

from tests.server.conftest import KEYS, Client, Serve, key_ring

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]
MORE = "The harbour of Skerrow was founded in 1871."


def turn(client: Client, question: str, documents: list[str], *, name: str = "c", **body):
    reuse = {"conversation_id": name, "method": "prefix"}
    return client.ask(question, documents=documents, chunkweave=reuse, **body)


def report(response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()["chunkweave"]


@pytest.mark.backend("engine")
def test_a_conversation_goes_on_where_it_was(client):
    first = report(turn(client, "When does the ferry leave?", DOCUMENTS))
    second = report(turn(client, "And who boards ships?", [DOCUMENTS[1], MORE]))
    assert (first["history_tokens"], second["chunks_not_sent"]) == (0, 1)
    assert 0 < second["history_tokens"] <= second["prefix_exact_tokens"]


def test_a_client_may_send_the_turns_that_the_server_has(client):
    said = turn(client, "When does the ferry leave?", DOCUMENTS).json()["choices"][0]["message"]["content"]
    messages = [
        {"role": "user", "content": "When does the ferry leave?"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And who boards ships?"},
    ]
    assert report(turn(client, "", [], messages=messages))["history_tokens"] > 0


def test_turns_that_the_server_has_not_are_refused(client):
    turn(client, "When does the ferry leave?", DOCUMENTS)
    lost = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": "Two"},
        {"role": "user", "content": "Three"},
    ]
    refused = turn(client, "", [], messages=lost)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "conversation_mismatch"


@pytest.mark.backend("engine")
def test_earlier_turns_need_a_conversation(client):
    messages = [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
    refused = client.ask(messages=messages)
    assert refused.status_code == 400
    assert "conversation_id" in refused.json()["error"]["message"]


def test_conversations_of_tenants_never_meet(serve: Serve):
    client = serve(keys=key_ring())
    report(turn(client, "When does the ferry leave?", DOCUMENTS, key=KEYS["acme"]))
    assert report(turn(client, "And who boards ships?", DOCUMENTS, key=KEYS["bolt"]))["history_tokens"] == 0


def test_documents_may_be_reordered_unless_the_request_says_no(client):
    def sources(order: str | None, documents: list[str]) -> list[tuple[str, int]]:
        reuse = {"method": "prefix"} | ({"order": order} if order else {})
        told = report(client.ask(documents=documents, chunkweave=reuse))
        return [chunk["rank"] for chunk in told["chunks"] if chunk["rank"] is not None]

    for _ in range(3):
        sources(None, [DOCUMENTS[1]])
    assert sources("fixed", DOCUMENTS) == [0, 1]
    assert sources(None, DOCUMENTS) == [1, 0]
