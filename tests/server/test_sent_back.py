"""What the server wrote, it takes back, with hints of clients in messages, parts and calls, over both backends.

Conversations are drawn: each answer, whole or streamed, ended or cut off, with or without calls, is sent again in the
next request with a hint or a null added to it.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from chunkweave.models.loading import bundled_tokenizer
from chunkweave_server.fields import UNKNOWN_HEADER
from chunkweave_server.requests import CalledFunction
from chunkweave_server.service import Service
from tests.chat_tools import TEMPLATE, called
from tests.chat_tools import said as result
from tests.server import conftest
from tests.server.conftest import audit, events_of, listening, toy_service, vllm_service
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import Front
from tests.server.test_structured import GET_TIME, with_template

FERRY = "The ferry leaves the northern pier at nine and again at noon. "
SERVERS = ["engine", "engine, tools in the template", "vllm"]
DRAWN = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}

Message = dict[str, Any]


def said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


QUESTION = said("user", "When does the ferry leave?")
ANSWER = said("assistant", "At nine.")
NEXT = said("user", "And then?")


@contextmanager
def asking(service: Service) -> Iterator[Front]:
    with listening(service) as server, Front(base_url=server.url, timeout=120) as client:
        client.service = service
        yield client
        audit(service)


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if request.param == "vllm":
            reports = str(tmp_path_factory.mktemp("vllm") / "reports")
            fake = stack.enter_context(FakeVllm(reports, parses=3, reasoning="Let me see."))
            service = vllm_service(fake, chat_template=TEMPLATE)
        else:
            patch.setattr(conftest, "toy_model", partial(conftest.toy_model, max_position_embeddings=4096))
            if request.param != "engine":
                with_template(patch, TEMPLATE)
            service = toy_service()
        yield stack.enter_context(asking(service))


def reported(reply: Any) -> list[str]:
    assert reply.status_code == 200, reply.text
    header = reply.headers.get(UNKNOWN_HEADER)
    return header.split(", ") if header else []


# The smallest inputs that were refused.

HINTS = {
    "cache_control": {"type": "ephemeral"},
    "reasoning_content": "Let me see.",
    "reasoning": "Let me see.",
    "thinking_blocks": [{"type": "thinking", "thinking": "Let me see.", "signature": "c2ln"}],
    "provider_specific_fields": {"refusal": None},
    "id": "msg_1",
    "status": "completed",
    "timestamp": 1764300000.5,
    "images": [],
    "files": [],
}
DUMPED = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
TAKEN = {
    "a call that is cut off": ([QUESTION, called('{"text'), NEXT], []),
    "its result": ([QUESTION, called('{"text'), result("It was cut off.")], []),
    "a later turn": ([QUESTION, called('{"town": "Hal'), result("?"), ANSWER, NEXT, ANSWER, NEXT], []),
    "a call that is no object": ([QUESTION, called("[7"), NEXT], []),
    "a call with half of a surrogate pair": ([QUESTION, called('{"town": "\\ud800"}'), NEXT], []),
    "a call that is nested too deeply": ([QUESTION, called('{"":' * 70), NEXT], []),
    "a call without arguments": ([QUESTION, called(None), NEXT], []),
    "two messages of calls": ([QUESTION, called(), called(), result("Noon.")], []),
    "null of the assistant": ([QUESTION, said("assistant", None), NEXT], []),
    "null of a tool": ([QUESTION, called(), said("tool", None, tool_call_id="call-1")], []),
    "an empty answer": ([QUESTION, said("assistant", ""), NEXT], []),
    "an answer without parts": ([QUESTION, said("assistant", []), NEXT], []),
    "an empty result": ([QUESTION, called(), result("")], []),
    "what the client's class adds": ([QUESTION, {**ANSWER, **DUMPED}, NEXT], []),
    "a refusal": ([QUESTION, said("assistant", None, refusal="I cannot say."), NEXT], []),
    "a hint in the question": ([{**QUESTION, "cache_control": {}}], ["messages[0].cache_control"]),
    "a hint in a part": (
        [said("user", [{"type": "text", "text": "When?", "cache_control": {"type": "ephemeral"}}])],
        ["messages[0].content[0].cache_control"],
    ),
    "hints before messages are joined": (
        [said("system", "Be brief."), said("system", "Be kind.", id="a"), {**QUESTION, "id": "b"}, {**NEXT, "id": "c"}],
        ["messages[1].id", "messages[2].id", "messages[3].id"],
    ),
    **{
        f"{name} of an answer": ([QUESTION, {**ANSWER, name: HINTS[name]}, NEXT], [f"messages[1].{name}"])
        for name in HINTS
    },
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_was_refused_is_taken(server: Front, name: str):
    messages, ignored = TAKEN[name]
    reply = server.ask(messages=messages, documents=[FERRY])
    assert reported(reply) == ignored
    without = [{name: value for name, value in message.items() if name not in HINTS} for message in messages]
    plain = server.ask(messages=without, documents=[FERRY]).json()
    assert reply.json()["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_a_call_is_in_the_prompt_up_to_where_it_was_cut_off(server: Front, prompts: list[list[int]]):
    server.ask(messages=[QUESTION, called('{"town": "Hal'), NEXT], documents=[FERRY])
    text = bundled_tokenizer()._tokenizer.decode(prompts[-1])
    assert '<tool_call>{"name": "get_time", "arguments": {"town": "Hal"}}</tool_call>' in text


OBJECTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    ),
    max_size=4,
)


@settings(deadline=None, derandomize=True, database=None)
@given(st.data(), OBJECTS, st.booleans())
def test_arguments_are_read_as_far_as_they_are_an_object(data: st.DataObject, arguments: Message, ascii_only: bool):
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    assert CalledFunction(name="f", arguments=text).parsed == arguments
    cut = CalledFunction(name="f", arguments=text[: data.draw(st.integers(1, len(text)))]).parsed
    assert cut.keys() <= arguments.keys()
    for name in [*cut][:-1]:
        assert cut[name] == arguments[name]


@settings(deadline=None, derandomize=True, database=None)
@given(st.text())
def test_arguments_of_any_text_are_an_object(text: str):
    json.dumps(CalledFunction(name="f", arguments=text).parsed)


# Conversations.


def places(messages: list[Message]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Messages, their parts, calls and functions by their paths."""
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        yield path, message
        if isinstance(message.get("content"), list):
            yield from ((f"{path}.content[{at}]", part) for at, part in enumerate(message["content"]))
        for at, call in enumerate(message.get("tool_calls") or []):
            yield f"{path}.tool_calls[{at}]", call
            yield f"{path}.tool_calls[{at}].function", call["function"]


