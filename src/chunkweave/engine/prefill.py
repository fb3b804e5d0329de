"""One prompt's prefill in steps, from its plan to the segments that are stored of it."""

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from sys import maxsize
from typing import Self

import torch

from chunkweave.config import CaptureConfig
from chunkweave.fusion.capture import AttentionCapture, PartCapture, WovenFrom
from chunkweave.fusion.loop import LoopTimes, PassRun
from chunkweave.fusion.rows import ActiveRows, CountedWork, counted, flags_of
from chunkweave.kv.request_cache import Placement, RequestCache, before_rope
from chunkweave.kv.segment import SegmentHeldUp, SegmentKV, SegmentLate, SegmentLost, SegmentSource
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.cost import CostModel, too_slow
from chunkweave.planning.method import ReuseMethod, with_history, without
from chunkweave.planning.outcome import LayerWork, Stop
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan, can_be_cut, cut
from chunkweave.prompt.parts import Prompt
from chunkweave.store.index import PromptLookup, RequestUse, TieredLease
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.store.store import TieredStore
from chunkweave.tiers.device import BlockSegment, HostMemory, Send
from chunkweave.tiers.preload import Gone, LayerLoader, LoadingSegment, LoadOrder
from chunkweave.types import SegmentId, Span, joined, spans_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt whose KV cache is complete up to its last token.

    `logits` `[vocab]` are those of the first new token. `recomputed` are the positions of reused chunks that were
    active at the last layer of a pass; `work` is what every layer of every pass did, `recompute_work` the sum
    over those layers of the reused-chunk tokens among them: a token that was dropped midway counts there for the layers
    it was active at, and is not among `recomputed`. `stop` says where unfocused chunks were dropped, if they were.
    `captures` are the parts whose KV can be stored, `attention` what their tokens attended to, if that was asked for.
    `loaded` are the segments that came from a slower tier, `woven` the reused parts that a conversation keeps as they
    were recomputed. `lost_segments` were planned with and could not be read. `owner` is the tenant that it is for.
    `lease` keeps what was found from being evicted by what is stored of this (RAGCache §5.1); None once that is.
    """

    prompt: Prompt
    plan: Plan
    cache: RequestCache
    logits: torch.Tensor
    captures: tuple[PartCapture, ...]
    attention: AttentionCapture | None
    work: tuple[LayerWork, ...]
    recomputed: tuple[Span, ...]
    recompute_work: int
    stop: Stop | None
    lookup_s: float
    load_s: float
    weave_s: float
    loaded: tuple[tuple[SegmentId, SegmentKV], ...] = ()
    woven: tuple[PartCapture, ...] = ()
    lost_segments: int = 0
    owner: str = ""
    lease: TieredLease | None = None


class Prefetch:
    """Pins a waiting request's segments and reads their first layers. Hand it to `Runner.prefill`, then close it.

    It helps as far as it goes: a plan that is made later takes from it what it still wants and reads the rest itself.
    """

    def __init__(self, lease: TieredLease, loader: LayerLoader) -> None:
        self._lease = lease
        self._loader = loader
        self._by_id = {SegmentId(segment.name): segment for segment in loader.segments}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its segments take once their first layers are in."""
        return sum(segment.nbytes for segment in self._loader.segments)

    def find(self, segment: SegmentId) -> LoadingSegment | None:
        """The segment on its way, if it is one of these; not one that is behind another which is late."""
        found = self._by_id.get(segment)
        return None if found is None or (self._loader.late and not found.complete) else found

    def start_using(self) -> None:
        """The request's turn has come: read on without bound."""
        self._loader.release()

    def close(self) -> None:
        """Stop reading and unpin."""
        self._loader.close()
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, eq=False)
class PrefillContext:
    """What all prefills of one runner share; its attributes say what each is for."""

    model: HuggingFaceModel
    store: TieredStore[SegmentSource]
    cost: CostModel | None
    load_order: LoadOrder
    capture: CaptureConfig
    send: Send
    memory: HostMemory


