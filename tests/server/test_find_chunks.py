"""Chunks found in plain prompts over HTTP: nothing is named, and passages that move are reused."""

import json
from array import array
from functools import partial
from random import Random

import pytest

from chunkweave.prompt.parts import FOUND, neutral_passages
from chunkweave.prompt.runs import GRAM
from chunkweave_server.bodies import NOTHING_NAMED
from tests.chat_tools import TEMPLATE
from tests.prompt_shapes import drawn_documents, drawn_shape, rotations
from tests.server import conftest
from tests.server.conftest import KEYS, Client, Serve, events_of, key_ring, report_of, serving
from tests.server.test_structured import CALLED, GET_TIME, QUESTION, RESULT, last_text, with_template

PASSAGES = neutral_passages()
METHOD = {"chunkweave": {"method": "cacheblend:ratio=0.1"}}
NO_TOOLS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
pytestmark = pytest.mark.backend("engine")


def rag(passages, question="Who paid for the bridge?"):
    """A prompt as RAG chains send it."""
    return "\n\n".join(("Use the context to answer.", *passages, f"Question: {question}"))


def taken(report):
    """Share of the prompt that was not computed."""
    kept = report["prefix_exact_tokens"] + report["reused_tokens"] + report["recomputed_tokens"]
    return kept / report["prompt_tokens"]


@pytest.fixture(autouse=True)
def _long_context(monkeypatch):
    longer = partial(conftest.toy_model, max_position_embeddings=2048)
    monkeypatch.setattr(conftest, "toy_model", longer)


@pytest.fixture
def finding(serve: Serve) -> Client:
    return serve(find_chunks=True, max_answer_tokens=64)


@pytest.mark.parametrize(
    ("usual", "asked", "found"),
    [
        pytest.param(True, {}, True, id="by the server"),
        pytest.param(True, {"find_chunks": False}, False, id="not by the request"),
        pytest.param(False, {}, False, id="not by default"),
        pytest.param(False, {"find_chunks": True}, True, id="by the request"),
    ],
)
def test_passages_of_a_plain_prompt_are_reused_in_another_order(serve: Serve, usual, asked, found):
    client = serve(find_chunks=usual, max_answer_tokens=64)
    reuse = {"chunkweave": {**METHOD["chunkweave"], **asked}}
    answers = [client.ask(rag(PASSAGES[:5][::order]), **reuse) for order in (1, -1)]
    first, again = map(report_of, answers)
    assert again["prompt_tokens"] == first["prompt_tokens"]
    assert taken(first) == 0
    assert (taken(again) > 0.8) if found else (taken(again) < 0.2)
    assert (again["reused_tokens"] > 0) == found
    assert answers[1].headers.get(NOTHING_NAMED[0]) == (None if found else NOTHING_NAMED[1])


def test_a_plain_completion_is_cut_too(finding: Client):
    prompts = [rag(PASSAGES[:5]), rag(PASSAGES[4::-1])]
    bodies = [{"prompt": prompt, "max_tokens": 4, "temperature": 0, **METHOD} for prompt in prompts]
    reports = [report_of(finding.post("/v1/completions", json=body)) for body in bodies]
    assert taken(reports[1]) > 0.8
    tokenizer = finding.engine.loaded.tokenizer
    assert reports[0]["prompt_tokens"] == len(tokenizer.start_ids) + len(tokenizer.encode(prompts[0]))


def test_token_ids_are_those_of_the_plain_chat_template(finding: Client):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": rag(PASSAGES[:2])}]
    tokenizer = finding.engine.loaded.tokenizer
    ids = tokenizer.encode(tokenizer.render_chat(messages), control_tokens=True)
    report = report_of(finding.ask(messages=messages))
    assert report["prompt_tokens"] == len(ids)


