"""Chunks found in plain prompts over HTTP: nothing is named, and passages that move are reused."""

import json
from functools import partial

import pytest

from chunkweave.config import FindConfig
from chunkweave.prompt.parts import neutral_passages
from chunkweave_server.bodies import NOTHING_NAMED
from tests.chat_tools import TEMPLATE
from tests.server import conftest
from tests.server.conftest import KEYS, Client, Serve, key_ring, report_of
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


def test_a_growing_conversation_continues_its_exact_prefix(finding: Client):
    messages, sent = [{"role": "system", "content": PASSAGES[9]}], 0.0
    for turn in range(3):
        messages.append({"role": "user", "content": rag(PASSAGES[turn : turn + 2])})
        report = report_of(finding.ask(messages=messages))
        assert report["prefix_exact_tokens"] >= sent
        sent = 0.75 * report["prompt_tokens"]
        messages.append({"role": "assistant", "content": PASSAGES[turn + 6]})


def test_system_prompts_are_woven_only_if_the_operator_says_so(serve: Serve):
    """LangChain's usual chain puts the documents into the system message."""
    for kinds, least, most in ((("system", "short"), 0.0, 0.1), (("short",), 0.8, 1.0)):
        client = serve(find_chunks=True, exact_pieces=kinds)
        for order in (1, -1):
            messages = [
                {"role": "system", "content": "\n\n".join(("Answer from this:", *PASSAGES[:5][::order]))},
                {"role": "user", "content": "Who paid for the bridge?"},
            ]
            report = report_of(client.ask(messages=messages, **METHOD))
        assert least <= taken(report) <= most


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
def test_an_agents_results_are_found_after_older_ones_are_dropped(serve: Serve, template):
    """If the operator says so: calls copy less well out of woven results."""
    shares = []
    for kinds in (("system", "short", "numbers", "code"), FindConfig().exact_pieces):
        finding = serve(find_chunks=True, exact_pieces=kinds, max_answer_tokens=64)
        if template is not None:
            finding.engine.loaded.tokenizer._tokenizer.chat_template = template
        reports = [(report_of(finding.ask(messages=messages, **METHOD)), len(messages)) for messages in agent_trace()]
        found = [report for report, messages in reports if messages == 10]  # older results were dropped
        assert len(found) >= 5
        shares.append(sum(map(taken, found)) / len(found))
        woven = sum(report["reused_tokens"] for report in found)
        assert (woven > 0) == ("results" not in kinds)
    assert shares[0] >= 0.7


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
    on, off = serve(find_chunks=True, exact_pieces=("short",), keys=key_ring()), serve(keys=key_ring())
    connector = on.service.settings.connector_config()
    assert (connector["find_chunks"], connector["exact_pieces"]) == (True, ["short"])
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
