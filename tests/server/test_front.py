"""The front before servers that look like vLLM: what is sent, what comes back, and what happens when one goes."""

import json
import threading
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from chunkweave.models.adapters import Adapter
from tests.chat_tools import TEMPLATE, TOOL
from tests.server.conftest import KEYS, bearer, error_of, key_ring, later, report_of, wait_until
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import DOCUMENTS, MORE, running_front

WEAVE = {"method": "cacheblend:ratio=0.25", "order": "fixed"}


@pytest.fixture
def front(vllm, request):
    with running_front(vllm, **getattr(request, "param", {})) as client:
        yield client


@pytest.fixture
def two(fakes):
    """Two servers, and a front before them."""
    with running_front(*fakes) as client:
        yield client, *fakes


def params_of(sent):
    """What the plug-in is told with a request."""
    return sent["kv_transfer_params"]["chunkweave"]


def builder_of(front):
    return front.service.backend.context.preparer.builder


def test_parts_are_tokenized_apart_and_their_places_are_told(front, vllm):
    assert front.ask(documents=DOCUMENTS, chunkweave=WEAVE).status_code == 200
    (sent,) = vllm.seen
    params = params_of(sent)
    prompt = builder_of(front).build("When does the ferry leave?", DOCUMENTS)
    assert sent["prompt"] == list(prompt.token_ids)
    assert [sent["prompt"][start:stop] for start, stop in params["chunks"]] == [
        list(part.token_ids) for part in prompt.parts if part.kind == "chunk"
    ]
    assert params["method"] == "cacheblend:ratio=0.25"
    assert params["start_tokens"] == len(prompt.parts[0])
    assert sent["max_tokens"] == 4


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


def test_a_completion_has_no_more_alternatives_than_it_asked_for(vllm, compared):
    body = {"prompt": "When?", "documents": DOCUMENTS, "max_tokens": 1, "logprobs": 1}
    with running_front(vllm) as front:
        for _ in range(2):
            logprobs = front.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
            assert logprobs["top_logprobs"] == [{" w0": -3.5, " x": -0.1}]
    assert any(body.get("logprobs") == 20 for body in vllm.seen)


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
    assert "m" in [model["id"] for model in front.get("/v1/models").json()["data"]]


@pytest.mark.parametrize("path", ["/sleep?level=2", "/pause", "/reset_prefix_cache?reset_external=true"])
def test_after_vllm_resets_its_caches_nothing_is_assumed_to_be_stored(front, path):
    front.ask(documents=DOCUMENTS)
    (replica,) = front.service.backend.fleet.replicas
    assert replica.sent.segments > 0
    front.post("/tokenize")
    assert replica.sent.segments > 0
    front.post(path).raise_for_status()
    assert replica.sent.segments == 0
    assert front.service.backend.fleet.sent.segments == 0


def test_once_no_server_is_left_orders_begin_anew(front):
    front.ask(documents=DOCUMENTS)
    fleet = front.service.backend.fleet
    (replica,) = fleet.replicas
    assert fleet.sent.segments > 0
    fleet.down(replica.upstream.server)
    fleet.up(replica.upstream.server)
    assert replica.sent.segments == fleet.sent.segments == 0


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
    fields = {"top_k": 7, "repetition_penalty": 1.1, "stop": ["x"], "temperature": 0.3, "priority": -3}
    front.ask(documents=DOCUMENTS, cache_salt="s", **fields)
    (sent,) = vllm.seen
    assert {name: sent[name] for name in fields} == fields
    assert sent["cache_salt"], "the tenant's own, of which `s` is a part"


@pytest.mark.parametrize(
    ("method", "raisable"), [("cacheblend", True), ("cacheblend:ratio=0.3", False), ("cachecraft:alpha=0.5", False)]
)
def test_the_plug_in_may_raise_what_no_client_has_asked_for(front, vllm, method, raisable):
    front.ask(documents=DOCUMENTS, chunkweave={"method": method})
    assert params_of(vllm.seen[0])["at_least"] is raisable


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"documents": ["a"], "tools": [TOOL]}, "tools need --enable-auto-tool-choice"),
        ({"documents": ["a"], "tools": [TOOL], "tool_choice": "none"}, "does not support tools"),
        ({"documents": ["a"], "tools": [TOOL], "tool_choice": "required"}, "tools need --enable-auto-tool-choice"),
        ({"documents": ["a"], "tool_choice": "required"}, "tool_choice needs tools"),
        ({"documents": ["a"], "truncate_prompt_tokens": 9}, "chunkweave: truncate_prompt_tokens"),
        ({"documents": ["a " * 5000]}, "at most 2048 fit into the context"),
        ({"chunkweave": {"corpus": "c"}}, "no corpus 'c'"),
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
    sent = [replica.sent for replica in front.service.backend.fleet.replicas]
    assert sum(chunks.tokens > 0 for chunks in sent) == 1
    parts = [part for part in builder_of(front).build("When?", DOCUMENTS).parts if part.id is not None]
    assert not any(chunks.chunk_tokens(part.id) for part in parts for chunks in sent)
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
    return builder_of(front).tokenizer._tokenizer.decode(sent["prompt"])


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


