"""Every route and method of the app: without a key, as a tenant, as an administrator."""

import re
from collections.abc import Iterable, Iterator

import pytest
from starlette.routing import BaseRoute, Route

from tests.server.conftest import ADMIN_KEY, KEYS, Client, Serve, bearer, key_ring

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
WITHOUT_KEY = {
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
}
OF_BACKEND = {"engine": {("GET", "/openapi.json")}, "vllm": {("GET", "/ping")}}
FOR_ADMINS = {
    ("GET", "/metrics"),
}
OF_VLLM_FOR_ADMINS = {
    ("GET", "/is_paused"),
    ("GET", "/is_sleeping"),
    ("GET", "/load"),
    ("GET", "/openapi.json"),
    ("GET", "/server_info"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/responses/x"),
    ("POST", "/cohere/v2/chat"),
    ("POST", "/collective_rpc"),
    ("POST", "/generative_scoring"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/invocations"),
    ("POST", "/pause"),
    ("POST", "/reset_encoder_cache"),
    ("POST", "/reset_mm_cache"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/resume"),
    ("POST", "/sleep"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/audio/translations"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses/x/cancel"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/wake_up"),
}


@pytest.fixture
def doors(serve: Serve) -> tuple[Client, dict[str, set[str]]]:
    """A server with keys, and what it serves."""
    client = serve(keys=key_ring())
    return client, served_by(client)


def served_by(client: Client) -> dict[str, set[str]]:
    """The methods that a server serves by path, with a value in the place of each parameter."""
    served: dict[str, set[str]] = {}
    routes = list(routes_of(client.app.routes))
    for route in routes:
        path = re.sub(r"\{what\}", "warm", route.path)
        served.setdefault(re.sub(r"\{[^}]*\}", "x", path), set()).update(route.methods - {"HEAD"})
    assert len(routes) >= 25, "routes were not found"
    return served


def routes_of(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    """All routes with a path; FastAPI keeps included routers as they are."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        else:
            yield from routes_of(route.original_router.routes)


def test_without_a_key_only_what_is_documented_answers(doors, server_backend):
    client, served = doors
    answered = set()
    for path in (
        *served,
        "/missing",
        "/v1/missing",
        "/v1/models/../../metrics",
        "/metrics/",
        "/v1/models%2f..%2fmetrics",
        "/health/",
    ):
        for method in METHODS:
            reply = client.request(method, path, json={} if method == "POST" else None, follow_redirects=False)
            if reply.status_code != 401:
                answered.add((method, path))
                assert reply.status_code == 200, (method, path, reply.status_code)
            elif method == "GET":
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.json()["error"]["code"] == "invalid_api_key"
    assert answered == WITHOUT_KEY | OF_BACKEND[server_backend]
    for wrong in ("wrong", KEYS["acme"] + "x"):
        assert client.get("/v1/models", headers=bearer(wrong)).status_code == 401


def test_a_tenant_gets_no_further_than_its_own(doors, server_backend):
    client, served = doors
    refused = set()
    for path, methods in served.items():
        for method in methods:
            headers = bearer(KEYS["acme"])
            reply = client.request(method, path, json={} if method == "POST" else None, headers=headers)
            assert reply.status_code != 401, (method, path)
            if reply.status_code == 403:
                refused.add((method, path))
                assert reply.json()["error"]["code"] == "not_admin", (method, path)
    assert refused == FOR_ADMINS | (OF_VLLM_FOR_ADMINS if server_backend == "vllm" else set())
    reply = client.post("/v1/cache/clear", json={"everything": True}, headers=bearer(KEYS["acme"]))
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "not_admin")


def test_an_administrator_is_refused_nothing_and_an_unknown_method_of_vllm_is_not_handed_on(doors, server_backend):
    client, served = doors
    headers = bearer(ADMIN_KEY)
    for path, methods in served.items():
        for method in METHODS:
            reply = client.request(method, path, json={} if method == "POST" else None, headers=headers)
            if method in methods:
                assert reply.status_code not in (401, 403, 405), (method, path)
            elif method != "HEAD":
                assert reply.status_code in (404, 405), (method, path)
    for path in ("/missing", "/v1/missing", "/v1/models/../x"):
        assert client.request("GET", path, headers=headers).status_code == 404