def test_without_a_method_only_exact_prefixes_are_reused(finding: Client):
    report_of(finding.ask(rag(PASSAGES[:5])))
    moved = report_of(finding.ask(rag(PASSAGES[4::-1])))
    assert moved["reused_tokens"] == moved["recomputed_tokens"] == 0
    same = report_of(finding.ask(rag(PASSAGES[:5], "Another question?")))
    assert same["method"] == "prefix"
    assert same["prefix_exact_tokens"] > 0.8 * same["prompt_tokens"]


@pytest.mark.parametrize(
    "more",
    [
        {"documents": ["A text."], "chunkweave": {"find_chunks": True}},
        {"chunkweave": {"find_chunks": True, "corpus": "c"}},
        {"chunkweave": {"find_chunks": True, "order": "free"}},
        {"chunkweave": {"find_chunks": 1}},
    ],
)
def test_what_excludes_it_is_refused(finding: Client, more):
    refused = finding.ask(**more)
    assert refused.status_code == 400
    assert "find_chunks" in refused.json()["error"]["message"]


@pytest.mark.parametrize("usual", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [("chat_template", "{% for n in range(300) %}x{% endfor %}"), ("bos_token", "</s>"), ("tokenizer_kwargs", {})],
)
def test_a_request_cannot_replace_the_chat_template(serve: Serve, usual: bool, name: str, value: object):
    client = serve(find_chunks=usual)
    refused = client.ask(chat_template_kwargs={name: value}, chunkweave={"find_chunks": True})
    assert refused.status_code == 400
    assert f"chat_template_kwargs: {name} cannot be set" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["messages", "arguments", "variables"])
def test_what_is_far_too_long_is_refused_before_it_is_rendered(serve: Serve, monkeypatch, kind: str):
    """Rendering and tokenizing 4 MB of arguments would take a quarter of a minute."""
    with_template(monkeypatch, TEMPLATE)
    client = serve(find_chunks=True)
    text = json.dumps({"a": "<|x " * 50_000})
    call = {"id": "c1", "function": {"name": "get_time", "arguments": text}}
    messages = [QUESTION, {"role": "assistant", "tool_calls": [call]}, RESULT]
    body = {
        "messages": {"messages": [{"role": "user", "content": text}]},
        "arguments": {"messages": messages, "tools": [GET_TIME]},
        "variables": {"chat_template_kwargs": {"a": text}},
    }[kind]
    monkeypatch.setattr("chunkweave_server.engine_backend.rendered_chat", None)
    refused = client.ask(**body)
    assert refused.status_code == 400, refused.text
    assert "messages and tools have 200" in refused.json()["error"]["message"]


def test_a_request_that_names_documents_is_not_cut(finding: Client):
    report = report_of(finding.ask(rag(PASSAGES[:3]), documents=[PASSAGES[4]]))
    assert [chunk["source"] for chunk in report["chunks"]][-1] == "document 0"


def equal_ids(first, second):
    """Number of equal ids at the beginning."""
    return next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(first))