def test_a_template_reads_what_the_request_says_to_it(with_tools):
    front, vllm = with_tools
    front.ask(documents=DOCUMENTS, chat_template_kwargs={"brief": True})
    assert rendered(front, vllm.seen[0]).endswith("<|assistant|>\nIn short: ")
    refused = front.ask(documents=DOCUMENTS, chat_template_kwargs={"tokenize": True})
    assert "chat_template_kwargs" in refused.json()["error"]["message"]


def test_a_full_prefill_takes_nothing_from_vllms_own_cache_either(front, vllm):
    """With documents the plug-in sees to it, and stores them under the client's salt; without, nothing is stored."""
    for documents in (DOCUMENTS, DOCUMENTS, [], []):
        told = front.ask(documents=documents, chunkweave={"method": "full"}, cache_salt="mine").json()
        assert told["chunkweave"]["computed_tokens"] == told["usage"]["prompt_tokens"]
        assert (told["chunkweave"]["method"], told["chunkweave"]["effective_method"]) == ("full", "full")
    assert [params_of(one)["method"] for one in vllm.seen[:2]] == ["full"] * 2
    assert not any("kv_transfer_params" in one for one in vllm.seen[2:])
    front.ask(chunkweave={"method": "prefix"}, cache_salt="mine")
    salts = [one["cache_salt"] for one in vllm.seen]
    assert salts[0] == salts[1] == salts[4]
    assert len(set(salts)) == 3, "those without documents have one of their own each"


def test_a_full_prefill_does_not_make_the_front_forget_what_a_server_holds(front):
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        front.ask(documents=documents, chunkweave={"order": "fixed"})
    (replica,) = front.service.backend.fleet.replicas
    held = replica.sent.tokens
    front.ask(documents=DOCUMENTS, chunkweave={"method": "full", "order": "fixed"})
    assert replica.sent.tokens == held > 0


def test_what_comes_back_is_promoted_and_what_does_not_is_not_expected_to_be_stored(vllm):
    """CRAFT's thresholds with a free order: the connector grows exact prefixes over what the front has counted."""

    def sent(*documents, **reuse):
        assert front.ask(documents=list(documents), chunkweave=reuse).status_code == 200
        params = params_of(vllm.seen[-1])
        return params.get("promoted"), params.get("continued")

    with running_front(vllm, promotion_threshold=1, continuation_threshold=2) as front:
        (replica,) = front.service.backend.fleet.replicas
        ferry, pilots = DOCUMENTS
        exact = {"method": "prefix", "order": "free"}
        assert sent(ferry, **exact) == ([0], None)
        assert replica.sent.segments == 2, "the instruction and the chunk"
        assert sent(ferry, MORE, **exact) == ([0, 1], [0])
        assert replica.sent.segments == 3
        assert sent(ferry, pilots, method="cacheblend", order="free") == ([0, 1], [0])
        assert sent(ferry, pilots, method="cacheblend", order="fixed") == (None, None)
    with running_front(vllm, promotion_threshold=2) as front:
        (replica,) = front.service.backend.fleet.replicas
        assert sent("The lighthouse has a fog horn.", **exact) == ([], None)
        assert replica.sent.segments == 1, "the instruction alone: what is not promoted is not expected to be there"
    with running_front(vllm) as front:
        assert [sent(ferry, **exact) for _ in range(2)] == [(None, None)] * 2


def test_tenants_never_share_a_salt(vllm):
    with running_front(vllm, keys=key_ring()) as front:
        for key in KEYS.values():
            pooled = front.post("/v2/embed", json={"input": "x"}, headers=bearer(key))
            assert "cache_salt" in json.loads(pooled.json()["body"])
            assert front.ask(documents=DOCUMENTS, key=key).status_code == 200
            for body in ({"prompt": "plain"}, {"prompt": "plain", "cache_salt": "x"}):
                assert front.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
        salts = [sent.get("cache_salt") for sent in vllm.seen]
        assert None not in salts
        assert salts[0] == salts[1], "documents and plain prompts of one tenant meet"
        assert len(set(salts)) == 4


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
    first, second = map(params_of, vllm.seen)
    assert (len(first["chunks"]), first["promoted"]) == (2, [0])
    assert (len(second["chunks"]), second["promoted"]) == (5, [0, 1, 2, 3])


