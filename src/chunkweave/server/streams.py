"""Answers over HTTP: as one body, or as server-sent events; both end when the client goes."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chunkweave.engine.request import Answer, StreamEvent
from chunkweave.errors import ChunkweaveError
from chunkweave.server.answering import RunningAnswer
from chunkweave.server.refusals import RefusalError, refusal_of
from chunkweave.server.replies import ReplyForm

ResultT = TypeVar("ResultT")

_DONE = b"data: [DONE]\n\n"


class ClientGoneError(RefusalError):
    """The client closed the connection; nobody reads the answer to this."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


async def unless_gone(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `work` returns, unless the client goes first: then it is cancelled.

    The request's body has been read by now, so that all there is to receive is that its client has gone.

    Raises:
        ClientGoneError: it has.
    """
    return await unless_gone_from(request.receive, work)


async def unless_gone_from(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The same by what a request is received with.

    Raises:
        ClientGoneError: its client has gone.
    """
    return await _first_of(work, _gone(receive))


async def whole_answer(running: RunningAnswer) -> Answer:
    """Wait for an answer to its end."""
    async for event in running:
        if event.answer is not None:
            return event.answer
    raise RefusalError(500, "the answer has no end", code="internal_error")


class Closable(Protocol):
    """What a stream is made of, and has to be told when it ends."""

    async def aclose(self) -> None:
        """Nobody reads any more; a second time is harmless."""


class EventStream(Response):
    """Server-sent events, as OpenAI's clients read them.

    What the client does not take in waits in the connection's buffer, a few pieces long, and where the events come
    from, which an answer's length bounds. A client that takes in nothing for `stalled_s` seconds is given up.
    """

    media_type = "text/event-stream"

    def __init__(self, source: Closable, events: AsyncIterator[dict[str, Any]], *, stalled_s: float) -> None:
        """A stream of `events`; `source` is closed at its end, however that comes."""
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._read = events
        self._stalled_s = stalled_s

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client goes; either way the request is over afterwards."""
        try:
            with suppress(ClientGoneError, TimeoutError):
                await _first_of(self._send_all(send), _gone(receive))
        finally:
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events():
            async with asyncio.timeout(self._stalled_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for one in self._read:
                yield _event(one)
        except (ChunkweaveError, RefusalError) as error:  # the status is sent: what is left is to say so in the stream
            yield _event(refusal_of(error).body)
        yield _DONE


async def answer_events(running: RunningAnswer, first: StreamEvent, form: ReplyForm) -> AsyncIterator[dict[str, Any]]:
    """An answer, whose `first` piece was read already, as events of that form."""
    for one in form.first():
        yield one
    event = first
    while True:
        if event.text:
            yield form.piece(event.text)
        if event.answer is not None:
            for one in form.last(event.answer, running.retrieved):
                yield one
            return
        event = await anext(running)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: Coroutine[Any, Any, ResultT], gone: Coroutine[Any, Any, None]) -> ResultT:
    tasks = working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        await _cancelled(working)
        await _cancelled(leaving)


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    """Cancel a task that may be done, and wait for its end."""
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