@pytest.mark.parametrize("stop", [None, ["e", "a"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_of_six_turns_is_exact_up_to_the_first_other_id(finding: Client, monkeypatch, stream, stop):
    """As the next turn renders it: an answer may be tokenized otherwise than it was generated. Less one token."""
    rng = Random(f"{stream} {stop}")
    tokenizer = finding.engine.loaded.tokenizer
    seen: list[tuple[int, ...]] = []
    core = finding.service.backend.batching._core
    store_turn = core._store_turn

    def noting(request, decode):
        seen.append((*request.prepared.prompt.token_ids, *decode.token_ids))
        store_turn(request, decode)

    monkeypatch.setattr(core, "_store_turn", noting)
    messages = [{"role": "system", "content": rng.choice(PASSAGES)}]
    known: tuple[int, ...] = ()
    for turn in range(6):
        messages.append({"role": "user", "content": rag(rng.sample(PASSAGES, 1), f"Question {turn}?")})
        ids = tokenizer.encode(tokenizer.render_chat(messages), control_tokens=True)
        body = {"messages": messages, "max_tokens": rng.randint(1, 40), "stop": stop, "stream": stream}
        reply = finding.ask(**body, temperature=1.0, seed=turn)
        if stream:
            events = list(events_of(reply))
            report = next(event["chunkweave"] for event in reversed(events) if "chunkweave" in event)
            choices = (choice for event in events for choice in event.get("choices", ()))
            answer = "".join(choice["delta"].get("content") or "" for choice in choices)
        else:
            report = report_of(reply)
            answer = reply.json()["choices"][0]["message"]["content"]
        assert report["prompt_tokens"] == len(ids)
        shared = min(equal_ids(known, ids), len(known) - 1) if known else 0
        # A match ends where the prompt does, and the first tokens belong to no part.
        assert report["prefix_exact_tokens"] >= shared - len(tokenizer.start_ids) - (shared < len(known) - 1) * GRAM
        known = seen[-1]
        messages.append({"role": "assistant", "content": answer})


def test_a_conversation_over_woven_documents_computes_new_text_only(finding: Client):
    """Its first turn is not exact; what follows is reused where it was."""
    report_of(finding.ask(rag(PASSAGES[:5]), **METHOD))
    messages = [{"role": "user", "content": rag(PASSAGES[4::-1])}]
    for turn in range(4):
        reply = finding.ask(messages=messages, max_tokens=40, **METHOD)
        report = report_of(reply)
        assert report["prefix_exact_tokens"] < 0.2 * report["prompt_tokens"]
        assert report["computed_tokens"] < 100, turn
        messages.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": f"And what is said of number {turn}?"})


def test_new_documents_behind_woven_ones_are_stored_across_roles(finding: Client):
    report_of(finding.ask(rag(PASSAGES[:4]), **METHOD))
    answer = {"role": "assistant", "content": "It is so."}
    messages = [
        {"role": "user", "content": rag(PASSAGES[3::-1])},
        answer,
        {"role": "user", "content": rag(PASSAGES[4:8])},
    ]
    report_of(finding.ask(messages=messages, **METHOD))
    assert taken(report_of(finding.ask(rag(PASSAGES[7:3:-1]), **METHOD))) > 0.8


@pytest.mark.parametrize("number", range(6))
def test_documents_in_drawn_shapes_are_reused_from_the_second_request_on(finding: Client, number: int):
    """Rotated over four requests. What is not woven for safety is counted apart; ids are those of the template."""
    rng = Random(number)
    tokenizer = finding.engine.loaded.tokenizer
    shape = drawn_shape(rng)
    documents = drawn_documents(rng, 4, lambda text: len(tokenizer.encode(text)), most=200)
    written = sum(len(tokenizer.encode(document)) for document in documents)
    for turn, order in enumerate(rotations(documents, 4)):
        messages = shape.messages(order, f"Who said so on day {turn}, and why?")
        report = report_of(finding.ask(messages=messages, **METHOD))
        ids = tokenizer.encode(tokenizer.render_chat(messages), control_tokens=True)
        assert report["prompt_tokens"] == len(ids)
        found = [chunk for chunk in report["chunks"] if chunk["source"] == FOUND]
        woven = sum(chunk["tokens"] for chunk in found if chunk["kv_source"] != "computed")
        safe = sum(chunk["tokens"] for chunk in found if chunk["kv_source"] == "computed")
        assert woven + safe >= (0.8 * written if turn else 0)
        assert not turn or shape.as_json or woven >= 0.7 * written
        assert woven <= taken(report) * len(ids) + 1


@pytest.mark.parametrize("cache", ["read", "off"])
def test_text_that_is_not_to_be_stored_is_not_kept_to_be_found(finding: Client, cache: str):
    report_of(finding.ask(rag(PASSAGES[:5]), chunkweave={"cache": cache}))
    assert len(finding.service.backend._finder._runs) == 0
    report_of(finding.ask(rag(PASSAGES[:5])))
    assert len(finding.service.backend._finder._runs) > 0


def test_what_was_answered_is_forgotten_with_a_text_in_it(finding: Client):
    """By content: the text was never named, and stands in the middle of messages, in histories and in answers."""
    rng = Random(5)
    gone = PASSAGES[0]
    messages = []
    for turn in range(4):
        texts = rng.sample(PASSAGES[1:8], 2)
        texts.insert(rng.randint(0, 2), gone)
        messages.append({"role": "user", "content": rag(texts, f"Question {turn}?")})
        answer = finding.ask(messages=messages, **METHOD).json()["choices"][0]["message"]["content"]
        if turn % 2:
            messages = []
        else:
            messages.append({"role": "assistant", "content": answer})
    report_of(finding.ask(rag(PASSAGES[8:12])))
    ids = finding.engine.loaded.tokenizer.encode(gone)
    grams = [array("I", ids[at : at + 31]).tobytes() for at in range(len(ids) - 30)]

    def holding():
        texts = (array("I", record.token_ids).tobytes() for record in finding.engine.store.records())
        return [text for text in texts if any(gram in text for gram in grams)]

    assert holding()
    before = len(finding.engine.store.records())
    cleared = finding.post("/v1/cache/clear", json={"documents": [gone]})
    assert cleared.status_code == 200
    assert cleared.json()["segments_removed"] > 0
    assert not holding()
    assert 0 < len(finding.engine.store.records()) < before, "other prompts stay"
    assert taken(report_of(finding.ask(rag([gone, PASSAGES[9]]), **METHOD))) < 0.7


def test_what_was_found_before_a_restart_is_found_after_it(tmp_path):
    """Histories as a whole, and documents in another order; by its own tenant only."""
    history = [{"role": "user", "content": rag(PASSAGES[:4])}]
    options = {"find_chunks": True, "cache_dir": tmp_path / "cache", "keys": key_ring()}
    with serving("engine", tmp_path, **options) as client:
        for _ in range(2):  # what was seen once is not written
            answer = client.ask(messages=history, key=KEYS["acme"], max_tokens=8, **METHOD).json()
    history += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
    history += [{"role": "user", "content": "And who paid for it?"}]
    with serving("engine", tmp_path, **options) as client:
        again = report_of(client.ask(messages=history, key=KEYS["acme"], **METHOD))
        woven, stranger = (report_of(client.ask(rag(PASSAGES[3::-1]), key=KEYS[name], **METHOD)) for name in KEYS)
    assert again["prefix_exact_tokens"] > 0.85 * again["prompt_tokens"]
    assert taken(woven) > 0.8
    assert taken(stranger) == 0


def test_a_system_message_of_documents_is_woven(serve: Serve):
    """LangChain's usual chain puts the documents there."""
    client = serve(find_chunks=True)
    for order in (1, -1):
        messages = [
            {"role": "system", "content": "\n\n".join(("Answer from this:", *PASSAGES[:5][::order]))},
            {"role": "user", "content": "Who paid for the bridge?"},
        ]
        report = report_of(client.ask(messages=messages, **METHOD))
    assert taken(report) >= 0.8


def agent_trace():
    """Prompts of an agent: results of tools are appended, and the oldest are dropped."""
    steps = [
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": str(n), "function": {"name": "search", "arguments": f'{{"query": "{n}"}}'}}],
            },
            {"role": "tool", "tool_call_id": str(n), "content": "\n\n".join(PASSAGES[n % 12 : n % 12 + 3])},
        ]
        for n in range(0, 36, 3)
    ]
    task = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "Who paid for the bridge?"}]
    for last in range(1, len(steps)):
        kept = steps[max(0, last - 4) : last]
        yield [*task, *(message for step in kept for message in step)]


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_an_agents_results_are_found_after_older_ones_are_dropped_and_computed(serve: Serve, template):
    """Calls copy less well out of woven results."""
    finding = serve(find_chunks=True, max_answer_tokens=64)
    if template is not None:
        finding.engine.loaded.tokenizer._tokenizer.chat_template = template
    reports = [(report_of(finding.ask(messages=messages, **METHOD)), len(messages)) for messages in agent_trace()]
    later = [report for report, messages in reports if messages == 10]  # older results were dropped
    assert len(later) >= 5
    for report in later[1:]:
        found = sum(chunk["tokens"] for chunk in report["chunks"] if chunk["source"] == FOUND)
        assert found >= 0.7 * report["prompt_tokens"]
        assert report["reused_tokens"] == 0


