"""The result of a request, the same for every backend: the answer, its stream of pieces, and its report."""

from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol, TypeVar

from chunkweave.metrics import ChunkReport, ReuseReport
from chunkweave.ordering.arrangement import Arranged
from chunkweave.planning.method_choice import MethodChoice
from chunkweave.planning.outcome import check_layers_of, reasons_of, recompute_fraction
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.types import SegmentId, Span, joined, spans_of


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
class PartReport:
    """What is known of one part of a prompt, besides its KV source.

    `segment` was reused, from `tier` (both None: none, or unknown). `reasons` are given by methods that score segments
    (`planning.outcome.reasons_of`). `contexts` is the number of contexts if the segment is a mean.
    """

    segment: SegmentId | None = None
    tier: str | None = None
    reasons: Mapping[str, float] = field(default_factory=dict)
    contexts: int = 0


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """Where the KV of a prompt came from, reported by the backend that prefilled it.

    `spans` by source cover the prompt. Of the reused ones `recomputed_tokens` were recomputed, at the positions
    `recomputed`, ascending (left out of the wire form of a long prompt). `recompute_fraction` is that of `ReuseReport`.
    `hits` are tokens of stored parts by tier. The first `local_tokens` were in vLLM's own prefix cache. `parts` are by
    first position.
    """

    spans: Mapping[KVSource, Sequence[Span]]
    recomputed: Sequence[int] = ()
    recomputed_tokens: int = 0
    recompute_fraction: float = 0.0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    check_layers: Sequence[int] = ()
    stopped_at_layer: int | None = None
    hits: Mapping[str, int] = field(default_factory=dict)
    local_tokens: int = 0
    parts: Mapping[int, PartReport] = field(default_factory=dict)

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        *,
        parameters: Mapping[str, Any],
        recomputed: Sequence[int],
        recompute_work: int,
        num_layers: int,
        stopped_at_layer: int | None,
        tier_of: Callable[[SegmentId], str],
        local_tokens: int = 0,
    ) -> "PrefillReport":
        """The report of an executed plan; `recompute_work` sums the recomputed tokens over all layers."""
        parts = {}
        hits = Counter[str]()
        for part in plan.parts:
            local = len(part.span.within(0, local_tokens))
            if part.part.id is not None:
                hits["vllm"] += local
            tier = None if part.segment is None else tier_of(part.segment)
            if tier is not None:
                hits[tier] += len(part.span) - local
            parts[part.span.start] = PartReport(part.segment, tier, reasons_of(part), part.contexts)
        return cls(
            {source: joined(plan.spans(source)) for source in KVSource},
            recomputed,
            len(recomputed),
            recompute_fraction(plan, recompute_work, num_layers),
            parameters,
            check_layers_of(plan),
            stopped_at_layer,
            {tier: tokens for tier, tokens in hits.items() if tokens},
            local_tokens,
            parts,
        )

    @classmethod
    def of_vllm(cls, prompt: Prompt, local_tokens: int, parameters: Mapping[str, Any]) -> "PrefillReport":
        """The report of a prompt that the plug-in did not handle: its first tokens were in vLLM's own prefix cache.

        They count as exact: woven requests have other hashes there.
        """
        stored = (span for part, span in zip(prompt.parts, prompt.spans(), strict=True) if part.id is not None)
        hit_tokens = sum(len(span.within(0, local_tokens)) for span in stored)
        return cls(
            {KVSource.EXACT: [Span(0, local_tokens)], KVSource.COMPUTED: [Span(local_tokens, len(prompt))]},
            parameters=parameters,
            hits={"vllm": hit_tokens} if hit_tokens else {},
            local_tokens=local_tokens,
        )

    def clipped(self, first: int, stop: int, prompt_tokens: int) -> "PrefillReport":
        """The same with all positions before `first` exact, and all from `stop` on computed."""
        spans = {source: [span.within(first, stop) for span in self.spans.get(source, ())] for source in KVSource}
        spans[KVSource.EXACT].append(Span(0, first))
        spans[KVSource.COMPUTED].append(Span(stop, prompt_tokens))
        recomputed = [position for position in self.recomputed if position < stop]
        clipped = {source: joined(source_spans) for source, source_spans in spans.items()}
        return replace(self, spans=clipped, recomputed=recomputed, recomputed_tokens=len(recomputed))

    def tokens(self, source: KVSource) -> int:
        """Tokens from a source; those of reused parts include the recomputed ones."""
        return sum(map(len, self.spans.get(source, ())))

    def source_at(self, part: Span) -> KVSource | None:
        """The source of a part's last token: one of vLLM's blocks may end inside the part."""
        for source, spans in self.spans.items():
            if any(span.start < part.stop <= span.stop for span in spans):
                return source
        return None

    @property
    def engine_cached_tokens(self) -> int:
        """Exact tokens from vLLM's own prefix cache."""
        return sum(len(span.within(0, self.local_tokens)) for span in self.spans.get(KVSource.EXACT, ()))

    @property
    def cached_tokens(self) -> int:
        """Tokens that were not computed for this prompt; recomputed ones do not count as cached."""
        reused = self.tokens(KVSource.REUSED) - self.recomputed_tokens
        return max(self.tokens(KVSource.EXACT) + reused, self.local_tokens)

    def as_dict(self) -> dict[str, Any]:
        """The wire form: tokens by source, and what `from_dict` reads."""
        exact = self.tokens(KVSource.EXACT)
        reused = self.tokens(KVSource.REUSED)
        computed = self.tokens(KVSource.COMPUTED)
        return {
            "parameters": dict(self.parameters),
            "prompt_tokens": exact + reused + computed,
            "prefix_exact_tokens": exact,
            "reused_tokens": reused - self.recomputed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "computed_tokens": computed,
            "engine_cached_tokens": self.engine_cached_tokens,
            "local_tokens": self.local_tokens,
            "recompute_fraction": self.recompute_fraction,
            "check_layers": list(self.check_layers),
            "stopped_at_layer": self.stopped_at_layer,
            "hits": dict(self.hits),
            "recomputed": list(self.recomputed),
            "kv_sources": {
                str(source): [[span.start, span.stop] for span in spans]
                for source, spans in self.spans.items()
                if any(map(len, spans))
            },
            "reasons": [[start, part.reasons] for start, part in self.parts.items() if part.reasons],
            "contexts": [[start, part.contexts] for start, part in self.parts.items() if part.contexts],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "PrefillReport":
        """The report with this wire form, without segments and tiers of parts."""
        reasons = {start: dict(reasons_of_part) for start, reasons_of_part in fields.get("reasons") or ()}
        contexts = dict(fields.get("contexts") or ())
        starts = [*reasons, *(start for start in contexts if start not in reasons)]
        return cls(
            {
                KVSource(source): [Span(start, stop) for start, stop in spans]
                for source, spans in fields["kv_sources"].items()
            },
            fields.get("recomputed") or (),
            fields["recomputed_tokens"],
            fields.get("recompute_fraction") or 0.0,
            fields["parameters"],
            fields.get("check_layers") or (),
            fields.get("stopped_at_layer"),
            fields.get("hits") or {},
            fields.get("local_tokens") or 0,
            {start: PartReport(reasons=reasons.get(start, {}), contexts=contexts.get(start, 0)) for start in starts},
        )


def build_report(
    arranged: Arranged,
    choice: MethodChoice | None,
    not_sent: Sequence[PromptPart],
    prefill: PrefillReport,
    durations: Durations,
    *,
    method: str,
    new_tokens: int,
    **fields: Any,
) -> ReuseReport:
    """The report of one answer.

    Args:
        arranged: the prompt, with its chunks in order.
        choice: the chosen method; None if the caller made it.
        not_sent: chunks that are not sent again, because earlier turns brought them.
        prefill: where the prompt's KV came from.
        durations: measured times.
        method: name of the method.
        new_tokens: tokens of the answer.
        fields: further fields of `ReuseReport` that the backend knows, such as times and FLOPs.
    """
    prompt = arranged.prompt
    chunks = _chunk_reports(arranged, prefill)
    return ReuseReport(
        method=method,
        why="" if choice is None else choice.reason,
        parameters=prefill.parameters,
        prompt_tokens=len(prompt),
        new_tokens=new_tokens,
        prefix_exact_tokens=prefill.tokens(KVSource.EXACT),
        reused_tokens=prefill.tokens(KVSource.REUSED) - prefill.recomputed_tokens,
        recomputed_tokens=prefill.recomputed_tokens,
        computed_tokens=prefill.tokens(KVSource.COMPUTED),
        recompute_fraction=prefill.recompute_fraction,
        engine_cached_tokens=prefill.engine_cached_tokens,
        check_layers=tuple(prefill.check_layers),
        stopped_at_layer=prefill.stopped_at_layer,
        hits=prefill.hits,
        queue_s=durations.queue_s,
        ttft_s=durations.ttft_s,
        decode_s=durations.decode_s,
        chunks=chunks,
        order=arranged.ordering,
        history_tokens=prompt.history_tokens,
        chunks_not_sent=len(not_sent),
        tokens_not_sent=sum(map(len, not_sent)),
        looked_up_tokens=sum(chunk.tokens for chunk in chunks),
        **fields,
    )


def _chunk_reports(arranged: Arranged, prefill: PrefillReport) -> tuple[ChunkReport, ...]:
    """The reports of all parts that can be stored."""
    reports = []
    prompt = arranged.prompt
    recomputed = prefill.recomputed
    for number, (part, span) in enumerate(zip(prompt.parts, prompt.spans(), strict=True)):
        if part.id is None:
            continue
        details = prefill.parts.get(span.start, PartReport())
        inside = spans_of(recomputed[bisect_left(recomputed, span.start) : bisect_left(recomputed, span.stop)])
        reports.append(
            ChunkReport(
                id=part.id,
                source=part.source or str(part.kind),
                kv_source=str(prefill.source_at(span) or ""),
                variant=details.segment,
                tier=details.tier,
                tokens=len(part),
                recomputed_tokens=sum(map(len, inside)),
                recomputed=inside,
                rank=arranged.ranks.get(number),
                start=span.start,
                reasons=details.reasons,
                contexts=details.contexts,
            )
        )
    return tuple(reports)
