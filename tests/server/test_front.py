"""The front before servers that look like vLLM: what is sent, what comes back, and what happens when one goes."""

import json
import random
import re
import threading
from pathlib import Path

import httpx
import openai
import pytest
from starlette.responses import JSONResponse

from chunkweave.models.adapters import Adapter
from tests.chat_tools import TEMPLATE, TOOL, called, said
from tests.server.conftest import ADMIN_KEY, KEYS, key_ring, wait_until
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import DOCUMENTS, MORE, running_front

WEAVE = {"method": "cacheblend", "recompute_ratio": 0.25, "order": "fixed"}


@pytest.fixture
def vllm(tmp_path):
    with FakeVllm(str(tmp_path / "reports")) as fake:
        yield fake


@pytest.fixture
def front(vllm, request):
    with running_front(vllm, **getattr(request, "param", {})) as client:
        yield client


@pytest.fixture
def two(tmp_path):
    """Two servers, and a front before them."""
    path = str(tmp_path / "reports")
    with FakeVllm(path) as one, FakeVllm(path) as other, running_front(one, other) as client:
        yield client, one, other


def test_parts_are_tokenized_apart_and_their_places_are_told(front, vllm):
    assert front.ask(documents=DOCUMENTS, chunkweave=WEAVE).status_code == 200
    (sent,) = vllm.seen
    params = sent["kv_transfer_params"]["chunkweave"]
    builder = front.service.backend.context.preparer.builder
    prompt = builder.build("When does the ferry leave?", DOCUMENTS)
    assert sent["prompt"] == list(prompt.token_ids)
    assert [sent["prompt"][start:stop] for start, stop in params["chunks"]] == [
        list(part.token_ids) for part in prompt.parts if part.kind == "chunk"
    ]
    assert (params["method"], params["recompute_ratio"]) == ("cacheblend", 0.25)
    assert params["start_tokens"] == len(prompt.parts[0])
    assert sent["max_tokens"] == 4


def test_a_requests_priority_is_vllms(front, vllm):
    assert front.ask(priority=-3, documents=DOCUMENTS, chunkweave=WEAVE).status_code == 200
    assert [sent["priority"] for sent in vllm.seen] == [-3]


def test_recomputed_tokens_are_not_cached_and_the_report_says_so(front):
    first = front.ask(documents=DOCUMENTS, chunkweave=WEAVE).json()["chunkweave"]
    assert (first["method"], first["why"], first["effective_method"]) == ("cacheblend", "asked for", "full")
    told = front.ask(documents=DOCUMENTS[::-1], chunkweave=WEAVE).json()
    report = told["chunkweave"]
    assert report["recomputed_tokens"] > 0
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == report["reused_tokens"]
    sources = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(report[name] for name in sources) == report["prompt_tokens"] == told["usage"]["prompt_tokens"]
    assert (report["why"], report["effective_method"]) == ("asked for", "cacheblend")
    assert [chunk["rank"] for chunk in report["chunks"]] == [0, 1]


def test_a_chat_that_is_not_streamed(front):
    told = front.ask(documents=DOCUMENTS).json()
    assert told["object"] == "chat.completion"
    choice = told["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": " w0 w1 w2 w3", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_chat_that_is_streamed_ends_with_usage_and_report(front, with_usage):
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    events = front.events(documents=DOCUMENTS, **options)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in events if one["choices"])
    assert text == " w0 w1 w2 w3"
    assert [("chunkweave" in one) for one in events] == [False] * (len(events) - 1) + [True]
    finished = [one["choices"][0]["finish_reason"] for one in events if one["choices"]]
    assert finished == [None] * (len(finished) - 1) + ["length"]
    assert bool(events[-1]["choices"]) is not with_usage
    if with_usage:
        assert events[-1]["usage"]["completion_tokens"] == 4
        assert all(one["usage"] is None for one in events[:-1])


def test_plain_completions_with_documents_and_several_answers(front):
    body = {"prompt": "When?", "documents": DOCUMENTS, "max_tokens": 2, "n": 2, "logprobs": 1}
    told = front.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in told["choices"]] == [" w0 w1"] * 2
    assert told["choices"][1]["logprobs"]["tokens"] == [" w0", " w1"]
    events = front.events("/v1/completions", **body)
    assert {choice["index"] for one in events for choice in one["choices"]} == {0, 1}
    assert "chunkweave" in events[-1]


def test_log_probabilities_of_a_chat_look_like_a_chats(front):
    told = front.ask(documents=DOCUMENTS, logprobs=True, top_logprobs=2).json()
    first = told["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == (" w0", -3.5, [32, 119, 48])
    assert [one["token"] for one in first["top_logprobs"]] == [" x", " y"], "the likeliest, of which it is none"


@pytest.mark.parametrize("front", [{"shadow_every": 1}], indirect=True)
def test_a_completion_has_no_more_alternatives_than_it_asked_for(front):
    body = {"prompt": "When?", "documents": DOCUMENTS, "max_tokens": 1, "logprobs": 1, "chunkweave": WEAVE}
    logprobs = front.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{" w0": -3.5, " x": -0.1}]