def test_a_server_that_does_not_begin_in_time_is_replaced_by_another(fakes):
    """RAGCache §6: a request that times out before its first token is made again; one that has begun is not."""
    one, _ = fakes
    with running_front(*fakes, first_token_timeout=0.5, replica_requests=1) as front:
        one.gate.clear()
        answers = [later(front.ask, documents=DOCUMENTS) for _ in range(3)]
        assert {report_of(answer.result())["replica"] for answer in answers} == {"upstream-1"}
        assert one.seen
        wait_until(lambda: one.aborted == len(one.seen))
        assert front.service.backend.context.retries >= len(one.seen)


def test_the_only_server_is_asked_a_second_time_and_then_for_as_long_as_it_takes(vllm):
    with running_front(vllm, first_token_timeout=0.2) as front:
        vllm.gate.clear()
        threading.Timer(1.0, vllm.gate.set).start()
        told = front.ask(documents=DOCUMENTS)
        assert told.status_code == 200, told.text
        assert len(vllm.seen) == 2
        assert vllm.seen[0]["prompt"] == vllm.seen[1]["prompt"]


def test_a_server_that_is_gone_is_waited_for_as_long_as_an_answer_may_take_to_begin(vllm):
    with running_front(vllm, first_token_timeout=20) as front:

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


def test_no_more_than_so_many_are_given_to_a_server_at_once(vllm):
    with running_front(vllm, replica_requests=2, max_waiting=3) as front:
        vllm.gate.clear()
        fleet = front.service.backend.fleet
        answers = [later(front.ask, documents=DOCUMENTS) for _ in range(5)]
        wait_until(lambda: (fleet.running, fleet.waiting) == (2, 3))
        wait_until(lambda: len(vllm.seen) == 2)
        assert error_of(front.ask(documents=DOCUMENTS)) == (503, "overloaded")
        vllm.gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * 5


def test_a_tenant_that_asks_for_too_much_keeps_no_other_one_waiting(vllm):
    """acme fills the queue; bolt is let in all the same, and served before what acme has waiting."""
    limits = {"replica_requests": 2, "max_waiting": 3, "tenant_weight": ("bolt=2",)}
    with running_front(vllm, keys=key_ring(), **limits) as front:
        vllm.gate.clear()
        fleet = front.service.backend.fleet
        of_acme = {"documents": DOCUMENTS, "key": KEYS["acme"]}
        answers = [later(front.ask, **of_acme) for _ in range(5)]
        wait_until(lambda: (fleet.running, fleet.waiting, len(vllm.seen)) == (2, 3, 2))
        assert front.ask(**of_acme).status_code == 503
        answers += [later(front.ask, documents=DOCUMENTS, key=KEYS["bolt"], max_tokens=7) for _ in range(2)]
        wait_until(lambda: fleet.waiting == 5)
        vllm.gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * 7
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


def test_a_deadline_ends_a_request(vllm):
    with running_front(vllm, deadline=0.3) as front:
        vllm.gate.clear()
        assert error_of(front.ask(documents=DOCUMENTS)) == (504, "timeout")


def test_metrics_of_all_servers_stand_beside_ours(two):
    front, *_ = two
    front.ask(documents=DOCUMENTS)
    text = front.get("/metrics").text
    assert text.count("# TYPE vllm:requests counter") == 1
    for name in ("upstream-0", "upstream-1"):
        assert f'vllm:requests{{replica="{name}",model_name="m"}}' in text
        assert f'chunkweave:replica_up{{model_name="m",replica="{name}"}} 1.0' in text
    assert 'chunkweave:prompt_tokens_by_source_total{kv_source="computed"' in text


def test_what_was_looked_up_and_found_is_counted_by_tier(front):
    for number in range(2):
        report = front.ask(documents=DOCUMENTS, chunkweave=WEAVE).json()["chunkweave"]
        stored = front.metric("cache_queries_total")
        assert report["looked_up_tokens"] > 0
        assert stored == (number + 1) * report["looked_up_tokens"]
    assert report["hits"] == {"host": report["reused_tokens"] + report["recomputed_tokens"]}
    assert front.metric("cache_hits_total", tier="host") == report["hits"]["host"]
    assert "_created" not in front.get("/metrics").text


