"""The connector's half in each worker: the segment store, the running weaves, and saving."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import inf

import torch

from chunkweave.conversation.answer import PrefillReport
from chunkweave.conversation.weave_request import StoredPart, WeaveRequest
from chunkweave.kv.segment import RawCodec, SegmentKV, SegmentLate, SegmentLost
from chunkweave.planning.adaptive_methods import ContextMethod, method_for
from chunkweave.planning.cost import MEASURED_BY_VLLM, CostModel, Loading, given_cost_model, stored_cost_model, too_slow
from chunkweave.planning.method import without
from chunkweave.planning.method_choice import EXACT_METHODS
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.prompt.contexts import MeanShare
from chunkweave.store.index import PromptLookup, RequestUse
from chunkweave.store.records import ANYTHING, SegmentRecord, segment_id
from chunkweave.tiers.device import Event, Staging, host_memory_for, streams_of
from chunkweave.tiers.preload import Gone
from chunkweave.types import ChunkId, SegmentId, Span
from chunkweave.vllm.background_work import BackgroundWork, Work
from chunkweave.vllm.model_check import rank_fingerprint
from chunkweave.vllm.orders import (
    AskedOrder,
    Holdings,
    NotWoven,
    SaveOrder,
    StepOrders,
    StepResults,
    WeaveOrder,
)
from chunkweave.vllm.paged_kv import RequestBlocks
from chunkweave.vllm.part_copy import PartCopy
from chunkweave.vllm.removal import RemovalOrder, StoreRemovals
from chunkweave.vllm.report_socket import CountsSender
from chunkweave.vllm.settings import LOAD_TIMEOUT_S, PluginSettings
from chunkweave.vllm.stock_layers import StockLayers
from chunkweave.vllm.store_events import RemoteLookups, StoreEvents
from chunkweave.vllm.weave import CapturedParts, Choices, WeaveJob
from chunkweave.vllm.weave_queue import Alone, PreparedWeave, QueuedWeave, RankFailedError, ReadAhead, WeaveQueue
from chunkweave.weaving.means import Means
from chunkweave.weaving.segments import Prefetch, WeavingStore, loading_now, reads_of
from chunkweave.weaving.stores import eviction_cost, eviction_order, loading_costs, open_store, store_counts

logger = logging.getLogger("vllm.chunkweave")

_CHOICES = 4096
"""Most prompts whose chosen positions are kept: some hundred integers each."""

_CHOSEN_POSITIONS = 4 << 20
"""Most chosen positions in total, 8 bytes each; with long prompts, fewer prompts are kept."""

_WAITING_SHARE = 1 / 8
_LOOKUPS_IN_A_LOAD = 20
"""A remote lookup may take this part of the time for loading."""
"""Share of vLLM's blocks that may wait to be copied."""

_STARTS = 64
_MOST_START_TOKENS = 8
"""Most prompt beginnings whose KV is kept as vLLM computed it, and the most tokens of one."""

_EXPIRE_S = 60.0
"""Seconds between scans of the store for expired segments."""

_StartKey = tuple[int, tuple[int, ...]]
"""The adapter, and the leading tokens of a prompt that belong to no chunk."""

_ChoiceKey = tuple[str, tuple[SegmentId, ...]]
"""Requests with the same chunks, method and reused segments choose the same positions.

Exact parts are not included: their KV is the same whether stored or computed.
"""


_Reads = Mapping[Span, frozenset[ChunkId] | None]
"""For each part, what it has read besides its context."""


