"""What usual clients send: fields that change nothing, unknown ones, long answers, and messages in any sequence."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunkweave_server.fields import CAPPED_HEADER, UNKNOWN_HEADER, WITHOUT_EFFECT
from chunkweave_server.requests import Message, joined_messages
from tests.server.conftest import Client, Serve, report_of

FERRY = "The ferry leaves the northern pier at nine and again at noon. "
QUESTION = "When does the ferry leave?"


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.fixture
def prompt_of(client: Client, prompts: list[list[int]]) -> Callable[..., list[int]]:
    """Asks, and returns the prompt that the messages became."""

    def asked(messages: list[dict[str, Any]]) -> list[int]:
        report_of(client.ask(messages=messages, documents=[FERRY], max_tokens=1))
        return prompts[-1]

    return asked


CHANGE_NOTHING = {
    "metadata": {"run": "7"},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": False,
    "user": "u-1",
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "modalities": ["text"],
}


@pytest.mark.parametrize(("obfuscated", "status"), [(False, 200), (True, 400)])
def test_a_stream_is_not_padded(client: Client, obfuscated: bool, status: int):
    options = {"include_usage": True, "include_obfuscation": obfuscated}
    reply = client.ask(documents=[FERRY], stream=True, stream_options=options)
    assert reply.status_code == status, reply.text


def test_fields_that_change_nothing_are_accepted_and_not_passed_on(client: Client):
    plain = client.ask(documents=[FERRY]).json()
    reply = client.ask(documents=[FERRY], **CHANGE_NOTHING)
    assert reply.status_code == 200, reply.text
    assert UNKNOWN_HEADER not in reply.headers
    assert reply.json()["choices"][0]["message"] == plain["choices"][0]["message"]
    if client.fake is not None:
        assert client.fake.seen[-1].keys().isdisjoint(WITHOUT_EFFECT)


def test_unknown_fields_are_accepted_and_named(client: Client):
    reply = client.ask(documents=[FERRY], made_up=1, enable_magic={"a": []})
    assert reply.status_code == 200, reply.text
    assert reply.headers[UNKNOWN_HEADER] == "made_up, enable_magic"
    refused = client.ask(documents=[FERRY], chunkweave={"made_up": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chunkweave")
    stream = client.ask(documents=[FERRY], made_up=1, stream=True)
    assert stream.headers[UNKNOWN_HEADER] == "made_up"
    assert "data: [DONE]" in stream.text


def test_the_header_of_unknown_fields_is_bounded_and_clean(client: Client):
    names = {f"field-{number}" + "x" * 2000: 1 for number in range(40)}
    value = client.ask(documents=[FERRY], **{"a\r\nset-cookie: b=1": 1, "ü": 1}, **names).headers[UNKNOWN_HEADER]
    assert value.startswith("a??set-cookie??b?1, ?, field-0xxx")
    assert value.endswith(", and 26 more")
    assert len(value) < 1200


def test_a_longer_answer_than_allowed_is_capped_with_a_header(serve: Serve):
    client = serve(max_answer_tokens=5)
    for name in ("max_tokens", "max_completion_tokens"):
        reply = client.ask(documents=[FERRY], **{"max_tokens": None, name: 4096})
        assert reply.status_code == 200, reply.text
        assert reply.headers[CAPPED_HEADER] == "5"
        assert reply.json()["usage"]["completion_tokens"] <= 5
    assert CAPPED_HEADER not in client.ask(documents=[FERRY], max_tokens=5).headers


@pytest.mark.parametrize(
    ("messages", "same"),
    [
        (
            [said("system", "Be brief."), said("developer", "Be kind."), said("user", QUESTION)],
            [said("system", "Be brief.\n\nBe kind."), said("user", QUESTION)],
        ),
        ([said("user", "Look."), said("user", QUESTION)], [said("user", f"Look.\n\n{QUESTION}")]),
        (
            [said("user", "Hi"), said("assistant", "Hello."), said("system", "Be brief."), said("user", QUESTION)],
            [said("user", "Hi"), said("assistant", "Hello."), said("user", f"Be brief.\n\n{QUESTION}")],
        ),
        ([said("user", QUESTION), said("system", "Be brief.")], [said("user", f"{QUESTION}\n\nBe brief.")]),
        (
            [said("user", "Hi"), said("assistant", "Hello."), said("assistant", "Yes?"), said("user", QUESTION)],
            [said("user", "Hi"), said("assistant", "Hello.\n\nYes?"), said("user", QUESTION)],
        ),
        ([said("user", QUESTION), said("assistant", "")], [said("user", QUESTION)]),
    ],
)
def test_messages_in_a_row_are_joined(prompt_of, messages, same):
    assert prompt_of(messages) == prompt_of(same)


def test_a_last_message_of_the_assistant_is_continued(prompt_of):
    plain = prompt_of([said("user", QUESTION)])
    continued = prompt_of([said("user", QUESTION), said("assistant", "The ferry leaves")])
    assert continued[: len(plain)] == plain
    assert len(continued) > len(plain)


@pytest.mark.backend("engine")
def test_an_answer_continues_the_text_as_transformers_does(client: Client, prompts):
    messages = [said("user", QUESTION), said("assistant", "The ferry leaves")]
    reply = client.ask(messages=messages, documents=[FERRY], max_tokens=6)
    model, tokenizer = client.engine.loaded.model.model, client.engine.loaded.tokenizer
    ids = list(prompts[-1])
    assert tokenizer.decode(ids).endswith("The ferry leaves")
    for _ in range(6):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert tokenizer.decode(ids).endswith("The ferry leaves" + reply.json()["choices"][0]["message"]["content"])


@pytest.mark.backend("engine")
def test_joining_many_messages_takes_time_in_proportion(client: Client):
    """10,000 messages of 400 characters in a row: each character is copied a few times, not thousands."""
    messages = [Message(role="user", content="x" * 400) for _ in range(10_000)]
    started = time.perf_counter()
    (one,) = joined_messages(messages)
    assert time.perf_counter() - started < 1.0
    assert len(one.text) == 10_000 * 402 - 2