def test_what_vllms_own_prefix_cache_found_is_a_tier_of_its_own(front, vllm):
    vllm.cached = 32
    report = front.ask(documents=DOCUMENTS, chunkweave={"method": "cacheblend"}).json()["chunkweave"]
    assert report["prefix_exact_tokens"] == report["engine_cached_tokens"] == 32
    assert (report["method"], report["effective_method"]) == ("cacheblend", "prefix")
    begins = len(builder_of(front).build("x", DOCUMENTS).parts[0])
    assert report["hits"] == {"vllm": 32 - begins}
    assert front.metric("cache_hits_total", tier="vllm") == 32 - begins


def test_one_in_so_many_woven_answers_is_compared_with_full_prefill(vllm, compared):
    with running_front(vllm) as front:
        for _ in range(5):
            answer = front.ask(documents=DOCUMENTS, temperature=0).json()
            assert answer["choices"][0]["logprobs"] is None
            assert answer["chunkweave"]["why"] == "calibrated"
        wait_until(lambda: front.metric("comparisons_total", result="compared") == 2)
        comparisons = [body for body in vllm.seen if "kv_transfer_params" not in body]
        assert len({body["cache_salt"] for body in comparisons}) == 2
        assert sum(body.get("logprobs") is not None for body in vllm.seen) == 4, "two answers, and two comparisons"
        [(answers, agreement)] = {
            (method["answers"], method["agreement"])
            for method in front.get("/v1/cache").json()["learned"]["methods"].values()
        }
        assert (answers, agreement) == (2, 1.0)
        for _ in range(4):
            front.ask(documents=DOCUMENTS, chunkweave=WEAVE)
        assert front.get("/v1/cache").json()["learned"]["pending"] == 0, "a named method is not judged"


@pytest.mark.parametrize("compare", [True, False])
def test_answers_that_drift_switch_weaving_off(vllm, compared, compare):
    def strayed(body):
        if "kv_transfer_params" in body:
            return None
        choice = {"index": 0, "text": "z", "token_ids": [9], "finish_reason": "length"}
        choice["logprobs"] = {"tokens": ["z"], "token_logprobs": [-0.1], "top_logprobs": [{"z": -0.1}]}
        data = json.dumps({"choices": [choice]})
        return PlainTextResponse(f"data: {data}\n\ndata: [DONE]\n\n", media_type="text/event-stream")

    vllm.behave = strayed
    with running_front(vllm, compare=compare) as front:
        whys = []
        for number in range(16):
            whys.append(front.ask(documents=DOCUMENTS).json()["chunkweave"]["why"])
            if number % 2:
                wait_until(lambda: not (front.get("/v1/cache").json().get("learned") or {}).get("pending"))
        assert whys[0] == "calibrated"
        assert whys[-1] == ("switched off" if compare else "calibrated")
        assert params_of(vllm.seen[-1]).get("method", "prefix").startswith("prefix") is compare
        assert front.ask(documents=DOCUMENTS, chunkweave=WEAVE).json()["chunkweave"]["why"] == "asked for"


def test_a_removal_drops_comparisons_that_wait(vllm, compared):
    held = threading.Event()

    def late(body):
        if "kv_transfer_params" not in body:
            held.wait(20)

    vllm.behave = late
    with running_front(vllm) as front:
        for _ in range(2):
            front.ask(documents=DOCUMENTS)
        wait_until(lambda: front.get("/v1/cache").json()["learned"]["pending"] == 1)
        front.post("/v1/cache/clear", json={"documents": DOCUMENTS})
        assert front.get("/v1/cache").json()["learned"]["pending"] == 0
        held.set()


@pytest.mark.parametrize("neutral_tokens", [0, 400])
def test_what_is_warmed_is_sent_behind_neutral_passages(vllm, neutral_tokens):
    with running_front(vllm, neutral_tokens=neutral_tokens, contexts="bundled") as front:
        warmed = front.warm(*DOCUMENTS)
        assert (warmed.status_code, warmed.json()["computed"]) == (200, len(DOCUMENTS))
        assert len(vllm.seen) == len(DOCUMENTS)
        for body in vllm.seen:
            params = params_of(body)
            assert (body["max_tokens"], params["counts_as_request"], params["method"]) == (1, False, "prefix")
            assert len(params["chunks"]) == params.get("neutral", 0) + 1
            assert params["chunks"][-1][1] == len(body["prompt"]), "the chunk comes last, and nothing behind it"
            assert (params.get("neutral", 0) > 0) is (neutral_tokens > 0)
        front.ask(documents=DOCUMENTS)
        first, asked = vllm.seen[0], vllm.seen[-1]
        start, stop = params_of(first)["chunks"][-1]
        chunk = first["prompt"][start:stop]
        assert chunk in [asked["prompt"][a:b] for a, b in params_of(asked)["chunks"]]
