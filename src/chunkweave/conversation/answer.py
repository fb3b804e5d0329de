"""What comes back of a request, whichever backend computes it: the answer, its pieces, and its report."""

from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, Self, TypeVar

from chunkweave.conversation.turns import NextTurn
from chunkweave.metrics import ChunkReport, ReuseReport
from chunkweave.ordering.arrangement import Arranged
from chunkweave.planning.method_choice import MethodChoice
from chunkweave.planning.outcome import PlanExplanation
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.prompt.parts import Prompt
from chunkweave.types import SegmentId, spans_of


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
    prompt: Prompt | None = None
    """As it was computed."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A piece of an answer as it comes; the last event has the whole `answer`, its `prompt`, and the rest of the text.

    >>> from chunkweave import Engine, Request
    >>> with Engine.load("reader") as engine:
    ...     events = list(engine.stream(Request("Who leads the choir?", ["The choir is led by Otto Gunmark."])))
    >>> "".join(event.text for event in events) == events[-1].answer.text
    True
    """

    text: str
    answer: Answer | None = None
    prompt: Prompt | None = None

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
        return AnswerEnd(report, report.as_dict(), cached_tokens, self.answer.finish_reason, inf, self.prompt)


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


class WholeChoices:
    """Adds up the pieces of a stream, choice by choice."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}

    def add(self, pieces: Sequence[Choice]) -> None:
        """The next pieces."""
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


def joined_logprobs(before: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """Log-probabilities of one piece and of the next."""
    if before is None:
        return {name: list(values) if isinstance(values, list) else values for name, values in more.items()}
    return {
        name: [*(before.get(name) or []), *values] if isinstance(values, list) else values
        for name, values in more.items()
    }


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of one request: from its arrival to the first token, from there to the end, and in the queue."""

    ttft_s: float
    decode_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a prompt by what became of them; the four sum to the prompt's."""

    prefix_exact: int
    reused: int
    recomputed: int
    computed: int

    @classmethod
    def of(cls, plan: Plan, recomputed: int) -> Self:
        """Those of an executed plan that computed so many tokens of its reused parts again."""
        reused = plan.tokens(KVSource.REUSED) - recomputed
        return cls(plan.tokens(KVSource.EXACT), reused, recomputed, plan.tokens(KVSource.COMPUTED))


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where the KV of one part of a prompt came from; `segment` and `tier` are None where that is not known.

    `reasons` are those of a method that scores segments (`planning.outcome.reasons_of`). `contexts` is over how many
    the segment is a mean.
    """

    kv_source: str
    segment: SegmentId | None = None
    tier: str | None = None
    reasons: Mapping[str, float] = field(default_factory=dict)
    contexts: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a backend did with a prompt: `sources` of its parts in order, and the positions that it computed again."""

    method: str
    counts: TokenCounts
    sources: Sequence[PartSource]
    recomputed: Sequence[int]
    """Ascending."""
    check_layers: tuple[int, ...] = ()
    stopped_at_layer: int | None = None


def build_report(
    arranged: Arranged,
    choice: MethodChoice | None,
    content: NextTurn | None,
    outcome: Outcome,
    durations: Durations,
    new_tokens: int,
) -> ReuseReport:
    """Tokens by KV source and time by phase of one answer of `new_tokens`.

    `choice` is the method that was chosen, `content` what is known of a conversation. What only some
    backends know has its default, or is 0: phases before the first token, FLOPs, losses.
    """
    prompt, counts = arranged.prompt, outcome.counts
    chunks = _chunk_reports(arranged, outcome)
    hits: Counter[str] = Counter()
    for chunk in chunks:
        if chunk.tier is not None:
            hits[chunk.tier] += chunk.tokens
    return ReuseReport(
        method=outcome.method,
        prompt_tokens=len(prompt),
        prefix_exact_tokens=counts.prefix_exact,
        reused_tokens=counts.reused,
        recomputed_tokens=counts.recomputed,
        computed_tokens=counts.computed,
        recompute_fraction=0.0,
        queue_s=durations.queue_s,
        lookup_s=0.0,
        load_s=0.0,
        weave_s=0.0,
        ttft_s=durations.ttft_s,
        decode_s=durations.decode_s,
        new_tokens=new_tokens,
        prefill_flops=0.0,
        full_prefill_flops=0.0,
        chunks=chunks,
        why="" if choice is None else str(choice.why),
        parameters={} if choice is None else choice.parameters,
        order=arranged.ordering,
        history_tokens=prompt.history_tokens,
        chunks_not_sent=0 if content is None else len(content.not_sent),
        tokens_not_sent=0 if content is None else sum(map(len, content.not_sent)),
        turns_cut=0 if content is None else content.cut,
        looked_up_tokens=sum(chunk.tokens for chunk in chunks),
        hits=dict(hits),
        check_layers=outcome.check_layers,
        stopped_at_layer=outcome.stopped_at_layer,
    )


def _chunk_reports(arranged: Arranged, outcome: Outcome) -> tuple[ChunkReport, ...]:
    """Each part that can be stored."""
    found = []
    prompt, recomputed = arranged.prompt, outcome.recomputed
    for number, (part, span, source) in enumerate(zip(prompt.parts, prompt.spans(), outcome.sources, strict=True)):
        if part.id is None:
            continue
        inside = spans_of(recomputed[bisect_left(recomputed, span.start) : bisect_left(recomputed, span.stop)])
        found.append(
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
    return tuple(found)