def test_openais_client(front):
    client = openai.OpenAI(base_url=str(front.base_url.join("/v1")), api_key="none")
    ask = {"model": "m", "messages": [{"role": "user", "content": "When?"}], "extra_body": {"documents": DOCUMENTS}}
    whole = client.chat.completions.create(**ask, max_tokens=3)
    assert whole.choices[0].message.content == " w0 w1 w2"
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = client.chat.completions.create(**ask, max_tokens=3, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == " w0 w1 w2"
    assert "m" in [model.id for model in client.models.list()]


def test_what_says_nothing_of_documents_is_handed_through_untouched(front, vllm):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [{}]}).encode()
    told = front.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert told.json()["body"] == body.decode()
    assert front.post("/tokenize?a=1").json() == {"path": "/tokenize", "query": "a=1", "body": ""}
    assert front.get("/v1/models/missing").status_code == 404
    assert front.get("/v1/models/missing").json()["error"]["message"] == "no such thing"
    assert front.get("/of-no-known-vllm").json()["error"]["message"] == "Not Found"
    with front.stream("GET", "/server_info?stream") as reply:
        assert [line for line in reply.iter_lines() if line] == ["data: 0", "data: 1", "data: 2"]
        assert reply.headers["content-type"].startswith("text/event-stream")
    assert {method for method, *_ in vllm.paths} == {"GET", "POST"}


@pytest.mark.parametrize("path", ["/sleep?level=2", "/pause", "/reset_prefix_cache?reset_external=true"])
def test_after_vllm_resets_its_caches_nothing_is_assumed_to_be_stored(front, path):
    front.ask(documents=DOCUMENTS)
    (replica,) = front.service.backend.fleet.replicas
    assert replica.contents.segments > 0
    front.post("/tokenize")
    assert replica.contents.segments > 0
    front.post(path).raise_for_status()
    assert replica.contents.segments == 0


def test_requests_that_name_no_model_are_answered_with_the_adapter(vllm):
    lora = Adapter("tiny", Path("tiny"), "", 4, "key")
    with running_front(vllm, lora=lora) as front:
        for named in ({}, {"model": "m"}, {"model": "m+tiny"}):
            front.ask(documents=DOCUMENTS, **named)
            front.post("/v1/completions", json={"prompt": "Hi", **named})
        front.post("/v2/embed", json={"input": "Hi"})
    assert [sent["model"] for sent in vllm.seen] == ["m+tiny", "m+tiny", "m", "m", "m+tiny", "m+tiny"]
    assert json.loads(vllm.paths[-1][3]) == {"input": "Hi"}, "vLLM has no adapter there"


def test_fields_of_vllm_go_on_to_it(front, vllm):
    front.ask(documents=DOCUMENTS, top_k=7, repetition_penalty=1.1, cache_salt="s", stop=["x"], temperature=0.3)
    (sent,) = vllm.seen
    picked = {name: sent[name] for name in ("top_k", "repetition_penalty", "cache_salt", "stop", "temperature")}
    picked["cache_salt"] = bool(picked["cache_salt"])  # the tenant's own, of which "s" is a part
    assert list(picked.values()) == [7, 1.1, True, ["x"], 0.3]


@pytest.mark.parametrize(
    ("reuse", "raisable"),
    [
        ({"method": "cacheblend"}, True),
        ({"method": "cacheblend", "recompute_ratio": 0.3}, None),
        ({"method": "cachecraft", "alpha": 0.5}, None),
    ],
)
def test_the_plug_in_may_raise_what_no_client_has_asked_for(front, vllm, reuse, raisable):
    front.ask(documents=DOCUMENTS, chunkweave=reuse)
    assert vllm.seen[0]["kv_transfer_params"]["chunkweave"].get("at_least") is raisable


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"documents": ["a"], "tools": [TOOL]}, "tools need --enable-auto-tool-choice"),
        ({"documents": ["a"], "tools": [TOOL], "tool_choice": "none"}, "does not support tools"),
        ({"documents": ["a"], "tools": [TOOL], "tool_choice": "required"}, "tools need --enable-auto-tool-choice"),
        ({"documents": ["a"], "tool_choice": "required"}, "tool_choice needs tools"),
        ({"documents": ["a"], "truncate_prompt_tokens": 9}, "chunkweave: truncate_prompt_tokens"),
        ({"documents": [""]}, "documents[0] is empty"),
        ({"documents": ["a"], "chunkweave": {"method": "nonsense"}}, "unknown reuse method"),
        ({"documents": ["a"], "chunkweave": {"methd": "full"}}, "unknown fields"),
        ({"documents": ["a " * 5000]}, "at most 2048 fit into the context"),
        ({"documents": ["a"], "chunkweave": {"corpus": "c"}}, "either documents or"),
        ({"chunkweave": {"corpus": "c"}}, "no corpus 'c'"),
        ({"documents": ["a"], "chunkweave": {"quality": "fast"}}, "was not calibrated"),
        ({"documents": ["a"], "messages": []}, "messages"),
    ],
)
def test_wrong_requests_are_refused_in_openais_form(front, vllm, body, told):
    refused = front.ask(**body)
    assert 400 <= refused.status_code < 500
    assert told in refused.json()["error"]["message"]
    assert not vllm.seen


