"""A request: what is asked, what comes back, and what it goes through in between. Imports no torch."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from chunkweave.config import SamplingParams
from chunkweave.conversation.turns import NextTurn
from chunkweave.metrics import ChunkReport, ReuseReport
from chunkweave.ordering.arrangement import Arranged
from chunkweave.planning.method import reuses_nothing
from chunkweave.planning.method_choice import MethodChoice
from chunkweave.planning.outcome import PlanExplanation, full_prefill_flops, prefill_flops
from chunkweave.planning.plan import KVSource, PartPlan, Plan
from chunkweave.scheduling.queue import Waiting
from chunkweave.scheduling.waiting import waiting_path
from chunkweave.store.index import RequestUse
from chunkweave.types import Chunk, ChunkId, Geometry, SegmentId, Span, spans_of

if TYPE_CHECKING:
    from chunkweave.engine.decode import DecodeState
    from chunkweave.engine.prefill import Prefetch, Prefilled, PrefillJob
    from chunkweave.engine.prepare import PreparedRequest


@dataclass(frozen=True, slots=True)
class Request:
    """One question over chunks, as `Engine.generate_batch` takes them.

    `system=None` means the template's own instruction. `cache_salt` separates tenants: chunks cached under one salt
    are never found under another. `order` is `free` if the chunks (given best first) may be
    reordered, `fixed` if not; None leaves it to the engine. With a `conversation_id`, one among those of the same salt,
    the question is the next turn of that conversation, or the first of a new one; `system=None` is then the
    conversation's own instruction. Who says the number of the `turn`, from 1, is refused where another one comes next.
    Conversations are shared out by `tenant`. Without an id `history` are earlier questions with their answers, which
    stand behind the instruction: nothing is kept of them but KV, which is found again by what they say.

    >>> from chunkweave import Engine, Request, SamplingParams
    >>> asked = Request("Who leads the choir?", ["The choir is led by Otto Gunmark."], sampling=SamplingParams(16))
    >>> with Engine.load("reader") as engine:
    ...     [answer.text.strip() for answer in engine.generate_batch([asked])]
    ['Otto Gunmark']
    """

    question: str
    chunks: Sequence[Chunk | str] = ()
    system: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    order: str | None = None
    conversation_id: str | None = None
    turn: int | None = None
    tenant: str = ""
    history: Sequence[tuple[str, str]] = ()


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


Deliver = Callable[[StreamEvent | Exception], None]
"""Takes each event of a request as it comes; the last one has the answer, or is the reason why there is none."""


class RequestStatus(Enum):
    """Where a request is between its arrival and its end. Only the scheduler and the core change it."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request of a batching engine, from its arrival to its end.

    It waits, is prefilled (`job`) or decodes, and holds `blocks` of KV memory unless it waits. Times are those of the
    core's clock.
    """

    id: int
    prepared: "PreparedRequest"
    deliver: Deliver
    arrived_s: float
    deadline_s: float | None = None
    speculative: bool = False
    """It started before retrieval has confirmed its chunks, and yields to all requests that are not speculative."""
    tenant: str = ""
    """Whose it is, for those who share the engine."""
    background: bool = False
    """Nobody waits for its answer: it computes something to be stored, and yields to all that is asked."""
    status: RequestStatus = RequestStatus.WAITING
    number: int = -1
    """Its place in the order of arrival, or of confirmation; speculative requests have an order of their own."""
    place: "Waiting[RequestState] | None" = None
    """Its place in the cache-aware queue, kept while it runs."""
    waits_since_s: float = field(init=False)
    """Since when its time in the queue counts: its arrival, or when it was confirmed."""
    admitted_s: float | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    prefetch: "Prefetch | None" = None
    looked_ahead: bool = False
    """Whether its segments were read ahead, or would have been, while it waits."""
    blocks: int = 0
    job: "PrefillJob | None" = None
    passed_over: int = 0
    """Steps in a row in which its prefill got nothing."""
    decode: "DecodeState | None" = None
    """From its first token on, preempted or not."""
    plan: Plan | None = None
    """What it was woven by, if another plan could give other tokens."""
    use: RequestUse | None = None
    """What it counts for in the store, from its first plan until it is counted."""
    counted: bool = False
    """Whether the store was told of it."""
    displaced: float = 0.0
    """Tokens computed for others that were thrown away for it: its tenant pays for them."""
    apart: bool = False
    """It has failed once, and runs apart from all others."""
    shown: int = 0
    """Characters of its text that were delivered."""
    context: Context = field(default_factory=copy_context)
    """That of its submission: what is done for it alone is done there, so that logs tell whose it is."""

    def __post_init__(self) -> None:
        self.waits_since_s = self.arrived_s

    @property
    def yields(self) -> bool:
        """Whether its place and its memory go to any request that waits."""
        return self.speculative or self.background

    @property
    def runs(self) -> bool:
        """Whether it was admitted and has not ended."""
        return self.status in (RequestStatus.PREFILLING, RequestStatus.DECODING)

    @property
    def generated(self) -> tuple[int, ...]:
        """Its tokens so far."""
        return () if self.decode is None else self.decode.generated

    @property
    def tokens(self) -> int:
        """Tokens that it must have room for when it is admitted: what is known of it, and one to come."""
        return len(self.prepared.prompt) + len(self.generated) + 1

    @property
    def path(self) -> tuple[ChunkId, ...]:
        """Its place in the queue's eyes: the ids of its stored parts, as far as its method may reuse them."""
        choice = self.prepared.choice
        if reuses_nothing(choice.method, choice.reuse):
            return ()
        ids = [part.id for part in self.prepared.prompt.parts if part.id is not None]
        share = choice.recomputed_share
        return waiting_path(ids, weaves=share is not None, recomputed=share or 0.0)

    def stop_reading(self) -> None:
        """End what is read for its prefill, and that with it; a second time is harmless."""
        self.looked_ahead = False
        if self.job is not None:
            self.job.close()
            self.job = None
        if self.prefetch is not None:
            self.prefetch.close()
            self.prefetch = None
