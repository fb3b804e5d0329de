"""What comes back of a request: the answer and its pieces, whichever backend computes it."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, TypeVar

from chunkweave.metrics import ReuseReport
from chunkweave.planning.outcome import PlanExplanation


@dataclass(frozen=True, slots=True)
class Answer:
    """The text, its token ids, why it ended (`stop` or `length`), and what was reused to get it.

    `explanation` is the plan part by part, with the reasons for it.

    >>> from chunkweave import Chunk, Engine
    >>> choir = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
    >>> with Engine.load("reader") as engine:
    ...     answer = engine.generate("Who leads the Selmond Choir?", [choir])
    >>> answer.text.strip(), answer.finish_reason
    ('Otto Gunmark', 'stop')
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: ReuseReport
    explanation: PlanExplanation


Choice = dict[str, Any]
"""A choice of an answer, or a piece of one, as vLLM's completions have them.

`index` and `text`, and where there are any `finish_reason`, `stop_reason`, `logprobs` and `token_ids`.
"""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """What is known of an answer when its last piece has come.

    `shown` is the report as clients get it; `cached_tokens` of the prompt were not computed for it.
    """

    report: ReuseReport
    shown: Mapping[str, Any]
    cached_tokens: int
    finish_reason: str
    prefilled_s: float | None = None
    """Until when it was computed ahead of its search, by `time.perf_counter`; None: not at all, inf: to its end."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A piece of an answer as it comes; the last event has the whole `answer` (and the rest of the text).

    >>> from chunkweave import Engine, Request
    >>> with Engine.load("reader") as engine:
    ...     events = list(engine.stream(Request("Who leads the choir?", ["The choir is led by Otto Gunmark."])))
    >>> "".join(event.text for event in events) == events[-1].answer.text
    True
    """

    text: str
    answer: Answer | None = None

    @property
    def choices(self) -> list[Choice]:
        """The piece as one of an answer's only choice; none if it says nothing."""
        if self.answer is not None:
            return [{"index": 0, "text": self.text, "finish_reason": self.answer.finish_reason}]
        return [{"index": 0, "text": self.text}] if self.text else []

    @property
    def end(self) -> AnswerEnd | None:
        """What is known at the last event."""
        if self.answer is None:
            return None
        report = self.answer.report
        cached_tokens = report.prefix_exact_tokens + report.reused_tokens
        return AnswerEnd(report, report.as_dict(), cached_tokens, self.answer.finish_reason, inf)


EventT_co = TypeVar("EventT_co", covariant=True)


class PendingAnswer(Protocol[EventT_co]):
    """The answer of a submitted request as a stream of events, whichever backend computes it. Leave it by `aclose`."""

    @property
    def begun(self) -> bool:
        """Whether there is, or was, a first event to be read, or the reason why there is none."""

    @property
    def failed(self) -> bool:
        """Whether it has ended, or will as soon as it is read, without an answer."""

    def confirm(self) -> None:
        """Make a speculative request an ordinary one; a no-op for others, and if it has ended.

        Raises:
            QueueFullError: it would have to wait, and as many wait as may.
        """

    def __aiter__(self) -> AsyncIterator[EventT_co]:
        """Its events.

        Raises:
            ChunkweaveError: the request was wrong, too many wait, the deadline has passed, or the backend stops.
        """

    def abort(self) -> None:
        """End the request now; reading it raises `RequestAbortedError`."""

    async def aclose(self) -> None:
        """End the request unless it has ended."""
