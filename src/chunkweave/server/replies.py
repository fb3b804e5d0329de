"""The bodies of answers, as OpenAI's clients read them, with our report beside."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chunkweave.engine.request import Answer
from chunkweave.metrics import ReuseReport
from chunkweave.retrieval.pipeline import Retrieved


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


@dataclass(slots=True)
class TenantCounts:
    """What one tenant's answers reused so far, in tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    prefix_exact_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    answer_tokens: int = 0

    def add(self, report: ReuseReport) -> None:
        """Count one answer."""
        self.requests += 1
        self.prompt_tokens += report.prompt_tokens
        self.prefix_exact_tokens += report.prefix_exact_tokens
        self.reused_tokens += report.reused_tokens
        self.recomputed_tokens += report.recomputed_tokens
        self.computed_tokens += report.computed_tokens
        self.answer_tokens += report.new_tokens

    def as_dict(self) -> dict[str, int]:
        """JSON-able."""
        return asdict(self)
