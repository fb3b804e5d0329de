"""Which names a server answers to, and for which web pages, over HTTP: DNS rebinding and other origins."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chunkweave.errors import UsageError
from chunkweave_server.settings import resolve
from tests.server.conftest import ADMIN_KEY, Client, Serve, bearer, key_ring
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import running_front
from tests.server.test_doors import served_by
from tests.server.test_hostile_clients import raw, status_of

PROBES = {("GET", "/health"), ("GET", "/ready")}
REBOUND = "evil.example:8000"


def routes_of(client: Client) -> list[tuple[str, str]]:
    """Method and a path of every route; of the pass-through those of vLLM's that it might know."""
    found = [(method, path) for path, methods in served_by(client).items() for method in methods]
    return [*found, ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/tokenize")]


def refusals(client: Client, **headers: str) -> dict[tuple[str, str], tuple[int, str | None]]:
    """Status and code of what every route answers to these headers."""
    found = {}
    for method, path in routes_of(client):
        reply = client.request(method, path, headers={name.replace("_", "-"): one for name, one in headers.items()})
        try:
            error = reply.json().get("error") or {}
        except (ValueError, AttributeError):
            error = {}
        found[method, path] = (reply.status_code, error.get("code"))
    return found


def test_a_rebound_name_is_answered_by_the_probes_alone(client: Client):
    answers = refusals(client, host=REBOUND)
    assert len(answers) > 20
    assert {answers.pop(probe) for probe in PROBES} == {(200, None)}
    assert set(answers.values()) == {(421, "host_not_allowed")}


@pytest.mark.parametrize(
    "sent",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost.evil.example:8000"},
        {"origin": "http://6.6.6.6"},
        {"origin": "http://localhost@evil.example"},
        {"origin": "http://[x"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
    ],
    ids=lambda sent: "-".join(sent.values()),
)
def test_a_foreign_page_is_refused_on_every_route_but_the_probes(client: Client, sent: dict[str, str]):
    answers = refusals(client, **sent)
    assert {answers.pop(probe) for probe in PROBES} == {(200, None)}
    assert set(answers.values()) == {(403, "origin_not_allowed")}


def test_the_refusal_has_the_form_of_all_errors(client: Client):
    reply = client.get("/v1/corpora", headers={"host": REBOUND, "x-request-id": "a-1"})
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert "allowed_hosts" in reply.json()["error"]["message"]
    assert reply.headers["x-request-id"] == "a-1"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "127.8.9.1", "[::1]", "[::1]:8000"]
)
def test_loopback_is_answered(client: Client, host: str):
    assert client.get("/v1/corpora", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["", "localhost:x", "localhost@evil.example", "127.0.0.1.evil.example", "127.1", "0.0.0.0", "10.0.0.5", "[::2]",
     "evil.example#localhost", "localhost/x", "localhost?x", "localhost, evil.example", "foo.localhost"],
)  # fmt: skip
def test_what_only_looks_like_loopback_is_not(client: Client, host: str):
    assert client.get("/v1/corpora", headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "sent",
    [
        {"origin": "http://localhost:8000"},
        {"origin": "http://127.0.0.1:5173", "sec-fetch-site": "cross-site"},
        {"origin": "http://[::1]:3000"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
    ],
)
def test_pages_of_this_machine_are_answered(client: Client, sent: dict[str, str]):
    assert client.post("/v1/corpora", json={"name": "a"}, headers=sent).status_code == 201


def test_a_link_of_another_site_opens_the_page_and_nothing_else(client: Client):
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client.get("/", headers=link).status_code == 200
    assert client.get("/v1/corpora", headers=link).status_code == 403
    assert client.get("/", headers={**link, "host": REBOUND}).status_code == 421


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        ("rag.example", "rag.example:8000", 200),
        ("rag.example", "RAG.example", 200),
        ("rag.example", "x.rag.example", 421),
        ("*.rag.example", "x.rag.example", 200),
        ("*.rag.example", "xrag.example", 421),
        ("*", REBOUND, 200),
        ("10.0.0.5", "10.0.0.5:8000", 200),
        ("fd00::5", "[fd00::5]", 200),
    ],
)
def test_allowed_hosts_widens_names_and_origins(serve: Serve, allowed: str, host: str, status: int):
    client = serve(allowed_hosts=(allowed,))
    assert client.get("/v1/corpora", headers={"host": host}).status_code == status
    page = client.get("/v1/corpora", headers={"origin": f"https://{host}"})
    assert page.status_code == (200 if status == 200 else 403)
    assert client.get("/v1/corpora").status_code == 200, "loopback is answered as before"


