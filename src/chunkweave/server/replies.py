"""The bodies of answers, as OpenAI's clients read them, and their streams, which end when the client goes."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chunkweave.engine.request import Answer, StreamEvent
from chunkweave.errors import ChunkweaveError
from chunkweave.metrics import ReuseReport
from chunkweave.retrieval.pipeline import Retrieved
from chunkweave.server.answering import RunningAnswer
from chunkweave.server.errors import HttpError, http_error_of


def usage_of(report: ReuseReport) -> dict[str, Any]:
    """Token counts. What was computed again is not cached, though its chunk was found."""
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.new_tokens,
        "total_tokens": report.prompt_tokens + report.new_tokens,
        "prompt_tokens_details": {"cached_tokens": report.prefix_exact_tokens + report.reused_tokens},
    }


def report_of(answer: Answer, retrieved: Retrieved | None) -> dict[str, Any]:
    """The reuse report, and what was retrieved if it came from a corpus, without the texts."""
    report = answer.report.as_dict()
    if retrieved is None:
        return report
    found = [{key: value for key, value in one.as_dict().items() if key != "text"} for one in retrieved.chunks]
    return {**report, "embed_s": retrieved.embed_s, "search_s": retrieved.search_s, "retrieved": found}


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How an answer is written down: `chat` or as a plain completion. One for each answer.

    A stream `with_usage` ends with an event that counts tokens; it has no choice, and the others have `usage: null`.
    """

    chat: bool
    model: str
    with_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, answer: Answer, retrieved: Retrieved | None) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        said: dict[str, Any]
        if self.chat:
            said = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        else:
            said = {"text": answer.text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": answer.finish_reason}
        kind = "chat.completion" if self.chat else "text_completion"
        body = self._frame(kind, [choice])
        return {**body, "usage": usage_of(answer.report), "chunkweave": report_of(answer, retrieved)}

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with: in a chat, who speaks."""
        return [self._event({"role": "assistant", "content": ""})] if self.chat else []

    def piece(self, text: str) -> dict[str, Any]:
        """An event with a piece of the text."""
        return self._event({"content": text} if self.chat else text)

    def last(self, answer: Answer, retrieved: Retrieved | None) -> list[dict[str, Any]]:
        """The events after the text; the report is in the last one.

        It has no event of its own: much code reads `choices[0]` of each, unless it asked for usage.
        """
        report = {"chunkweave": report_of(answer, retrieved)}
        ended = self._event({} if self.chat else "", answer.finish_reason)
        if not self.with_usage:
            return [{**ended, **report}]
        return [ended, {**self._frame(self._event_kind, []), "usage": usage_of(answer.report), **report}]

    def _event(self, said: dict[str, Any] | str, finish_reason: str | None = None) -> dict[str, Any]:
        content = {"delta": said} if self.chat else {"text": said}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        frame = self._frame(self._event_kind, [choice])
        return {**frame, "usage": None} if self.with_usage else frame

    @property
    def _event_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _frame(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        number = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {"id": number, "object": kind, "created": self.created, "model": self.model, "choices": list(choices)}


ResultT = TypeVar("ResultT")

_DONE = b"data: [DONE]\n\n"


class ClientGoneError(HttpError):
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
    raise HttpError(500, "the answer has no end", code="internal_error")


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
        except (ChunkweaveError, HttpError) as error:  # the status is sent: what is left is to say so in the stream
            yield _event(http_error_of(error).body)
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
