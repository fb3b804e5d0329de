"""What no well-behaved client does, over sockets: odd paths, slow bytes, half-open connections, requests in line."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from benchmarks.server_thread import ServerThread

from tests.server.conftest import ADMIN_KEY, KEYS, Asking, audit, key_ring, listening, toy_service, wait_until
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
        return rest_of(connection)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def get(path: str, key: str, *more: str) -> str:
    return "\n".join(
        [f"GET {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {key}", "connection: close", *more]
    )


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


STALLED_S = 0.5


@pytest.fixture(scope="module")
def impatient() -> Iterator[ServerThread]:
    """A server that waits half a second for its clients."""
    service = toy_service(stalled_s=STALLED_S, max_answer_tokens=4000)
    with listening(service) as server:
        yield server
        wait_until(lambda: not connections(server))
        audit(service)


def connections(server: ServerThread) -> set[object]:
    return server._server.server_state.connections


def connected(server: ServerThread, sent: bytes = b"", *, buffer_bytes: int | None = None) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    connection.sendall(sent)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    answer = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            answer += data
    return answer


def post(path: str, body: object, *, more_bytes: int = 0) -> bytes:
    """A request; with `more_bytes` one that says that its body has so many more."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data) + more_bytes}\r\n\r\n".encode() + data


@pytest.mark.parametrize(
    "begun", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: "], ids=["nothing", "half a head"]
)
def test_a_head_that_does_not_come_is_not_waited_for(impatient: ServerThread, begun: bytes):
    with connected(impatient, begun) as connection:
        assert rest_of(connection) == b""


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: ", id="head"),
        pytest.param(
            b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999\r\n\r\n", id="body that nobody reads"
        ),
        pytest.param(post("/v1/completions", {"prompt": "x"}, more_bytes=9999), id="body"),
    ],
)
def test_a_request_that_comes_byte_by_byte_is_not_waited_for(impatient: ServerThread, begun: bytes):
    with connected(impatient, begun) as connection, suppress(ConnectionError):
        for _ in range(1000):
            connection.send(b"a")
            time.sleep(0.02)
        pytest.fail("the server still waits")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/corpora/notes/documents/files"])
def test_a_client_that_goes_within_its_body_is_no_failure(
    impatient: ServerThread, path: str, caplog: pytest.LogCaptureFixture
):
    with connected(impatient, post(path, {"prompt": "x"}, more_bytes=99)):
        wait_until(lambda: bool(connections(impatient)))
    wait_until(lambda: not connections(impatient))
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == []


def test_half_a_body_is_408(impatient: ServerThread):
    with connected(impatient, post("/v1/completions", {"prompt": "x"}, more_bytes=99)) as connection:
        answer = rest_of(connection)
    assert status_of(answer) == 408
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_slow"


def test_a_body_that_comes_slowly_but_steadily_is_read(impatient: ServerThread):
    request = post(
        "/v1/completions", {"prompt": "x", "max_tokens": 1, "documents": ["The ferry leaves at nine. " * 40]}
    )
    with connected(impatient) as connection:
        pieces = [request[start : start + 60] for start in range(0, len(request), 60)]
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(2 * STALLED_S / len(pieces))
        assert status_of(connection.recv(1 << 16)) == 200


def test_a_client_that_takes_in_no_answer_keeps_no_connection(impatient: ServerThread):
    documents = [{"text": f"Text {number}.", "metadata": {"x": "a" * 15_000}} for number in range(600)]
    with Asking(base_url=impatient.url, timeout=60) as client:
        client.service = impatient._server._service
        client.make_corpus("large", documents)
    wait_until(lambda: not connections(impatient))
    with connected(
        impatient, b"GET /v1/corpora/large/documents?limit=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n", buffer_bytes=4096
    ):
        wait_until(lambda: bool(connections(impatient)))
        wait_until(lambda: not connections(impatient), timeout_s=10)


def test_requests_that_are_sent_at_once_are_answered_in_turn(impatient: ServerThread):
    bodies = [{"prompt": "When?", "max_tokens": count, "stream": count == 3, "temperature": 0} for count in (2, 3, 4)]
    requests = b"".join(post("/v1/completions", body) for body in bodies)
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with connected(impatient, requests + last) as connection:
        answer = rest_of(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    order = [
        answer.index(mark) for mark in (b'"completion_tokens":2', b"[DONE]", b'"completion_tokens":4', b'"version"')
    ]
    assert order == sorted(order)


def test_a_client_that_leaves_with_requests_in_line_ends_them(impatient: ServerThread):
    stream = post("/v1/completions", {"prompt": "When?", "max_tokens": 4000, "stream": True})
    running = impatient._server._service.require_ready().answering.running
    with connected(impatient, stream + post("/v1/completions", {"prompt": "Then?", "max_tokens": 4000})) as connection:
        assert b"200 OK" in connection.recv(100)
        wait_until(lambda: len(running) == 1)
    wait_until(lambda: not running)
    wait_until(lambda: not connections(impatient))


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_jumps_changes_nothing_but_dates(impatient: ServerThread, monkeypatch, years: int):
    real = time.time
    body = {"prompt": "When?", "documents": ["The ferry leaves at nine."], "max_tokens": 4, "temperature": 0}
    before = httpx.post(f"{impatient.url}/v1/completions", json=body, timeout=20).json()
    monkeypatch.setattr(time, "time", lambda: real() + years * 365 * 86400)
    after = httpx.post(f"{impatient.url}/v1/completions", json=body, timeout=20).json()
    assert after["choices"] == before["choices"]
    assert abs(after["created"] - before["created"]) > 300 * 86400
    assert 0 <= after["chunkweave"]["ttft_s"] < 20
