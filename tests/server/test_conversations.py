"""Conversations and free order over HTTP."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from chunkweave_server.engine_backend import EngineBackend
from chunkweave_server.service import Service
from chunkweave_server.tenants import KeyRing
from tests.server.conftest import (
    KEYS,
    Asking,
    Serve,
    engine_of,
    events_of,
    key_ring,
    listening,
    report_of,
    serving,
    settings_of,
)

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]
MORE = "The harbour of Skerrow was founded in 1871."


def said(*texts: str) -> list[dict[str, str]]:
    """Messages that begin and end with the user's."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


FIRST = ("When does the ferry leave?", "At seven.")
SECOND = ("And who boards ships?", "Pilots.")


def test_earlier_messages_stand_in_the_prompt_without_a_conversation(client):
    alone = report_of(client.ask(messages=said("And?"), documents=DOCUMENTS))
    later = report_of(client.ask(messages=said(*FIRST, "And?"), documents=DOCUMENTS))
    assert later["prompt_tokens"] - alone["prompt_tokens"] == later["history_tokens"] > 0
    assert alone["history_tokens"] == 0
    plain = {"messages": said(*FIRST, "And?"), "chunkweave": {"method": "full"}}
    assert report_of(client.ask(**plain))["history_tokens"] == later["history_tokens"]


@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_chunk_that_earlier_messages_brought_is_not_sent_again(serve, deduplicate):
    """CRAFT §4.3 for clients that send all messages and no id, as OpenAI's do."""
    client = serve(keys=key_ring(), deduplicate=deduplicate)
    exact = {"chunkweave": {"method": "prefix"}, "key": KEYS["acme"]}

    def later(*messages: str, **more: Any) -> dict:
        return report_of(client.ask(messages=said(*messages), documents=[DOCUMENTS[1], MORE], **{**exact, **more}))

    first = client.ask(messages=said(FIRST[0]), documents=DOCUMENTS, **exact)
    answer = first.json()["choices"][0]["message"]["content"]
    stranger = later(FIRST[0], answer, "And?", key=KEYS["bolt"])
    second = later(FIRST[0], answer, "And?")
    assert stranger["chunks_not_sent"] == 0, "another tenant"
    assert second["chunks_not_sent"] == int(deduplicate)
    if not deduplicate:
        assert second["history_tokens"] == stranger["history_tokens"]
        return
    chunk_tokens = [chunk["tokens"] for chunk in report_of(first)["chunks"] if chunk["rank"] is not None]
    assert second["tokens_not_sent"] == chunk_tokens[1]
    assert second["history_tokens"] == stranger["history_tokens"] + sum(chunk_tokens)
    assert second["prompt_tokens"] == stranger["prompt_tokens"] + chunk_tokens[0]
    third = later(FIRST[0], f"  {answer}\n", "And?", "Of what?", "When?")
    assert third["chunks_not_sent"] == 2, "one of each earlier turn"
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
    sources = [(chunk["source"], chunk["kv_source"]) for chunk in report_of(second)["chunks"]]
    assert [source for _, source in sources[1:3]] == ["prefix-exact", "prefix-exact"]
    assert [source for source, _ in sources[3:5]] == ["turn", "end of turn"]
    full = client.ask(**ask, chunkweave={"method": "full"}).json()
    assert full["choices"][0]["message"]["content"] == second.json()["choices"][0]["message"]["content"]


@pytest.mark.backend("engine")
def test_messages_bring_no_more_again_than_fits(serve):
    client = serve(deduplicate=True)
    long = [f"{MORE} " * 3, f"{DOCUMENTS[0]} " * 2]
    limit = report_of(client.ask(messages=said(FIRST[0]), documents=long))["prompt_tokens"]
    context = client.engine.loaded.model.geometry.max_positions
    fits = context // limit
    messages: list[str] = []
    for number in range(fits + 2):
        asked = [f"{document} Of {number}." for document in long]
        told = client.ask(messages=said(*messages, f"Question {number}?"), documents=asked)
        found = report_of(told)
        assert found["prompt_tokens"] < context
        messages += [f"Question {number}?", told.json()["choices"][0]["message"]["content"]]
    assert found["history_tokens"] < (fits + 1) * limit


