"""Bodies of answers in OpenAI's form, and their streams, which end when the client disconnects."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chunkweave.conversation.answer import AnswerEnd, Choice
from chunkweave.errors import ChunkweaveError
from chunkweave.planning.method_choice import FIELD
from chunkweave_server.answering import RunningAnswer
from chunkweave_server.errors import HttpError, http_error_of
from chunkweave_server.threads import ClientGoneError, unless_gone


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """The form of one request's answer: `chat`, or a plain completion.

    A stream `with_usage` ends with an event that has token counts and no choice; the other events have `usage: null`.
    `alternatives` is the number of alternatives of each token; None: no log-probabilities.
    """

    chat: bool
    model: str
    with_usage: bool = False
    with_token_ids: bool = False
    alternatives: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, choices: Sequence[Choice], end: AnswerEnd) -> bytes:
        """The body of an answer that is not streamed; `choices` are those of `WholeChoices`."""
        body = self._frame("chat.completion" if self.chat else "text_completion")
        body |= {"usage": _usage(end), FIELD: dict(end.shown)}
        return with_items(body, "choices", (rendered(self._choice(choice)) for choice in choices))

    async def events(
        self, running: RunningAnswer, first: Sequence[Choice], choices: int
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer with this number of `choices`; its `first` pieces are already read.

        An event that ends a choice is held back until the next one, since the last event with a choice carries the
        report. The report has no event of its own, because much client code reads `choices[0]` of every event, unless
        it asks for usage.
        """
        for index in range(choices if self.chat else 0):
            delta = {"role": "assistant", "content": ""}
            yield self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
        held = self._event(list(map(self._piece, first)))
        if not _ends(held):
            yield held
        async for pieces in running:
            if _ends(held):
                yield held
            held = self._event(list(map(self._piece, pieces)))
            if not _ends(held):
                yield held
        assert running.end is not None, "the answer has ended"
        report = {FIELD: dict(running.end.shown)}
        if self.with_usage:
            yield held
            yield {**self._frame(self._event_kind), "choices": [], "usage": _usage(running.end), **report}
        else:
            yield {**held, **report}

    def _choice(self, choice: Choice) -> Choice:
        text = choice["text"]
        if not self.chat:
            return {"index": choice["index"], "text": text, **self._details(choice)}
        message = {"role": "assistant", "content": text, "refusal": None, **_parsed(choice)}
        if message.get("tool_calls") and not text:
            message["content"] = None
        return {"index": choice["index"], "message": message, **self._details(choice)}

    def _piece(self, choice: Choice) -> Choice:
        text = choice.get("text", "")
        delta = {**({"content": text} if text else {}), **_parsed(choice)}
        content = {"delta": delta} if self.chat else {"text": text}
        return {"index": choice["index"], **content, **self._details(choice)}

    def _details(self, choice: Choice) -> Choice:
        logprobs = choice.get("logprobs") if self.alternatives is not None else None
        if logprobs is not None:
            logprobs = (chat_logprobs if self.chat else completion_logprobs)(logprobs, self.alternatives or 0)
        details = {"logprobs": logprobs, "finish_reason": choice.get("finish_reason")}
        if choice.get("stop_reason") is not None:
            details["stop_reason"] = choice["stop_reason"]
        if self.with_token_ids and "token_ids" in choice:
            details["token_ids"] = choice["token_ids"]
        return details

    def _event(self, choices: list[Choice]) -> dict[str, Any]:
        frame = {**self._frame(self._event_kind), "choices": choices}
        return {**frame, "usage": None} if self.with_usage else frame

    @property
    def _event_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _frame(self, kind: str) -> dict[str, Any]:
        number = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {"id": number, "object": kind, "created": self.created, "model": self.model}


def _ends(event: dict[str, Any]) -> bool:
    return any(choice["finish_reason"] is not None for choice in event["choices"])


def _parsed(choice: Choice) -> dict[str, Any]:
    """Results of vLLM's parsers in a choice, or in a piece of one."""
    return {name: choice[name] for name in ("tool_calls", "reasoning") if choice.get(name)}


def _usage(end: AnswerEnd) -> dict[str, Any]:
    """Token counts. Recomputed tokens do not count as cached, although their chunk was found."""
    report = end.report
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.new_tokens,
        "total_tokens": report.prompt_tokens + report.new_tokens,
        "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
    }


def chat_logprobs(logprobs: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Log-probabilities of a completion in the form of a chat, with at most `most` alternatives."""
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return {
        "content": [
            {
                **_alternative(token, logprob),
                "top_logprobs": [_alternative(*alternative) for alternative in _likeliest(top or {}, most)],
            }
            for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
        ]
    }


def completion_logprobs(logprobs: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Log-probabilities with at most `most` alternatives in addition to the token itself."""
    tops = [
        top and {**{token: top[token] for token in (chosen,) if token in top}, **dict(_likeliest(top, most))}
        for chosen, top in zip(logprobs["tokens"], logprobs.get("top_logprobs") or [], strict=False)
    ]
    return {**logprobs, "top_logprobs": tops}


def _likeliest(top: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    """The `most` likeliest tokens. Sorted, because vLLM puts the chosen token first, even if it is unlikely."""
    return sorted(top.items(), key=lambda alternative: -alternative[1])[:most]


def _alternative(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", errors="replace"))}


_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Server-sent events in OpenAI's form.

    Pieces that the client has not read yet wait in the connection's buffer, which holds a few, and at the source of the
    events, where the answer's length bounds them. The connection of a client that reads nothing for `stalled_s` seconds
    is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, running: RunningAnswer, events: AsyncIterator[dict[str, Any]], *, stalled_s: float) -> None:
        """A stream of `events`. It closes `running` at the end, also after an error or a disconnect."""
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._running = running
        self._read = events
        self._stalled_s = stalled_s

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client disconnects. Closes the request."""
        try:
            with suppress(ClientGoneError, TimeoutError):
                await unless_gone(receive, self._send_all(send))
        finally:
            await self._running.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events():
            async with asyncio.timeout(self._stalled_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._read:
                yield _event(event)
        except (ChunkweaveError, HttpError) as error:  # the status is already sent: report the error in the stream
            yield _event(http_error_of(error).body)
        yield _DONE


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + rendered(data) + b"\n\n"


def rendered(value: Any) -> bytes:
    """A value as JSON. The interpreter's lock is held for the whole call."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def with_items(body: Mapping[str, Any], name: str, items: Iterable[bytes]) -> bytes:
    """An object as JSON, with a list of `items` that are rendered one by one: together they may take seconds."""
    return b'%b,"%b":[%b]}' % (rendered(body)[:-1], name.encode(), b",".join(items))