def test_an_answer_that_ends_with_no_token_is_told_no_stop_tokens(front, vllm):
    front.ask(documents=DOCUMENTS)
    front.ask(documents=DOCUMENTS, ignore_eos=True, stop_token_ids=[7])
    assert [bool(sent["stop_token_ids"]) for sent in vllm.seen] == [True, True]
    assert vllm.seen[1]["stop_token_ids"] == [7]


def test_an_adapters_chunks_are_not_expected_where_anothers_are(two):
    """The adapter is part of what routes go by, as of the plug-in's keys."""
    front, one, other = two
    front.ask(documents=DOCUMENTS, model="ada")
    mirrors = [replica.contents for replica in front.service.backend.fleet.replicas]
    builder = front.service.backend.context.preparer.builder
    assert sum(mirror.tokens > 0 for mirror in mirrors) == 1
    prompt = builder.build("When?", DOCUMENTS)
    path = [part.id for part in prompt.parts if part.id is not None]
    sizes = [len(part) for part in prompt.parts if part.id is not None]
    assert [mirror.cached_tokens(path, sizes, weaves=True) for mirror in mirrors] == [0, 0]
    assert {sent["model"] for sent in (*one.seen, *other.seen)} == {"ada"}


def test_the_rank_that_has_a_requests_chunks_is_told_to_vllm(vllm):
    """vLLM's data-parallel ranks are replicas behind one URL."""
    with running_front(vllm, of_vllm=("--data-parallel-size", "2")) as front:
        others = [text.upper() for text in DOCUMENTS]
        for documents in (DOCUMENTS, others, others, DOCUMENTS, DOCUMENTS):
            front.ask(documents=documents)
        first, second = vllm.ranks[:2]
        assert {first, second} == {"0", "1"}
        assert vllm.ranks[2:] == [second, first, first]
        assert {one["name"] for one in front.service.backend.cache.stats()["replicas"]} == {
            "upstream-0.0",
            "upstream-0.1",
        }
        metrics = front.get("/metrics").text
        assert 'replica="upstream-0.1"' in metrics
        assert metrics.count("vllm:requests{") == 1, "its server's, once"
    with running_front(vllm, of_vllm=("-dp=2", "--data-parallel-external-lb")) as front:
        front.ask(documents=DOCUMENTS)
    assert vllm.ranks[-1] is None


@pytest.fixture
def with_tools(tmp_path):
    """vLLM that parses, and a front whose chat template has a place for tools."""
    with (
        FakeVllm(str(tmp_path / "reports"), parses=3) as vllm,
        running_front(vllm, chat_template=TEMPLATE) as front,
    ):
        yield front, vllm


def rendered(front, sent) -> str:
    tokenizer = front.service.backend.context.preparer.builder.tokenizer
    return tokenizer._tokenizer.decode(sent["prompt"])