@pytest.mark.backend("engine")
def test_messages_that_were_sent_before_are_found_by_what_they_say(serve: Serve):
    client = serve(keys=key_ring())
    exact = {"documents": DOCUMENTS, "chunkweave": {"method": "prefix"}, "key": KEYS["acme"]}

    def turns(told: dict) -> list[str]:
        return [chunk["kv_source"] for chunk in told["chunks"] if chunk["source"] == "turn"]

    assert turns(report_of(client.ask(messages=said(*FIRST, "And?"), **exact))) == ["computed"]
    assert turns(report_of(client.ask(messages=said(*FIRST, *SECOND, "And?"), **exact))) == ["prefix-exact", "computed"]
    other = ("When does the ferry leave?", "At eight.")
    assert turns(report_of(client.ask(messages=said(*other, *SECOND, "And?"), **exact))) == ["computed", "computed"]
    stranger = {**exact, "key": KEYS["bolt"]}
    assert turns(report_of(client.ask(messages=said(*FIRST, *SECOND, "And?"), **stranger))) == ["computed", "computed"]


@pytest.fixture(scope="module")
def reader() -> Iterator[Asking]:
    """A server whose answers are text."""
    settings = settings_of(shape=None, model="reader", served_model_name=None, deduplicate=True)
    service = Service(settings, EngineBackend(settings), KeyRing())
    with listening(service) as server, Asking(base_url=server.url, timeout=60) as client:
        client.service = service
        yield client


def drawn_world(rng: random.Random) -> tuple[list[str], list[str]]:
    """Documents of the kind that the reader can read, and questions about them."""
    names = rng.sample(["Selmond", "Gerfern", "Skerrow", "Aldmoor", "Varnholt", "Ostwick"], 3)
    documents = [
        f"The {name} Choir is led by Otto Gunmark. There are {rng.randint(20, 400)} singers in all." for name in names
    ]
    questions = [f"{what} the {name} Choir?" for name in names for what in ("Who leads", "How many singers are in")]
    rng.shuffle(questions)
    return documents, questions


@pytest.mark.parametrize("seed", range(8))
def test_a_resent_conversation_is_exact_up_to_its_last_answer(reader: Asking, seed: int):
    """Drawn turns, with documents or without, streamed or not, ended by the model, a length or a stop text.

    What is computed of a next turn is the last token of the answer, the end of the turn, and what is new.
    """
    rng = random.Random(seed)
    builder = engine_of(reader.service).engine.builder
    documents, questions = drawn_world(rng)
    exact = {"chunkweave": {"method": "prefix"}, "temperature": 0, "cache_salt": f"conversation {seed}"}
    texts: list[str] = []
    stored = 0
    known_tokens = 0
    for question in questions:
        before = engine_of(reader.service).batching.stats
        limit = rng.choice([{"max_tokens": 12}, {"max_tokens": rng.randint(2, 4)}, {"max_tokens": 12, "stop": ["u"]}])
        named = {"documents": rng.sample(documents, 1)} if rng.random() < 0.5 else {}
        body = {"messages": said(*texts, question), **exact, **limit}
        text, report = answer_of(reader, {**body, **named}, stream=rng.random() < 0.5)
        if texts and stored:
            assert report["prefix_exact_tokens"] == known_tokens - 1
        after = engine_of(reader.service).batching.stats
        stored = after.turns_stored - before.turns_stored
        assert stored + after.turns_changed - before.turns_changed == bool(text.strip())
        known_tokens = (
            report["prompt_tokens"] + len(builder.answer_ids(text.strip())) - len(builder.tokenizer.start_ids)
        )
        texts += [question, text]
    whole = {"messages": said(*texts, "Who leads the Selmond Choir?"), **exact, "max_tokens": 12}
    answers = {answer_of(reader, {**whole, "chunkweave": {"method": name}})[0] for name in ("prefix", "full")}
    assert len(answers) == 1


