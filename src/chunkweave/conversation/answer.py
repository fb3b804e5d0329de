"""The result of a request, the same for every backend: the answer, its stream of pieces, and its report."""

from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, TypeVar

from chunkweave.metrics import ChunkReport, ReuseReport
from chunkweave.ordering.arrangement import Arranged
from chunkweave.planning.method_choice import MethodChoice
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.types import SegmentId, spans_of


@dataclass(frozen=True, slots=True)
class Answer:
    """The text, its token ids, the finish reason (`stop` or `length`), and the reuse report.

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


Choice = dict[str, Any]
"""A choice of an answer, or a piece of one, in the form of vLLM's completions.

It has `index` and `text`, and optionally `finish_reason`, `stop_reason`, `logprobs` and `token_ids`.
"""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """Data about an answer that is complete with its last piece.

    `shown` is the report for clients; `cached_tokens` of the prompt were not computed for this answer.
    """

    report: ReuseReport
    shown: Mapping[str, Any]
    cached_tokens: int
    finish_reason: str
    prefilled_s: float | None = None
    """Time (`time.perf_counter`) until which it was computed ahead of its search; None: not at all, inf: to its end."""
    prompt: Prompt | None = None
    """The prompt that was computed."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A piece of an answer's stream. The last event has the whole `answer`, its `prompt`, and the rest of the text.

    In a stream of several answers to one prompt, it has the answer that ended last, with the tokens of all in its
    report.

    >>> from chunkweave import Engine, Request
    >>> with Engine.load("reader") as engine:
    ...     events = list(engine.stream(Request("Who leads the choir?", ["The choir is led by Otto Gunmark."])))
    >>> "".join(event.text for event in events) == events[-1].answer.text
    True
    """

    text: str
    answer: Answer | None = None
    prompt: Prompt | None = None
    index: int = 0
    """Which of several answers to one prompt this is a piece of."""
    finish_reason: str | None = None
    """Set at the end of an answer, if others to the same prompt have not ended."""
    logprobs: Mapping[str, Any] | None = None
    """Log-probabilities of the piece's tokens, if wanted, in the form of vLLM's completions."""

    @property
    def choices(self) -> list[Choice]:
        """The piece as a choice list; empty if there is no text."""
        ends = self.finish_reason if self.answer is None else self.answer.finish_reason
        if not self.text and ends is None:
            return []
        more = {"finish_reason": ends, "logprobs": self.logprobs}
        fields = {name: value for name, value in more.items() if value is not None}
        return [{"index": self.index, "text": self.text, **fields}]

    @property
    def end(self) -> AnswerEnd | None:
        """The data about the whole answer at the last event, else None."""
        if self.answer is None:
            return None
        report = self.answer.report
        cached_tokens = report.prefix_exact_tokens + report.reused_tokens
        return AnswerEnd(report, report.as_dict(), cached_tokens, self.answer.finish_reason, inf, self.prompt)


EventT_co = TypeVar("EventT_co", covariant=True)


class PendingAnswer(Protocol[EventT_co]):
    """The answer of a submitted request as a stream of events, for every backend. Close it with `aclose`."""

    @property
    def begun(self) -> bool:
        """Whether a first event, or an error in its place, is or was available."""

    @property
    def failed(self) -> bool:
        """Whether it ended without an answer; reading it raises the error."""

    def confirm(self) -> None:
        """Make a speculative request an ordinary one. Does nothing for others, or if it has ended.

        Raises:
            QueueFullError: it would have to wait, and the queue is full.
        """

    def __aiter__(self) -> AsyncIterator[EventT_co]:
        """Iterate over its events.

        Raises:
            ChunkweaveError: the request is invalid, the queue is full, the deadline has passed, or the backend stops.
        """

    def abort(self) -> None:
        """End the request now; reading it raises `RequestAbortedError`."""

    async def aclose(self) -> None:
        """End the request unless it has ended."""


class WholeChoices:
    """Joins the pieces of a stream by choice."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}

    def add(self, pieces: Sequence[Choice]) -> None:
        """Add the next pieces."""
        for piece in pieces:
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
            if piece.get("tool_calls"):  # whole calls: pieces of calls occur only in streams
                calls = [
                    {name: value for name, value in call.items() if name != "index"} for call in piece["tool_calls"]
                ]
                whole["tool_calls"] = [*whole.get("tool_calls", []), *calls]
            if piece.get("logprobs"):
                whole["logprobs"] = joined_logprobs(whole["logprobs"], piece["logprobs"])

    @property
    def choices(self) -> list[Choice]:
        """All choices so far, by index."""
        return [self._choices[index] for index in sorted(self._choices)]