def hints_in(messages: list[Message]) -> list[str]:
    return [
        f"{path}.{name}"
        for path, place in places(messages)
        for name, value in place.items()
        if value is not None and (name in HINTS or name.startswith("x-")) and not (name == "id" and "function" in place)
    ]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20).filter(str.strip)
CONTENTS = TEXTS | st.lists(TEXTS, min_size=1, max_size=3).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)
EMPTY = st.sampled_from([None, "", []])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)


def add_a_hint(data: st.DataObject, messages: list[Message]) -> None:
    """Add a hint at a drawn place, or a null, or a field that the client's class adds."""
    _, place = data.draw(st.sampled_from([*places(messages)]))
    names = st.sampled_from([*HINTS]) | st.text("abcdefgh_.-0123456789", max_size=12).map("x-{}".format)
    name = data.draw(names.filter(lambda name: name not in place))
    place[name] = [] if name in ("images", "files") else data.draw(VALUES)
    if "role" in place:
        place.update(
            (name, value) for name, value in data.draw(st.just({}) | st.just(DUMPED)).items() if name not in place
        )


def ask(data: st.DataObject, server: Front, messages: list[Message]) -> tuple[Message, tuple[Any, ...]]:
    """The answer as a client would send it back, and how it came."""
    body: dict[str, Any] = {"messages": messages, "documents": [FERRY], "temperature": 0}
    choice = data.draw(
        st.sampled_from([None, "auto", "required", {"type": "function", "function": {"name": "get_time"}}])
    )
    cut_off, stream = data.draw(st.booleans()), data.draw(st.booleans())
    if choice is not None:
        body |= {"tools": [GET_TIME], "tool_choice": choice, "parallel_tool_calls": False}
    body["max_tokens"] = data.draw(st.integers(1, 48)) if cut_off else 70
    if not cut_off:
        body |= {"min_p": 0, **({} if choice else {"stop": [" ", "e", "a"]})}
    reply = server.ask(**body, stream=stream)
    assert reported(reply) == hints_in(messages)
    if stream:
        message, ends = merged(events_of(reply))
    else:
        message, ends = reply.json()["choices"][0]["message"], reply.json()["choices"][0]["finish_reason"]
    if data.draw(st.booleans()):
        message = ChatCompletionMessage.model_validate(message).model_dump()
    return message, (ends, bool(message.get("tool_calls")), stream)


