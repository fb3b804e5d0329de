"""Conversations and free order over HTTP."""

from typing import Any

import pytest

from tests.server.conftest import KEYS, Client, Serve, key_ring

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]
MORE = "The harbour of Skerrow was founded in 1871."


def turn(
    client: Client, question: str, documents: list[str], *, name: str = "c", number: int | None = None, **body
) -> Any:
    reuse = {"conversation_id": name, "method": "prefix"} | ({} if number is None else {"turn": number})
    return client.ask(question, documents=documents, chunkweave=reuse, **body)


def report(response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()["chunkweave"]


@pytest.mark.parametrize("deduplicate", [None, False, True])
def test_a_chunk_is_sent_again_unless_it_is_asked_not_to_be(serve, deduplicate):
    client = serve(**({} if deduplicate is None else {"deduplicate": deduplicate}))
    turn(client, "When does the ferry leave?", DOCUMENTS)
    second = report(turn(client, "And who boards ships?", [DOCUMENTS[1], MORE]))
    assert second["chunks_not_sent"] == int(deduplicate or 0)


@pytest.mark.backend("engine")
def test_a_conversation_goes_on_where_it_was(serve):
    client = serve(deduplicate=True)
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


def said(*texts: str) -> list[dict[str, str]]:
    """Messages that begin and end with the user's."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


FIRST = ("When does the ferry leave?", "At seven.")
SECOND = ("And who boards ships?", "Pilots.")


def test_earlier_messages_stand_in_the_prompt_without_a_conversation(client):
    alone = report(client.ask(messages=said("And?"), documents=DOCUMENTS))
    later = report(client.ask(messages=said(*FIRST, "And?"), documents=DOCUMENTS))
    assert later["prompt_tokens"] - alone["prompt_tokens"] == later["history_tokens"] > 0
    assert alone["history_tokens"] == 0
    plain = {"messages": said(*FIRST, "And?"), "chunkweave": {"method": "full"}}
    assert report(client.ask(**plain))["history_tokens"] == later["history_tokens"]


@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_chunk_that_earlier_messages_brought_is_not_sent_again(serve, deduplicate):
    """CRAFT §4.3 for clients that send all messages and no id, as OpenAI's do."""
    client = serve(keys=key_ring(), deduplicate=deduplicate)
    exact = {"chunkweave": {"method": "prefix"}, "key": KEYS["acme"]}

    def later(*messages: str, **more: Any) -> dict:
        return report(client.ask(messages=said(*messages), documents=[DOCUMENTS[1], MORE], **{**exact, **more}))

    first = client.ask(messages=said(FIRST[0]), documents=DOCUMENTS, **exact)
    answer = first.json()["choices"][0]["message"]["content"]
    stranger = later(FIRST[0], answer, "And?", key=KEYS["bolt"])
    second = later(FIRST[0], answer, "And?")
    assert stranger["chunks_not_sent"] == 0, "another tenant"
    assert second["chunks_not_sent"] == int(deduplicate)
    if not deduplicate:
        assert second["history_tokens"] == stranger["history_tokens"]
        return
    chunk_tokens = [chunk["tokens"] for chunk in report(first)["chunks"] if chunk["rank"] is not None]
    assert second["tokens_not_sent"] == chunk_tokens[1]
    assert second["history_tokens"] == stranger["history_tokens"] + sum(chunk_tokens)
    assert second["prompt_tokens"] == stranger["prompt_tokens"] + chunk_tokens[0]
    third = later(FIRST[0], f"  {answer}\n", "And?", "Of what?", "When?")
    assert (third["chunks_not_sent"], third["turns_cut"]) == (2, 0), "one of each earlier turn"
    other = later("When does the ferry land?", answer, "And?")
    assert other["chunks_not_sent"] == 0, "another conversation"


@pytest.mark.backend("engine")
def test_what_earlier_messages_brought_is_an_exact_prefix(serve):
    client = serve(deduplicate=True)
    exact = {"chunkweave": {"method": "prefix"}}
    first = client.ask(messages=said(FIRST[0]), documents=DOCUMENTS, **exact)
    answer = first.json()["choices"][0]["message"]["content"]
    ask = {"messages": said(FIRST[0], answer, "And?"), "documents": [DOCUMENTS[1], MORE]}
    second = client.ask(**ask, **exact)
    sources = [(chunk["source"], chunk["kv_source"]) for chunk in report(second)["chunks"]]
    assert [source for _, source in sources[1:]] == ["prefix-exact", "prefix-exact", "computed", "computed"]
    assert sources[3][0] == "turn"
    full = client.ask(**ask, chunkweave={"method": "full"}).json()
    assert full["choices"][0]["message"]["content"] == second.json()["choices"][0]["message"]["content"]


@pytest.mark.backend("engine")
def test_messages_bring_no_more_again_than_fits(serve):
    client = serve(deduplicate=True)
    long = [f"{MORE} " * 3, f"{DOCUMENTS[0]} " * 2]
    limit = report(client.ask(messages=said(FIRST[0]), documents=long))["prompt_tokens"]
    context = client.engine.loaded.model.geometry.max_positions
    fits = context // limit
    messages: list[str] = []
    for number in range(fits + 2):
        asked = [f"{document} Of {number}." for document in long]
        told = client.ask(messages=said(*messages, f"Question {number}?"), documents=asked)
        found = report(told)
        assert found["prompt_tokens"] < context
        messages += [f"Question {number}?", told.json()["choices"][0]["message"]["content"]]
    assert found["history_tokens"] < (fits + 1) * limit


@pytest.mark.backend("engine")
def test_messages_that_were_sent_before_are_found_by_what_they_say(serve: Serve):
    client = serve(keys=key_ring())
    exact = {"documents": DOCUMENTS, "chunkweave": {"method": "prefix"}, "key": KEYS["acme"]}

    def turns(told: dict) -> list[str]:
        return [chunk["kv_source"] for chunk in told["chunks"] if chunk["source"] == "turn"]

    assert turns(report(client.ask(messages=said(*FIRST, "And?"), **exact))) == ["computed"]
    assert turns(report(client.ask(messages=said(*FIRST, *SECOND, "And?"), **exact))) == ["prefix-exact", "computed"]
    other = ("When does the ferry leave?", "At eight.")
    assert turns(report(client.ask(messages=said(*other, *SECOND, "And?"), **exact))) == ["computed", "computed"]
    stranger = {**exact, "key": KEYS["bolt"]}
    assert turns(report(client.ask(messages=said(*FIRST, *SECOND, "And?"), **stranger))) == ["computed", "computed"]


@pytest.mark.backend("engine")
def test_an_answer_behind_earlier_messages_is_that_of_full_prefill(client):
    asked = {"messages": said(*FIRST, *SECOND, "And?"), "documents": DOCUMENTS}
    texts = {
        client.ask(**asked, chunkweave={"method": method}).json()["choices"][0]["message"]["content"]
        for method in ("full", "prefix", "prefix")
    }
    assert len(texts) == 1


@pytest.mark.backend("vllm")
def test_earlier_messages_are_parts_of_their_own_before_vllm(client):
    report(client.ask(messages=said(*FIRST, "And?"), documents=DOCUMENTS, chunkweave={"method": "cacheblend"}))
    builder = client.service.backend.context.preparer.builder
    prompt = builder.build("And?", DOCUMENTS, history=[FIRST])
    kinds = [str(part.kind) for part in prompt.parts if part.kind != "start"]
    assert kinds == ["system", "turn", "chunk", "chunk", "question"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "One"}, {"role": "user", "content": "Two"}],
        [{"role": "tool", "content": "One"}, {"role": "user", "content": "Two"}],
    ],
)
def test_earlier_messages_are_questions_with_their_answers(client, messages):
    refused = client.ask(messages=messages, documents=DOCUMENTS)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_conversation", "messages")
    assert "begin with the user's" in error["message"]