def test_tools_are_rendered_and_their_calls_parsed_by_vllm(with_tools):
    front, vllm = with_tools
    told = front.ask(documents=DOCUMENTS, tools=[TOOL], parallel_tool_calls=False, min_p=0).json()
    (choice,) = told["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("call-1", "function", "get_time")
    assert choice["message"]["content"] == " w0 w1"
    assert choice["finish_reason"] == "tool_calls"
    assert told["chunkweave"]["chunks"]
    assert '"name": "get_time"' in rendered(front, vllm.seen[0]).partition(DOCUMENTS[0])[0]
    (parsed,) = vllm.parsed
    assert parsed["chat_request"]["tools"] == [TOOL]
    assert parsed["chat_request"]["parallel_tool_calls"] is False
    assert parsed["generate_response"]["prompt_token_ids"] == vllm.seen[0]["prompt"]


def test_calls_come_in_streams_as_they_are_parsed(with_tools):
    front, vllm = with_tools
    body = {"documents": DOCUMENTS, "tools": [TOOL], "min_p": 0, "n": 2, "logprobs": True}
    events = front.events(**body)
    for index in (0, 1):
        of_choice = [one["choices"][0] for one in events if one["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in of_choice]
        assert "".join(delta.get("content", "") for delta in deltas) == " w0 w1"
        (calls,) = (delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
        assert calls[0]["function"]["arguments"] == '{"town": "Halvik"}'
        assert None not in calls[0].values()
        assert [choice["finish_reason"] for choice in of_choice if choice["finish_reason"]] == ["tool_calls"]
        assert sum(len(choice["logprobs"]["content"]) for choice in of_choice if choice["logprobs"]) == 4
    assert "chunkweave" in events[-1]
    states = [one["stream_state"] for one in vllm.parsed]
    assert states.count(None) == 2, "each choice has a state of its own"


def test_without_a_choice_nothing_is_parsed_and_without_tools_neither(with_tools):
    front, vllm = with_tools
    front.ask(documents=DOCUMENTS, tools=[TOOL], tool_choice="none")
    front.ask(documents=DOCUMENTS)
    assert not vllm.parsed
    assert ["# Tools" in rendered(front, sent) for sent in vllm.seen] == [True, False]
    refused = front.ask(documents=DOCUMENTS, tools=[TOOL], stop=["x"])
    assert "stop cannot be given with tools" in refused.json()["error"]["message"]


def test_a_forced_call_is_held_to_vllms_form_which_is_asked_for_once(with_tools):
    front, vllm = with_tools
    body = {"documents": DOCUMENTS, "tools": [TOOL], "min_p": 0, "response_format": {"type": "json_object"}}
    named = {"type": "function", "function": {"name": "get_time"}}
    for choice, ends in (("required", "tool_calls"), ("required", "tool_calls"), (named, "stop")):
        told = front.ask(**body, tool_choice=choice).json()["choices"][0]
        assert told["message"]["tool_calls"][0]["function"]["name"] == "get_time"
        assert told["finish_reason"] == ends
        assert vllm.parsed[-1]["chat_request"]["tool_choice"] == choice
    front.ask(**body)
    assert [sent["tool_choice"] for sent in vllm.rendered] == ["required", named, "auto"]
    assert {sent["response_format"]["type"] for sent in vllm.rendered} == {"json_object"}
    forms = [(sent.get("structured_outputs"), sent["response_format"]) for sent in vllm.seen]
    assert forms == [*[({"json": {"const": None}}, None)] * 3, (None, {"type": "json_object"})]
    refused = front.ask(**body, tool_choice={"type": "function", "function": {"name": "nobody"}})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "no such tool")


def test_a_forced_call_needs_a_parser_in_vllm(with_tools):
    front, vllm = with_tools
    vllm.forms = False
    refused = front.ask(documents=DOCUMENTS, tools=[TOOL], tool_choice="required")
    assert "a forced call needs --enable-auto-tool-choice" in refused.json()["error"]["message"]
    assert not vllm.seen


def test_what_tools_said_stands_behind_the_question(with_tools):
    front, vllm = with_tools
    question = {"role": "user", "content": "What time is it in Halvik?"}
    exchange = [called('{"town": "Halvik</s>"}'), said("Noon.</s>")]
    front.ask(documents=DOCUMENTS, tools=[TOOL], messages=[question, *exchange])
    text = rendered(front, vllm.seen[0])
    head, _, behind = text.partition("What time is it in Halvik?")
    assert DOCUMENTS[1] in head
    assert behind == (
        '</s>\n<|assistant|>\n<tool_call>{"name": "get_time", "arguments": {"town": "Halvik</s>"}}</tool_call></s>\n'
        "<|user|>\n<said>Noon.</s></said></s>\n<|assistant|>\n"
    )
    stops = vllm.seen[0]["prompt"].count(
        front.service.backend.context.preparer.builder.tokenizer._tokenizer.eos_token_id
    )
    assert stops == text.count("</s>") - 2, "what a tool says ends no turn"

    more = [{"role": "assistant", "content": "It is noon."}, {"role": "user", "content": "And in Lune?"}]
    front.ask(documents=DOCUMENTS, tools=[TOOL], messages=[question, *exchange, *more])
    text = rendered(front, vllm.seen[1])
    assert text.index("What time") < text.index("It is noon.") < text.index(DOCUMENTS[0]) < text.index("And in Lune?")


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([said("Noon.")], "earlier turns"),
        ([called("7"), said("Noon.")], "not a JSON object"),
        ([called(), said("Noon."), called()], "earlier turns"),
        ([called()], "the last message must be the user's"),
    ],
)
def test_messages_of_tools_that_make_no_turn_are_refused(with_tools, messages, told):
    front, vllm = with_tools
    refused = front.ask(documents=DOCUMENTS, messages=[{"role": "user", "content": "When?"}, *messages])
    assert refused.status_code == 400
    assert told in refused.json()["error"]["message"]
    assert not vllm.seen


def test_a_template_reads_what_the_request_says_to_it(with_tools):
    front, vllm = with_tools
    front.ask(documents=DOCUMENTS, chat_template_kwargs={"brief": True})
    assert rendered(front, vllm.seen[0]).endswith("<|assistant|>\nIn short: ")
    refused = front.ask(documents=DOCUMENTS, chat_template_kwargs={"tokenize": True})
    assert "chat_template_kwargs" in refused.json()["error"]["message"]


def test_what_vllm_refuses_is_told_in_its_words(front, vllm):
    vllm.behave = lambda _: JSONResponse({"error": {"message": "top_k is odd", "code": 400, "param": "top_k"}}, 400)
    refused = front.ask(documents=DOCUMENTS, top_k=-7)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "top_k is odd"


def test_a_full_prefill_takes_nothing_from_vllms_own_cache_either(front, vllm):
    """With documents the plug-in sees to it, and stores them under the client's salt; without, nothing is stored."""
    for documents in (DOCUMENTS, DOCUMENTS, [], []):
        told = front.ask(documents=documents, chunkweave={"method": "full"}, cache_salt="mine").json()
        assert told["chunkweave"]["computed_tokens"] == told["usage"]["prompt_tokens"]
        assert (told["chunkweave"]["method"], told["chunkweave"]["effective_method"]) == ("full", "full")
    assert [one["kv_transfer_params"]["chunkweave"]["method"] for one in vllm.seen[:2]] == ["full"] * 2
    assert not any("kv_transfer_params" in one for one in vllm.seen[2:])
    front.ask(chunkweave={"method": "prefix"}, cache_salt="mine")
    salts = [one["cache_salt"] for one in vllm.seen]
    assert salts[0] == salts[1] == salts[4]
    assert len(set(salts)) == 3, "those without documents have one of their own each"


def test_a_full_prefill_does_not_make_the_front_forget_what_a_server_holds(front):
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        front.ask(documents=documents, chunkweave={"order": "fixed"})
    (replica,) = front.service.backend.fleet.replicas
    held = replica.contents.tokens
    front.ask(documents=DOCUMENTS, chunkweave={"method": "full", "order": "fixed"})
    assert replica.contents.tokens == held > 0


def test_documents_may_be_reordered_unless_the_request_says_no(front):
    def ranks(order, documents):
        told = front.ask(documents=documents, chunkweave={"order": order}).json()["chunkweave"]
        return [chunk["rank"] for chunk in told["chunks"]]

    for _ in range(3):
        ranks("free", [DOCUMENTS[1]])
    assert ranks("fixed", DOCUMENTS) == [0, 1]
    assert ranks("free", DOCUMENTS) == [1, 0]


def test_what_comes_back_is_promoted_and_what_does_not_is_not_expected_to_be_stored(vllm):
    """CRAFT's thresholds with a free order: the connector grows exact prefixes over what the front has counted."""

    def sent(*documents, **reuse):
        assert front.ask(documents=list(documents), chunkweave=reuse).status_code == 200
        params = vllm.seen[-1]["kv_transfer_params"]["chunkweave"]
        return params.get("promoted"), params.get("continued")

    with running_front(vllm, promotion_threshold=1, continuation_threshold=2) as front:
        (replica,) = front.service.backend.fleet.replicas
        ferry, pilots = DOCUMENTS
        exact = {"method": "prefix", "order": "free"}
        assert sent(ferry, **exact) == ([0], None)
        assert replica.contents.segments == 2, "the instruction and the chunk"
        assert sent(ferry, MORE, **exact) == ([0, 1], [0])
        assert replica.contents.segments == 3
        assert sent(ferry, pilots, method="cacheblend", order="free") == ([0, 1], [0])
        assert sent(ferry, pilots, method="cacheblend", order="fixed") == (None, None)
    with running_front(vllm, promotion_threshold=2) as front:
        (replica,) = front.service.backend.fleet.replicas
        assert sent("The lighthouse has a fog horn.", **exact) == ([], None)
        assert replica.contents.segments == 1, "the instruction alone: what is not promoted is not expected to be there"
    with running_front(vllm) as front:
        assert [sent(ferry, **exact) for _ in range(2)] == [(None, None)] * 2


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_threshold_of_n_is_reached_by_the_nth_request(vllm, threshold):
    """The request that asks counts, as it does in our own engine."""

    def sent(method, name):
        assert front.ask(documents=DOCUMENTS, chunkweave={"method": method, "order": "free"}).status_code == 200
        return vllm.seen[-1]["kv_transfer_params"]["chunkweave"].get(name) or []

    thresholds = {"promotion_threshold": threshold, "continuation_threshold": threshold}
    for method, name in (("prefix", "promoted"), ("cacheblend", "continued")):
        with running_front(vllm, **thresholds) as front:
            told = [sent(method, name) for _ in range(4)]
        assert told == [[] if number < threshold else [0, 1] for number in range(1, 5)], method


def test_a_corpus_is_searched_before_vllm_is_asked(front, vllm):
    assert front.post("/v1/corpora", json={"name": "sea", "chunk_tokens": 32}).status_code == 201
    added = front.post("/v1/corpora/sea/documents", json={"documents": [*DOCUMENTS, MORE]})
    assert added.status_code == 200, added.text
    told = front.ask(chunkweave={"corpus": "sea", "top_k": 2}).json()["chunkweave"]
    assert len(told["retrieved"]) == 2
    assert len(vllm.seen[-1]["kv_transfer_params"]["chunkweave"]["chunks"]) == 2


def test_tenants_never_share_a_salt(vllm):
    with running_front(vllm, keys=key_ring()) as front:
        assert front.ask(documents=DOCUMENTS).status_code == 401
        for key in KEYS.values():
            pooled = front.post("/v2/embed", json={"input": "x"}, headers={"authorization": f"Bearer {key}"})
            assert "cache_salt" in json.loads(pooled.json()["body"])
            for body in ({"documents": DOCUMENTS}, {"prompt": "plain"}, {"prompt": "plain", "cache_salt": "x"}):
                path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
                whole = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2, **body}
                told = front.post(path, json=whole, headers={"authorization": f"Bearer {key}"})
                assert told.status_code == 200
        salts = [sent.get("cache_salt") for sent in vllm.seen]
        assert None not in salts
        assert salts[0] == salts[1], "documents and plain prompts of one tenant meet"
        assert len(set(salts)) == 4
        assert front.post("/collective_rpc", headers={"authorization": f"Bearer {KEYS['acme']}"}).status_code == 403
        assert front.post("/collective_rpc", headers={"authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200
        assert front.get("/metrics").status_code == 401
        assert front.get("/ping").status_code == 200, "it needs no key"


@pytest.mark.parametrize("method", ["cacheblend", "prefix"])
def test_what_is_assumed_to_be_at_a_replica_is_what_it_finds_there(vllm, method):
    """The mirror has the size that the replica reports, and what it did not find is assumed no longer."""
    texts = [" ".join(f"{word}{number}" for word in ("harbour", "ferry", "pilot") * 12) for number in range(24)]
    vllm.store_tokens = 2000
    rng = random.Random(1)
    with running_front(vllm) as front:
        for _ in range(120):
            one = [texts[min(23, int(rng.paretovariate(0.6)) - 1)]]
            assert front.ask(documents=one, chunkweave={"method": method}, max_tokens=1).status_code == 200
        (shown,) = front.get("/v1/cache").json()["replicas"]
        metrics = front.get("/metrics").text
    assert shown["mirror_budget_tokens"] == 2000
    assert shown["mirror_tokens"] <= 2000
    believed, real = (shown[name] / shown["prompt_tokens"] for name in ("expected_tokens", "found_tokens"))
    assert 0.2 < real < 0.8, "something is found, and something was evicted"
    assert abs(believed - real) <= 0.05, (believed, real)
    assert (
        f'replica_found_tokens_total{{model_name="m",replica="upstream-0"}} {float(shown["found_tokens"])}' in metrics
    )


def test_what_full_prefill_computes_is_stored_and_expected(front, vllm):
    """It takes nothing itself, so that nothing is expected for it."""
    for method in ("full", "full"):
        front.ask(documents=DOCUMENTS, chunkweave={"method": method})
    assert front.get("/v1/cache").json()["replicas"][0]["expected_tokens"] == 0
    front.ask(documents=DOCUMENTS, chunkweave={"method": "prefix"})
    assert front.get("/v1/cache").json()["replicas"][0]["expected_tokens"] > 0


def test_requests_go_where_their_documents_are(two):
    front, one, other = two
    for number in range(12):
        documents = [f"{text} So it was in {number}." for text in DOCUMENTS]
        replies = [front.ask(documents=documents[::order], chunkweave=WEAVE).json() for order in (1, -1, 1)]
        assert len({reply["chunkweave"]["replica"] for reply in replies}) == 1, "in any order"
    assert len(one.seen) + len(other.seen) == 36
    assert min(len(one.seen), len(other.seen)) >= 3


def test_a_server_that_breaks_before_the_first_token_is_replaced_by_another(two):
    front, one, _ = two
    one.break_after = 0
    for number in range(8):
        told = front.ask(documents=[f"{MORE} So it was in {number}."], chunkweave=WEAVE)
        assert told.status_code == 200, told.text
        assert told.json()["chunkweave"]["replica"] == "upstream-1"
    assert one.seen
    assert front.service.backend.context.retries >= 1
    assert b"chunkweave:request_retries_total" in front.get("/metrics").content


@pytest.mark.parametrize("front", [{"path_chunks": 1, "deduplicate": True}], indirect=True)
def test_of_a_large_top_k_only_the_first_chunks_are_promoted(front, vllm):
    """RAGCache §8, before vLLM: numbers of what the plug-in sees as chunks, turns among them."""
    exact = {"chunkweave": {"method": "prefix"}}
    told = front.ask(documents=DOCUMENTS, **exact).json()
    answer = told["choices"][0]["message"]["content"]
    texts = (("user", "When does the ferry leave?"), ("assistant", answer), ("user", "And?"))
    messages = [{"role": role, "content": text} for role, text in texts]
    front.ask(messages=messages, documents=[MORE, "The tower has 230 steps."], **exact)
    first, second = (sent["kv_transfer_params"]["chunkweave"] for sent in vllm.seen)
    assert (len(first["chunks"]), first["promoted"]) == (2, [0])
    assert (len(second["chunks"]), second["promoted"]) == (5, [0, 1, 2, 3])


def test_a_server_that_does_not_begin_in_time_is_replaced_by_another(tmp_path):
    """RAGCache §6: a request that times out before its first token is made again; one that has begun is not."""
    socket = str(tmp_path / "reports")
    limits = {"first_token_timeout_s": 0.5, "replica_requests": 1}
    with FakeVllm(socket) as one, FakeVllm(socket) as other, running_front(one, other, **limits) as front:
        one.gate.clear()
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(front.ask(documents=DOCUMENTS))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 3
        assert {answer.json()["chunkweave"]["replica"] for answer in answers} == {"upstream-1"}
        assert one.seen
        wait_until(lambda: one.aborted == len(one.seen))
        assert front.service.backend.context.retries >= len(one.seen)


def test_the_only_server_is_asked_a_second_time_and_then_for_as_long_as_it_takes(vllm):
    with running_front(vllm, first_token_timeout_s=0.2) as front:
        vllm.gate.clear()
        threading.Timer(1.0, vllm.gate.set).start()
        told = front.ask(documents=DOCUMENTS)
        assert told.status_code == 200, told.text
        assert len(vllm.seen) == 2
        assert vllm.seen[0]["prompt"] == vllm.seen[1]["prompt"]


def test_a_server_that_is_gone_is_waited_for_as_long_as_an_answer_may_take_to_begin(vllm):
    with running_front(vllm, first_token_timeout_s=20) as front:

        def comes_back() -> None:
            vllm.behave, vllm.break_after, vllm.healthy = None, None, True

        def goes(_body) -> None:
            vllm.behave, vllm.break_after, vllm.healthy = None, 0, False
            threading.Timer(0.7, comes_back).start()

        vllm.behave = goes
        told = front.ask(documents=DOCUMENTS)
        assert told.status_code == 200, told.text
        assert len(vllm.seen) == 2


def test_a_stream_that_breaks_ends_with_an_error_in_openais_form(front, vllm):
    vllm.break_after = 2
    events = front.events(documents=DOCUMENTS)
    assert events[-1]["error"]["code"] == "replica_lost"
    assert len(vllm.seen) == 1, "what was streamed in part is not tried again"


def test_a_server_that_is_gone_is_told_at_once(vllm):
    with running_front(vllm) as front:
        vllm.stop()
        refused = front.ask(documents=DOCUMENTS)
        assert refused.status_code in (502, 503)
        assert refused.json()["error"]["type"] == "server_error"
        assert front.post("/v2/embed").status_code in (502, 503)
        wait_until(lambda: front.get("/ready").status_code == 503)


def test_no_more_than_so_many_are_given_to_a_server_at_once(tmp_path):
    with FakeVllm(str(tmp_path / "reports")) as vllm, running_front(vllm, replica_requests=2, max_waiting=3) as front:
        vllm.gate.clear()
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(front.ask(documents=DOCUMENTS).status_code))
            for _ in range(5)
        ]
        fleet = front.service.backend.fleet
        for thread in threads:
            thread.start()
        wait_until(lambda: (fleet.running, fleet.waiting) == (2, 3))
        wait_until(lambda: len(vllm.seen) == 2)
        full = front.ask(documents=DOCUMENTS)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
        vllm.gate.set()
        for thread in threads:
            thread.join()
        assert answers == [200] * 5