def merged(events: list[dict[str, Any]]) -> tuple[Message, str]:
    message: Message = {"role": "assistant", "content": "", "tool_calls": []}
    ends = None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["tool_calls"] += delta.get("tool_calls") or []
            if delta.get("reasoning"):
                message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
            ends = choice["finish_reason"] or ends
    return message, str(ends)


def test_each_answer_is_taken_back(server: Front):
    ways: set[tuple[Any, ...]] = set()
    cut_off: list[str] = []

    @settings(max_examples=20, **DRAWN)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        messages = [said("system", data.draw(CONTENTS))] if data.draw(st.booleans()) else []
        messages.append(said("user", data.draw(CONTENTS)))
        for _ in range(data.draw(st.integers(2, 3))):
            message, way = ask(data, server, messages)
            ways.add(way)
            calls = message.get("tool_calls") or []
            cut_off.extend(call["function"]["arguments"] for call in calls if way[0] == "length")
            messages.append(message)
            if calls and data.draw(st.booleans()):
                results = (said("tool", data.draw(CONTENTS | EMPTY), tool_call_id=call["id"]) for call in calls)
                messages.extend(results)
            if messages[-1]["role"] == "assistant" or data.draw(st.booleans()):
                messages.append(said("user", data.draw(CONTENTS)))
            add_a_hint(data, messages)
        ask(data, server, messages)

    run()
    assert {(ends, stream) for ends, _, stream in ways} >= {(e, s) for e in ("stop", "length") for s in (True, False)}
    assert {(calls, stream) for _, calls, stream in ways} == {(c, s) for c in (True, False) for s in (True, False)}
    assert any(not text.endswith("}") for text in cut_off)


UNREADABLE = [
    *("attachments", "audio", "audio_url", "experimental_attachments", "file", "files", "function_call"),
    *("image", "image_url", "images", "input_audio", "video", "video_url", "videos"),
]


def test_contents_that_cannot_be_read_are_refused_by_their_path(server: Front):
    @settings(max_examples=20, **DRAWN)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        messages = [said(role, data.draw(CONTENTS)) for role in ("user", "assistant", "user")]
        messages[1] = data.draw(st.sampled_from([messages[1], called('{"text')]))
        messages = json.loads(json.dumps(messages))
        add_a_hint(data, messages)
        path, place = data.draw(st.sampled_from([*places(messages)]))
        name = data.draw(st.sampled_from(UNREADABLE))
        place[name] = data.draw(VALUES.filter(bool))
        refused = server.ask(messages=messages, documents=[FERRY])
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == (f"{path}.{name}", "unsupported_field")
        assert f"{path}.{name}" in error["message"]
        place[name] = data.draw(EMPTY)
        assert server.ask(messages=messages, documents=[FERRY]).status_code == 200

    run()


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "file", "file": {}}])
def test_a_part_of_another_type_is_refused_by_its_path(server: Front, part: dict[str, Any]):
    messages = [QUESTION, ANSWER, said("user", [{"type": "text", "text": "And this?"}, part])]
    refused = server.ask(messages=messages, documents=[FERRY])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[2].content[1].type")
