"""Clients that go away, read slowly or ask too much, and servers that stop: nothing is left behind."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable

import pytest

from chunkweave.engine.runner import Runner
from chunkweave_server.app import create_app, listening_socket
from chunkweave_server.service import Service
from chunkweave_server.settings import ListenSettings
from tests.server.conftest import engine_of, toy_service, until_ready

PASSAGE = "The ferry leaves the northern pier at nine and again at noon. "


class Caller:
    """One ASGI request by hand: what the app sends, and when the client goes."""

    def __init__(self, app, body: dict, path: str = "/v1/chat/completions") -> None:
        self.sent: list[dict] = []
        self.gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self._body = json.dumps(body).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(self._body)).encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "server": ("test", 80),
            "client": ("test", 1),
            "scheme": "http",
            "root_path": "",
        }
        self._read = False
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        await self.reading.wait()
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def until(self, pieces: int) -> None:
        await until(lambda: self.text.count("data: ") >= pieces)


def long_answer(**more) -> dict:
    messages = [{"role": "user", "content": "When does the ferry leave?"}]
    return {"messages": messages, "documents": [PASSAGE], "temperature": 0, "max_tokens": 400, "stream": True, **more}


def serving(test, **options):
    """Run `test(app, service)` in a loop with a server that is ready and stopped afterwards, and audit it."""

    async def main():
        service = toy_service(**options)
        app = create_app(service)
        async with app.router.lifespan_context(app):
            await asyncio.to_thread(until_ready, service)
            await test(app, service)
            if service.ready:
                await idle(service)
                await asyncio.to_thread(engine_of(service).batching.check)
        assert service.parts is None

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


async def idle(service: Service) -> None:
    """All requests have ended, and their blocks are free."""
    running, batching = service.require_ready().answering.running, engine_of(service).batching
    await until(lambda: not (running or batching.stats.running or batching.stats.waiting))
    assert batching.stats.blocks_reserved == 0
    assert service.limits.running("") == 0


async def one_runs_and_one_waits(app, service: Service, **more) -> tuple[Caller, Caller]:
    """Two requests to a server that runs one at a time."""
    batching = engine_of(service).batching
    running = Caller(app, long_answer(**more))
    await until(lambda: batching.stats.running)
    waiting = Caller(app, long_answer(**more))
    await until(lambda: batching.stats.waiting)
    return running, waiting


@pytest.mark.parametrize("pieces", [0, 1, 5], ids=["not streamed", "at the first piece", "in mid stream"])
def test_a_client_that_goes_frees_its_blocks(pieces: int):
    async def test(app, service: Service):
        batching = engine_of(service).batching
        caller = Caller(app, long_answer(stream=pieces > 0))
        await until(lambda: batching.stats.running)
        await caller.until(pieces)
        assert batching.stats.blocks_reserved > 0
        caller.gone.set()
        await asyncio.wait_for(caller.task, 10)
        await idle(service)
        assert (batching.stats.aborted, batching.stats.finished) == (1, 0)
        assert batching.stats.decoded_tokens < 399

    serving(test)


def test_a_cancelled_handler_frees_its_blocks():
    async def test(app, service: Service):
        for pieces in (0, 3):
            caller = Caller(app, long_answer())
            await caller.until(pieces)
            caller.task.cancel()
            await asyncio.gather(caller.task, return_exceptions=True)
            await idle(service)

    serving(test)


def test_a_client_that_stops_reading_is_given_up():
    async def test(app, service: Service):
        caller = Caller(app, long_answer())
        await caller.until(3)
        caller.reading.clear()
        await asyncio.wait_for(caller.task, 10)
        await idle(service)
        assert "[DONE]" not in caller.text

    serving(test, stalled_s=0.2)


def test_a_slow_reader_gets_its_whole_answer():
    async def test(app, service: Service):
        caller = Caller(app, long_answer(max_tokens=30))
        for _ in range(10):
            caller.reading.clear()
            await asyncio.sleep(0.02)
            caller.reading.set()
            await asyncio.sleep(0.005)
        await asyncio.wait_for(caller.task, 10)
        assert caller.text.endswith("data: [DONE]\n\n")

    serving(test)


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """No step ends before the gate is open."""
    gate, real = threading.Event(), Runner.step

    def step(self, decoding, prefilling, **_):
        gate.wait(20)
        return real(self, decoding, prefilling)

    monkeypatch.setattr(Runner, "step", step)
    return gate


def test_a_full_queue_is_503_with_retry_after(gate: threading.Event):
    async def test(app, service: Service):
        running, waiting = await one_runs_and_one_waits(app, service, max_tokens=1)
        refused = Caller(app, long_answer(max_tokens=1))
        await asyncio.wait_for(refused.task, 10)
        assert refused.status == 503
        assert (b"retry-after", b"1") in refused.sent[0]["headers"]
        gate.set()
        await asyncio.wait_for(asyncio.gather(running.task, waiting.task), 20)
        assert (running.status, waiting.status) == (200, 200)

    serving(test, max_num_seqs=1, max_waiting=1)


def test_a_deadline_before_the_first_token_is_504(gate: threading.Event):
    async def test(app, service: Service):
        running, waiting = await one_runs_and_one_waits(app, service)
        await asyncio.sleep(0.3)
        gate.set()
        await asyncio.wait_for(asyncio.gather(running.task, waiting.task), 10)
        assert waiting.status == 504
        assert '"code":"timeout"' in waiting.text

    serving(test, max_num_seqs=1, deadline=0.2)


def test_a_stopping_server_takes_nothing_new_and_ends_what_runs():
    async def test(app, service: Service):
        running = Caller(app, long_answer())
        await running.until(2)
        service.refuse_new()
        refused = Caller(app, long_answer())
        await asyncio.wait_for(refused.task, 10)
        assert refused.status == 503
        await service.stop()
        await asyncio.wait_for(running.task, 10)
        *_, error, done, rest = running.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "stopping"

    serving(test)


def test_an_engine_that_a_bug_ended_is_not_ready():
    async def test(app, service: Service):
        await asyncio.to_thread(engine_of(service).batching.close)
        caller = Caller(app, long_answer())
        await asyncio.wait_for(caller.task, 10)
        assert caller.status == 503
        assert service.state == "the engine has stopped"
        assert "the engine has stopped" in caller.text

    serving(test)


def test_an_engine_that_fails_tells_nothing_of_itself(monkeypatch):
    def step(self, decoding, prefilling, **_):
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(Runner, "step", step)

    async def test(app, service: Service):
        caller = Caller(app, long_answer(stream=False))
        await asyncio.wait_for(caller.task, 10)
        assert caller.status == 500
        assert "secret" not in caller.text

    serving(test)


def test_the_first_token_does_not_wait_for_the_client_to_acknowledge_the_head():
    with (
        listening_socket(ListenSettings(port=0)) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
