"""Bytes that no well-behaved client sends, over sockets: odd paths and headers."""

import socket
from collections.abc import Iterator

import pytest

from tests.server.conftest import ADMIN_KEY, KEYS, key_ring
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import Front, running_front


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeVllm]:
    with FakeVllm(str(tmp_path_factory.mktemp("front") / "reports")) as fake:
        yield fake


@pytest.fixture(scope="module")
def front(vllm: FakeVllm) -> Iterator[Front]:
    with running_front(vllm, keys=key_ring()) as front:
        yield front


def raw(url: str, head: str, *, timeout_s: float = 20.0) -> bytes:
    """What a server answers to these bytes; the line ends of the head are left out of it."""
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n")
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
        return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def get(path: str, key: str, *more: str) -> str:
    return "\n".join([f"GET {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", "connection: close", *more])


@pytest.mark.parametrize("key", [KEYS["acme"], ADMIN_KEY], ids=["tenant", "admin"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../metrics",
        "/v1/models/../completions",
        "/v1/models/..%2f..%2fcollective_rpc",
        "/v1/models/%2e%2e/%2E%2E/collective_rpc",
        "/v1/models/%252e%252e/completions",
        "/v1/models/a/./b",
        "/v1/models/..%5cx",
        "/v1/models/%00",
    ],
)
def test_no_path_becomes_another_one_on_its_way_to_vllm(front: Front, vllm: FakeVllm, path: str, key: str):
    assert status_of(raw(str(front.base_url), get(path, key))) == 404
    assert not [one for one in vllm.paths if one[1] != "/v1/models/x"]
    assert vllm.seen == []


def test_a_path_that_is_too_long_is_the_clients_fault(front: Front):
    assert 400 <= status_of(raw(str(front.base_url), get("/v1/models/" + "a" * 66_000, KEYS["acme"]))) < 500


def test_headers_are_handed_through_byte_by_byte(front: Front, vllm: FakeVllm):
    assert status_of(raw(str(front.base_url), get("/v1/models/x", KEYS["acme"], "x-name: caf\xe9"))) == 200
    assert vllm.paths[-1][2]["x-name"] == "caf\xe9"
