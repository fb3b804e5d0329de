"""Answers in a given form from the engine backend: JSON, schemas, and calls of tools, also in streams."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.resources import files
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chunkweave.engine import grammar
from chunkweave.engine.decode import Sampler
from chunkweave.models.loading import bundled_tokenizer
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave_server.structured import BEGIN, END, AnswerForm, Grammars, ParsedAnswer, ParsedEvent
from tests.server import conftest
from tests.server.conftest import KEYS, Client, Serve, engine_of, events_of, key_ring

pytestmark = pytest.mark.backend("engine")

FERRY = "The ferry leaves the northern pier at nine and again at noon. "
TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Halvik", "Lune"]}, "hour": {"type": "integer", "minimum": 0, "maximum": 23}},
    "required": ["town", "hour"],
    "additionalProperties": False,
}
GET_TIME = {"type": "function", "function": {"name": "get_time", "description": "Tells the time", "parameters": TOWN}}
PING = {"type": "function", "function": {"name": "ping"}}
TEMPLATE = (
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QUESTION = {"role": "user", "content": "What time is it in Halvik?"}


def answered(reply: Any) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def checked(arguments: Any) -> None:
    assert arguments.keys() == {"town", "hour"}
    assert arguments["town"] in ("Halvik", "Lune")
    assert 0 <= arguments["hour"] <= 23


def schema(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": of, "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers_match_their_schema(client: Client, temperature: float):
    body = {"documents": [FERRY], "temperature": temperature, "seed": 1, "max_tokens": 60, "n": 3}
    for choice in answered(client.ask(**body, response_format=schema(TOWN))):
        checked(json.loads(choice["message"]["content"]))
        assert choice["finish_reason"] == "stop"
    text = "".join(
        choice["delta"].get("content") or ""
        for event in events_of(client.ask(**{**body, "n": 1}, response_format=schema(TOWN), stream=True))
        for choice in event["choices"]
    )
    checked(json.loads(text))


def test_plain_completions_have_forms_too(client: Client):
    body = {"prompt": "When?", "max_tokens": 60, "response_format": schema(TOWN)}
    checked(json.loads(answered(client.post("/v1/completions", json=body))[0]["text"]))


def test_any_json_object(client: Client):
    (choice,) = answered(client.ask(max_tokens=30, response_format={"type": "json_object"}))
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize("template", ["", TEMPLATE])
@pytest.mark.parametrize(
    ("choice", "ends"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_time"}}, "stop")],
)
def test_a_forced_call_is_a_call(serve: Serve, choice: Any, ends: str, template: str, monkeypatch):
    if template:
        with_template(monkeypatch, template)
    client = serve()
    body = {"documents": [FERRY], "tools": [GET_TIME], "tool_choice": choice, "parallel_tool_calls": False}
    (whole,) = answered(client.ask(**body, max_tokens=80))
    (call,) = whole["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"], whole["message"]["content"]) == ("function", "get_time", None)
    assert "index" not in call
    checked(json.loads(call["function"]["arguments"]))
    assert whole["finish_reason"] == ends

    found = events_of(client.ask(**body, max_tokens=80, stream=True))
    (streamed,) = [one for event in found for one in event["choices"][0]["delta"].get("tool_calls", [])]
    assert (streamed["index"], streamed["type"], streamed["function"]) == (0, "function", call["function"])
    assert streamed["id"].startswith("call_")
    assert all("content" not in event["choices"][0]["delta"] for event in found[1:])


def test_several_calls_at_once_and_in_several_answers(client: Client):
    body = {"tools": [GET_TIME, PING], "tool_choice": "required", "temperature": 2, "n": 4, "seed": 5}
    found = answered(client.ask(**body, max_tokens=200))
    for choice in found:
        for call in choice["message"]["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "get_time":
                checked(arguments)
            else:
                assert arguments == {}
    assert {choice["index"] for choice in found} == {0, 1, 2, 3}
    alone = answered(client.ask(**body, max_tokens=200, parallel_tool_calls=False))
    assert {len(choice["message"]["tool_calls"]) for choice in alone} == {1}


def test_without_a_forced_call_an_answer_is_text_or_a_call(client: Client, monkeypatch: pytest.MonkeyPatch):
    """The model's choice is played by a sampler that says a given text as far as the grammar allows it."""
    for text, content, arguments in (
        ("The ferry <tool does leave.", "The ferry <tool does leave.", None),
        (
            'Wait.<tool_call>{"name": "get_time", "arguments": {"town": "Lune", "hour": 7}}</tool_call>',
            "Wait.",
            {"town": "Lune", "hour": 7},
        ),
    ):
        saying(monkeypatch, client, text)
        (whole,) = answered(client.ask(tools=[GET_TIME], max_tokens=200))
        assert whole["message"]["content"] == content
        calls = whole["message"].get("tool_calls", [])
        assert [json.loads(call["function"]["arguments"]) for call in calls] == ([arguments] if arguments else [])
        assert whole["finish_reason"] == ("tool_calls" if arguments else "stop")
        found = events_of(client.ask(tools=[GET_TIME], max_tokens=200, stream=True))
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in found) == content
    saying(monkeypatch, client, text)
    (whole,) = answered(client.ask(tools=[GET_TIME], tool_choice="none", max_tokens=200))
    assert "<tool_call>" in whole["message"]["content"]
    assert "tool_calls" not in whole["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_content_in_a_form_may_spell_the_beginning_of_a_call(client: Client, monkeypatch, stream: bool):
    of = {"type": "object", "properties": {"note": {"type": "string"}}, "additionalProperties": False}
    body = {"tools": [PING], "response_format": schema(of), "max_tokens": 100, "stream": stream}

    def said(text: str) -> list[dict[str, Any]]:
        saying(monkeypatch, client, text)
        reply = client.ask(**body)
        if not stream:
            return [choice["message"] for choice in answered(reply)]
        return [event["choices"][0]["delta"] for event in events_of(reply)]

    text = '{"note": "<tool_call>{} <tool_call>"}'
    assert "".join(one.get("content") or "" for one in said(text)) == text
    messages = said('<tool_call>{"name": "ping", "arguments": {}}</tool_call>')
    calls = [call["function"] for one in messages for call in one.get("tool_calls", [])]
    assert [call["name"] for call in calls if "name" in call] == ["ping"]
    assert "".join(call["arguments"] for call in calls) == "{}"
    assert not any(one.get("content") for one in messages)


def saying(monkeypatch: pytest.MonkeyPatch, client: Client, text: str) -> None:
    """Make each answer this text, within its grammar."""
    tokenizer = client.engine.loaded.tokenizer
    ids = [*tokenizer.encode(text), min(tokenizer.stop_ids)]

    def chosen(self: Any, logits: Any) -> int:
        said = self.__dict__.setdefault("said", iter(ids))
        wanted = next(said)
        assert logits[wanted] > float("-inf"), tokenizer.decode([wanted])
        return wanted

    monkeypatch.setattr(Sampler, "_chosen", chosen)


def with_template(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """Give the toy model a chat template with a place for tools."""
    toy_model = conftest.toy_model

    def model(family: str) -> Any:
        loaded = toy_model(family)
        tokenizer = HuggingFaceTokenizer(bundled_tokenizer()._tokenizer)
        tokenizer._tokenizer.chat_template = template
        return replace(loaded, tokenizer=tokenizer)

    monkeypatch.setattr(conftest, "toy_model", model)


def with_tokenizer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Give the toy model the tokenizer of a bundled model."""
    toy_model = conftest.toy_model
    folder = files("chunkweave") / "assets" / name
    tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(str(folder)))
    monkeypatch.setattr(conftest, "toy_model", lambda family: replace(toy_model(family), tokenizer=tokenizer))


def test_forms_hold_with_a_tokenizer_that_adds_a_space(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    with_tokenizer(monkeypatch, "reader")
    client = serve()
    towns = ["Halvik", "Lune"]
    text = {"type": "string", "maxLength": 8}
    draw = Random(6)
    for _ in range(5):
        body = {"temperature": draw.choice([0, 0.7, 2]), "seed": draw.randrange(1000), "max_tokens": 120}
        for of, right in (({"enum": towns}, towns.__contains__), (text, lambda value: len(value) <= 8)):
            (choice,) = answered(client.ask(**body, response_format=schema(of)))
            assert right(json.loads(choice["message"]["content"]))
        (choice,) = answered(client.ask(**body, response_format=schema(TOWN)))
        checked(json.loads(choice["message"]["content"]))
        (choice,) = answered(client.ask(**body, tools=[GET_TIME], tool_choice="required", parallel_tool_calls=False))
        checked(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]))


@pytest.mark.parametrize("seed", range(4))
def test_a_grammar_in_error_is_an_error_and_no_answer(client: Client, monkeypatch: pytest.MonkeyPatch, seed: int):
    """The sampler chooses a token that the grammar refuses, at a step that is drawn."""
    draw = Random(seed)
    chosen = Sampler._chosen
    wrong_step = draw.randrange(6)

    def wrongly_chosen(self: Any, logits: Any) -> int:
        self.__dict__["step"] = step = self.__dict__.get("step", -1) + 1
        return draw.choice(logits.isinf().nonzero().flatten().tolist()) if step == wrong_step else chosen(self, logits)

    body = {"response_format": schema(TOWN), "max_tokens": 60}
    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "_chosen", wrongly_chosen)
        failed = client.ask(**body)
        streamed = client.ask(**body, stream=True)
    assert failed.status_code == 500, failed.text
    error = failed.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "form" in error["message"]
    if streamed.status_code == 500:  # before the first text
        assert streamed.json()["error"] == error
    else:
        *events, last = events_of(streamed)
        assert last["error"] == error
        assert all(choice["finish_reason"] is None for event in events for choice in event["choices"])
    checked(json.loads(answered(client.ask(**body))[0]["message"]["content"]))


def last_text(client: Client, prompts: list[list[int]]) -> str:
    """The prompt that was computed last."""
    return client.engine.loaded.tokenizer._tokenizer.decode(prompts[-1])


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"town": "Halvik"}'}}
    ],
}
RESULT = {"role": "tool", "content": "Noon.", "tool_call_id": "c1"}


def test_tools_and_their_messages_are_plain_text_without_a_place_in_the_template(client: Client, prompts):
    body = {"documents": [FERRY], "tools": [GET_TIME, PING], "messages": [QUESTION, CALLED, RESULT]}
    answered(client.ask(**body))
    text = last_text(client, prompts)
    system, _, rest = text.partition("What time is it in Halvik?")
    assert '{"name": "get_time", "description": "Tells the time", "parameters": {"type": "object"' in system
    assert '{"name": "ping"}' in system
    asked, _, behind = rest.partition(FERRY.strip())
    assert '<tool_call>{"name": "get_time", "arguments": {"town": "Halvik"}}</tool_call>' in asked
    assert "<tool_response>Noon.</tool_response>" in behind


def test_a_template_with_a_place_for_tools_renders_them(serve: Serve, monkeypatch: pytest.MonkeyPatch, prompts):
    with_template(monkeypatch, TEMPLATE)
    body = {"documents": [FERRY], "tools": [GET_TIME], "messages": [QUESTION, CALLED, RESULT]}
    client = serve()
    answered(client.ask(**body))
    text = last_text(client, prompts)
    assert text.index("# Tools") < text.index(FERRY.strip()) < text.index("What time")
    assert '<tool_call>{"name": "get_time", "arguments": {"town": "Halvik"}}</tool_call>' in text
    assert text.endswith("<|tool|>\nNoon.</s>\n<|assistant|>\n")


def test_documents_are_found_with_other_tools_than_before(client: Client):
    client.ask(documents=[FERRY * 3], chunkweave={"method": "full-reuse"}, tools=[PING])
    report = client.ask(documents=[FERRY * 3], chunkweave={"method": "full-reuse"}, tools=[GET_TIME]).json()
    assert report["chunkweave"]["reused_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": schema({"not": {"type": "string"}})}, "response_format.json_schema.schema.not"),
        ({"response_format": schema({"type": "string", "format": "color"})}, None),
        ({"response_format": schema({"enum": ["x" * 70_000]})}, "response_format"),
        ({"tools": [{"type": "code"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [PING, PING]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [PING], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [PING], "tool_choice": {"type": "function", "function": {"name": "pong"}}}, "tool_choice"),
    ],
)
def test_wrong_forms_are_refused_by_name(client: Client, body: dict[str, Any], param: str | None):
    refused = client.ask(**body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


STEPS = {
    "properties.uniqueItems": lambda inner: {"type": "object", "properties": {"uniqueItems": inner}},
    "items": lambda inner: {"type": "array", "items": inner},
    "anyOf[1]": lambda inner: {"anyOf": [{"enum": [{"not": 1, "uniqueItems": True}]}, inner]},
}
LACKING = {"uniqueItems": True, "contains": {}, "not": {}, "unevaluatedItems": False, "if": {}}


@pytest.mark.parametrize("seed", range(8))
def test_a_keyword_that_is_not_supported_is_named_with_its_path(client: Client, seed: int):
    draw = Random(seed)
    keyword = draw.choice(list(LACKING))
    steps = draw.choices(list(STEPS), k=draw.randrange(4))
    of: dict[str, Any] = {"type": "array", keyword: LACKING[keyword]}
    for step in reversed(steps):
        of = STEPS[step](of)
    path = ".".join([*steps, keyword])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": of}}}}
    for body, place in (
        ({"response_format": schema(of)}, "response_format.json_schema.schema"),
        ({"tools": [PING, tool], "tool_choice": "required"}, "tools[1].function.parameters.properties.a"),
    ):
        refused = client.ask(**body)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == (f"{place}.{path}", "unsupported_field")
        assert error["message"] == f"not supported: {place}.{path}"


def test_a_grammar_that_is_too_costly_is_refused_and_other_requests_continue(client: Client):
    """Its regular expressions must all match, which would take the compiler years."""
    never = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{number}}}b.*$"} for number in range(40)]}
    refused = client.ask(response_format=schema(never), max_tokens=4)
    assert refused.status_code == 400
    assert "takes more than 2 s to compile" in refused.json()["error"]["message"]
    pattern = {"type": "string", "pattern": "^[ab]{3}$"}
    (choice,) = answered(client.ask(response_format=schema(pattern), max_tokens=9))
    assert set(json.loads(choice["message"]["content"])) <= {"a", "b"}


def test_without_the_library_the_answer_says_what_to_install(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar, "find_spec", lambda _: None)
    for body in ({"response_format": {"type": "json_object"}}, {"tools": [PING]}):
        refused = client.ask(**body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "not_installed")
        assert "[server]" in refused.json()["error"]["message"]
    assert answered(client.ask(response_format={"type": "text"}, max_tokens=2))


def test_grammars_are_compiled_once_for_each_tenant(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []
    compile_ = grammar.GrammarCompiler.compile

    def counted(self: Any, lark: str) -> Any:
        compiled.append(lark)
        return compile_(self, lark)

    monkeypatch.setattr(grammar.GrammarCompiler, "compile", counted)
    client = serve(keys=key_ring())
    for key in ("acme", "acme", "bolt"):
        answered(client.ask(key=KEYS[key], response_format=schema(TOWN), max_tokens=40))
    assert len(compiled) == 2
    grammars = engine_of(client.service)._grammars
    assert isinstance(grammars, Grammars)
    for number in range(40):
        of = {"type": "object", "properties": {f"a{number}": {"type": "boolean"}}, "additionalProperties": False}
        answered(client.ask(key=KEYS["acme"], response_format=schema(of), max_tokens=1))
    answered(client.ask(key=KEYS["acme"], response_format=schema(TOWN), max_tokens=1))
    assert len(compiled) == 43, "the oldest was dropped"


values = st.recursive(
    st.text(max_size=8) | st.sampled_from(["</tool_call>", '"}', "\\", "<tool_call>"]) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def read_calls(pieces: list[str]) -> list[str]:
    """The arguments of the calls in an answer that comes in these pieces."""

    async def events() -> AsyncIterator[ParsedEvent]:
        for number, piece in enumerate(pieces, start=1):
            ended = {"finish_reason": "stop"} if number == len(pieces) else {}
            yield ParsedEvent([{"index": 0, "text": piece, **ended}], None)

    async def read() -> list[str]:
        parsed = ParsedAnswer(events(), AnswerForm("", calls=True))  # type: ignore[arg-type]
        choices = [choice async for event in parsed for choice in event.choices]
        return [call["function"]["arguments"] for choice in choices for call in choice.get("tool_calls", [])]

    return asyncio.run(read())


@given(
    arguments=st.lists(st.dictionaries(st.text(max_size=6), values, max_size=3), min_size=1, max_size=3),
    size=st.integers(1, 40),
    cut=st.integers(0, 30),
)
def test_calls_are_read_whole_however_the_text_is_cut_into_pieces(arguments: list[dict], size: int, cut: int):
    written = [json.dumps(one) for one in arguments]
    text = "\n".join(f'{BEGIN}{{"name": "f", "arguments": {one}}}{END}' for one in written)
    ends = len(written[-1]) + len(END) + 1 if cut else 0  # cut off in the last call's arguments
    text = text[: len(text) - min(cut, ends)]
    calls = read_calls([text[at : at + size] for at in range(0, len(text), size)])
    assert calls[: len(written) - 1] == written[:-1]
    assert written[-1].startswith("".join(calls[len(written) - 1 :]))
    assert cut or calls == written


@pytest.mark.parametrize("odd", ["[" * 990 + "]" * 990, "9" * 5000], ids=["nested deeply", "long number"])
def test_arguments_that_python_does_not_parse_end_where_their_call_ends(odd: str):
    calls = [f'{BEGIN}{{"name": "f", "arguments": {{"a": {value}}}}}{END}' for value in (odd, "1")]
    assert read_calls(["\n".join(calls)]) == [f'{{"a": {odd}}}', '{"a": 1}']