def test_conversations_of_tenants_never_meet(serve: Serve):
    client = serve(keys=key_ring())
    report(turn(client, "When does the ferry leave?", DOCUMENTS, key=KEYS["acme"]))
    assert report(turn(client, "And who boards ships?", DOCUMENTS, key=KEYS["bolt"]))["history_tokens"] == 0


def refused_with(response, status: int, code: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), response.text
    assert error["param"] == "chunkweave.conversation_id"


def test_a_tenant_cannot_push_out_the_conversations_of_another(serve: Serve):
    client = serve(keys=key_ring(), max_conversations=4)
    report(turn(client, "When does the ferry leave?", DOCUMENTS, key=KEYS["acme"]))
    for number in range(6):
        report(turn(client, "When?", DOCUMENTS, name=f"flood {number}", key=KEYS["bolt"]))
    assert report(turn(client, "And who boards ships?", [], key=KEYS["acme"]))["history_tokens"] > 0
    refused_with(turn(client, "And?", [], name="flood 0", key=KEYS["bolt"]), 404, "conversation_not_found")


def test_a_share_is_what_the_operator_says(serve: Serve):
    client = serve(keys=key_ring(), max_conversations=4, conversation_share=1)
    for name in ("older", "newer"):
        report(turn(client, "When does the ferry leave?", DOCUMENTS, name=name, key=KEYS["acme"]))
    for number in range(3):
        report(turn(client, "When?", DOCUMENTS, name=f"flood {number}", key=KEYS["bolt"]))
    refused_with(turn(client, "And?", [], name="older", key=KEYS["acme"]), 404, "conversation_not_found")
    assert report(turn(client, "And?", [], name="newer", key=KEYS["acme"]))["history_tokens"] > 0


def test_a_forgotten_conversation_is_not_answered_without_its_history(serve: Serve):
    client = serve(max_conversations=1)
    report(turn(client, "When does the ferry leave?", DOCUMENTS))
    report(turn(client, "When does the ferry leave?", DOCUMENTS, name="another"))
    refused_with(turn(client, "And who boards ships?", []), 404, "conversation_not_found")
    assert report(turn(client, "And who boards ships?", [], number=1))["history_tokens"] == 0
    assert report(turn(client, "And when?", []))["history_tokens"] > 0


def test_who_says_that_it_continues_is_not_answered_by_a_server_that_knows_nothing(client):
    refused_with(turn(client, "And who boards ships?", DOCUMENTS, number=2), 404, "conversation_not_found")
    earlier = [{"role": "user", "content": "When?"}, {"role": "user", "content": "And who boards ships?"}]
    refused_with(turn(client, "", DOCUMENTS, messages=earlier), 404, "conversation_not_found")


def test_a_turn_is_the_one_that_comes_next(client):
    report(turn(client, "When does the ferry leave?", DOCUMENTS, number=1))
    for wrong in (1, 3):
        refused_with(turn(client, "And who boards ships?", [], number=wrong), 409, "conversation_mismatch")
    assert report(turn(client, "And who boards ships?", [], number=2))["history_tokens"] > 0
    refused_with(turn(client, "And who boards ships?", [], number=2), 409, "conversation_mismatch")


def test_a_turn_needs_a_conversation_and_agrees_with_the_messages(client):
    alone = client.ask(chunkweave={"turn": 2})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "chunkweave")
    earlier = [{"role": "user", "content": "When?"}, {"role": "user", "content": "And who boards ships?"}]
    other = turn(client, "", DOCUMENTS, messages=earlier, number=3)
    assert (other.status_code, other.json()["error"]["param"]) == (400, "chunkweave.turn")
