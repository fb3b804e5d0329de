"""Segments for weaving, for every backend: plan with them, pin, read, count, and create them."""

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
from chunkweave.planning.method import ReuseMethod, without
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan
from chunkweave.prompt.parts import Prompt
from chunkweave.store.index import PromptLookup, TieredLease
from chunkweave.store.records import SegmentRecord, all_read, segment_id
from chunkweave.store.store import TieredStore
from chunkweave.tiers.device import BlockSegment, HostMemory, Send, Staging
from chunkweave.tiers.preload import Gone, LayerLoader, LoadingSegment, LoadOrder
from chunkweave.types import ChunkId, Geometry, SegmentId


class Prefetch:
    """Pins a pending request's segments and reads their first layers. Pass it to `WeavingStore.pin`, then close it.

    Optional: a plan made later takes the segments that it still needs, and reads the others itself.
    """

    def __init__(self, lease: TieredLease, loader: LayerLoader) -> None:
        self._lease = lease
        self._loader = loader
        self._by_id = {SegmentId(segment.name): segment for segment in loader.segments}

    @property
    def nbytes(self) -> int:
        """Memory of its segments once their first layers are loaded, in bytes."""
        return sum(segment.nbytes for segment in self._loader.segments)

    def find(self, segment: SegmentId) -> LoadingSegment | None:
        """The segment if it is being prefetched; None also if it is queued behind a late one."""
        read = self._by_id.get(segment)
        return None if read is None or (self._loader.late and not read.complete) else read

    def left(self, segment: SegmentId) -> float:
        """The share of a segment that is still to be read; 1 if it is not prefetched or its read failed."""
        read = self.find(segment)
        return 1.0 if read is None or read.failure is not None else read.left

    def start_using(self, wanted: Collection[SegmentId], held_back: Collection[SegmentId] = ()) -> None:
        """Read on without limit for the `wanted` segments, and cancel the others: the request is running now.

        Copies are sent to the device from now on, except those of segments that are `held_back`.
        """
        for segment in self._by_id.keys() - set(wanted):
            dropped = self._by_id[segment]
            if not dropped.complete:
                del self._by_id[segment]
                dropped.fail(SegmentLate(dropped.name, "the plan does without it"))
        self._loader.hold_back({*held_back, *(self._by_id.keys() - set(wanted))})
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
    """A store as a backend weaves from it: on the compute `device`, for a model's `geometry`.

    With a `cost` model, a layer that takes longer than computing its segment is given up, unless the backend waits for
    layers elsewhere and is `patient`. `order` is for comparisons only. Segments are read into `memory` (None: plain
    memory) and sent to the device by `send` (None: the device is the host), ahead of their use within the budget
    `staging` (None: no limit).
    """

    store: TieredStore[SegmentSource]
    geometry: Geometry
    device: torch.device
    cost: CostModel | None = None
    order: LoadOrder = LoadOrder.LAYERS
    send: Send | None = None
    memory: HostMemory | None = None
    patient: bool = False
    staging: Staging | None = None

    def loading(self, ahead: Prefetch | None = None) -> Loading | None:
        """The current cost of loading; segments read `ahead` are in memory. None without a cost model."""
        return None if self.cost is None else loading_now(self.cost, self.store, ahead)

    def plan(
        self,
        prompt_lookup: PromptLookup,
        method: ReuseMethod,
        *,
        given_up: Collection[SegmentId] = (),
        loading: Loading | None = None,
    ) -> Plan:
        """Plan with a `prompt_lookup`, without segments in `given_up` and those that, by `loading`, compute faster
        than they load.

        Without `loading` the plan is for prefetching: segments of any tier are used, even slow ones.
        """
        lookup = without(prompt_lookup, given_up)
        if loading is not None:
            lookup = without(lookup, too_slow(lookup, loading))
        plan = method.plan(lookup, self.geometry)
        plan.validate(self.geometry.num_layers)
        return plan

    def pin(
        self, plan: Plan, *, prefetched: Prefetch | None = None, windows: Sequence[int | None] = (), first: int = 0
    ) -> "PlanSources":
        """Pin the segments of a plan and start reading them; `prefetched` ones are taken over.

        `windows` are those of the layers; with them, layers of a segment that no token looks at are not read. Segments
        that end before position `first` are not sent to the device ahead.
        """
        lease = self.store.lease(plan.segments())
        try:
            return PlanSources(self, plan, lease, prefetched, unseen_layers(plan, windows), first)
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
        """Start reading what `pin` would read into host memory, while the request is pending.

        With a cost model only the first layers are read, as many as keep later ones from being waited for (Cache-Craft
        eq. 16). The equation assumes that loading can be hidden. If a tier is slower than computing, all layers are
        read while the request is queued (§3.5 hides loading there), segment by segment and faster tiers first, so that
        as many as possible are complete when the request starts. If the segments exceed `max_bytes`, the first ones of
        the prompt that fit are read. Without `from_memory`, segments in host memory are not read.
        """
        lease = self.store.lease(plan.segments())
        unseen = unseen_layers(plan, windows)
        exact = _exact_segments(plan)
        sources = ((segment, self.store.get(segment, exact=segment in exact)) for segment in plan.segments())
        slow = [(segment, source) for segment, source in sources if source and is_slow(source, self.device)]
        if not from_memory:
            slow = [(segment, source) for segment, source in slow if not isinstance(source, SegmentKV | BlockSegment)]
        if max_bytes is not None:
            layers = self.geometry.num_layers
            totals = accumulate(source.nbytes * (layers - len(unseen[segment])) // layers for segment, source in slow)
            slow = [entry for entry, total in zip(slow, totals, strict=True) if total <= max_bytes]
        late = self._too_slow(plan)
        if not late:
            return Prefetch(lease, self.loader(slow, unseen, depth=self._preload_depth(plan, slow, windows)))
        slow.sort(key=lambda entry: entry[0] in late)
        return Prefetch(lease, self.loader(slow, unseen, order=LoadOrder.SEGMENTS))

    def loader(
        self,
        slow: Sequence[tuple[SegmentId, SegmentSource]],
        unseen: Mapping[str, frozenset[int]],
        *,
        depth: int | None = None,
        order: LoadOrder | None = None,
        held_back: Collection[SegmentId] | None = None,
    ) -> LayerLoader:
        """Read segments in a thread, and send them except those `held_back` (None: send none yet).

        No layer is waited for longer than computing takes.
        """
        longest = max((source.tokens for _, source in slow), default=0)
        wait_s = None if self.cost is None or self.patient or not slow else self.cost.prefill(longest)
        return LayerLoader(
            slow,
            self.geometry.num_layers,
            order=order or self.order,
            depth=depth,
            wait_s=wait_s,
            send=self.send,
            staging=self.staging,
            held_back=[segment for segment, _ in slow] if held_back is None else held_back,
            memory=self.memory,
            unseen=unseen,
        )

    def _too_slow(self, plan: Plan) -> set[SegmentId]:
        """The segments of a plan that load slower than they compute."""
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
    """The current cost of loading, for both backends; segments read `ahead` are in memory."""
    return Loading(cost, store.tier_of) if ahead is None else Loading(cost, store.tier_of, ahead.left)


def is_slow(source: SegmentSource, device: torch.device) -> bool:
    """Whether a segment is not in compute memory yet: in a slower tier, or on the host of a GPU."""
    return not isinstance(source, SegmentKV | BlockSegment) or source.device.type != device.type


def _exact_segments(plan: Plan) -> set[SegmentId | None]:
    return {part.segment for part in plan.parts if part.kv_source is KVSource.EXACT}


def unseen_layers(plan: Plan, windows: Sequence[int | None]) -> dict[str, frozenset[int]]:
    """By segment, the layers at which no token looks at it, at any of its places in the prompt."""
    unseen: dict[str, frozenset[int]] = {}
    for part in plan.parts:
        if part.segment is not None:
            unseen_here = plan.unseen_layers(part, windows)
            unseen[part.segment] = unseen.get(part.segment, unseen_here) & unseen_here
    return unseen


class PlanSources:
    """The pinned segments of one plan; those not on the device are read layer by layer in a thread. Close it.

    `placements` maps each segment to positions; a segment that was evicted in the meantime is `Gone`. Owned by the
    plan's request.
    """

    def __init__(
        self,
        store: WeavingStore,
        plan: Plan,
        lease: TieredLease,
        prefetched: Prefetch | None,
        unseen: Mapping[str, frozenset[int]],
        first: int,
    ) -> None:
        """Start reading; made by `WeavingStore.pin`."""
        self._num_layers = store.geometry.num_layers
        self._lease = lease
        self._loader: LayerLoader | None = None
        exact = _exact_segments(plan)
        sources: dict[SegmentId, SegmentSource] = {}
        for segment in plan.segments():
            ahead = None if prefetched is None else prefetched.find(segment)
            if ahead is not None and not ahead.unseen <= unseen[segment]:
                ahead = None  # the earlier plan skipped layers that this one needs
            sources[segment] = ahead or store.store.get(segment, exact=segment in exact) or Gone(segment)
        slow = [
            (segment, source)
            for segment, source in sources.items()
            if not isinstance(source, LoadingSegment | Gone) and is_slow(source, store.device)
        ]
        skipped = {part.segment for part in plan.parts if part.span.stop <= first}
        skipped -= {part.segment for part in plan.parts if part.span.stop > first}
        held_back = [segment for segment in sources if segment in skipped]
        if prefetched is not None:
            prefetched.start_using(sources.keys(), held_back)
        if slow:
            self._loader = store.loader(slow, unseen, held_back=held_back)
            sources |= {SegmentId(segment.name): segment for segment in self._loader.segments}
            self._loader.release()
        chosen = [(part.span, part.segment) for part in plan.parts if part.segment is not None]
        self.placements = [Placement(span, sources[segment], unseen[segment]) for span, segment in chosen]

    @property
    def layers_in(self) -> int:
        """Number of leading layers of every segment that are in memory."""
        return min((segment.layers_in for segment in self._from_below()), default=self._num_layers)

    @property
    def complete(self) -> bool:
        """Whether every layer of every segment is in memory."""
        return self.layers_in == self._num_layers

    @property
    def reading(self) -> bool:
        """Whether a segment is still being read and may still arrive or fail."""
        return any(not segment.complete and segment.failure is None for segment in self._from_below())

    @property
    def failure(self) -> SegmentLost | None:
        """The known loss or delay of a segment; None if there is none."""
        sources = (placement.segment for placement in self.placements)
        read = [source for source in sources if isinstance(source, LoadingSegment | Gone)]
        losses = [*(source.failure or source.late for source in read), *(source.held_up for source in read)]
        return next((loss for loss in losses if loss is not None), None)

    def loaded(self) -> Iterator[tuple[SegmentId, SegmentKV]]:
        """The segments that were read completely from a slower tier."""
        for segment in self._from_below():
            whole = segment.whole()
            if whole is not None:
                yield SegmentId(segment.name), whole

    def keep_lease(self) -> TieredLease:
        """Stop reading; segments stay pinned until the returned lease is released."""
        self._stop_reading()
        lease, self._lease = self._lease, TieredLease((), ())
        return lease

    def drop_sent(self) -> None:
        """Free what was sent to the device ahead; layers are then read from the host."""
        for segment in self._from_below():
            segment.drop_sent()

    def close(self) -> None:
        """Stop reading, free what was sent ahead, and unpin; idempotent."""
        self._stop_reading()
        self.drop_sent()
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
    """Captures for `parts`; `geometry` has the heads computed here."""
    return [PartCapture(part, geometry, dtype, device=device, woven_from=origin) for part, origin in parts]


def parts_to_keep(
    prompt: Prompt,
    plan: Plan,
    placements: Sequence[Placement],
    store: TieredStore[SegmentSource],
    *,
    variant_fraction: float | None,
) -> Iterator[tuple[PartPlan, WovenFrom | None]]:
    """Each computed part to store, and each reused part that may become a variant, with its origin.

    A reused chunk becomes a variant (Cache-Craft §3.3: a new chunk and prefix) if enough of it is recomputed
    (`_least_recomputed`) and no variant of this context is stored. A variant is cached KV with one pass written over
    it, so a plan of several passes makes none. Which tokens a rule will keep is not known yet, so a part is expected to
    get its proportional share. A part that gets more by chance is not stored: tracking every part would cost more than
    that saves.
    """
    sources = {placement.span: placement.segment for placement in placements}
    fraction = variant_fraction if len(plan.passes) == 1 else None
    active = torch.zeros(0) if fraction is None else _active_tokens(plan.passes[0], plan.prompt_tokens)
    exact = True
    for part, context in zip(plan.parts, prompt.contexts(), strict=True):
        exact = exact and part.kv_source is not KVSource.REUSED
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
    """Tokens of a reused part that must be recomputed through the last layer to store it as a variant.

    For a part that Cache-Craft scored (eq. 12): at least `fraction` of its tokens, all that it chose, and one. A chunk
    whose recomputation stopped because the question did not attend to it does not fit this context yet. Other methods
    choose tokens by the question or by deviation, not by what this context needs, so they need all tokens.
    """
    if part.score is None:
        return len(part.span)
    return max(1, ceil(fraction * len(part.span)), part.score.tokens)


def _active_tokens(pass_: Pass, tokens: int) -> torch.Tensor:
    """Probability that each token is active at the last layer of a pass, `[tokens]` on the host."""
    required = flags_of(pass_.required, tokens)
    candidates = flags_of(pass_.candidates, tokens)
    share = pass_.candidates_at(maxsize) / max(1, pass_.candidate_tokens)
    return required.double().maximum(candidates * share)


def reads_of(plan: Plan, store: TieredStore[SegmentSource]) -> Iterator[frozenset[ChunkId] | None]:
    """For each part of a plan, the chunks read by the segments that this and earlier parts reuse.

    None from the first removed segment on: parts computed after it must not be stored.
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
    """The finished segments in prompt order, with profiles if attention was captured.

    A part is exact only if it ends at or before `exact_to` and all parts before it are exact; nothing after a reused
    chunk is exact, nor is a woven part. A segment has read what the reused segments before it have read (their records
    are in `store`). After a removed segment, nothing is returned.
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
            novel=part.part.novel,
        )
        yield record, capture.segment()