def test_a_tenant_that_asks_for_too_much_keeps_no_other_one_waiting(tmp_path):
    """acme fills the queue; bolt is let in all the same, and served before what acme has waiting."""
    with (
        FakeVllm(str(tmp_path / "reports")) as vllm,
        running_front(vllm, keys=key_ring(), replica_requests=2, max_waiting=3, tenant_weight=("bolt=2",)) as front,
    ):
        vllm.gate.clear()
        answers: list[tuple[str, int]] = []

        def ask(tenant: str, tokens: int) -> None:
            reply = front.ask(documents=DOCUMENTS, key=KEYS[tenant], max_tokens=tokens)
            answers.append((tenant, reply.status_code))

        fleet = front.service.backend.fleet
        threads = [threading.Thread(target=ask, args=("acme", 4)) for _ in range(5)]
        for thread in threads:
            thread.start()
        wait_until(lambda: (fleet.running, fleet.waiting, len(vllm.seen)) == (2, 3, 2))
        ask("acme", 4)
        assert answers == [("acme", 503)]
        threads += [threading.Thread(target=ask, args=("bolt", 7)) for _ in range(2)]
        for thread in threads[5:]:
            thread.start()
        wait_until(lambda: fleet.waiting == 5)
        vllm.gate.set()
        for thread in threads:
            thread.join()
        assert sorted(answers[1:]) == [("acme", 200)] * 5 + [("bolt", 200)] * 2
        assert [sent["max_tokens"] for sent in vllm.seen[2:4]] == [7, 7]