def test_two_tenants_with_the_same_text_observe_nothing_of_each_other(serve: Serve):
    client = serve(find_chunks=True, keys=key_ring())
    first = report_of(client.ask(rag(PASSAGES[:5]), key="acme-key-that-is-long-enough", **METHOD))
    other = report_of(client.ask(rag(PASSAGES[:5]), key="bolt-key-that-is-long-enough", **METHOD))
    same = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    assert [first[name] for name in same] == [other[name] for name in same]
    records = client.engine.store.records()
    assert sum(record.novel for record in records) == len(records)


@pytest.mark.parametrize("template", [NO_TOOLS, None])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [QUESTION], "tools": [GET_TIME]},
        {"messages": [QUESTION, CALLED, RESULT], "tools": [GET_TIME]},
        {"messages": [QUESTION, CALLED, RESULT, {"role": "assistant", "content": "It is"}]},
        {"messages": [QUESTION, {"role": "assistant", "content": "It is"}]},
        {"messages": [QUESTION, {"role": "assistant", "content": ""}]},
    ],
)
def test_tools_and_begun_answers_are_in_the_prompt_as_without(serve: Serve, monkeypatch, prompts, template, body):
    if template is not None:
        with_template(monkeypatch, template)
    messages = [{"role": "system", "content": "Be kind."}, *body["messages"]]
    texts = []
    for finds in (True, False):
        client = serve(find_chunks=finds)
        report_of(client.ask(**{**body, "messages": messages}))
        texts.append(last_text(client, prompts).replace("Question: ", ""))
    assert texts[0] == texts[1]