def make_plan(
    context: PrefillContext,
    prompt: Prompt,
    method: ReuseMethod,
    *,
    given_up: Collection[SegmentId] = (),
    history: Mapping[int, SegmentId] | None = None,
) -> tuple[Plan, PromptLookup]:
    """Plan with what is stored, but for what was given up or takes longer to load than to compute; and all that is.

    `history` has the segments of a conversation's earlier turns by the place of their part.
    """
    found = context.store.lookup(prompt)
    lookup = without(found, given_up)
    if history:
        lookup = with_history(lookup, dict(_stored(history, context.store, given_up)))
    if context.cost is not None:
        lookup = without(lookup, too_slow(lookup, context.cost, context.store.tier_of))
    plan = method.plan(lookup, context.model.geometry)
    plan.validate(context.model.geometry.num_layers)
    return plan, found


def must_be_loaded(source: SegmentSource, device: torch.device) -> bool:
    """Whether a segment is not yet where it is computed with: in a slower tier, or on the host of a GPU."""
    return not isinstance(source, SegmentKV | BlockSegment) or source.device.type != device.type


def _stored(
    history: Mapping[int, SegmentId], store: TieredStore[SegmentSource], given_up: Collection[SegmentId]
) -> Iterator[tuple[int, SegmentRecord]]:
    for place, segment in history.items():
        record = None if segment in given_up else store.record(segment)
        if record is not None:
            yield place, record


def unseen_layers(plan: Plan, windows: Sequence[int | None]) -> dict[str, frozenset[int]]:
    """By segment, the layers on which nothing looks at it, wherever in the prompt it is placed."""
    unseen: dict[str, frozenset[int]] = {}
    for part in plan.parts:
        if part.segment is not None:
            here = plan.unseen_layers(part, windows)
            unseen[part.segment] = unseen.get(part.segment, here) & here
    return unseen


