"""`POST /v1/embeddings`, and pages of other origins (CORS), over both backends."""

from base64 import b64decode
from random import Random
from typing import Any

import numpy as np
import pytest

from chunkweave.errors import UsageError
from chunkweave.retrieval.embedders import make_embedder
from chunkweave_server.fields import UNKNOWN_HEADER
from tests.server.conftest import KEYS, Client, Serve, bearer, key_ring, toy_service

TEXTS = ["The ferry leaves at seven.", "The choir sings on Sundays."]
UI = "https://ui.example"


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in embedder, also where a model is installed."""
    monkeypatch.setattr("chunkweave_server.embeddings.make_embedder", lambda: make_embedder("hashed-ngrams"))


def embed(client: Client, key: str | None = None, **body: Any) -> Any:
    return client.post("/v1/embeddings", json=body, headers=bearer(key))


def test_vectors_are_those_of_the_embedder_in_both_encodings(client: Client):
    expected = make_embedder("hashed-ngrams").embed_documents(TEXTS)
    found = embed(client, input=TEXTS, model="hashed-ngrams").json()
    assert (found["object"], found["model"]) == ("list", "hashed-ngrams")
    assert [(one["object"], one["index"]) for one in found["data"]] == [("embedding", 0), ("embedding", 1)]
    assert np.array_equal(np.float32([one["embedding"] for one in found["data"]]), expected)
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 8
    (one,) = embed(client, input=TEXTS[0], encoding_format="base64").json()["data"]
    assert np.array_equal(np.frombuffer(b64decode(one["embedding"]), "<f4"), expected[0])
    many = embed(client, input=TEXTS * 20).json()
    assert [one["index"] for one in many["data"]] == list(range(40))
    assert many["usage"]["total_tokens"] == 20 * found["usage"]["total_tokens"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": " "}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input[1]"),
        ({"input": [None]}, 400, "input[0]"),
        ({"input": "a" * 70_000}, 400, "input"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "dimensions": 7}, 400, "dimensions"),
        ({"input": "a", "model": "text-embedding-4"}, 404, "model"),
    ],
)
def test_wrong_requests_are_refused(client: Client, body: dict[str, Any], status: int, param: str):
    refused = embed(client, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


def test_a_name_that_clients_send_by_default_is_the_servers_embedder(client: Client):
    expected = make_embedder("hashed-ngrams").embed_documents(TEXTS)
    for model in ("text-embedding-ada-002", "text-embedding-3-small", "text-embedding-3-large"):
        reply = embed(client, input=TEXTS, model=model).json()
        assert reply["model"] == "hashed-ngrams"
        assert np.array_equal(np.float32([entry["embedding"] for entry in reply["data"]]), expected)


@pytest.mark.parametrize("seed", range(4))
def test_token_ids_are_refused_with_the_way_to_send_texts(client: Client, seed: int):
    draw = Random(seed)
    ids = [[draw.randrange(100_000) for _ in range(draw.randrange(1, 9))] for _ in range(draw.randrange(1, 4))]
    for sent in (ids, ids[0], [*TEXTS, ids[0]]):
        refused = embed(client, input=sent, encoding_format="base64", model="text-embedding-ada-002")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        assert "check_embedding_ctx_length=False" in refused.json()["error"]["message"]


def test_unknown_fields_are_named(client: Client):
    assert embed(client, input="a", user="u", dimensions=2048, more=1).headers[UNKNOWN_HEADER] == "more"


def page(client: Client, origin: str, method: str = "GET", path: str = "/v1/models", **headers: str) -> Any:
    given = {"origin": origin, "sec-fetch-site": "cross-site", **headers}
    return client.request(method, path, headers=given)


def preflight(client: Client, origin: str) -> Any:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    return page(client, origin, "OPTIONS", "/v1/chat/completions", **asked)


def test_pages_of_other_origins_are_refused_unless_they_are_named(serve: Serve):
    client = serve()
    assert page(client, UI).status_code == 403
    assert preflight(client, UI).status_code in (403, 405)
    client = serve(cors_origins=(UI, "http://localhost:3000"))
    for origin in (UI, "http://localhost:3000"):
        allowed = preflight(client, origin)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == origin
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        body = {"messages": [{"role": "user", "content": "When?"}], "max_tokens": 1, "documents": ["a"], "more": 1}
        reply = client.post("/v1/chat/completions", json=body, headers={"origin": origin})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == origin
        assert UNKNOWN_HEADER in reply.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in reply.headers
    other = "https://evil.example"
    assert preflight(client, other).status_code == 400
    refused = page(client, other)
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


def test_any_origin_needs_keys(serve: Serve):
    with pytest.raises(UsageError, match="give API keys"):
        toy_service(cors_origins=("*",))
    client = serve(keys=key_ring(), cors_origins=("*",))
    refused = page(client, UI)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
    assert page(client, UI, authorization=f"Bearer {KEYS['acme']}").status_code == 200


@pytest.mark.parametrize("origin", ["ui.example", "https://ui.example/", "https://a b", ""])
def test_an_origin_is_a_scheme_with_a_host(origin: str):
    with pytest.raises(UsageError, match="cors_origins"):
        toy_service(cors_origins=(origin,))
