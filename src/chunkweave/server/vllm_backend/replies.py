"""vLLM's completions as its chat endpoint would have said them, with truthful usage and the reuse report."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunkweave.planning.method_choice import FIELD
from chunkweave.server.vllm_backend.upstream import Event

Choice = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of an answer at its end: tokens, and the report as it is shown."""

    usage: Mapping[str, Any]
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """How the answer to one request is written down: `chat` or as a plain completion.

    A stream `with_usage` ends with an event that counts tokens and has no choice. `top_logprobs` are the alternatives
    that each token was asked with, None for no log-probabilities at all.
    """

    chat: bool
    model: str
    with_usage: bool = False
    with_token_ids: bool = False
    top_logprobs: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, choices: Sequence[Choice], ending: Ending) -> dict[str, Any]:
        """The body of an answer that is not streamed, of `choices` as `WholeChoices` has them."""
        body = self._frame("chat.completion" if self.chat else "text_completion", [self._told(one) for one in choices])
        return {**body, "usage": dict(ending.usage), FIELD: dict(ending.report)}

    def opening(self, choices: int) -> Iterator[dict[str, Any]]:
        """What a stream begins with: in a chat, who speaks."""
        for index in range(choices if self.chat else 0):
            said = {"index": index, "delta": {"role": "assistant", "content": ""}}
            yield self._event([{**said, "logprobs": None, "finish_reason": None}])

    def piece(self, event: Event) -> dict[str, Any]:
        """An event of vLLM's stream as an event of this one."""
        return self._event([self._piece_of(choice) for choice in event["choices"]])

    def closing(self, last: dict[str, Any], ending: Ending) -> Iterator[dict[str, Any]]:
        """The last event with a choice, and what follows it; the report is in the last one."""
        report = {FIELD: dict(ending.report)}
        if not self.with_usage:
            yield {**last, **report}
            return
        yield last
        yield {**self._frame(self._event_kind, []), "usage": dict(ending.usage), **report}

    def _told(self, choice: Choice) -> Choice:
        text = choice["text"]
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        return {"index": choice["index"], **said, **self._about(choice)}

    def _piece_of(self, choice: Choice) -> Choice:
        text = choice.get("text", "")
        said = {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
        return {"index": choice["index"], **said, **self._about(choice)}

    def _about(self, choice: Choice) -> Choice:
        logprobs = choice.get("logprobs") if self.top_logprobs is not None else None
        if logprobs is not None:
            logprobs = chat_logprobs(logprobs, self.top_logprobs or 0) if self.chat else logprobs
        told = {"logprobs": logprobs, "finish_reason": choice.get("finish_reason")}
        if choice.get("stop_reason") is not None:
            told["stop_reason"] = choice["stop_reason"]
        if self.with_token_ids and "token_ids" in choice:
            told["token_ids"] = choice["token_ids"]
        return told

    def _event(self, choices: list[Choice]) -> dict[str, Any]:
        frame = self._frame(self._event_kind, choices)
        return {**frame, "usage": None} if self.with_usage else frame

    @property
    def _event_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _frame(self, kind: str, choices: list[Choice]) -> dict[str, Any]:
        number = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {"id": number, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class WholeChoices:
    """Adds up the pieces of a stream, choice by choice."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}

    def add(self, event: Event) -> None:
        """Another event of vLLM's stream."""
        for piece in event["choices"]:
            whole = self._choices.setdefault(
                piece["index"], {"index": piece["index"], "text": "", "token_ids": [], "logprobs": None}
            )
            whole["text"] += piece.get("text") or ""
            whole["token_ids"] += piece.get("token_ids") or []
            for name in ("finish_reason", "stop_reason"):
                if piece.get(name) is not None:
                    whole[name] = piece[name]
            if piece.get("logprobs"):
                whole["logprobs"] = _joined(whole["logprobs"], piece["logprobs"])

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
                "top_logprobs": [_alternative(*one) for one in list((top or {}).items())[:most]],
            }
            for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
        ]
    }


def _alternative(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", errors="replace"))}


def _joined(before: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    if before is None:
        return {name: list(values) if isinstance(values, list) else values for name, values in more.items()}
    return {
        name: [*(before.get(name) or []), *values] if isinstance(values, list) else values
        for name, values in more.items()
    }
