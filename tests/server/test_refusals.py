"""Requests that no client library would send: refused in our own words, with nothing of the server's inside."""

import json
import re

import pytest

from tests.server.conftest import KEYS, Client, Serve, bearer, key_ring

HALF = "\ud800"
TEXT = '{"prompt": "\u2200", "documents": ["x"]}'
MESSAGES = [{"role": "user", "content": "When does the ferry leave?"}]
INSIDE = re.compile(r"0x[0-9a-f]{4}|function|validator|<class|Traceback|pydantic|UploadFile|sys\.|extract fields")


def error_of(response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert INSIDE.search(f"{error['message']} {error['param']}") is None, error
    assert len(error["message"]) < 1100
    return error


def post(client: Client, path: str, body, key: str | None = None) -> object:
    headers = {"content-type": "application/json", **bearer(key)}
    return client.post(path, content=json.dumps(body).encode(), headers=headers)


def ask(client: Client, **body) -> object:
    return post(client, "/v1/chat/completions", {"messages": MESSAGES, "documents": ["a"], "max_tokens": 1, **body})


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    "body",
    [
        {"chunkweave": {HALF: 1}},
        {"chunkweave": {"method": HALF}},
        {"chunkweave": {"corpus": HALF}},
        {"documents": [{"text": "a", HALF: 1}]},
        {"messages": [{"role": "user", "content": [{"type": HALF, "text": "a"}]}]},
        {"stream": True, "stream_options": {HALF: 1}},
        {"model": HALF},
        {"bad_words": [HALF]},
        {"cache_salt": HALF},
        {"x\udfff": 1},
    ],
)
@pytest.mark.parametrize("documents", [["a"], []], ids=["documents", "plain"])
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "open"])
def test_half_a_surrogate_pair_is_refused_wherever_it_is(serve: Serve, body: dict, documents: list[str], keys: bool):
    client = serve(keys=key_ring()) if keys else serve()
    asked = {"messages": MESSAGES, "documents": documents, **body}
    error_of(post(client, "/v1/chat/completions", asked, KEYS["acme"] if keys else None))


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"stop": 1}, "stop must be a text or a list", "stop"),
        ({"stop": [1]}, "stop[0] must be a text", "stop[0]"),
        ({"stop": ""}, "stop must have at least 1 character", "stop"),
        ({"stop": ["a", ""]}, "stop[1] must have at least 1 character", "stop[1]"),
        ({"stop": "\ud800"}, "stop must be valid Unicode: it has half of a surrogate pair", "stop"),
        ({"documents": [1]}, "documents[0] must be a text or an object", "documents[0]"),
        ({"documents": [{"text": 1}]}, "documents[0].text must be a text", "documents[0].text"),
        ({"documents": [{"title": "x"}]}, "documents[0].text: Field required", "documents[0].text"),
        ({"documents": {"text": "a"}}, "documents must be a list", "documents"),
        ({"n": 0}, "n must be greater than or equal to 1", "n"),
        ({"n": "1"}, "n must be a whole number", "n"),
        ({"stream": 1}, "stream must be true or false", "stream"),
        ({"chunkweave": 1}, "chunkweave must be an object", "chunkweave"),
        ({"chunkweave": {"order": "any"}}, "chunkweave.order must be 'free' or 'fixed'", "chunkweave.order"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]},
            "messages[0].content[0].type must be 'text'",
            "messages[0].content[0].type",
        ),
        ({"chunkweave": {"method": "x" * 5000}}, None, "chunkweave.method"),
    ],
)
def test_a_wrong_field_is_named_as_the_client_wrote_it(client: Client, body: dict, said: str | None, param: str):
    error = error_of(ask(client, **body))
    assert error["param"] == param
    assert said in (None, error["message"])


def test_a_misspelt_field_of_ours_is_refused_with_the_one_that_is_close(client: Client):
    error = error_of(ask(client, chunkweave={"metod": "epic"}))
    assert "of chunkweave: metod (did you mean method?); there are" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"{no", id="broken"),
        pytest.param(b"", id="empty"),
        pytest.param(b'{"prompt": "\xff"}', id="no UTF-8"),
        pytest.param(TEXT.encode("utf-16"), id="UTF-16"),
        pytest.param(TEXT.encode("utf-32"), id="UTF-32"),
        pytest.param(TEXT.encode("utf-8-sig"), id="with a mark of its order"),
    ],
)
def test_what_is_no_json_in_utf_8_is_refused(client: Client, raw: bytes):
    """`json.loads` would take other encodings, and nothing in them was counted."""
    refused = client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert refused.json()["error"]["code"] == "invalid_json"
    error_of(refused)


def test_a_body_that_is_no_object_is_refused(client: Client):
    for body in ([1], ["a" * 100_000]):
        assert error_of(post(client, "/v1/corpora", body))["message"] == "the body must be an object"
    refused = client.get("/v1/corpora/notes/documents", params={"limit": "many"})
    assert error_of(refused)["message"] == "limit must be a whole number"


@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_body_may_come_in_pieces(notes: Client, says_its_length: bool):
    body = json.dumps({"documents": ["a" * 100_000, "b" * 50_000]}).encode()
    headers = {"content-type": "application/json"} | ({"content-length": str(len(body))} if says_its_length else {})
    pieces = iter([body[:1], body[1:70_000], body[70_000:]])
    added = notes.post("/v1/corpora/notes/documents", content=pieces, headers=headers)
    assert len(added.json()["added"]) == 2


@pytest.mark.parametrize("levels", [400, 950, 990, 100_000])
def test_deep_nesting_is_refused(notes: Client, levels: int):
    headers = {"content-type": "application/json"}
    for field in (b'"documents": %s', b'"documents": ["a"], "chunkweave": {"method": %s}'):
        body = b'{"messages": [{"role": "user", "content": "a"}], ' + field % deep(levels) + b"}"
        error_of(notes.post("/v1/chat/completions", content=body, headers=headers))
    body = b'{"documents": [{"text": "a", "metadata": {"a": %s}}]}' % deep(levels)
    error_of(notes.post("/v1/corpora/notes/documents", content=body, headers=headers))
    assert notes.get("/v1/corpora/notes/documents").json()["total"] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a", "more": ' + deep(100_000) + b"}", "nested too deeply"),
        (b'{"text": "a", "more": ' + deep(400) + b"}", "nested too deeply"),
        (b'{"text": "a", "more": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"text": "a", "more": NaN}', "metadata"),
        (rb'{"text": "a", "\ud800": 1}', "surrogate"),
        (b"not JSON", "line 2: not JSON"),
    ],
)
def test_a_line_that_cannot_be_kept_is_refused_by_its_number(notes: Client, line: bytes, said: str):
    files = {"files": ("lines.jsonl", b'{"text": "one"}\n' + line)}
    message = error_of(notes.post("/v1/corpora/notes/documents/files?strict=true", files=files))["message"]
    assert "lines.jsonl" in message
    assert said in message
    assert notes.get("/v1/corpora/notes/documents").json()["total"] == 0
    assert error_of(notes.post("/v1/corpora/notes/documents/files", data={"files": "a"}))["param"] == "files[0]"


def test_what_is_nested_as_deeply_as_may_be_is_kept_and_shown(notes: Client):
    metadata = {"a": json.loads(deep(63))}
    assert notes.add([{"text": "a", "metadata": metadata}]).is_success
    assert notes.get("/v1/corpora/notes/documents").json()["data"][0]["metadata"] == metadata
    assert notes.search("a").json()["data"][0]["metadata"] == metadata