class PlanSources:
    """Pins the segments of one plan; those not on the device are read layer by layer on a thread. Close it.

    `placements` says where every segment goes; a segment that left its store meanwhile is `Gone`. Owned by the request
    whose plan it is.
    """

    def __init__(
        self,
        store: TieredStore[SegmentSource],
        plan: Plan,
        num_layers: int,
        device: torch.device,
        *,
        prefetched: Prefetch | None = None,
        cost: CostModel | None = None,
        order: LoadOrder = LoadOrder.LAYERS,
        send: Send | None = None,
        memory: HostMemory | None = None,
        windows: Sequence[int | None] = (),
    ) -> None:
        """Pin and start to read; what was `prefetched` comes from there. For the rest see `PrefillContext`.

        `windows` are those of the layers; with them, layers of a segment that nothing will look at are not read.
        """
        self._num_layers = num_layers
        unseen = unseen_layers(plan, windows)
        self._lease = store.lease(plan.segments())
        self._loader: LayerLoader | None = None
        exact = {part.segment for part in plan.parts if part.kv_source is KVSource.EXACT}
        sources: dict[SegmentId, SegmentSource] = {}
        try:
            for segment in plan.segments():
                ahead = None if prefetched is None else prefetched.find(segment)
                if ahead is not None and not ahead.unseen <= unseen[segment]:
                    ahead = None  # it was planned otherwise then
                sources[segment] = ahead or store.get(segment, exact=segment in exact) or Gone(segment)
        except BaseException:
            self._lease.release()
            raise
        slow = [
            (segment, source)
            for segment, source in sources.items()
            if not isinstance(source, LoadingSegment | Gone) and must_be_loaded(source, device)
        ]
        if prefetched is not None:
            prefetched.start_using()
        if slow:
            self._loader = LayerLoader(
                slow,
                num_layers,
                order=order,
                wait_s=longest_wait_s(slow, cost),
                send=send,
                memory=memory,
                unseen=unseen,
            )
            sources |= {SegmentId(segment.name): segment for segment in self._loader.segments}
            self._loader.release()
        chosen = [(part.span, part.segment) for part in plan.parts if part.segment is not None]
        self.placements = [Placement(span, sources[segment], unseen[segment]) for span, segment in chosen]

    @property
    def layers_in(self) -> int:
        """How many of the first layers of every segment are in memory."""
        return min((segment.layers_in for segment in self._from_below()), default=self._num_layers)

    @property
    def complete(self) -> bool:
        """Whether every layer of every segment is in memory."""
        return self.layers_in == self._num_layers

    def loaded(self) -> Iterator[tuple[SegmentId, SegmentKV]]:
        """The segments that were read from a slower tier, as far as they came in whole."""
        for segment in self._from_below():
            whole = segment.whole()
            if whole is not None:
                yield SegmentId(segment.name), whole

    @property
    def under_way(self) -> bool:
        """Whether a segment is still being read, and may yet come in or be lost."""
        return any(not segment.complete and segment.failure is None for segment in self._from_below())

    @property
    def failure(self) -> SegmentLost | None:
        """Why a segment is known to be lost, or late; None as long as none is."""
        sources = (placement.segment for placement in self.placements)
        read = [source for source in sources if isinstance(source, LoadingSegment | Gone)]
        losses = [*(source.failure or source.late for source in read), *(source.held_up for source in read)]
        return next((loss for loss in losses if loss is not None), None)

    def keep_lease(self) -> TieredLease:
        """Stop reading; what was found stays pinned until the lease is released."""
        self._stop_reading()
        lease, self._lease = self._lease, TieredLease((), ())
        return lease

    def close(self) -> None:
        """Stop reading and unpin; a second time is harmless."""
        self._stop_reading()
        self._lease.release()

    def _stop_reading(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _from_below(self) -> tuple[LoadingSegment, ...]:
        sources = (placement.segment for placement in self.placements)
        return tuple(dict.fromkeys(source for source in sources if isinstance(source, LoadingSegment)))


def longest_wait_s(slow: Sequence[tuple[str, SegmentSource]], cost: CostModel | None) -> float | None:
    """Seconds after which a layer of one of these segments is not waited for: computing the largest takes no longer."""
    return cost.prefill(max(source.tokens for _, source in slow)) if cost and slow else None


def parts_to_keep(
    prompt: Prompt,
    plan: Plan,
    placements: Sequence[Placement],
    store: TieredStore[SegmentSource],
    *,
    woven_fraction: float | None,
) -> Iterator[tuple[PartPlan, WovenFrom | None]]:
    """Each computed part that is to be kept, and with its origin each reused one that may be worth storing as woven.

    The latter is worth it if at least `woven_fraction` of it is recomputed (None: never), and if no variant of this
    context is stored yet. A woven part is the cached KV with one pass written over it, so there is none after several.
    Which tokens a rule will keep nobody knows yet: a part is expected to get its share of them. One that gets more by
    chance is not stored again; to follow every part for its sake takes longer than that saves.
    """
    sources = {placement.span: placement.segment for placement in placements}
    least = woven_fraction if len(plan.passes) == 1 else None
    active = _active_tokens(plan.passes[0], plan.prompt_tokens) if least else torch.zeros(plan.prompt_tokens)
    for part, context in zip(plan.parts, prompt.contexts(), strict=True):
        if part.part.id is None or not part.kept:
            continue
        if part.kv_source is KVSource.COMPUTED:
            yield part, None
        elif part.kv_source is not KVSource.REUSED or not least:
            continue
        elif (
            active[part.span.start : part.span.stop].sum() >= least * len(part.span)
            and segment_id(part.part.id, context) not in store
        ):
            record = None if part.segment is None else store.record(part.segment)
            yield part, WovenFrom(sources[part.span], None if record is None else record.attention, least)


def _active_tokens(a_pass: Pass, tokens: int) -> torch.Tensor:
    """Of each of so many tokens, how likely it is active at the last layer of a pass, `[tokens]` on the host."""
    required, candidates = flags_of(a_pass.required, tokens), flags_of(a_pass.candidates, tokens)
    share = a_pass.candidates_at(maxsize) / max(1, a_pass.candidate_tokens)
    return required.double().maximum(candidates * share)


def segments_of(
    prompt: Prompt,
    plan: Plan,
    captures: Sequence[PartCapture],
    attention: AttentionCapture | None,
    *,
    owner: str = "",
) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
    """The finished segments in prompt order, with their profiles if attention was captured.

    A part is exact only if every part before it was; what follows a reused chunk never is, nor is a woven one.
    """
    captured = {capture.part.span: capture for capture in captures}
    exact = True
    for part, context in zip(plan.parts, prompt.contexts(), strict=True):
        exact = exact and part.kv_source is not KVSource.REUSED
        capture = captured.get(part.span)
        if capture is None or part.part.id is None:
            continue
        profile = None if attention is None else attention.profile(part, capture.recomputed, capture.attention_before)
        record = SegmentRecord.of(
            part.part.id,
            context,
            part.part.token_ids,
            exact=exact,
            nbytes=capture.nbytes,
            source=part.part.source,
            attention=profile,
            owner=owner,
        )
        yield record, capture.segment()


@dataclass(frozen=True, slots=True, eq=False)
class PrefillOptions:
    """What a prefill starts from and what is kept of it.

    The cache has room for `new_tokens` more. With `capture` new segments can be stored afterwards, with `profiles` and
    what their tokens attend to. `prefetched` is what was read ahead.

    A prefill that was given up during decoding is made again with what it had `generated` by then, computed behind the
    prompt as decoding would have; nothing is captured then. `plan` is what it was executed by, and will be again unless
    a segment of it is gone: methods that approximate give other tokens if the plan is another.

    `history` makes the prompt one of a conversation: the segments of its earlier turns by the place of their part. Then
    what was woven is kept for the turns to come, and what the last part, the question, and all behind it hold.

    `owner` is the tenant that what is stored of it counts for. With `unseen` the cache gets even what no layer's window
    reaches any more: for those that compare caches.
    """

    new_tokens: int = 0
    capture: bool = True
    profiles: bool = False
    prefetched: Prefetch | None = None
    generated: tuple[int, ...] = ()
    plan: Plan | None = None
    history: Mapping[int, SegmentId] | None = None
    owner: str = ""
    unseen: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """A pass or a slice of one.

    Parts are captured for the store in the prompt's last pass, for a conversation in all whole ones.
    """

    a_pass: Pass
    captures: bool
    whole: bool
    in_slices: bool = False


@dataclass(slots=True, eq=False)
class _Progress:
    """What the steps so far have added up to; begins anew with every plan."""

    weave_s: float
    load_s: float = 0.0
    work: list[CountedWork] = field(default_factory=list)
    recompute_work: int = 0
    recomputed: tuple[Span, ...] = ()
    stop: Stop | None = None
    evidence: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class LayeredPass:
    """A pass that is left between two layers and goes on in a later step: its rows, its run and what that took."""

    rows: ActiveRows
    run: PassRun
    times: LoopTimes
    spent_s: float = 0.0


class PrefillJob:
    """Makes a prompt's KV cache by a method's plan, one pass or slice of a pass after the other.

    Take the rows of the `next_rows`, run them, alone or beside others', and give back what came of them with `take`,
    until `prefilled` is there. Segments stay pinned, and are read, until then or until `close`. If one turns out to be
    lost, `go_on_without` it plans again; what was computed by then is lost too. Owned by one request.

    While segments are being read a pass may be run by layers, as they come in: it is `under_way` then.
    """

    def __init__(self, context: PrefillContext, prompt: Prompt, method: ReuseMethod, options: PrefillOptions) -> None:
        """Plan and begin to load; nothing is computed yet."""
        self.prefilled: Prefilled | None = None
        self._context = context
        self._prompt = prompt
        self._method = method
        self._options = options
        self.use: RequestUse | None = None
        """What it counts for if it is a request's, from its first plan; None where a plan was given."""
        self.under_way: LayeredPass | None = None
        """The next pass, if a part of its layers was run."""
        self._given_up: set[SegmentId] = set()
        self._began = time.perf_counter()
        self._open(options.plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def next_tokens(self) -> int:
        """Tokens that the next pass, or what is left of it, has in its first layer."""
        a_pass = self._steps[0].a_pass
        return a_pass.required_tokens + a_pass.starting_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens of all passes that are left, as they have them in their first layers; 0 once it is done.

        Of a pass that is under way, those that are still active, by the share of layers that are left to them.
        """
        steps = [step.a_pass.required_tokens + step.a_pass.starting_tokens for step in self._steps]
        if self.under_way is not None:
            steps[0] = self.tokens_through(self._num_layers - self.under_way.run.layer)
        return sum(steps)

    @property
    def layers_ready(self) -> int | None:
        """How many layers the next pass may go on through now without waiting for one.

        None if it is to be run as a whole, or in slices by position: nothing is being read, and none of it was run yet.
        0 if something was lost: it has to be planned again first.
        """
        if self.lost is not None:
            return 0
        if self.under_way is None:
            return self._sources.layers_in if self.loading else None
        return max(0, self._sources.layers_in - self.under_way.run.layer)

    def tokens_through(self, layers: int) -> int:
        """The work of going on through `layers` layers, as tokens through all of them."""
        active = self.next_tokens if self.under_way is None else len(self.under_way.rows)
        return ceil(active * layers / self._num_layers)

    @property
    def can_be_cut(self) -> bool:
        """Whether the next pass may come in slices."""
        return can_be_cut(self._steps[0].a_pass)

    @property
    def loading(self) -> bool:
        """Whether segments are still being read. It may be run even so, and then waits for each layer."""
        return self._sources.under_way

    @property
    def lost(self) -> SegmentLost | None:
        """Why a segment is known to be lost before its layers were asked for."""
        return self._sources.failure

    def next_rows(self, max_tokens: int | None = None) -> ActiveRows:
        """The rows of the next step: at most `max_tokens` of the next pass if it can be cut, else all of it."""
        started = time.perf_counter()
        step = self._steps[0]
        if max_tokens is not None and max_tokens < self.next_tokens and can_be_cut(step.a_pass):
            head, tail = cut(step.a_pass, max_tokens)
            if tail is not None:
                step = replace(step, a_pass=head, in_slices=True)
                self._steps[0] = replace(step, a_pass=tail)
                self._steps.appendleft(step)
        rows = ActiveRows.of_pass(
            self._cache,
            self._ids,
            step.a_pass,
            dtype=self._context.model.dtype,
            evidence=self._progress.evidence,
            recomputed=self._progress.recomputed,
            answers=len(self._steps) == 1,
        )
        captures = (*(self._captures if step.captures else ()), *(self._woven if step.whole else ()))
        if captures:
            rows.keep(captures, self._attention if step.captures else None, in_slices=step.in_slices)
        self._progress.weave_s += time.perf_counter() - started
        return rows

    def take(self, rows: ActiveRows, logits: torch.Tensor | None, *, weave_s: float, load_s: float) -> None:
        """Take in a step's rows after their run, of so many seconds, and the last step's `logits` `[vocab]`."""
        a_pass = self._steps.popleft().a_pass
        so_far = self._progress
        so_far.weave_s += weave_s
        so_far.load_s += load_s
        so_far.work += rows.work
        so_far.stop, so_far.evidence = rows.stop or so_far.stop, rows.evidence
        fixed = self.plan.computed_tokens_of(a_pass)
        so_far.recompute_work += sum(layer.kept_tokens - fixed for layer, _ in rows.work)
        if a_pass.depth is None:
            recomputed = spans_of(self.plan.reused_among(rows.where))
            so_far.recomputed = joined([*so_far.recomputed, *recomputed])
        if not self._steps:
            assert logits is not None, "the last pass gives answers"
            self._finish(logits)

    def mark(self) -> None:
        """The next rows may have to be run twice."""
        if self._attention is not None:
            self._attention.mark()

    def undo(self) -> None:
        """The rows given since `mark` were not run to the end: the next ones are the same."""
        if self._attention is not None:
            self._attention.undo()

    def go_on_without(self, lost: SegmentLost) -> None:
        """Plan again without a segment: a late one is left out for this request, a broken one removed for good."""
        logger.warning("%s; it is computed instead", lost)
        self._given_up.add(SegmentId(lost.segment))
        if not isinstance(lost, SegmentLate):
            self._context.store.remove(SegmentId(lost.segment))
        elif not isinstance(lost, SegmentHeldUp):
            self._context.store.was_late(SegmentId(lost.segment))
        self.close()
        self._open()

    @property
    def _num_layers(self) -> int:
        return self._context.model.geometry.num_layers

    def computed(self) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
        """Segments of the parts that were computed whole so far, for a job that is given up between two steps."""
        complete = [capture for capture in self._captures if capture.complete]
        return segments_of(self._prompt, self.plan, complete, self._attention, owner=self._options.owner)

    def close(self) -> None:
        """Stop reading and unpin; a job that is not done cannot go on afterwards. A second time is harmless."""
        self.under_way = None
        self._sources.close()

    def _open(self, plan: Plan | None = None) -> None:
        options, model = self._options, self._context.model
        if plan is None:
            plan, found = make_plan(
                self._context, self._prompt, self._method, given_up=self._given_up, history=options.history
            )
            self.use = self.use or RequestUse.of(found, plan.segments())
        self.plan = plan
        self._sources = PlanSources(
            self._context.store,
            self.plan,
            model.geometry.num_layers,
            model.device,
            prefetched=options.prefetched,
            cost=self._context.cost,
            order=self._context.load_order,
            send=self._context.send,
            memory=self._context.memory,
            windows=() if options.unseen else model.geometry.windows,
        )
        started = time.perf_counter()
        self._lookup_s = started - self._began
        self._ids = torch.tensor((*self._prompt.token_ids, *options.generated), device=model.device)
        capacity = len(self._prompt) + options.new_tokens
        self._placements = before_rope(self._sources.placements, model.unrotate_keys, model.device)
        self._cache = RequestCache(
            model.geometry,
            capacity,
            self._placements,
            dtype=model.dtype,
            device=model.device,
            kept_from=None if options.history is None else self._prompt.spans()[-1].start,
        )
        self._captures, self._attention = self._new_captures()
        self._woven = self._woven_captures() if options.history is not None else ()
        self._steps = deque(_steps_of(self.plan, behind=len(options.generated)))
        self._progress = _Progress(weave_s=time.perf_counter() - started)

    def _new_captures(self) -> tuple[Sequence[PartCapture], AttentionCapture | None]:
        if not self._options.capture or self._options.generated:
            return (), None
        model, config = self._context.model, self._context.capture
        fraction = config.woven_fraction if self._options.history is None else None
        parts = parts_to_keep(self._prompt, self.plan, self._placements, self._context.store, woven_fraction=fraction)
        captures = self._captures_of(parts)
        if not captures or not self._options.profiles:
            return captures, None
        return captures, AttentionCapture(self.plan.parts, model.geometry, config, device=model.device)

    def _woven_captures(self) -> Sequence[PartCapture]:
        """For each reused part of which tokens may be recomputed: a conversation goes on from it as it is woven now."""
        if self._options.generated:
            return ()
        sources = {placement.span: placement.segment for placement in self._placements}
        return self._captures_of(
            (part, WovenFrom(sources[part.span], None, 0.0))
            for part in self.plan.parts
            if part.kv_source is KVSource.REUSED and len(part.fresh) < len(part.span)
        )

    def _captures_of(self, parts: Iterable[tuple[PartPlan, WovenFrom | None]]) -> list[PartCapture]:
        model = self._context.model
        return [
            PartCapture(part, model.geometry, model.dtype, device=model.device, woven_from=origin)
            for part, origin in parts
        ]

    def _finish(self, logits: torch.Tensor) -> None:
        started = time.perf_counter()
        self._cache.release_segments()
        self._note_reuse()
        self.prefilled = Prefilled(
            prompt=self._prompt,
            plan=self.plan,
            cache=self._cache,
            logits=logits,
            captures=tuple(capture for capture in self._captures if capture.complete),
            attention=self._attention,
            work=tuple(counted(self._progress.work)),
            recomputed=self._progress.recomputed,
            recompute_work=self._progress.recompute_work,
            stop=self._progress.stop,
            lookup_s=self._lookup_s,
            load_s=self._progress.load_s,
            weave_s=self._progress.weave_s + time.perf_counter() - started,
            loaded=tuple(self._sources.loaded()),
            woven=tuple(capture for capture in self._woven if capture.complete and capture.changed),
            lost_segments=len(self._given_up),
            owner=self._options.owner,
            lease=self._sources.keep_lease(),
        )

    def _note_reuse(self) -> None:
        """Tell the store how much each segment saved. Where the method does not score them, a use is just a use."""
        for part in self.plan.parts:
            if part.segment is not None:
                unscored = 0.0 if part.kv_source is KVSource.EXACT else 1.0
                self._context.store.note_reuse(part.segment, part.score.impact if part.score is not None else unscored)


def _steps_of(plan: Plan, *, behind: int) -> list[_Step]:
    """The plan's passes, and one over the `behind` tokens that come after the prompt."""
    last = len(plan.passes) - 1
    steps = [
        _Step(a_pass, captures=number == last, whole=number == last or a_pass.depth is None)
        for number, a_pass in enumerate(plan.passes)
    ]
    if behind:
        rest = Span(plan.prompt_tokens, plan.prompt_tokens + behind)
        steps.append(_Step(Pass(required=(rest,)), captures=False, whole=False))
    return steps