def answer_of(client: Asking, body: dict[str, Any], *, stream: bool = False) -> tuple[str, dict[str, Any]]:
    """The text of an answer and its report."""
    reply = client.post("/v1/chat/completions", json={**body, "stream": stream})
    if not stream:
        return reply.json()["choices"][0]["message"]["content"], report_of(reply)
    events = events_of(reply)
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    return "".join(pieces), events[-1]["chunkweave"]


@pytest.mark.backend("engine")
def test_an_answer_behind_earlier_messages_is_that_of_full_prefill(client):
    asked = {"messages": said(*FIRST, *SECOND, "And?"), "documents": DOCUMENTS}
    texts = {
        client.ask(**asked, chunkweave={"method": method}).json()["choices"][0]["message"]["content"]
        for method in ("full", "prefix", "prefix")
    }
    assert len(texts) == 1


FERRY = "The ferry leaves at seven, at noon and at six."
CHOIR = "The choir sings on Sundays behind the old wall."


def arranged(client, **reuse):
    """Where chunks of a request came from whose second one is asked for most, and what put them there."""
    for _ in range(3):
        client.ask(documents=[CHOIR], chunkweave={"order": "free"})
    report = report_of(client.ask(documents=[FERRY, CHOIR], chunkweave=reuse))
    return ranks_in(report), report["order"]


@pytest.mark.parametrize("reuse", [{}, {"quality": "exact"}, {"method": "prefix"}, {"method": "cacheblend"}])
def test_chunks_stand_as_they_were_sent(serve, reuse):
    ranks, order = arranged(serve(), **reuse)
    assert ranks == [0, 1]
    assert order == "original"


def test_the_client_may_say_that_order_is_free(serve):
    assert arranged(serve(), order="free") == ([1, 0], "frequency")


def test_the_operator_may_say_that_order_is_free_and_the_client_that_it_is_not(serve):
    client = serve(order="free")
    assert arranged(client) == ([1, 0], "frequency")
    assert arranged(client, order="fixed") == ([0, 1], "original")


def ranks_of(client, *documents, **body):
    return ranks_in(report_of(client.ask(documents=documents, **body)))


def ranks_in(report):
    return [chunk["rank"] for chunk in report["chunks"] if chunk["rank"] is not None]


@pytest.mark.parametrize(("popular", "other"), [(FERRY, CHOIR), (CHOIR, FERRY)])
def test_what_one_tenant_asks_pushes_out_nothing_of_another_ones(serve, popular, other):
    """CRAFT §4.1 counts over a window of requests: each tenant has its own."""
    client = serve(keys=key_ring(), order="free", ordering_window=3)
    for _ in range(2):
        client.ask(documents=[popular], key=KEYS["acme"])
    for _ in range(3):
        client.ask(documents=["The tower has 230 steps."], key=KEYS["bolt"])
    assert ranks_of(client, other, popular, key=KEYS["acme"]) == [1, 0]


@pytest.mark.parametrize(("popular", "other"), [(FERRY, CHOIR), (CHOIR, FERRY)])
def test_what_was_asked_for_is_known_after_a_restart(server_backend, tmp_path, popular, other):
    settings = {"order": "free", "cache_dir": tmp_path / "kv"}
    with serving(server_backend, tmp_path, **settings) as client:
        for _ in range(3):
            client.ask(documents=[popular])
    with serving(server_backend, tmp_path, **settings) as client:
        assert ranks_of(client, other, popular) == [1, 0]
    assert len(list((tmp_path / "kv").rglob("*access-counts.json"))) == 1
