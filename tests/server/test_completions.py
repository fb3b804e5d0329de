"""Chat and plain completions: answers, streams, usage, and what is refused."""

from random import Random

import pytest

from chunkweave import Request, SamplingParams
from chunkweave_server.bodies import NOTHING_NAMED, say_that_nothing_was_named
from chunkweave_server.replies import ReplyForm
from tests.chat_tools import called, said
from tests.server.conftest import Client, events_of, report_of, toy_engine

FERRY = "The ferry leaves the northern pier at nine and again at noon. "
CHOIR = "The choir sings on Sundays in the hall behind the church. "
QUESTION = {"role": "user", "content": "When?"}


@pytest.mark.backend("engine")
def test_an_answer_is_the_engines_own(client: Client):
    response = client.ask(documents=[FERRY, {"text": CHOIR, "title": "The choir", "id": "c-1"}])
    assert response.status_code == 200
    body = response.json()
    request = Request(
        "When does the ferry leave?", [FERRY, f"The choir\n{CHOIR}"], sampling=SamplingParams(max_new_tokens=6)
    )
    expected = toy_engine().generate_batch([request])[0]
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == expected.finish_reason
    assert (body["object"], body["model"]) == ("chat.completion", "toy")
    report = body["chunkweave"]
    assert [chunk["source"] for chunk in report["chunks"][1:]] == ["document 0", "c-1"]
    assert body["usage"] == {
        "prompt_tokens": report["prompt_tokens"],
        "completion_tokens": len(expected.token_ids),
        "total_tokens": report["prompt_tokens"] + len(expected.token_ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_langchains_documents_are_taken_as_they_are(client: Client):
    metadata = {"title": "The choir", "source": "c-1", "page": 3}
    given = {"page_content": CHOIR, "metadata": metadata, "id": None, "type": "Document"}
    whole = client.ask(documents=[FERRY, given]).json()
    same = client.ask(documents=[FERRY, {"text": CHOIR, "title": "The choir", "id": "c-1"}]).json()
    assert whole["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    sources = [[chunk["source"] for chunk in one["chunkweave"]["chunks"]] for one in (whole, same)]
    assert sources[0] == sources[1]
    assert client.ask(documents=[{"page_content": CHOIR, "metadata": {"source": 7}}]).status_code == 200
    for wrong in ({"page_content": 1}, {"page_content": CHOIR, "metadata": 1}, {"page_content": CHOIR, "more": 1}):
        assert client.ask(documents=[wrong]).status_code == 400


def test_an_answer_over_nothing_says_so(client: Client, caplog):
    say_that_nothing_was_named.cache_clear()
    caplog.set_level("INFO", "chunkweave_server")
    name, words = NOTHING_NAMED
    for more in ({}, {"stream": True}):
        assert client.ask(**more).headers[name] == words
        assert name not in client.ask(documents=[FERRY], **more).headers
    assert sum("named no documents" in record.message for record in caplog.records) == 1


@pytest.mark.backend("engine")
@pytest.mark.parametrize(
    ("usual", "own", "capture", "kept"),
    [
        (None, None, None, [False]),
        ("prefix", "prefix", None, [False]),
        ("full", None, None, []),
        ("cacheblend", "prefix", None, [False]),
        ("cachecraft", "prefix", None, [True]),
        ("prefix", "cachecraft", None, [True]),
        ("prefix", None, True, [True]),
        ("cachecraft", None, False, [False]),
    ],
)
def test_what_is_kept_is_what_a_method_of_the_server_or_the_request_reads(serve, usual, own, capture, kept):
    """Whether the chunks that a request leaves in the store have a profile of what they attended to."""
    given = {"method": usual, "capture": capture}
    client = serve(**{name: value for name, value in given.items() if value is not None})
    client.ask(documents=[FERRY, CHOIR], **({"chunkweave": {"method": own}} if own else {}))
    records = [record for record in client.engine.store.records() if record.source != "turn"]
    assert sorted({record.attention is not None for record in records}) == kept


@pytest.mark.backend("engine")
def test_the_system_message_is_the_instruction(client: Client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    body = client.ask(messages=messages, documents=[FERRY]).json()
    request = Request("Who?", [FERRY], "Be brief.", SamplingParams(max_new_tokens=6))
    assert body["choices"][0]["message"]["content"] == toy_engine().generate_batch([request])[0].text


def test_a_report_names_the_method_that_was_requested_and_what_it_came_to(client: Client):
    documents = [FERRY * 3, CHOIR * 3]
    weave = {"method": "cacheblend:ratio=0.4", "order": "fixed"}
    asked = [(documents, weave), (documents[::-1], weave), (documents, {"method": "full", "order": "fixed"})]
    answers = [client.ask(documents=given, chunkweave=reuse) for given, reuse in asked]
    reports = list(map(report_of, answers))
    assert [one["method"] for one in reports] == ["cacheblend", "cacheblend", "full"]
    assert {one["why"] for one in reports} == {"asked for"}
    assert [one["effective_method"] for one in reports] == ["full", "cacheblend", "full"]
    assert all(one["engine_cached_tokens"] == 0 for one in reports)
    woven, usage = reports[1], answers[1].json()["usage"]
    assert woven["recomputed_tokens"] > 0
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == woven["prefix_exact_tokens"] + woven["reused_tokens"], "what is computed again is not cached"
    assert cached + woven["recomputed_tokens"] + woven["computed_tokens"] == usage["prompt_tokens"]


@pytest.mark.backend("engine")
def test_one_that_finds_all_of_it_as_an_exact_prefix_came_to_prefix(client: Client):
    weave = {"method": "cacheblend", "order": "fixed"}
    answers = [client.ask(documents=[FERRY, CHOIR], chunkweave=weave) for _ in range(2)]
    reports = list(map(report_of, answers))
    assert [one["method"] for one in reports] == ["cacheblend"] * 2
    assert [one["effective_method"] for one in reports] == ["full", "prefix"]
    cached = answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == reports[1]["prefix_exact_tokens"] > 0


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_says_the_same_piece_by_piece(client: Client, with_usage: bool):
    whole = client.ask(documents=[FERRY], max_tokens=12).json()
    assert (whole["object"], whole["usage"]["completion_tokens"]) == ("chat.completion", 12)
    assert whole["choices"][0]["finish_reason"] == "length"
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    told = events_of(client.ask(documents=[FERRY], max_tokens=12, stream=True, **options))
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in told}) == 1
    assert told[0]["object"] == "chat.completion.chunk"
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [one["choices"][0]["delta"].get("content", "") for one in told if one["choices"]]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    assert sum(map(bool, texts)) > 2, "not in pieces"
    reasons = [one["choices"][0]["finish_reason"] for one in told if one["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert told[-1]["chunkweave"]["method"] == "prefix"
    assert all("chunkweave" not in one for one in told[:-1])
    if with_usage:
        assert told[-1]["choices"] == []
        assert told[-1]["usage"]["completion_tokens"] == 12
        assert all(one["usage"] is None for one in told[:-1])
    else:
        assert all("usage" not in one and one["choices"] for one in told)


def test_a_plain_completion_is_the_question_of_a_chat(client: Client):
    chat = client.ask(documents=[FERRY]).json()
    body = {"prompt": "When does the ferry leave?", "documents": [FERRY], "temperature": 0, "max_tokens": 6}
    plain = client.post("/v1/completions", json=body).json()
    assert plain["object"] == "text_completion"
    assert plain["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert plain["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
    told = events_of(client.post("/v1/completions", json={**body, "prompt": [body["prompt"]], "stream": True}))
    assert "".join(one["choices"][0]["text"] for one in told) == plain["choices"][0]["text"]
    assert told[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_that_is_not_taken_is_named(client: Client, seed: int):
    """Over vLLM a prompt without documents is vLLM's own matter."""
    draw = Random(seed)
    ids = [draw.randrange(4096) for _ in range(draw.randrange(1, 9))]
    texts = ["When?"] * draw.randrange(2, 9)
    for prompt, message in (
        (ids, "prompt has token ids: it takes one text"),
        ([ids] * draw.randrange(1, 3), "prompt has token ids: it takes one text"),
        (texts, f"prompt has {len(texts)} texts: it takes one; send a request for each"),
    ):
        refused = client.post("/v1/completions", json={"prompt": prompt, "documents": [FERRY], "max_tokens": 1})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["message"]) == ("prompt", message)


@pytest.mark.backend("engine")
def test_sampling_follows_seed_stop_and_limits(client: Client):
    first = client.ask(temperature=1, seed=3, max_tokens=10).json()["choices"][0]["message"]["content"]
    assert client.ask(temperature=1, seed=3, max_tokens=10).json()["choices"][0]["message"]["content"] == first
    assert client.ask(temperature=1, seed=4, max_tokens=10).json()["choices"][0]["message"]["content"] != first
    long = client.ask(max_tokens=12).json()["choices"][0]["message"]["content"]
    stop = long[4:7]
    stopped = client.ask(max_tokens=12, stop=stop).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == (long[: long.index(stop)], "stop")
    assert client.ask(max_completion_tokens=3, max_tokens=None).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        ({"chunkweave": {"method": "magic"}}, "magic"),
        ({"chunkweave": {"method": "epic:ratio=1.5"}}, "recompute_ratio must be between 0 and 1, not 1.5"),
        ({"chunkweave": {"recompute_ratio": 0.5}}, "unknown fields of chunkweave: recompute_ratio"),
        ({"chunkweave": {"method": "cacheblend:layers=0"}}, "check_layers"),
        ({"chunkweave": {"method": "cachecraft:alpha=-1"}}, "alpha"),
        ({"chunkweave": {"method": "cachecraft:alpha=much"}}, "alpha"),
        ({"chunkweave": {"quality": "nice"}}, "nice"),
        ({"chunkweave": {"quality": "exact", "method": "cacheblend"}}, "both given"),
        ({"chunkweave": {"ratio": 0.1}}, "ratio"),
        ({"chunkweave": {"order": "random"}}, "order"),
        ({"chunkweave": {"top_k": 2}}, "top_k"),
        ({"chunkweave": {"corpus": "a"}, "documents": ["b"]}, "documents"),
        ({"documents": ["fine", "  "]}, "documents[1]"),
        ({"documents": [{"title": "no text"}]}, "documents[0]"),
        ({"documents": ["x"] * 65}, "64 documents"),
        ({"documents": ["x " * 5000]}, "context"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "question is empty"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "last message"),
        ({"messages": [{"role": "system", "content": "x"}]}, "last message"),
        ({"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}, "earlier turns"),
        (
            {"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}]},
            "unsupported_conversation",
        ),
        ({"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}]}, "begin with the user's"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "earlier turns"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [QUESTION, said("Noon.")]}, "tools' results must follow their calls"),
        ({"messages": [QUESTION, called(), QUESTION, said("Noon.")]}, "tools' results must follow their calls"),
        ({"messages": [QUESTION, called(), said("Noon."), called()]}, "the last message must be the user's"),
        ({"messages": [QUESTION, called()]}, "the last message must be the user's"),
    ],
)
def test_what_is_wrong_is_refused_by_name(client: Client, body: dict, named: str):
    response = client.ask(**{"documents": [FERRY], **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert named in f"{error['message']} {error['param']} {error['code']}"
    assert client.fake is None or client.fake.seen == []


@pytest.mark.backend("engine")
@pytest.mark.parametrize("documents", [[], [FERRY]])
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"temperature": 2.5}, "temperature"),
        ({"repetition_penalty": 1.1, "min_p": 0.1}, "repetition_penalty, min_p"),
    ],
)
def test_what_the_engine_does_not_support_is_refused_by_name(client: Client, documents, body: dict, named: str):
    response = client.ask(documents=documents, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert named in f"{error['message']} {error['param']}"
    if error["code"] == "unsupported_field":
        assert "--backend vllm" in error["message"]


FROM_A_ROUTER = {"ignore_eos": False, "skip_special_tokens": True, "include_reasoning": True, "no_stop_trim": False}


def test_fields_that_say_what_holds_without_them_change_nothing(client: Client):
    """vLLM's router (0.1.17) writes these into every chat request."""
    assert client.ask(documents=[FERRY], **FROM_A_ROUTER).status_code == 200


@pytest.mark.backend("engine")
@pytest.mark.parametrize("name", FROM_A_ROUTER)
def test_but_another_value_of_them_is_refused(client: Client, name: str):
    refused = client.ask(documents=[FERRY], **(FROM_A_ROUTER | {name: not FROM_A_ROUTER[name]}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.backend("vllm")
@pytest.mark.parametrize(
    "body",
    [{"logit_bias": {"1": 2}}, {"response_format": {"type": "json_object"}}, {"n": 2}, {"frequency_penalty": 0.5}],
)
def test_vllm_takes_what_the_engine_does_not(client: Client, body: dict):
    assert client.ask(documents=[FERRY], **body).status_code == 200


def test_neutral_values_of_what_is_not_supported_are_fine(client: Client):
    neutral = {"n": 1, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0, "user": "u", "tools": None}
    assert client.ask(**neutral, model="toy").status_code == 200


@pytest.mark.backend("engine")
def test_another_model_is_not_found(client: Client):
    assert client.ask(model="gpt-9").status_code == 404
    assert client.get("/v1/models").json()["data"][0]["id"] == "toy"
    assert client.get("/v1/models/toy").json()["object"] == "model"
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_every_answer_has_its_own_number():
    assert ReplyForm(True, "m").number != ReplyForm(True, "m").number