def test_a_client_that_leaves_ends_its_request(front, vllm):
    vllm.gate.clear()
    body = {"messages": [{"role": "user", "content": "?"}], "documents": DOCUMENTS, "stream": True}
    for stream in (True, False):
        with pytest.raises(Exception, match="timed out"):
            front.post("/v1/chat/completions", json={**body, "stream": stream}, timeout=0.3)
    vllm.gate.set()
    wait_until(lambda: not front.service.parts.answering.running)
    wait_until(lambda: vllm.aborted == 2)


def test_a_deadline_ends_a_request(tmp_path):
    with FakeVllm(str(tmp_path / "reports")) as vllm, running_front(vllm, deadline_s=0.3) as front:
        vllm.gate.clear()
        late = front.ask(documents=DOCUMENTS)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")


def test_metrics_of_all_servers_stand_beside_ours(two):
    front, *_ = two
    front.ask(documents=DOCUMENTS)
    text = front.get("/metrics").text
    assert text.count("# TYPE vllm:requests counter") == 1
    for name in ("upstream-0", "upstream-1"):
        assert f'vllm:requests{{replica="{name}",model_name="m"}}' in text
        assert f'chunkweave:replica_up{{model_name="m",replica="{name}"}} 1.0' in text
    assert 'chunkweave:prompt_tokens_by_source_total{kv_source="computed"' in text


