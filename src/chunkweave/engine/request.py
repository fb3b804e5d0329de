"""What comes back of a request: the answer, its pieces, and the report. Imports no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chunkweave.conversation.turns import NextTurn
from chunkweave.metrics import ChunkReport, ReuseReport
from chunkweave.ordering.arrangement import Arranged
from chunkweave.planning.method_choice import MethodChoice
from chunkweave.planning.outcome import PlanExplanation, full_prefill_flops, prefill_flops
from chunkweave.planning.plan import KVSource, PartPlan
from chunkweave.types import Geometry, SegmentId, Span, spans_of

if TYPE_CHECKING:
    from chunkweave.engine.prefill import Prefilled


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


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds that the engine measured around the runner's own."""

    ttft_s: float
    decode_s: float
    queue_s: float


def make_report(
    prefilled: "Prefilled",
    geometry: Geometry,
    durations: Durations,
    new_tokens: int,
    tiers: Mapping[SegmentId, str] | None = None,
    choice: MethodChoice | None = None,
    arranged: Arranged | None = None,
    *,
    content: NextTurn | None = None,
) -> ReuseReport:
    """Tokens by KV source and time by phase of one answer.

    `tiers` has the tier of each segment (host if it has none), `choice` why the method was chosen, `arranged` how the
    chunks were ordered, `content` what a conversation's turn put into the prompt.
    """
    plan = prefilled.plan
    reused = plan.tokens(KVSource.REUSED)
    recomputed = sum(len(span) for span in prefilled.recomputed)
    arranged = arranged or Arranged(prefilled.prompt)
    chunks = tuple(
        _chunk_report(part, prefilled.recomputed, tiers or {}, arranged.ranks.get(number))
        for number, part in enumerate(plan.parts)
        if part.part.id is not None
    )
    return ReuseReport(
        method=plan.method,
        prompt_tokens=plan.prompt_tokens,
        prefix_exact_tokens=plan.tokens(KVSource.EXACT),
        reused_tokens=reused - recomputed,
        recomputed_tokens=recomputed,
        computed_tokens=plan.tokens(KVSource.COMPUTED),
        recompute_fraction=prefilled.recompute_work / (geometry.num_layers * reused) if reused else 0.0,
        queue_s=durations.queue_s,
        lookup_s=prefilled.lookup_s,
        load_s=prefilled.load_s,
        weave_s=prefilled.weave_s,
        ttft_s=durations.ttft_s,
        decode_s=durations.decode_s,
        new_tokens=new_tokens,
        prefill_flops=prefill_flops(geometry, list(prefilled.work)),
        full_prefill_flops=full_prefill_flops(geometry, plan.prompt_tokens),
        chunks=chunks,
        why="" if choice is None else str(choice.why),
        parameters={} if choice is None else choice.parameters_raised(plan.raised_to),
        order=arranged.ordering,
        history_tokens=arranged.prompt.turn_tokens if content is None else content.history_tokens,
        chunks_not_sent=0 if content is None else len(content.not_sent),
        tokens_not_sent=0 if content is None else sum(map(len, content.not_sent)),
        turns_cut=0 if content is None else content.cut,
        lost_segments=prefilled.lost_segments,
        loaded_fraction=plan.loaded_fraction(geometry.windows),
        looked_up_tokens=sum(chunk.tokens for chunk in chunks),
        hits=_by_tier(chunks),
    )


def _by_tier(chunks: Sequence[ChunkReport]) -> dict[str, int]:
    hits: Counter[str] = Counter()
    for chunk in chunks:
        if chunk.tier is not None:
            hits[chunk.tier] += chunk.tokens
    return dict(hits)


def _chunk_report(
    part: PartPlan, recomputed: Sequence[Span], tiers: Mapping[SegmentId, str], rank: int | None
) -> ChunkReport:
    assert part.part.id is not None, "parts that are stored have ids"
    own = part.span
    inside = spans_of(p for span in recomputed for p in range(max(span.start, own.start), min(span.stop, own.stop)))
    return ChunkReport(
        id=part.part.id,
        source=part.part.source or str(part.part.kind),
        kv_source=str(part.kv_source),
        variant=part.segment,
        tier=tiers.get(part.segment, "host") if part.segment is not None else None,
        tokens=len(part.span),
        recomputed_tokens=sum(len(span) for span in inside),
        recomputed=inside,
        rank=rank,
        start=own.start,
    )
