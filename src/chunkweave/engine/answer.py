"""What the engine takes and what it gives back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chunkweave.config import SamplingParams
from chunkweave.engine.prefilled import Prefilled
from chunkweave.metrics import ChunkReport, ReuseReport
from chunkweave.ordering.arrangement import Arranged
from chunkweave.ordering.conversation import NextTurn
from chunkweave.planning.method_choice import MethodChoice
from chunkweave.planning.outcome import PlanExplanation, full_prefill_flops, prefill_flops
from chunkweave.planning.plan import KVSource, PartPlan, Plan
from chunkweave.types import Chunk, Geometry, SegmentId, Span, spans_of


@dataclass(frozen=True, slots=True)
class Request:
    """One question over chunks, as `Engine.generate_batch` takes them.

    `system=None` means the template's own instruction. `cache_salt` separates tenants: chunks cached under one salt
    are never found under another. `order` is `free` if the chunks may stand in any order, the given one being how well
    they fit, the best first; `fixed` if they stand as given; None leaves it to the engine. With a `conversation_id`,
    one among those of the same salt, the question is the next turn of that conversation, or the first of a new one;
    `system=None` is then the conversation's own instruction.
    """

    question: str
    chunks: Sequence[Chunk | str] = ()
    system: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    order: str | None = None
    conversation_id: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The text, its token ids, why it ended (`stop` or `length`), and what was reused to get it.

    `explanation` is the plan part by part, with the reasons for it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: ReuseReport
    explanation: PlanExplanation


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A piece of an answer as it comes; the last event has the whole `answer` (and the rest of the text)."""

    text: str
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds that the engine measured around the runner's own."""

    ttft_s: float
    decode_s: float
    queue_s: float


def make_report(
    prefilled: Prefilled,
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

    `tiers` says where segments came from (host, if it does not), `choice` why the method was taken, `arranged` how the
    chunks came to stand where they do, `content` what the turn of a conversation put into the prompt.
    """
    plan = prefilled.plan
    reused = plan.tokens(KVSource.REUSED)
    recomputed = sum(len(span) for span in prefilled.recomputed)
    arranged = arranged or Arranged(prefilled.prompt)
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
        chunks=tuple(
            _chunk_report(part, prefilled.recomputed, tiers or {}, arranged.ranks.get(number))
            for number, part in enumerate(plan.parts)
            if part.part.id is not None
        ),
        why="" if choice is None else str(choice.why),
        parameters={} if choice is None else _parameters(choice, plan),
        order=arranged.ordering,
        history_tokens=0 if content is None else content.history_tokens,
        chunks_not_sent=0 if content is None else len(content.not_sent),
        tokens_not_sent=0 if content is None else sum(map(len, content.not_sent)),
        turns_cut=0 if content is None else content.cut,
        lost_segments=prefilled.lost_segments,
    )


def _parameters(choice: MethodChoice, plan: Plan) -> Mapping[str, float]:
    """What the method was told, the controller's word before the caller's."""
    return {name: value if plan.raised_to is None else plan.raised_to for name, value in choice.parameters.items()}


def _chunk_report(
    part: PartPlan, recomputed: Sequence[Span], tiers: Mapping[SegmentId, str], rank: int | None
) -> ChunkReport:
    assert part.part.id is not None, "parts that are stored have ids"
    inside = spans_of(p for span in recomputed for p in _overlap(span, part.span).positions())
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
    )


def _overlap(a: Span, b: Span) -> Span:
    start = max(a.start, b.start)
    return Span(start, max(start, min(a.stop, b.stop)))
