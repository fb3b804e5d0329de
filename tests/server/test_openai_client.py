"""The real OpenAI client against a real server on loopback."""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Literal

import openai
import pydantic
import pytest

from tests.server.conftest import KEYS, key_ring, listening, toy_service

PASSAGE = "The ferry leaves the northern pier at nine and again at noon. "
MESSAGES = [{"role": "user", "content": "When does the ferry leave?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(toy_service(keys=key_ring(), requests_per_minute=6000.0)) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEYS["acme"], max_retries=0) as client:
        yield client


def test_a_chat(client: openai.OpenAI):
    body = {"documents": [PASSAGE], "chunkweave": {"method": "cacheblend"}}
    completion = client.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=6, temperature=0, extra_body=body
    )
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.prompt_tokens_details.cached_tokens == 0
    assert completion.model_extra["chunkweave"]["method"] == "cacheblend"


def test_embeddings_with_the_clients_own_defaults(client: openai.OpenAI):
    drawn = Random(6)
    texts = [" ".join(drawn.choices(PASSAGE.split(), k=5)) for _ in range(4)]
    encoded = client.embeddings.create(model="text-embedding-3-small", input=texts)
    assert len(encoded.data) == 4
    plain = client.embeddings.create(model="text-embedding-3-small", input=texts, encoding_format="float")
    assert [entry.embedding for entry in plain.data] == [entry.embedding for entry in encoded.data]
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(model="text-embedding-3-small", input=[[drawn.randrange(9999)], [1]])


def test_a_stream_as_the_quickstart_reads_it(client: openai.OpenAI):
    asked = {"model": "toy", "messages": MESSAGES, "max_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *others, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in others) == whole.choices[0].message.content
    assert all(chunk.usage is None for chunk in others)
    assert (last.choices, last.usage.completion_tokens) == ([], 9)
    assert last.model_extra["chunkweave"]["new_tokens"] == 9


def test_streaming_helpers_and_the_asynchronous_client(url: str):
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEYS["acme"]) as client:
            create = client.chat.completions.create
            told = await asyncio.gather(
                *(create(model="toy", messages=MESSAGES, max_tokens=4, temperature=0) for _ in range(6))
            )
            assert len({one.choices[0].message.content for one in told}) == 1
            plain = await client.completions.create(model="toy", prompt="Who?", max_tokens=4)
            assert plain.usage.completion_tokens == 4
            assert [model.id async for model in client.models.list()] == ["toy"]

    asyncio.run(main())


def test_a_stream_that_is_left(client: openai.OpenAI):
    with client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=300, stream=True) as stream:
        next(iter(stream))
    assert client.models.list().data[0].id == "toy"


def test_errors_are_the_clients_own(client: openai.OpenAI, url: str):
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="frequency_penalty") as refused:
        create(model="toy", messages=MESSAGES, frequency_penalty=1)
    assert (refused.value.param, refused.value.code) == ("frequency_penalty", "unsupported_field")
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=url, api_key="wrong") as stranger:
        stranger.models.list()


class Where(pydantic.BaseModel):
    town: Literal["Halvik", "Lune"]
    open: bool


def test_parse_returns_objects(client: openai.OpenAI):
    parse = client.chat.completions.parse
    found = parse(model="toy", messages=MESSAGES, response_format=Where, n=2, temperature=1, max_tokens=60)
    assert all(isinstance(choice.message.parsed, Where) for choice in found.choices)
    tools = [openai.pydantic_function_tool(Where)]
    called = parse(model="toy", messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Where)
    with client.chat.completions.stream(
        model="toy", messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Where)
    messages = [*MESSAGES, final.choices[0].message.to_dict()]
    messages.append({"role": "tool", "tool_call_id": final.choices[0].message.tool_calls[0].id, "content": "Halvik"})
    assert client.chat.completions.create(model="toy", messages=messages, tools=tools, max_tokens=2).choices


def test_log_probabilities_and_several_answers(client: openai.OpenAI):
    create = client.chat.completions.create
    found = create(model="toy", messages=MESSAGES, logprobs=True, top_logprobs=3, n=2, max_tokens=4, seed=1)
    for choice in found.choices:
        assert [len(one.top_logprobs) for one in choice.logprobs.content] == [3] * 4