def test_any_host_is_any_site(serve: Serve):
    client = serve(allowed_hosts=("*",))
    for sent in ({"origin": "null"}, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert client.get("/v1/corpora", headers=sent).status_code == 200


def test_with_keys_a_name_does_not_matter_unless_names_are_given(serve: Serve):
    sent = {"host": REBOUND, "origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    client = serve(keys=key_ring())
    assert client.get("/v1/corpora", headers=sent).status_code == 401
    assert client.get("/v1/corpora", headers={**sent, **bearer(ADMIN_KEY)}).status_code == 200
    client = serve(keys=key_ring(), allowed_hosts=("rag.example",))
    assert client.get("/v1/corpora", headers={**sent, **bearer(ADMIN_KEY)}).status_code == 421
    assert client.get("/v1/corpora", headers={"host": "rag.example", **bearer(ADMIN_KEY)}).status_code == 200


def test_where_other_machines_reach_it_addresses_are_answered_and_names_are_not(serve: Serve):
    client = serve(host="0.0.0.0", allow_anonymous=True)
    for host, status in {"10.0.0.5:8000": 200, "[fd00::5]": 200, "localhost": 200, REBOUND: 421, "rag": 421}.items():
        assert client.get("/v1/corpora", headers={"host": host}).status_code == status, host
    foreign = {"host": "10.0.0.5:8000", "origin": "http://10.0.0.6"}
    assert client.get("/v1/corpora", headers=foreign).status_code == 403
    assert client.get("/v1/corpora", headers={**foreign, "origin": "http://10.0.0.5:8000"}).status_code == 200
    client = serve(host="rag.lan", allow_anonymous=True)
    assert client.get("/v1/corpora", headers={"host": "rag.lan:8000"}).status_code == 200


@pytest.mark.parametrize("wrong", ["http://rag.example", "rag.example:8000", "rag.*", "", "a b", "**"])
def test_what_is_no_host_is_no_setting(wrong: str):
    with pytest.raises(UsageError, match="allowed_hosts"):
        resolve({"allowed_hosts": (wrong,)}, {})


def test_a_variable_names_several():
    settings = resolve({}, {"CHUNKWEAVE_ALLOWED_HOSTS": "rag.example, *.lan"}).settings
    assert settings.listen.allowed_hosts == ("rag.example", "*.lan")


@pytest.fixture
def front_url(vllm: FakeVllm) -> Any:
    with running_front(vllm) as front:
        yield str(front.base_url)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /v1/corpora HTTP/1.1\nconnection: close\nhost: localhost", 200),
        ("GET /v1/corpora HTTP/1.1\nconnection: close\nhost: evil.example", 421),
        ("GET /v1/corpora HTTP/1.1\nconnection: close", 400),
        ("GET /v1/corpora HTTP/1.0", 421),
        ("GET /v1/corpora HTTP/1.1\nconnection: close\nhost: localhost\nhost: evil.example", 400),
        ("GET /v1/corpora HTTP/1.0\nhost: localhost\nhost: evil.example", 400),
        ("GET http://evil.example/v1/corpora HTTP/1.1\nconnection: close\nhost: localhost", 404),
        ("GET http://localhost/v1/corpora HTTP/1.1\nconnection: close\nhost: evil.example", 421),
        ("GET /v1/corpora HTTP/1.1\nconnection: close\nhost: localhost\nx-forwarded-host: evil.example", 200),
        ("GET /v1/corpora HTTP/1.1\nconnection: close\nhost: evil.example\nx-forwarded-host: localhost", 421),
        ("GET /health HTTP/1.1\nconnection: close\nhost: 10.2.3.4:8000", 200),
        ("GET /health HTTP/1.0", 200),
    ],
)
def test_raw_requests(front_url: str, head: str, status: int):
    answer = raw(front_url, head)
    assert status_of(answer) == status
    if status == 421:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "host_not_allowed"


def test_a_path_comes_from_the_request_and_not_from_its_host(vllm: FakeVllm):
    """With keys every host is taken: one with a path in it must not be taken for the path."""
    with running_front(vllm, keys=key_ring()) as front:
        head = "GET /v1/models/x HTTP/1.1\nconnection: close\nhost: {}\nauthorization: Bearer " + ADMIN_KEY
        for host in ("a/v1/collective_rpc?", "a/version#", "a"):
            assert status_of(raw(str(front.base_url), head.format(host))) in (200, 400)
        assert {path for _, path, _, _ in vllm.paths} <= {"/v1/models/x"}


def test_probes_of_what_is_deployed_ask_for_nothing_else():
    """A pod is probed by its address, an image by 127.0.0.1."""
    deploy = Path(__file__).resolve().parents[2] / "deploy"
    files = [*deploy.glob("Dockerfile*"), *deploy.rglob("*.yaml")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    asked = re.findall(r"httpGet: \{path: (/\w+),|urlopen\('http://127\.0\.0\.1:8000(/\w+)'", text)
    assert {("GET", one or other) for one, other in asked} == PROBES
    assert "ALLOW_ANONYMOUS" not in text.upper().replace("-", "_")
