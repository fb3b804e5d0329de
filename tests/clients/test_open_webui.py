"""Open WebUI is too large to install here: these are the calls that it makes with `examples/open_webui.env`.

Its connection takes `GET /models`; a chat is streamed with `include_usage`, retrieved texts in a template of its own
before the question; titles, tags and queries are asked without a stream and with `max_completion_tokens`.
"""

import json
import random

import httpx
import pytest

from tests.clients.chains import QUESTION, passages
from tests.clients.conftest import EXAMPLES

HEADERS = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-Chat-Id": "7"}
TEMPLATE = """### Task:
Answer the query from the context, with inline citations such as [id] where a <source> tag has an id (<source id="1">).

### Guidelines:
- If you don't know the answer, say so.
- Answer in the language of the query.
- Do not use XML tags in your answer.

<context>
{context}
</context>
"""
TASK = """### Task:
Write a title of at most five words for the chat.

### Output:
JSON format: {{ "title": "the title" }}

### Chat History:
<chat_history>
USER: {question}
</chat_history>"""


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    lines = (EXAMPLES / "open_webui.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def client(server, settings):
    url = server("open_webui.env")
    assert httpx.URL(settings["OPENAI_API_BASE_URL"]).path == httpx.URL(url).path
    with httpx.Client(base_url=url, headers=HEADERS, timeout=300) as client:
        yield client


def chat(client: httpx.Client, content: str) -> tuple[str, dict]:
    """The text and the usage of a chat, read as the page does: line by line, up to `[DONE]`."""
    messages = [{"role": "user", "content": content}]
    body = {"model": "smollm2", "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"temperature": 0, "max_tokens": 8, "params": {}, "chat_id": "7", "session_id": "s"}
    text, usage = "", {}
    with client.stream("POST", "/chat/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in filter(None, reply.iter_lines()):
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return text, usage
            event = json.loads(data)
            usage = event.get("usage") or usage
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    raise AssertionError("the stream ended without [DONE]")


def test_the_model_is_listed(client):
    assert [model["id"] for model in client.get("/models").json()["data"]] == ["smollm2"]


def test_retrieved_sources_are_reused_at_other_ranks(client):
    """A source's tag has its rank, so only the text behind it is the same."""
    sources = [(f"notes-{number}.md", one.page_content) for number, one in enumerate(passages(6))]
    shares = []
    for order in (sources, random.Random(0).sample(sources, len(sources))):
        tags = (f'<source id="{rank}" name="{name}">{text}</source>' for rank, (name, text) in enumerate(order, 1))
        text, usage = chat(client, f"{TEMPLATE.format(context=chr(10).join(tags))}\n{QUESTION}")
        assert text
        shares.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    assert shares[0] < 0.1
    assert shares[1] > 0.65


def test_tasks_are_answered_without_a_stream(client):
    messages = [{"role": "user", "content": TASK.format(question=QUESTION)}]
    body = {"model": "smollm2", "messages": messages, "stream": False, "max_completion_tokens": 16}
    reply = client.post("/chat/completions", json={**body, "metadata": {"task": "title_generation", "chat_id": None}})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"]


def test_knowledge_is_embedded(client, settings):
    assert settings["RAG_EMBEDDING_ENGINE"] == "openai"
    texts = [one.page_content for one in passages(3)]
    reply = client.post("/embeddings", json={"input": texts, "model": settings["RAG_EMBEDDING_MODEL"]})
    assert reply.status_code == 200, reply.text
    assert [len(one["embedding"]) > 100 for one in reply.json()["data"]] == [True] * 3
