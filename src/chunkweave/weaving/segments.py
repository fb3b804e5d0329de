"""The segments that prompts are woven from, for every backend: planned with, pinned, read, counted, and made anew."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from sys import maxsize
from typing import Self

import torch

from chunkweave.fusion.capture import AttentionCapture, PartCapture, WovenFrom
from chunkweave.fusion.rows import flags_of
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV, SegmentLate, SegmentLost, SegmentSource
from chunkweave.planning.cost import CostModel, Loading, preload_depth, too_slow
from chunkweave.planning.method import ReuseMethod, with_history, without
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan
from chunkweave.prompt.parts import Prompt
from chunkweave.store.index import PromptLookup, TieredLease
from chunkweave.store.records import SegmentRecord, all_read, segment_id
from chunkweave.store.store import TieredStore
from chunkweave.tiers.device import BlockSegment, HostMemory, Send
from chunkweave.tiers.preload import Gone, LayerLoader, LoadingSegment, LoadOrder
from chunkweave.types import ChunkId, Geometry, SegmentId


class Prefetch:
    """Pins a waiting request's segments and reads their first layers. Give it to `WeavingStore.pin`, then close it.

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

    def left(self, segment: SegmentId) -> float:
        """The share of a segment that is still to be read; all of one that is not among these, or will not come."""
        found = self.find(segment)
        return 1.0 if found is None or found.failure is not None else found.left

    def start_using(self, wanted: Collection[SegmentId]) -> None:
        """The request's turn has come: read on without bound, but no more than what is `wanted` now."""
        for segment in self._by_id.keys() - set(wanted):
            dropped = self._by_id[segment]
            if not dropped.complete:
                del self._by_id[segment]
                dropped.fail(SegmentLate(dropped.name, "the plan does without it"))
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
class WeavingStore:
    """A store of segments as a backend weaves from it: on the `device` that computes, of a model's `geometry`.

    With a `cost` model, a layer that comes later than computing its segment takes is given up, unless the backend waits
    for layers elsewhere and is `patient`. `order` is for comparison only. What is read goes into `memory` (None: plain)
    and by `send` to the device (None: it is the host).
    """

    store: TieredStore[SegmentSource]
    geometry: Geometry
    device: torch.device
    cost: CostModel | None = None
    order: LoadOrder = LoadOrder.LAYERS
    send: Send | None = None
    memory: HostMemory | None = None
    patient: bool = False

    def loading(self, ahead: Prefetch | None = None) -> Loading | None:
        """What bringing segments in takes now; what was read `ahead` is in memory. None without a cost model."""
        return None if self.cost is None else loading_now(self.cost, self.store, ahead)

    def plan(
        self,
        found: PromptLookup,
        method: ReuseMethod,
        *,
        given_up: Collection[SegmentId] = (),
        history: Mapping[int, SegmentId] | None = None,
        loading: Loading | None = None,
    ) -> Plan:
        """Plan with what was `found`, but for what was given up or, by `loading`, is computed sooner than it is in.

        Without `loading` it is a plan for what a queue reads ahead: from any tier, be it slower than computing.
        `history` has the segments of a conversation's earlier turns by the index of their part.
        """
        lookup = without(found, given_up)
        if history:
            records = ((place, self.store.record(segment)) for place, segment in history.items())
            kept = {place: one for place, one in records if one is not None and one.id not in given_up}
            lookup = with_history(lookup, kept)
        if loading is not None:
            lookup = without(lookup, too_slow(lookup, loading))
        plan = method.plan(lookup, self.geometry)
        plan.validate(self.geometry.num_layers)
        return plan

    def pin(
        self, plan: Plan, *, prefetched: Prefetch | None = None, windows: Sequence[int | None] = ()
    ) -> "PlanSources":
        """Pin the segments of a plan and start to read them; what was `prefetched` comes from there.

        `windows` are those of the layers; with them, layers of a segment that nothing will look at are not read.
        """
        lease = self.store.lease(plan.segments())
        try:
            return PlanSources(self, plan, lease, prefetched, unseen_layers(plan, windows))
        except BaseException:
            lease.release()
            raise

    def prefetch(
        self,
        plan: Plan,
        *,
        max_bytes: int | None = None,
        windows: Sequence[int | None] = (),
        from_memory: bool = True,
    ) -> Prefetch:
        """Start reading what `pin` would read, while the request still waits.

        With a cost model only the first layers, as many as keep the later ones from being waited for (Cache-Craft
        eq. 16). The equation takes for granted that loading is hidden. Where a tier is slower than computing, all
        layers are read as long as the queue lasts (§3.5 hides loading there), segment by segment and those of faster
        tiers first, so that when the turn comes as many as possible are whole. Of segments that together take more
        than `max_bytes` the first ones of the prompt are read, as many as fit. Without `from_memory`, what lies in the
        host's memory stays there.
        """
        lease = self.store.lease(plan.segments())
        unseen = unseen_layers(plan, windows)
        exact = _exact_segments(plan)
        found = ((segment, self.store.get(segment, exact=segment in exact)) for segment in plan.segments())
        slow = [(segment, source) for segment, source in found if source and is_slow(source, self.device)]
        if not from_memory:
            slow = [(segment, source) for segment, source in slow if not isinstance(source, SegmentKV | BlockSegment)]
        if max_bytes is not None:
            layers = self.geometry.num_layers
            totals = accumulate(source.nbytes * (layers - len(unseen[segment])) // layers for segment, source in slow)
            slow = [one for one, total in zip(slow, totals, strict=True) if total <= max_bytes]
        late = self._too_slow(plan)
        if not late:
            return Prefetch(lease, self.loader(slow, unseen, depth=self._preload_depth(plan, slow, windows)))
        slow.sort(key=lambda one: one[0] in late)
        return Prefetch(lease, self.loader(slow, unseen, order=LoadOrder.SEGMENTS))

    def loader(
        self,
        slow: Sequence[tuple[SegmentId, SegmentSource]],
        unseen: Mapping[str, frozenset[int]],
        *,
        depth: int | None = None,
        order: LoadOrder | None = None,
    ) -> LayerLoader:
        """Read segments to the device on a thread. None of their layers is waited for longer than computing takes."""
        longest = max((source.tokens for _, source in slow), default=0)
        wait_s = None if self.cost is None or self.patient or not slow else self.cost.prefill(longest)
        return LayerLoader(
            slow,
            self.geometry.num_layers,
            order=order or self.order,
            depth=depth,
            wait_s=wait_s,
            send=self.send,
            memory=self.memory,
            unseen=unseen,
        )

    def _too_slow(self, plan: Plan) -> set[SegmentId]:
        """The segments of a plan that take longer to load than to compute."""
        loading = self.loading()
        parts = [] if loading is None else [(part.segment, part.span) for part in plan.parts]
        return {segment for segment, span in parts if segment and loading and not loading.pays(segment, span)}

    def _preload_depth(
        self, plan: Plan, slow: Sequence[tuple[SegmentId, SegmentSource]], windows: Sequence[int | None]
    ) -> int | None:
        if self.cost is None or self.patient:
            return None
        layers = self.geometry.num_layers
        load_s = plan.loaded_fraction(windows) * sum(
            self.cost.load(source.tokens, self.store.tier_of(segment) or "") for segment, source in slow
        )
        return preload_depth(layers, self.cost.prefill(plan.tokens_behind_loading(layers)), load_s)


def loading_now(cost: CostModel, store: TieredStore[SegmentSource], ahead: Prefetch | None) -> Loading:
    """What bringing segments in takes now, for both backends; what was read `ahead` is in memory."""
    return Loading(cost, store.tier_of) if ahead is None else Loading(cost, store.tier_of, ahead.left)


def is_slow(source: SegmentSource, device: torch.device) -> bool:
    """Whether a segment is not yet where it is computed with: in a slower tier, or on the host of a GPU."""
    return not isinstance(source, SegmentKV | BlockSegment) or source.device.type != device.type


def _exact_segments(plan: Plan) -> set[SegmentId | None]:
    return {part.segment for part in plan.parts if part.kv_source is KVSource.EXACT}


def unseen_layers(plan: Plan, windows: Sequence[int | None]) -> dict[str, frozenset[int]]:
    """By segment, the layers on which nothing looks at it, wherever in the prompt it is placed."""
    unseen: dict[str, frozenset[int]] = {}
    for part in plan.parts:
        if part.segment is not None:
            here = plan.unseen_layers(part, windows)
            unseen[part.segment] = unseen.get(part.segment, here) & here
    return unseen


class PlanSources:
    """The pinned segments of one plan; those not on the device are read layer by layer on a thread. Close it.

    `placements` says where every segment goes; a segment that left its store meanwhile is `Gone`. Owned by the request
    whose plan it is.
    """

    def __init__(
        self,
        store: WeavingStore,
        plan: Plan,
        lease: TieredLease,
        prefetched: Prefetch | None,
        unseen: Mapping[str, frozenset[int]],
    ) -> None:
        """Start to read; `WeavingStore.pin` makes one."""
        self._num_layers = store.geometry.num_layers
        self._lease = lease
        self._loader: LayerLoader | None = None
        exact = _exact_segments(plan)
        sources: dict[SegmentId, SegmentSource] = {}
        for segment in plan.segments():
            ahead = None if prefetched is None else prefetched.find(segment)
            if ahead is not None and not ahead.unseen <= unseen[segment]:
                ahead = None  # it was planned otherwise then
            sources[segment] = ahead or store.store.get(segment, exact=segment in exact) or Gone(segment)
        slow = [
            (segment, source)
            for segment, source in sources.items()
            if not isinstance(source, LoadingSegment | Gone) and is_slow(source, store.device)
        ]
        if prefetched is not None:
            prefetched.start_using(sources.keys())
        if slow:
            self._loader = store.loader(slow, unseen)
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

    @property
    def reading(self) -> bool:
        """Whether a segment is still being read, and may yet come in or be lost."""
        return any(not segment.complete and segment.failure is None for segment in self._from_below())

    @property
    def failure(self) -> SegmentLost | None:
        """Why a segment is known to be lost, or late; None as long as none is."""
        sources = (placement.segment for placement in self.placements)
        read = [source for source in sources if isinstance(source, LoadingSegment | Gone)]
        losses = [*(source.failure or source.late for source in read), *(source.held_up for source in read)]
        return next((loss for loss in losses if loss is not None), None)

    def loaded(self) -> Iterator[tuple[SegmentId, SegmentKV]]:
        """The segments that were read from a slower tier, as far as they came in whole."""
        for segment in self._from_below():
            whole = segment.whole()
            if whole is not None:
                yield SegmentId(segment.name), whole

    def keep_lease(self) -> TieredLease:
        """Stop reading; what was found stays pinned until the lease is released."""
        self._stop_reading()
        lease, self._lease = self._lease, TieredLease((), ())
        return lease

    def close(self) -> None:
        """Stop reading and unpin; idempotent."""
        self._stop_reading()
        self._lease.release()

    def _stop_reading(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _from_below(self) -> tuple[LoadingSegment, ...]:
        sources = (placement.segment for placement in self.placements)
        return tuple(dict.fromkeys(source for source in sources if isinstance(source, LoadingSegment)))


def new_captures(
    parts: Iterable[tuple[PartPlan, WovenFrom | None]], geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> list[PartCapture]:
    """What captures each of `parts`, which are to be kept; `geometry` has the heads that are computed here."""
    return [PartCapture(part, geometry, dtype, device=device, woven_from=origin) for part, origin in parts]


def parts_to_keep(
    prompt: Prompt,
    plan: Plan,
    placements: Sequence[Placement],
    store: TieredStore[SegmentSource],
    *,
    variant_fraction: float | None,
) -> Iterator[tuple[PartPlan, WovenFrom | None]]:
    """Each computed part that is to be kept, and with its origin each reused one that may become a variant.

    A reused chunk becomes one (Cache-Craft §3.3: a new chunk and prefix) if enough of it is recomputed
    (`_least_recomputed`), and if no variant of this context is stored yet. It is the cached KV with one pass written
    over it, so there is none after several. Which tokens a rule will keep is not known yet: a part is expected to get
    its share of them. One that gets more by chance is not stored again; to follow every part for its sake takes longer
    than that saves.
    """
    sources = {placement.span: placement.segment for placement in placements}
    fraction = variant_fraction if len(plan.passes) == 1 else None
    active = torch.zeros(0) if fraction is None else _active_tokens(plan.passes[0], plan.prompt_tokens)
    for part, context in zip(plan.parts, prompt.contexts(), strict=True):
        if part.part.id is None or not part.kept:
            continue
        if part.kv_source is KVSource.COMPUTED:
            yield part, None
        elif part.kv_source is KVSource.REUSED and fraction is not None:
            least = _least_recomputed(part, fraction)
            enough = active[part.span.start : part.span.stop].sum() >= least
            record = store.record(part.segment) if enough and part.segment is not None else None
            if record is not None and segment_id(part.part.id, context) not in store:
                yield part, WovenFrom(sources[part.span], record.attention, least, record.generation)


def _least_recomputed(part: PartPlan, fraction: float) -> int:
    """Tokens of a reused part that must be recomputed through the last layer for it to be stored as a variant.

    Of a part that Cache-Craft scored (eq. 12) at least `fraction` of them, all that it chose, and one: a chunk whose
    recomputation stopped because the question did not attend to it is not yet fit for this context. Other methods
    choose by the question or by deviation, not by what this context needs: all tokens.
    """
    if part.score is None:
        return len(part.span)
    return max(1, ceil(fraction * len(part.span)), part.score.tokens)


def _active_tokens(a_pass: Pass, tokens: int) -> torch.Tensor:
    """Of each of so many tokens, how likely it is active at the last layer of a pass, `[tokens]` on the host."""
    required, candidates = flags_of(a_pass.required, tokens), flags_of(a_pass.candidates, tokens)
    share = a_pass.candidates_at(maxsize) / max(1, a_pass.candidate_tokens)
    return required.double().maximum(candidates * share)


def reads_of(plan: Plan, store: TieredStore[SegmentSource]) -> Iterator[frozenset[ChunkId] | None]:
    """For each part of a plan, what the segments have read that parts up to it are reused from.

    None from the first on that was removed meanwhile: what is computed behind that is not to be stored.
    """
    read: frozenset[ChunkId] | None = frozenset()
    for part in plan.parts:
        if part.kv_source is KVSource.REUSED and part.segment is not None and read is not None:
            record = store.record(part.segment)
            read = None if record is None else read | record.sources
        yield read


def segments_of(
    prompt: Prompt,
    plan: Plan,
    captures: Sequence[PartCapture],
    attention: AttentionCapture | None,
    *,
    store: TieredStore[SegmentSource],
    exact_to: int = maxsize,
    owner: str = "",
) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
    """The finished segments in prompt order, with their profiles if attention was captured.

    A part is exact only if it ends at `exact_to` or before, and every part before it was; what follows a reused chunk
    never is, nor is a woven one. What the reused segments have read, of which the `store` has the records, these have
    read too. Nothing is given behind one that was removed meanwhile.
    """
    captured = {capture.part.span: capture for capture in captures}
    exact = True
    for part, context, read in zip(plan.parts, prompt.contexts(), reads_of(plan, store), strict=True):
        if read is None:
            return
        exact = exact and part.kv_source is not KVSource.REUSED
        capture = captured.get(part.span)
        if capture is None or part.part.id is None:
            continue
        profile = None if attention is None else attention.profile(part, capture.recomputed, capture.attention_before)
        record = SegmentRecord.of(
            part.part.id,
            context,
            part.part.token_ids,
            exact=exact and part.span.stop <= exact_to,
            nbytes=capture.nbytes,
            source=part.part.source,
            attention=profile,
            owner=owner,
            generation=capture.generation,
            read=all_read(read.difference(context)),
        )
        yield record, capture.segment()