class ConnectorWorker:
    """Owns store and weaves of one worker. Called from the worker's thread only.

    A step runs from `begin` to `end`; between steps, KV to be saved is copied out of the blocks.

    Every rank of a tensor-parallel group gets the same orders in the same order and does the same. Before it uses
    anything that depends on its own tiers, threads or clock, `WeaveQueue` agrees on it with the other ranks.
    """

    def __init__(
        self,
        layers: StockLayers,
        fingerprint: str,
        settings: PluginSettings,
        ranks: Alone | None = None,
        *,
        replica: int = 0,
        room_bytes: float = inf,
        measure: Callable[[], CostModel] | None = None,
    ) -> None:
        """`fingerprint` is the model's; each of several `ranks` stores its own share of the heads (None: a single
        rank).

        `replica` is the number of the engine among those that vLLM runs in parallel (`--data-parallel-size`). Weaves
        take at most `room_bytes` of device memory at once; a prompt that needs more is computed by vLLM. `measure`
        measures prefill here, for a policy that weighs it, and for a `cost_model` that does not exist yet.
        """
        ranks = Alone() if ranks is None else ranks
        self._room_bytes = room_bytes
        self._layers = layers
        self._num_layers = layers.geometry.num_layers
        self._lossless = settings.store.codec == RawCodec.name
        self._step_work = settings.step_tokens * self._num_layers
        named = rank_fingerprint(fingerprint, ranks.rank, ranks.size) + layers.paged.scales_name
        self._streams = streams_of(layers.device)
        cost_model = given_cost_model(settings.store.cost_model, fingerprint)
        store_config = (
            settings.store if ranks.size == 1 else replace(settings.store, cache_dir=None)
        )  # all of several measure
        weighed = eviction_cost(store_config, named, cost_model, measure, MEASURED_BY_VLLM)
        self._store = open_store(settings.store, named, layers.device, self._streams, weighed)
        self._memory = host_memory_for(layers.device, settings.store.most_pinned_bytes)
        self._cost = loading_costs(
            settings.store.cost_model,
            cost_model or stored_cost_model(settings.store.cache_dir, named),
            measure if ranks.size == 1 else None,
            self._store,
            layers.geometry,
            layers.paged.stored_dtype,
        )
        self._weaving_store = WeavingStore(
            self._store,
            layers.geometry,
            layers.device,
            self._cost,
            send=self._streams.send,
            memory=self._memory,
            patient=True,
            staging=Staging(settings.store.device_staging_bytes),
        )
        self._idle = False
        self._follower = self._store.follow()
        self._lookups = RemoteLookups(self._store.probe, LOAD_TIMEOUT_S / _LOOKUPS_IN_A_LOAD)
        self._means = Means()
        self._removals = StoreRemovals(self._store, self._means.forget)
        self._events = StoreEvents(self._follower.take, self._lookups.answered, self._removals.take)
        slow = any(level.background for level in self._store.levels)
        self._queue = WeaveQueue(self.look_up, self.plan, ranks, background=slow, timeout_s=LOAD_TIMEOUT_S)
        self._in_background: Callable[[Callable[[], object]], object] = self._lookups.run if slow else _at_once
        self._saving = streams_of(layers.device)  # apart from `_streams`: a weave's loads do not wait for saves
        self._between_steps = BackgroundWork(int(layers.paged.num_slots * _WAITING_SHARE), self._saving)
        self._held: set[str] = set()
        """Ended requests whose blocks vLLM keeps until they are copied."""
        self._woven: dict[str, PreparedWeave] = {}
        """Kept until a request is finished, so that a preempted one is woven in the same way again."""
        self._choices: OrderedDict[_ChoiceKey, Choices] = OrderedDict()
        self._chosen_positions = 0
        self._begun: dict[str, dict[Span, PartCopy]] = {}
        """By request, parts whose beginning vLLM has computed."""
        self._starts: OrderedDict[_StartKey, PartCopy] = OrderedDict()
        """Equal on all ranks in the same step: if an entry is missing, all ranks compute these tokens."""
        self._outdated: set[str] = set()
        """Requests that use removed KV: nothing of them is stored."""
        self._noted: set[str] = set()
        """Requests that were counted."""
        self._arrived: set[str] = set()
        self._results = StepResults()
        self._expires = settings.store.ttl_s is not None
        self._expired_s = time.monotonic()
        self._ahead = ReadAhead(self._read_ahead) if slow else None
        self._counts = CountsSender(replica * ranks.size + ranks.rank, self._counted)

    def holdings(self) -> Holdings:
        """What is stored at start-up, for the scheduler; call it before the first step."""
        return Holdings(self._follower.take().added, self._store.shared)

    def begin(self, orders: StepOrders) -> None:
        """Copy KV to be saved before vLLM gives blocks of preempted requests to others."""
        self._between_steps.begin_step()
        self._between_steps.finish(lambda work: work.request_id in orders.preempted)

    def step(self, orders: StepOrders) -> None:
        """Process cancellations, then weave: a whole request in an idle step, else about `step_tokens`.

        A whole weave is less work than the prefill slice that vLLM would run instead, so a request that arrives
        meanwhile waits no longer than without the plug-in. Nothing here waits for a slow tier: while segments of one
        request are read, another request is woven.
        """
        self._idle = orders.idle
        self._streams.computes_here()
        self._held.update(orders.held)
        self._withdraw(orders)
        self._lookups.begin(orders.lookups)
        if self._ahead is not None:
            self._ahead.begin(orders.waiting, (order.request_id for order in orders.weaves))
        self._expire()
        wanted = {part.id for order in orders.weaves for part in order.request.stored_parts()}
        self._between_steps.finish(lambda work: not work.chunks.isdisjoint(wanted))
        for asked in orders.asked:
            self._between_steps.add(Work(self._counting(asked), asked.request_id))
        for order in orders.weaves:
            self._queue.add(order, self._woven.get(order.request_id))
        for request_id in orders.cancelled:
            if self._queue.remove(request_id):
                self._arrived.add(request_id)
        token_layers_left = inf if orders.idle else self._step_work
        while token_layers_left > 0 and (weave := self._queue.next()) is not None:
            token_layers_left -= self._weave(weave, token_layers_left)
            if orders.idle and self._arrived:
                return  # vLLM answers it before the others are woven

    def save(self, orders: StepOrders) -> None:
        """Store the parts whose KV this step's forward completed: between steps, or at once if windows may drop it."""
        for order in orders.saves:
            self._keep_start(order)
            woven = self._woven.get(order.request_id)
            written = self._saving.mark()
            exact_to = (order.computed if order.exact else 0) if woven is None else woven.exact_to
            reads = self._reads(order.request, woven, exact=order.exact)  # while its segments are pinned
            outdated = order.request_id in self._outdated
            parts = [part for part in order.request.stored_parts() if order.saved < part.span.stop <= order.computed]
            work = Work(
                iter(()) if outdated else self._completed(order, exact_to, reads, written),
                order.request_id,
                order.number,
                frozenset(part.id for part in parts),
                sum(len(part.span) for part in parts),
            )
            self._between_steps.add(work, at_once=order.windowed)

    def forget(self, finished: Collection[str]) -> None:
        """Drop the plans of ended requests, and copies of parts that they never completed."""
        self._outdated.difference_update(finished)
        self._noted.difference_update(finished)
        for request_id in finished:
            self._begun.pop(request_id, None)
            if self._ahead is not None:
                self._ahead.drop(request_id)
            woven = self._woven.pop(request_id, None)
            if woven is not None:
                woven.pinned.close()

    def take_outcome(self) -> tuple[set[str], StepResults]:
        """Requests that no longer wait, and the results for the scheduler, failures included."""
        self._results.saved.update(self._between_steps.take_done())
        self._events.add_to(self._results)
        outcome = self._arrived, self._results
        self._arrived, self._results = set(), StepResults()
        return outcome

    def take_released(self) -> set[str]:
        """Ended requests whose blocks are no longer needed; each once."""
        released = {request_id for request_id in self._held if not self._between_steps.reads(request_id)}
        self._held -= released
        return released

    def before_sleep(self) -> None:
        """Copy all KV to be saved, because sleeping frees vLLM's blocks. Called between steps."""
        self._between_steps.finish()

    def end(self) -> None:
        """End the step; copying continues until the next one begins."""
        self._between_steps.end_step()

    def close(self) -> None:
        """Flush pending writes and close the store."""
        self._between_steps.close()
        self._counts.close()
        self._queue.close()
        self._lookups.close()
        self.forget(tuple(self._woven))
        if self._ahead is not None:
            self._ahead.close()
        self._store.close()

    def look_up(self, order: WeaveOrder) -> PromptLookup:
        """What is stored for an order's prompt. Thread-safe."""
        return self._store.lookup(order.request.prompt)

    def plan(self, order: WeaveOrder, lookup: PromptLookup) -> PreparedWeave:
        """Plan with the lookup `found`, pin the segments, and start reading. Thread-safe.

        Raises:
            NotWoven: nothing of it is stored and nothing is to be captured, or an exact segment is gone.
        """
        promotion = order.request.promotion
        full_lookup = lookup
        behind = order.first > order.exact  # starts after approximate KV in vLLM's cache: no exact prefix grows there
        if behind:
            promotion = replace(promotion, continued=frozenset())
        ahead = None if self._ahead is None else self._ahead.find(order.request_id)
        loading = None if self._cost is None or not self._alone else loading_now(self._cost, self._store, ahead)
        if loading is not None:
            lookup = without(lookup, self._too_slow(order, lookup, loading))
        method = method_for(order.request.choice, promotion, loading if order.request.raisable else None)
        mean = order.request.mean
        wanted = mean is not None and (mean.anew or not any(variant.contexts for variant in lookup.parts[-1].variants))
        share_s = time.monotonic() if wanted else None
        if mean is not None:  # also if the mean is stored, because no plan reuses the last token
            method = ContextMethod()
        elif lookup.parts[-1].part.id is not None:  # for the same reason
            lookup = without(lookup, [variant.id for variant in lookup.parts[-1].variants])
        while lookup.hits or order.request.kept.profiles or order.request.mean is not None:
            plan = self._weaving_store.plan(lookup, method)
            reused = [span.start for span in plan.spans(KVSource.REUSED)]
            exact_to = order.exact if behind else min(reused, default=plan.prompt_tokens)
            if exact_to < order.exact:
                raise NotWoven("an exact segment is gone, and others may take the blocks that it was to fill")
            pinned = self._weaving_store.pin(plan, prefetched=ahead, first=order.first)
            gone = [
                SegmentId(placement.segment.name)
                for placement in pinned.placements
                if isinstance(placement.segment, Gone)
            ]
            if gone:
                pinned.close()
                lookup = without(lookup, gone)
                continue
            self._note(order, full_lookup, plan)
            return PreparedWeave(plan, pinned, exact_to, behind, share_s)
        self._note(order, full_lookup, None)
        raise NotWoven("nothing of it is stored")

    def _note(self, order: WeaveOrder, lookup: PromptLookup, plan: Plan | None) -> None:
        """Count a requested request once, however often its weave is ordered."""
        if order.request.counts_as_request and order.request_id not in self._noted:
            self._noted.add(order.request_id)
            use = RequestUse.of(lookup, ()) if plan is None else RequestUse.of(lookup, plan.segments(), plan.saved())
            self._store.note_request(use)

    def _too_slow(self, order: WeaveOrder, lookup: PromptLookup, loading: Loading) -> Collection[SegmentId]:
        """Segments that load slower than they compute, except those that shared blocks need as exact."""
        exact = order.exact if order.request.method not in EXACT_METHODS else 0
        needed = {part.exact.id for part in lookup.parts if part.exact is not None and part.span.start < exact}
        return too_slow(lookup, loading) - needed

    @property
    def _alone(self) -> bool:
        """Whether nothing else is computed or woven now.

        Otherwise loading delays no other request, while computing instead would.
        """
        return self._idle and len(self._queue) == 1

    def _read_ahead(self, request: WeaveRequest) -> Prefetch | None:
        """Prefetch what a waiting request will read from slow tiers; None if there is nothing. Thread-safe."""
        plan = self._usual_plan(request, self._store.lookup(request.prompt))
        prefetch = self._weaving_store.prefetch(plan, from_memory=False)
        if prefetch.nbytes:
            return prefetch
        prefetch.close()
        return None

    def _usual_plan(self, request: WeaveRequest, lookup: PromptLookup) -> Plan:
        return request.choice.made.plan(lookup, self._layers.geometry)

    def _counted(self) -> dict[str, object]:
        return {"store": store_counts(self._store), "eviction": eviction_order(self._store)}

    def _counting(self, order: AskedOrder) -> Iterator[Event]:
        self._in_background(partial(self._count, order))
        yield None

    def _removing(self, order: RemovalOrder) -> Iterator[Event]:
        self._in_background(partial(self._removals.run, order))
        yield None

    def _count(self, order: AskedOrder) -> None:
        """Count a request that vLLM computes; segments of tokens in vLLM's own cache count as used."""
        lookup = self._store.lookup(order.prompt)
        if order.woven is None:
            exact = (entry.exact for entry in lookup.parts if entry.span.start < order.local)
            saved = {record.id: float(len(record)) for record in exact if record is not None}
            used = list(saved)
        else:  # the segments that it was woven from are not recorded: use those of a plan made now
            plan = self._usual_plan(order.woven, lookup)
            used = [part.segment for part in plan.parts if part.segment is not None and part.span.stop <= order.local]
            saved = plan.saved()
        self._store.note_request(RequestUse.of(lookup, used, saved))

    def _weave(self, weave: QueuedWeave, work: float) -> int:
        """Continue a weave, for about `work`; returns the work done.

        If it fails, vLLM computes the request. Several ranks fail alike: by an error that they have agreed on.

        Raises:
            RankFailedError: this rank alone failed, so others may wait for it in a collective.
        """
        order = weave.order
        done = 0
        size = self._queue.ranks
        try:
            if weave.error is None:
                done = self._continue(weave, work)
        except NotWoven as error:  # by `adapters`: loaded alike on all ranks
            weave.error = error
        except Exception as error:  # a failed weave must not fail the request
            if size > 1:
                what = f"one of {size} tensor-parallel ranks failed while it wove request {order.request_id}"
                logger.critical("%s; vLLM ends, because other ranks wait for it", what, exc_info=True)
                raise RankFailedError(f"{what}: {error!r}") from error
            weave.error = error
        if weave.error is not None:
            self._queue.remove(order.request_id)
            self._fail(order, weave.error)
            weave.error = None  # its traceback holds the weave's tensors
        return done

    def _continue(self, weave: QueuedWeave, work: float) -> int:
        order = weave.order
        done = 0
        with self._layers.adapters.using(order.adapter):
            if weave.job is None:
                assert weave.planned is not None
                self._queue.begin(weave, partial(self._begin, order, weave.planned))
            if weave.job is not None:
                done = weave.job.run(weave.layers, work)
        if weave.job is not None and weave.job.done:
            self._queue.remove(order.request_id)
            self._finish(order, weave.job)
        return done

    def _begin(self, order: WeaveOrder, woven: PreparedWeave) -> WeaveJob:
        self._woven[order.request_id] = woven
        request = order.request
        plan = woven.plan
        placements = woven.pinned.placements
        blocks = RequestBlocks(order.block_ids, self._layers.paged)
        captured: CapturedParts | None = None
        looked_at = woven.share_s is not None if request.mean is not None else request.kept.profiles
        if looked_at or not (blocks.whole or request.mean is not None):
            # Without profiles, only KV that has left a window must be captured; the rest is read from the blocks later.
            looked_at_before = None if looked_at else min(blocks.begins, order.stop)
            config = request.reuse.capture if request.kept.profiles else None
            first = order.first if request.mean is None else max(order.first, plan.parts[-1].span.start)
            captured = CapturedParts(
                self._layers,
                request.prompt,
                plan,
                placements,
                self._store,
                config,
                first=first,
                before=looked_at_before,
            )
        job = WeaveJob(
            self._layers,
            blocks,
            plan,
            placements,
            request.prompt.token_ids,
            first=self._place_start(order, blocks),
            stop=order.stop,
            captured=captured,
            chosen=self._choices.get(_choice_key(request, plan)) if order.first > order.exact else None,
        )
        if job.device_bytes + self._queue.device_bytes > self._room_bytes:
            raise NotWoven(
                f"it needs {job.device_bytes} bytes of device memory, of {self._room_bytes:.0f} for all weaves"
            )
        self._layers.paged.reserve(job.scratch_bytes)
        return job

    def _keep_start(self, order: SaveOrder) -> None:
        """Keep the KV of a prompt's leading tokens, which no segment has, as vLLM computed it in a large batch."""
        blocks = RequestBlocks(order.block_ids, self._layers.paged)
        start = order.request.start
        key = order.adapter, start
        if not (order.exact and blocks.whole and 0 < len(start) <= _MOST_START_TOKENS) or key in self._starts:
            return
        span = Span(0, len(start))
        copy = PartCopy(StoredPart(ChunkId(""), start, span, ()), self._layers, self._memory, as_they_are=True)
        try:
            deque(copy.read(blocks, span), maxlen=0)
        except torch.OutOfMemoryError:
            if self._queue.ranks > 1:  # their copies are equal
                raise
            return
        self._starts[key] = copy
        if len(self._starts) > _STARTS:
            self._starts.popitem(last=False)

    def _place_start(self, order: WeaveOrder, blocks: RequestBlocks) -> int:
        """Write that KV into the blocks of a request with an exact method; returns the position to fill from.

        Computed alone, it would round differently from the first time, and so could the answer.
        """
        copy = self._starts.get((order.adapter, order.request.start))
        if order.first or copy is None or order.request.method not in EXACT_METHODS or not blocks.whole:
            return order.first
        copy.write(blocks)
        return len(order.request.start)

    def _finish(self, order: WeaveOrder, job: WeaveJob) -> None:
        woven = self._woven[order.request_id]
        plan = woven.plan
        if order.first <= order.exact:  # for equal requests that find woven blocks in vLLM's own cache
            self._remember(_choice_key(order.request, plan), job.chosen)
        self._arrived.add(order.request_id)
        report = PrefillReport.of_plan(
            plan,
            parameters=order.request.choice.parameters_raised(plan.raised_to),
            recomputed=job.recomputed,
            recompute_work=job.recompute_work,
            num_layers=self._num_layers,
            stopped_at_layer=job.stopped_at_layer,
            tier_of=lambda segment: self._store.tier_of(segment) or "host",
            local_tokens=order.first,
        )
        # Where vLLM's own cache had blocks woven for this prompt, the plan says what they are.
        first = job.first if order.first <= order.exact else 0
        self._results.reports[order.request_id] = report.clipped(first, order.stop, plan.prompt_tokens)
        for segment, whole in () if order.request.reads_only else woven.pinned.loaded():
            self._store.promote(segment, whole)
        woven.pinned.drop_sent()
        if self._ahead is not None:
            self._ahead.drop(order.request_id)
        fresh = {part.span for part in plan.parts if part.kv_source is KVSource.COMPUTED}
        if job.captured is not None and not order.request.reads_only:
            fresh -= job.captured.spans
            segments: Iterable[tuple[SegmentRecord, SegmentKV]]
            segments = job.captured.segments(woven.exact_to, self._memory)
            if woven.behind:
                segments = ((replace(record, read=(ANYTHING,)), kv) for record, kv in segments)
            mean, share_s = order.request.mean, woven.share_s  # the scheduler may run on another machine's clock
            share = None if mean is None or share_s is None else replace(mean, begun_s=share_s)
            self._insert(order.request_id, segments, share)
        first = 0 if order.first <= order.exact else order.first  # exact KV in vLLM's cache is stored too
        parts = [
            part
            for part in order.request.kept_parts(self._is_exact)
            if part.span in fresh and first <= part.span.start and part.span.stop <= order.stop
        ]
        self._insert(order.request_id, self._copied(order, parts, woven))

    def _remember(self, key: _ChoiceKey, chosen: Choices) -> None:
        self._chosen_positions -= _positions(self._choices.pop(key, {}))
        self._choices[key] = chosen
        self._chosen_positions += _positions(chosen)
        while len(self._choices) > _CHOICES or self._chosen_positions > _CHOSEN_POSITIONS:
            self._chosen_positions -= _positions(self._choices.popitem(last=False)[1])

    def _insert(
        self, request_id: str, segments: Iterable[tuple[SegmentRecord, SegmentKV]], share: MeanShare | None = None
    ) -> None:
        """Store segments as they are read or captured, or the mean that this share completes.

        A failure is logged; it costs later requests time.
        """
        if request_id in self._outdated:
            return
        try:
            if share is not None:
                self._means.store_shares(self._store, share, segments)
                return
            for record, kv in segments:
                self._store.insert(record, kv)
        except Exception:  # a failed store must not end the engine
            logger.exception("KV computed by request %s could not be stored", request_id)

    def _copied(
        self, order: WeaveOrder, parts: Iterable[StoredPart], woven: PreparedWeave
    ) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
        """Copies of parts in a request's blocks, except those computed after a removed segment."""
        blocks = RequestBlocks(order.block_ids, self._layers.paged)
        reads = self._reads(order.request, woven)
        for part in parts:
            copy = self._copy_of(part)
            read = reads[part.span]
            if read is not None and copy.follows(blocks, part.span):
                deque(copy.read(blocks, part.span), maxlen=0)
                yield copy.segment(woven.exact_to, read)

    def _reads(self, request: WeaveRequest, woven: PreparedWeave | None, *, exact: bool = False) -> _Reads:
        """For each part, what the segments before it or under it have read; None as in `reads_of`.

        For KV from vLLM's own cache this is unknown, unless it is `exact`.
        """
        if woven is not None and not woven.behind:
            return {
                part.span: read for part, read in zip(woven.plan.parts, reads_of(woven.plan, self._store), strict=True)
            }
        read = frozenset[ChunkId]() if exact and woven is None else frozenset({ANYTHING})
        return dict.fromkeys((part.span for part in request.stored_parts()), read)

    def _woven_from(self, chunks: frozenset[ChunkId] | None) -> set[str]:
        """Requests woven from segments that have read one of these chunks."""
        gone = (chunks or frozenset()) | {ANYTHING}
        reads = ((name, [*reads_of(woven.plan, self._store)][-1]) for name, woven in self._woven.items())
        return {name for name, read in reads if read is not None and not gone.isdisjoint(read)}

    def _completed(self, order: SaveOrder, exact_to: int, reads: _Reads, written: Event) -> Iterator[Event]:
        """Store the parts that a step completed: yields `written`, after which the KV is there, and each layer's copy.

        If blocks leave windows, the beginning of incomplete parts is read now too.
        """
        yield written
        blocks = RequestBlocks(order.block_ids, self._layers.paged)
        begun = self._begun.pop(order.request_id, {})
        prefix = [segment_id(part.id, part.context) for part in order.request.stored_parts()]
        for part in order.request.kept_parts(self._is_exact):
            first = max(part.span.start, order.readable)
            stop = min(part.span.stop, order.computed)
            complete = part.span.stop <= order.computed
            if part.span.stop <= order.saved or first >= stop or not (complete or order.windowed):
                continue
            read = reads[part.span]
            if read is None or self._is_exact(part):
                continue
            copy = None if first == part.span.start else begun.get(part.span)
            if copy is None:  # earlier positions may be in vLLM's own cache, and still readable
                first = part.span.start
                copy = self._copy_of(part)
            if not copy.follows(blocks, Span(first, stop)):
                continue
            for _ in copy.read(blocks, Span(first, stop), wait=False):
                yield self._saving.mark()
            if complete:
                with self._store.lease(prefix):  # so that storing does not evict what the request found
                    self._store.insert(*copy.segment(exact_to, read))
            else:
                self._begun.setdefault(order.request_id, {})[part.span] = copy

    def _copy_of(self, part: StoredPart) -> PartCopy:
        return PartCopy(part, self._layers, self._memory, as_they_are=self._lossless)

    def _is_exact(self, part: StoredPart) -> bool:
        """Whether an exact segment of a part is stored."""
        record = self._store.record(segment_id(part.id, part.context))
        return record is not None and record.exact

    def _withdraw(self, orders: StepOrders) -> None:
        """Reset, and queue removals behind pending stores, which they may concern."""
        if orders.reset:
            self._reset()
        for removal in orders.removals:
            if not removal.first_passes:
                self._outdated |= removal.requests | self._woven_from(removal.chunks)
            self._between_steps.add(Work(self._removing(removal), removal.request_id))

    def _reset(self) -> None:
        """Drop all KV in memory, because the weights may be others now, and let vLLM compute what is being woven.

        The slow tiers keep KV of the weights that they are named by. What is stored from now on is not written there.
        """
        self._between_steps.finish()
        for order in self._queue.orders:
            self._queue.remove(order.request_id)
            self._fail(order, NotWoven("the cache is reset"))
        self._means.forget(None)
        self._store.leave_slow_levels()
        self._starts.clear()
        self._begun.clear()
        self._choices.clear()
        self._chosen_positions = 0

    def _expire(self) -> None:
        if self._expires and time.monotonic() - self._expired_s > _EXPIRE_S:
            self._expired_s = time.monotonic()
            self._lookups.run(self._store.expire)

    def _fail(self, order: WeaveOrder, error: BaseException) -> None:
        if isinstance(error, NotWoven):
            logger.debug("request %s is not woven: %s", order.request_id, error)
        else:
            lost = isinstance(error, SegmentLost)
            log, trace = (logger.warning, None) if lost else (logger.error, error)
            log("request %s could not be woven (%s); vLLM computes it", order.request_id, error, exc_info=trace)
        if isinstance(error, SegmentLost) and not isinstance(error, SegmentLate):
            self._store.drop_damaged(SegmentId(error.segment))
        self.forget([order.request_id])
        self._arrived.add(order.request_id)
        self._results.failed.add(order.request_id)


def _positions(chosen: Choices) -> int:
    return sum(positions.numel() for positions in chosen.values())


def _at_once(work: Callable[[], object]) -> None:
    work()


def _choice_key(request: WeaveRequest, plan: Plan) -> _ChoiceKey:
    woven_from = (part.segment for part in plan.parts if part.kv_source is KVSource.REUSED)
    return request.salt, tuple(segment for segment in woven_from if segment is not None)
