"""The report of one answer, from what its backend says of the prompt. Both backends build it here."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chunkweave.conversation.turns import NextTurn
from chunkweave.metrics import ChunkReport, ReuseReport
from chunkweave.ordering.arrangement import Arranged
from chunkweave.planning.method_choice import MethodChoice
from chunkweave.types import SegmentId, spans_of


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


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where the KV of one part of a prompt came from; `segment` and `tier` are None where that is not known."""

    kv_source: str
    segment: SegmentId | None = None
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a backend did with a prompt: `sources` of its parts in order, and the positions that it computed again."""

    method: str
    counts: TokenCounts
    sources: Sequence[PartSource]
    recomputed: Sequence[int]
    """Ascending."""


def build_report(
    arranged: Arranged,
    choice: MethodChoice | None,
    turn: NextTurn | None,
    outcome: Outcome,
    durations: Durations,
    new_tokens: int,
) -> ReuseReport:
    """Tokens by KV source and time by phase of one answer of `new_tokens`.

    `choice` is the method that was chosen, `turn` what a conversation's turn put into the prompt. What only some
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
        history_tokens=prompt.turn_tokens if turn is None else turn.history_tokens,
        chunks_not_sent=0 if turn is None else len(turn.not_sent),
        tokens_not_sent=0 if turn is None else sum(map(len, turn.not_sent)),
        turns_cut=0 if turn is None else turn.cut,
        looked_up_tokens=sum(chunk.tokens for chunk in chunks),
        hits=dict(hits),
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
            )
        )
    return tuple(found)