@pytest.mark.backend("vllm")
def test_the_front_leaves_finding_to_vllms_half(serve: Serve):
    """Where a request is to store nothing, it has a salt of its own: vLLM's own prefix cache would store it."""
    on, off = serve(find_chunks=True, keys=key_ring()), serve(keys=key_ring())
    assert on.service.settings.connector_config()["find_chunks"]
    found, not_found = {"find_chunks": True}, {"find_chunks": False}
    with_method, read = {**found, **METHOD["chunkweave"]}, {**found, "cache": "read"}
    for client, field, sent, stores in (
        (on, None, None, True),
        (on, not_found, not_found, True),
        (on, {**found, "cache": "off"}, not_found, False),
        (on, {**not_found, "cache": "off"}, not_found, False),
        (on, {**not_found, "cache": "read"}, not_found, False),
        (on, read, read, True),
        (off, found, found, True),
        (off, with_method, with_method, True),
        (off, {**found, "cache": "off"}, not_found, False),
        (off, read, read, True),
    ):
        salts = set()
        for _ in range(2):
            asked = {} if field is None else {"chunkweave": field}
            response = client.ask(rag(PASSAGES[:2]), key=KEYS["acme"], cache_salt="s", **asked)
            assert response.status_code == 200
            body = json.loads(response.json()["body"])  # a server that looks like vLLM returns what it was sent
            assert "chunkweave" not in body
            assert (body.get("kv_transfer_params") or {}).get("chunkweave") == sent
            salts.add(body["cache_salt"])
        assert len(salts) == (1 if stores else 2)
        assert field is not None or NOTHING_NAMED[0] not in response.headers
        assert field != not_found or NOTHING_NAMED[0] in response.headers
    for wrong in ({"corpus": "c"}, {"method": "cachecraft:alpha=-1"}, {"top_k": 3}):
        refused = off.ask(chunkweave={**found, **wrong}, key=KEYS["acme"])
        assert refused.status_code == 400
        assert next(iter(wrong)) in refused.json()["error"]["message"]
