"""A client's mistake is a 400 that names the field; only a lost connection or vLLM's own failure is a 502."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from chunkweave_server.vllm_backend.upstream import refusal
from tests.chat_tools import TEMPLATE, TOOL
from tests.server.conftest import Client, bearer, wait_until
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import DOCUMENTS, Front, running_front

MESSAGES = [{"role": "user", "content": "When does the ferry leave?"}]
OURS = {"message", "type", "param", "code"}
FAILED = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
"""What vLLM says where a schema has no end, `{"$ref": "#"}`, as a status or as an event of a stream."""
VALIDATION = (
    "2 validation errors:\n  {'type': 'string_unicode', 'loc': 'body.cache_salt', 'msg': 'Input should be a valid "
    "string', 'input': 'x'}\n  {'type': 'missing', 'loc': 'body.prompt', 'msg': 'Field required'}"
)


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == OURS
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["type"] in ("invalid_request_error", "not_found_error", "server_error", "rate_limit_error")
    return error


def post(client: Any, body: dict[str, Any], key: str | None = None, path: str = "/v1/chat/completions") -> Any:
    raw = json.dumps({"messages": MESSAGES, "max_tokens": 2, **body}).replace('"1e999"', "1e999").encode()
    return client.post(path, content=raw, headers={"content-type": "application/json", **bearer(key)})


@pytest.mark.parametrize("documents", [["a"], []], ids=["documents", "plain"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1e999"], ids=str)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (lambda value: {"logit_bias": {"5": value}}, "logit_bias"),
        (lambda value: {"min_p": value}, "min_p"),
        (lambda value: {"temperature": value}, "temperature"),
        (lambda value: {"presence_penalty": value}, "presence_penalty"),
        (lambda value: {"tools": [TOOL, {"more": {"most": value}}]}, "tools"),
        (lambda value: {"chunkweave": {"method": f"cachecraft:alpha={value}"}}, "chunkweave.method"),
    ],
    ids=["logit_bias", "min_p", "temperature", "presence_penalty", "tools", "alpha"],
)
def test_a_number_that_is_not_finite_is_refused_by_its_name(
    client: Client, body: Any, param: str, value: Any, documents: list[str]
):
    error = error_of(post(client, {**body(value), "documents": documents}), 400)
    assert error["param"].startswith(param)
    assert param.rpartition(".")[2] in error["message"]


@pytest.mark.backend("vllm")
def test_names_that_a_text_only_looks_like_are_no_mistake(client: Client):
    texts = "NaN, Infinity, 1e999 and \\ud83d\\ude00"
    assert post(client, {"documents": [texts], "logit_bias": {"5": 1.5}, "stop": "\U0001f600"}).status_code == 200


@pytest.fixture
def two(fakes: tuple[FakeVllm, FakeVllm]) -> Iterator[tuple[Front, FakeVllm, FakeVllm]]:
    with running_front(*fakes) as front:
        yield front, *fakes


def events(*pieces: str) -> Response:
    return StreamingResponse(iter(pieces), media_type="text/event-stream")


def as_status(error: dict[str, Any]) -> Response:
    return JSONResponse(error, error["error"]["code"])


def as_event(error: dict[str, Any]) -> Response:
    return events(f"data: {json.dumps(error)}\n\n", "data: [DONE]\n\n")


def as_nonsense(_: dict[str, Any]) -> Response:
    return events("data: nonsense\n\n")


@pytest.mark.parametrize("behave", [as_status, as_event, as_nonsense])
def test_what_a_healthy_server_fails_at_is_not_sent_to_another(two: tuple[Front, FakeVllm, FakeVllm], behave: Any):
    front, one, other = two
    one.behave = other.behave = lambda _: behave(FAILED)
    body = {"documents": DOCUMENTS, "structured_outputs": {"json": {"$ref": "#"}}}
    error = error_of(front.ask(**body), 502)
    assert error["code"] == "upstream_error"
    assert "Internal" not in error["message"]
    assert len(one.seen) + len(other.seen) == 1
    assert error_of(front.ask(**body, stream=True), 502)["code"] == "upstream_error"
    one.behave = other.behave = None
    assert front.ask(documents=DOCUMENTS).status_code == 200
    assert front.service.backend.context.retries == 0
    assert all(replica.up for replica in front.service.backend.fleet.replicas)


@pytest.mark.parametrize("behave", [as_status, as_event])
def test_what_a_server_fails_at_that_is_not_healthy_any_more_is_sent_to_another(
    two: tuple[Front, FakeVllm, FakeVllm], behave: Any
):
    front, one, other = two
    replicas = front.service.backend.fleet.replicas
    for broken, whole in ((one, other), (other, one)):
        broken.behave, broken.healthy, whole.behave, whole.healthy = lambda _: behave(FAILED), False, None, True
        assert front.ask(documents=DOCUMENTS).status_code == 200
        broken.healthy = True
        wait_until(lambda: all(replica.up for replica in replicas))  # the watcher may have seen that it was not


@pytest.mark.parametrize("behave", [as_status, as_event])
def test_what_vllm_refuses_is_the_clients_mistake_in_its_words(two: tuple[Front, FakeVllm, FakeVllm], behave: Any):
    front, one, other = two
    refused = {"message": "no such token", "type": "BadRequestError", "param": "body.logit_bias", "code": 400}
    one.behave = other.behave = lambda _: behave({"error": refused})
    error = error_of(front.ask(documents=DOCUMENTS, logit_bias={"999999": 1}), 400)
    assert (error["message"], error["param"]) == ("no such token", "logit_bias")
    assert len(one.seen) + len(other.seen) == 1


def test_a_parser_that_fails_is_no_lost_server(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    async def fails(self: FakeVllm, request: Any) -> Response:
        return JSONResponse(FAILED if await request.json() else {}, 500 if await request.json() else 400)

    monkeypatch.setattr(FakeVllm, "_parse", fails)
    with FakeVllm(str(tmp_path / "reports")) as vllm, running_front(vllm, chat_template=TEMPLATE) as front:
        assert error_of(front.ask(documents=DOCUMENTS, tools=[TOOL]), 502)["code"] == "upstream_error"


@pytest.mark.parametrize(
    ("reply", "status", "expected"),
    [
        (
            {"error": {"message": VALIDATION, "type": "Bad Request", "param": "x", "code": 400}},
            400,
            ("invalid_request_error", "cache_salt", None, "cache_salt: Input should be a valid string"),
        ),
        (
            {"error": {"message": "min_p must be in [0, 1]", "param": None, "code": 400}},
            400,
            ("invalid_request_error", "min_p", None, "min_p must be in [0, 1]"),
        ),
        ({"detail": "Not Found"}, 404, ("not_found_error", None, None, "Not Found")),
        ({"object": "error", "message": "no"}, 422, ("invalid_request_error", None, None, "no")),
        (FAILED, 500, ("server_error", None, "upstream_error", None)),
        ("Trace of /home/x.py", 500, ("server_error", None, "upstream_error", None)),
        ({"error": {"message": "slow down"}}, 429, ("rate_limit_error", None, None, "slow down")),
    ],
    ids=["validation", "no param", "detail", "message alone", "failed", "no JSON", "later"],
)
def test_vllms_errors_are_handed_on_in_our_form(vllm: FakeVllm, reply: Any, status: int, expected: tuple[Any, ...]):
    headers = {"retry-after": "7"} if status == 429 else {}
    kind = PlainTextResponse if isinstance(reply, str) else JSONResponse
    vllm.behave = lambda _: kind(reply, status, headers)
    with running_front(vllm) as front:
        response = front.post("/v1/completions", json={"prompt": "plain"})
    error = error_of(response, status)
    *known, message = expected
    assert [error["type"], error["param"], error["code"]] == known
    assert message is None or error["message"] == message
    assert "/home" not in error["message"]
    assert response.headers.get("retry-after") == headers.get("retry-after")


def test_errors_in_streams_that_are_handed_through_are_in_our_form(vllm: FakeVllm):
    failed, first = f"data: {json.dumps(FAILED)}\n\n", 'data: {"choices": [{"text": "\\n \\"error\\""}]}\n\n'
    refused = 'data: {"error": {"message": "bad", "param": "body.n", "code": 400}}\n\n'
    pieces = [
        first,
        first[:9],
        first[9:] + failed[:11],
        failed[11:30],
        failed[30:-1],
        "\n" + refused,
        "data: [DONE]\n\n",
    ]
    vllm.behave = lambda _: events(*pieces)
    with running_front(vllm) as front:
        text = front.post("/v1/completions", json={"prompt": "plain", "stream": True, "max_tokens": 1}).text
    lines = [line for line in text.split("\n") if line]
    assert lines[:2] == [first.strip()] * 2
    assert lines[-1] == "data: [DONE]"
    errors = [json.loads(line.removeprefix("data: "))["error"] for line in lines[2:-1]]
    assert [(one["type"], one["param"], one["code"]) for one in errors] == [
        ("server_error", None, "upstream_error"),
        ("invalid_request_error", "n", None),
    ]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_another_kind_is_told_what_it_has_to_be(client: Client, kind: str):
    """A form is all that a page of another site may send."""
    body = b'{"prompt": "x", "messages": [], "documents": ["x"]}'
    for path in ("completions", "chat/completions", "cache/clear", "cache/warm"):
        reply = client.post(f"/v1/{path}", content=body, headers={"content-type": kind})
        assert reply.status_code == 400
        assert "application/json" in reply.json()["error"]["message"]


@pytest.mark.timed
def test_a_long_message_of_vllms_is_not_searched_for_long():
    begun_s = time.perf_counter()
    refusal(404, json.dumps({"error": {"message": "'loc': '', 'msg': \"" * 3000, "code": 404}}).encode())
    assert time.perf_counter() - begun_s < 0.2


@pytest.mark.timed
def test_tools_that_no_context_holds_are_refused_before_they_are_rendered(client: Client, server_backend: str):
    tools = [{"type": "function", "function": {"name": "f", "description": "<" * 2_000_000}}]
    begun_s = time.perf_counter()
    reply = client.ask(documents=["x"], tools=tools)
    assert reply.status_code == 400
    assert time.perf_counter() - begun_s < 2