def joined_logprobs(previous: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """The log-probabilities of two consecutive pieces, joined."""
    if previous is None:
        return {name: list(values) if isinstance(values, list) else values for name, values in more.items()}
    return {
        name: [*(previous.get(name) or []), *values] if isinstance(values, list) else values
        for name, values in more.items()
    }


@dataclass(frozen=True, slots=True)
class Durations:
    """Times of one request in seconds: arrival to first token, first token to end, and in the queue."""

    ttft_s: float
    decode_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where the KV of one part of a prompt came from; `segment` and `tier` are None if unknown.

    `reasons` are given by methods that score segments (`planning.outcome.reasons_of`). `contexts` is the number of
    contexts if the segment is a mean.
    """

    kv_source: str
    segment: SegmentId | None = None
    tier: str | None = None
    reasons: Mapping[str, float] = field(default_factory=dict)
    contexts: int = 0


def build_report(
    arranged: Arranged,
    choice: MethodChoice | None,
    not_sent: Sequence[PromptPart],
    sources: Sequence[PartSource],
    recomputed: Sequence[int],
    durations: Durations,
    **fields: Any,
) -> ReuseReport:
    """The report of one answer.

    Args:
        arranged: the prompt, with its chunks in order.
        choice: the chosen method; None if the caller made it.
        not_sent: chunks that are not sent again, because earlier turns brought them.
        sources: of each part of the prompt, in order.
        recomputed: prompt positions of reused parts that were recomputed, ascending.
        durations: measured times.
        fields: fields of `ReuseReport` that the backend knows: the method, the tokens by source, and so on.
    """
    prompt = arranged.prompt
    chunks = _chunk_reports(arranged, sources, recomputed)
    hits: Counter[str] = Counter()
    for chunk in chunks:
        if chunk.tier is not None:
            hits[chunk.tier] += chunk.tokens
    report_fields = {
        "why": "" if choice is None else str(choice.why),
        "parameters": {} if choice is None else choice.parameters,
        "hits": dict(hits),
        **fields,
    }
    return ReuseReport(
        prompt_tokens=len(prompt),
        queue_s=durations.queue_s,
        ttft_s=durations.ttft_s,
        decode_s=durations.decode_s,
        chunks=chunks,
        order=arranged.ordering,
        history_tokens=prompt.history_tokens,
        chunks_not_sent=len(not_sent),
        tokens_not_sent=sum(map(len, not_sent)),
        looked_up_tokens=sum(chunk.tokens for chunk in chunks),
        **report_fields,
    )


def _chunk_reports(
    arranged: Arranged, sources: Sequence[PartSource], recomputed: Sequence[int]
) -> tuple[ChunkReport, ...]:
    """The reports of all parts that can be stored."""
    reports = []
    prompt = arranged.prompt
    for number, (part, span, source) in enumerate(zip(prompt.parts, prompt.spans(), sources, strict=True)):
        if part.id is None:
            continue
        inside = spans_of(recomputed[bisect_left(recomputed, span.start) : bisect_left(recomputed, span.stop)])
        reports.append(
            ChunkReport(
                id=part.id,
                source=part.source or str(part.kind),
                kv_source=source.kv_source,
                variant=source.segment,
                tier=source.tier,
                tokens=len(part),
                recomputed_tokens=sum(map(len, inside)),
                recomputed=inside,
                rank=arranged.ranks.get(number),
                start=span.start,
                reasons=source.reasons,
                contexts=source.contexts,
            )
        )
    return tuple(reports)