def counted(front, name: str, **labels: str) -> float:
    """The value of one of the server's own counters now; 0 if it does not stand there."""
    inside = ",".join(f'{key}="{value}"' for key, value in sorted({**labels, "model_name": "m"}.items()))
    found = re.search(
        rf"^chunkweave:{name}_total{{{re.escape(inside)}}} (.*)$", front.get("/metrics").text, re.MULTILINE
    )
    return float(found[1]) if found else 0.0


def test_what_was_looked_up_and_found_is_counted_by_tier(front):
    for number in range(2):
        report = front.ask(documents=DOCUMENTS, chunkweave=WEAVE).json()["chunkweave"]
        stored = counted(front, "cache_queries")
        assert report["looked_up_tokens"] > 0
        assert stored == (number + 1) * report["looked_up_tokens"]
    assert report["hits"] == {"host": report["reused_tokens"] + report["recomputed_tokens"]}
    assert counted(front, "cache_hits", tier="host") == report["hits"]["host"]
    assert "_created" not in front.get("/metrics").text


def test_what_vllms_own_prefix_cache_found_is_a_tier_of_its_own(front, vllm):
    vllm.cached = 32
    report = front.ask(documents=DOCUMENTS, chunkweave={"method": "cacheblend"}).json()["chunkweave"]
    assert report["prefix_exact_tokens"] == report["engine_cached_tokens"] == 32
    assert (report["method"], report["effective_method"]) == ("cacheblend", "prefix")
    begins = len(front.service.backend.context.preparer.builder.build("x", DOCUMENTS).parts[0])
    assert report["hits"] == {"vllm": 32 - begins}
    assert counted(front, "cache_hits", tier="vllm") == 32 - begins


