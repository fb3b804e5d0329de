"""The bodies of answers, as OpenAI's clients read them, and their streams, which end when the client goes."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chunkweave.errors import ChunkweaveError
from chunkweave.planning.method_choice import FIELD
from chunkweave_server.backend import AnswerEnd, Choice, Event
from chunkweave_server.errors import HttpError, http_error_of
from chunkweave_server.threads import ClientGoneError, unless_gone


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How the answer to one request is written down: `chat` or as a plain completion.

    A stream `with_usage` ends with an event that counts tokens; it has no choice, and the others have `usage: null`.
    `alternatives` of each token are wanted, None for no log-probabilities at all.
    """

    chat: bool
    model: str
    with_usage: bool = False
    with_token_ids: bool = False
    alternatives: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, choices: Sequence[Choice], end: AnswerEnd) -> dict[str, Any]:
        """The body of an answer that is not streamed, of `choices` as `WholeChoices` has them."""
        kind = "chat.completion" if self.chat else "text_completion"
        body = self._frame(kind, [self._choice(one) for one in choices])
        return {**body, "usage": _usage(end), FIELD: dict(end.shown)}

    def opening(self, choices: int) -> Iterator[dict[str, Any]]:
        """What a stream begins with: in a chat, who speaks."""
        for index in range(choices if self.chat else 0):
            delta = {"role": "assistant", "content": ""}
            yield self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, event: Event) -> dict[str, Any]:
        """An event of the backend's as one of a stream."""
        return self._event([self._piece(choice) for choice in event])

    def closing(self, last: dict[str, Any], end: AnswerEnd) -> Iterator[dict[str, Any]]:
        """The last event with a choice, and what follows it; the report is in the last one.

        It has no event of its own: much code reads `choices[0]` of each, unless it wants usage.
        """
        report = {FIELD: dict(end.shown)}
        if not self.with_usage:
            yield {**last, **report}
            return
        yield last
        yield {**self._frame(self._event_kind, []), "usage": _usage(end), **report}

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
        frame = self._frame(self._event_kind, choices)
        return {**frame, "usage": None} if self.with_usage else frame

    @property
    def _event_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _frame(self, kind: str, choices: list[Choice]) -> dict[str, Any]:
        number = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {"id": number, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _parsed(choice: Choice) -> dict[str, Any]:
    """What parsers found in a choice, or a piece of one."""
    return {name: choice[name] for name in ("tool_calls", "reasoning") if choice.get(name)}


def _usage(end: AnswerEnd) -> dict[str, Any]:
    """Token counts. What was computed again is not cached, though its chunk was found."""
    report = end.report
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.new_tokens,
        "total_tokens": report.prompt_tokens + report.new_tokens,
        "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
    }


class WholeChoices:
    """Adds up the pieces of a stream, choice by choice."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}

    def add(self, event: Event) -> None:
        """The next pieces."""
        for piece in event:
            whole = self._choices.setdefault(
                piece["index"], {"index": piece["index"], "text": "", "token_ids": [], "logprobs": None}
            )
            whole["text"] += piece.get("text") or ""
            whole["token_ids"] += piece.get("token_ids") or []
            for name in ("finish_reason", "stop_reason"):
                if piece.get(name) is not None:
                    whole[name] = piece[name]
            if piece.get("reasoning"):
                whole["reasoning"] = whole.get("reasoning", "") + piece["reasoning"]
            if piece.get("tool_calls"):  # whole ones: pieces of calls are for streams
                calls = [
                    {name: value for name, value in call.items() if name != "index"} for call in piece["tool_calls"]
                ]
                whole["tool_calls"] = [*whole.get("tool_calls", []), *calls]
            if piece.get("logprobs"):
                whole["logprobs"] = joined_logprobs(whole["logprobs"], piece["logprobs"])

    @property
    def choices(self) -> list[Choice]:
        """All choices so far, by their numbers."""
        return [self._choices[index] for index in sorted(self._choices)]


def chat_logprobs(logprobs: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Log-probabilities of a completion as a chat has them, with at most that many alternatives."""
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return {
        "content": [
            {
                **_alternative(token, logprob),
                "top_logprobs": [_alternative(*one) for one in _likeliest(top or {}, most)],
            }
            for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
        ]
    }


def completion_logprobs(logprobs: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Log-probabilities with no more alternatives than were asked for, beside the token itself."""
    tops = [
        top and {**{token: top[token] for token in (chosen,) if token in top}, **dict(_likeliest(top, most))}
        for chosen, top in zip(logprobs["tokens"], logprobs.get("top_logprobs") or [], strict=False)
    ]
    return {**logprobs, "top_logprobs": tops}


def _likeliest(top: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    """The likeliest: where vLLM names more, it begins with the chosen token, however unlikely that was."""
    return sorted(top.items(), key=lambda one: -one[1])[:most]


def _alternative(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", errors="replace"))}


def joined_logprobs(before: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """Log-probabilities of one piece and of the next."""
    if before is None:
        return {name: list(values) if isinstance(values, list) else values for name, values in more.items()}
    return {
        name: [*(before.get(name) or []), *values] if isinstance(values, list) else values
        for name, values in more.items()
    }


_DONE = b"data: [DONE]\n\n"


class Closable(Protocol):
    """The source of a stream, closed when that ends."""

    async def aclose(self) -> None:
        """Stop; a second time is harmless."""


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
                await unless_gone(receive, self._send_all(send))
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


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