def test_one_in_so_many_woven_answers_is_checked_against_full_prefill(tmp_path):
    with FakeVllm(str(tmp_path / "reports")) as vllm, running_front(vllm, shadow_every=2) as front:
        for _ in range(5):
            told = front.ask(documents=DOCUMENTS, chunkweave=WEAVE, temperature=0).json()
            assert told["choices"][0]["logprobs"] is None
        wait_until(lambda: front.get("/v1/shadow").json()["checked"] == 2)
        checks = [body for body in vllm.seen if "kv_transfer_params" not in body]
        assert len(checks) == 2
        assert len({body["cache_salt"] for body in checks}) == 2
        stats = front.get("/v1/shadow").json()
        assert (stats["woven"], stats["agreed"], stats["same_tokens"]) == (4, 2, 8)


def test_what_strays_too_far_switches_weaving_off(tmp_path):
    def strayed(body):
        if "kv_transfer_params" in body:
            return None
        choice = {"index": 0, "text": "z", "token_ids": [9], "finish_reason": "length"}
        choice["logprobs"] = {"tokens": ["z"], "token_logprobs": [-0.1], "top_logprobs": [{"z": -0.1}]}
        data = json.dumps({"choices": [choice]})
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(f"data: {data}\n\ndata: [DONE]\n\n", media_type="text/event-stream")

    limits = {"shadow_every": 1, "shadow_window": 1, "shadow_min_agreement": 0.9}
    with FakeVllm(str(tmp_path / "reports"), strayed) as vllm, running_front(vllm, **limits) as front:
        for _ in range(2):
            front.ask(documents=DOCUMENTS, chunkweave=WEAVE)
        wait_until(lambda: not front.get("/v1/shadow").json()["weaving"])
        front.ask(documents=DOCUMENTS, chunkweave=WEAVE)
        assert vllm.seen[-1]["kv_transfer_params"]["chunkweave"]["method"] == "prefix"
        assert front.post("/v1/shadow/switch-on").json()["weaving"]


@pytest.mark.parametrize("neutral_tokens", [0, 400])
def test_what_is_warmed_is_sent_behind_neutral_passages(tmp_path, neutral_tokens):
    with (
        FakeVllm(str(tmp_path / "reports")) as vllm,
        running_front(vllm, neutral_tokens=neutral_tokens, contexts="bundled") as front,
    ):
        warmed = front.post("/v1/cache/warm", json={"documents": DOCUMENTS})
        assert (warmed.status_code, warmed.json()["computed"]) == (200, len(DOCUMENTS))
        assert len(vllm.seen) == len(DOCUMENTS)
        for body in vllm.seen:
            params = body["kv_transfer_params"]["chunkweave"]
            assert (body["max_tokens"], params["counts_as_request"], params["method"]) == (1, False, "prefix")
            assert len(params["chunks"]) == params.get("neutral", 0) + 1
            assert params["chunks"][-1][1] == len(body["prompt"]), "the chunk comes last, and nothing behind it"
            assert (params.get("neutral", 0) > 0) is (neutral_tokens > 0)
        front.ask(documents=DOCUMENTS)
        first, asked = vllm.seen[0], vllm.seen[-1]
        start, stop = first["kv_transfer_params"]["chunkweave"]["chunks"][-1]
        chunk = first["prompt"][start:stop]
        assert chunk in [asked["prompt"][a:b] for a, b in asked["kv_transfer_params"]["chunkweave"]["chunks"]]


def test_a_document_that_is_too_long_to_warm_is_refused(front):
    refused = front.post("/v1/cache/warm", json={"documents": ["x " * 60_000]})
    assert refused.status_code == 400
