"""The connector's half in each worker: the segment store, the weaves that run, and what is saved."""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import inf

from chunkweave.kv.segment import RawCodec, SegmentKV, SegmentLate, SegmentLost
from chunkweave.planning.adaptive_methods import ContextMethod, method_for
from chunkweave.planning.cost import MEASURED_BY_VLLM, CostModel, Loading, given_cost_model, stored_cost_model, too_slow
from chunkweave.planning.method import make_method, without
from chunkweave.planning.method_choice import EXACT_METHODS
from chunkweave.planning.outcome import check_layers_of, reasons_of, recompute_fraction
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.prompt.contexts import MeanShare
from chunkweave.store.index import PromptLookup, RequestUse
from chunkweave.store.records import ANYTHING, SegmentRecord, segment_id
from chunkweave.tiers.device import host_memory_for, streams_of
from chunkweave.tiers.preload import Gone
from chunkweave.types import ChunkId, SegmentId, Span
from chunkweave.vllm.background_work import BackgroundWork, Work, wait_for_now
from chunkweave.vllm.model_check import rank_fingerprint
from chunkweave.vllm.orders import (
    AskedOrder,
    Holdings,
    NotWoven,
    SaveOrder,
    StepOrders,
    StepResults,
    WeaveOrder,
    request_report,
)
from chunkweave.vllm.paged_kv import RequestBlocks
from chunkweave.vllm.part_copy import PartCopy
from chunkweave.vllm.removal import RemovalOrder, StoreRemovals
from chunkweave.vllm.report_socket import CountsSender
from chunkweave.vllm.request import StoredPart, WeaveRequest
from chunkweave.vllm.settings import PluginSettings
from chunkweave.vllm.stock_layers import StockLayers
from chunkweave.vllm.store_events import RemoteLookups, StoreEvents
from chunkweave.vllm.weave import CapturedParts, Choices, WeaveJob
from chunkweave.vllm.weave_queue import Alone, PreparedWeave, QueuedWeave, ReadAhead, WeaveQueue
from chunkweave.weaving.means import Means
from chunkweave.weaving.segments import Prefetch, WeavingStore, loading_now, reads_of
from chunkweave.weaving.stores import eviction_cost, eviction_order, open_store, store_counts

logger = logging.getLogger("vllm.chunkweave")

_CHOICES = 4096
"""Prompts whose chosen positions are remembered: some hundred integers each."""

_CHOSEN_POSITIONS = 4 << 20
"""All that are remembered, 8 bytes each: long prompts leave fewer prompts."""

_WAITING_SHARE = 1 / 8
"""Of vLLM's blocks, how many may wait to be copied."""

_STARTS, _MOST_START_TOKENS = 64, 8
"""Beginnings of prompts whose KV is kept as vLLM computed it, and the most tokens of one."""

_EXPIRE_S = 60.0
"""How often the store is searched for what has outlived its time."""

_StartKey = tuple[int, tuple[int, ...]]
"""The adapter, and the tokens that a prompt begins with and that are part of no chunk."""

_ChoiceKey = tuple[str, tuple[SegmentId, ...]]
"""Requests of the same chunks and method, woven from the same segments, choose the same positions.

Exact parts do not count: stored or computed, their KV is the same.
"""


_Reads = Mapping[Span, frozenset[ChunkId] | None]
"""What parts have read beside their contexts."""


class ConnectorWorker:
    """Owns store and weaves of one worker. Called from the worker's thread only.

    A step goes from `begin` to `end`; between steps, what is to be saved is copied out of the blocks.

    Every rank of a tensor-parallel group gets the same orders in the same order, and does the same: before it uses what
    depends on its own tiers, threads or clock, `WeaveQueue` agrees on that with the other ranks.
    """

    def __init__(
        self,
        layers: StockLayers,
        fingerprint: str,
        settings: PluginSettings,
        ranks: Alone | None = None,
        *,
        replica: int = 0,
        measure: Callable[[], CostModel] | None = None,
    ) -> None:
        """`fingerprint` is the model's; each of several `ranks` keeps its own share of the heads (None: one alone).

        `replica` is the number of the engine among those that vLLM runs in parallel (`--data-parallel-size`). `measure`
        says what prefill costs here, for a policy that weighs it, if no `cost_model` is given: what `chunkweave
        profile` writes into the cache folder are our own engine's times.
        """
        ranks = Alone() if ranks is None else ranks
        self._layers = layers
        self._num_layers = layers.geometry.num_layers
        self._lossless = settings.store.codec == RawCodec.name
        self._step_work = settings.step_tokens * self._num_layers
        named = rank_fingerprint(fingerprint, ranks.rank, ranks.size)
        self._streams = streams_of(layers.device)
        given = given_cost_model(settings.store.cost_model, fingerprint)
        kept = settings.store if ranks.size == 1 else replace(settings.store, cache_dir=None)  # all of several measure
        weighed = eviction_cost(kept, named, given, measure, MEASURED_BY_VLLM)
        self._store = open_store(settings.store, named, layers.device, self._streams, weighed)
        self._memory = host_memory_for(layers.device, settings.store.most_pinned_bytes)
        self._cost = given or stored_cost_model(settings.store.cache_dir, named)
        self._weaving_store = WeavingStore(
            self._store,
            layers.geometry,
            layers.device,
            self._cost,
            send=self._streams.send,
            memory=self._memory,
            patient=True,
        )
        self._idle = False
        self._follower = self._store.follow()
        self._lookups = RemoteLookups(self._store.probe, settings.weave.lookup_timeout_s)
        self._means = Means()
        self._removals = StoreRemovals(self._store, self._means.forget)
        self._events = StoreEvents(self._follower.take, self._lookups.answered, self._removals.take)
        slow = any(level.background for level in self._store.levels)
        timeout_s = settings.weave.load_timeout_s
        self._queue = WeaveQueue(self.look_up, self.plan, ranks, background=slow, timeout_s=timeout_s)
        self._in_background: Callable[[Callable[[], object]], object] = self._lookups.run if slow else _at_once
        self._between_steps = BackgroundWork(int(layers.paged.num_slots * _WAITING_SHARE))
        self._held: set[str] = set()
        """Requests that have ended, whose blocks vLLM keeps until they are copied."""
        self._woven: dict[str, PreparedWeave] = {}
        """Kept until a request is finished, so that a preempted one is woven the same again."""
        self._choices: OrderedDict[_ChoiceKey, Choices] = OrderedDict()
        self._chosen_positions = 0
        self._begun: dict[str, dict[Span, PartCopy]] = {}
        """By request, parts of which vLLM has computed the beginning."""
        self._starts: OrderedDict[_StartKey, PartCopy] = OrderedDict()
        """As every rank has it in the same step: where it is missing, all compute these tokens."""
        self._outdated: set[str] = set()
        """Requests that use what was removed meanwhile: nothing of them is stored."""
        self._noted: set[str] = set()
        """Requests that are counted."""
        self._arrived: set[str] = set()
        self._results = StepResults()
        self._expires = settings.store.ttl_s is not None
        self._expired_s = time.monotonic()
        self._ahead = ReadAhead(self._read_ahead) if slow else None
        self._counts = CountsSender(replica * ranks.size + ranks.rank, self._counted)

    def holdings(self) -> Holdings:
        """What is stored from earlier on, for the scheduler to begin with; call it before the first step."""
        bytes_per_token = self._layers.own_geometry.kv_elements_per_token() * self._layers.dtype.itemsize
        return Holdings(self._follower.take().added, self._store.shared, self._store.room_bytes // bytes_per_token)

    def begin(self, orders: StepOrders) -> None:
        """Before vLLM gives blocks of preempted requests to others: copy what is to be kept of them."""
        self._between_steps.begin_step()
        self._between_steps.finish(lambda work: work.request_id in orders.preempted)

    def step(self, orders: StepOrders) -> None:
        """Cancel what is to be cancelled, then weave: a whole request in an idle step, else about `step_tokens`.

        A whole weave is less work than the prefill slice that vLLM would run in its place, so a request that comes in
        meanwhile waits no longer than without the plug-in. Nothing here waits for a slow tier: while segments of one
        request are read, another one is woven.
        """
        self._idle = orders.idle
        self._streams.computes_here()
        self._held.update(orders.held)
        for removal in orders.removals:  # behind what is still to be stored, which it may concern
            if not removal.first_passes:
                self._outdated |= removal.requests | self._woven_from(removal.chunks)
            self._between_steps.add(Work(self._removing(removal), removal.request_id))
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
        left = inf if orders.idle else self._step_work
        while left > 0 and (weave := self._queue.next()) is not None:
            left -= self._weave(weave, left)
            if orders.idle and self._arrived:
                return  # it is answered before the others are woven

    def save(self, orders: StepOrders) -> None:
        """Store the parts whose KV this step's forward has completed: between steps, or at once what leaves windows."""
        for order in orders.saves:
            self._keep_start(order)
            woven, written = self._woven.get(order.request_id), wait_for_now(self._layers.device)
            exact_to = (order.computed if order.exact else 0) if woven is None else woven.exact_to
            reads = self._reads(order.request, woven, exact=order.exact)  # while what it is woven from is pinned
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
        """Drop the plans of requests that have ended, and what was read of parts that they never completed."""
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
        """Requests that wait no longer, and what the scheduler gets to know: also which of them failed."""
        self._results.saved.update(self._between_steps.take_done())
        self._events.add_to(self._results)
        outcome = self._arrived, self._results
        self._arrived, self._results = set(), StepResults()
        return outcome

    def take_released(self) -> set[str]:
        """Requests that have ended and whose blocks are needed no longer; each once."""
        released = {request_id for request_id in self._held if not self._between_steps.reads(request_id)}
        self._held -= released
        return released

    def end(self) -> None:
        """The step is over: there is time to copy, until the next one begins."""
        self._between_steps.end_step()

    def close(self) -> None:
        """Write what is still to be written, and close the store."""
        self._between_steps.close()
        self._counts.close()
        self._queue.close()
        self._lookups.close()
        self.forget(tuple(self._woven))
        if self._ahead is not None:
            self._ahead.close()
        self._store.close()

    def look_up(self, order: WeaveOrder) -> PromptLookup:
        """What is stored for an order's prompt. From any thread."""
        return self._store.lookup(order.request.prompt)

    def plan(self, order: WeaveOrder, found: PromptLookup) -> PreparedWeave:
        """Plan with what was found, pin it, and begin to read. From any thread.

        Raises:
            NotWoven: nothing of it is stored (any more), and nothing is to be captured; or what was exact is gone.
        """
        promotion, known = order.request.promotion, found
        behind = order.first > order.exact  # what is approximate in vLLM's own cache: no exact prefix grows behind it
        if behind:
            promotion = replace(promotion, continued=frozenset())
        ahead = None if self._ahead is None else self._ahead.find(order.request_id)
        loading = None if self._cost is None or not self._alone else loading_now(self._cost, self._store, ahead)
        if loading is not None:
            found = without(found, self._too_slow(order, found, loading))
        method = method_for(order.request.choice, promotion, loading if order.request.raisable else None)
        mean = order.request.mean
        wanted = mean is not None and (mean.anew or not any(one.contexts for one in found.parts[-1].variants))
        share_s = time.monotonic() if wanted else None
        if mean is not None:  # also if one is stored: no plan reuses the last token
            method = ContextMethod()
        while found.hits or order.request.kept.profiles or order.request.mean is not None:
            plan = self._weaving_store.plan(found, method)
            reused = [span.start for span in plan.spans(KVSource.REUSED)]
            exact_to = order.exact if behind else min(reused, default=plan.prompt_tokens)
            if exact_to < order.exact:
                raise NotWoven("an exact segment is gone, and others may take the blocks that it was to fill")
            pinned = self._weaving_store.pin(plan, prefetched=ahead)
            gone = [SegmentId(one.segment.name) for one in pinned.placements if isinstance(one.segment, Gone)]
            if gone:
                pinned.close()
                found = without(found, gone)
                continue
            self._note(order, known, plan)
            return PreparedWeave(plan, pinned, exact_to, behind, share_s)
        self._note(order, known, None)
        raise NotWoven("nothing of it is stored")

    def _note(self, order: WeaveOrder, found: PromptLookup, plan: Plan | None) -> None:
        """Count a request that is asked for, once, however often its weave is ordered."""
        if order.request.asked and order.request_id not in self._noted:
            self._noted.add(order.request_id)
            use = RequestUse.of(found, ()) if plan is None else RequestUse.of(found, plan.segments(), plan.saved())
            self._store.note_request(use)

    def _too_slow(self, order: WeaveOrder, found: PromptLookup, loading: Loading) -> Collection[SegmentId]:
        """What takes longer to load than to compute; not what others take from these blocks as exact."""
        exact = order.exact if order.request.method not in EXACT_METHODS else 0
        needed = {part.exact.id for part in found.parts if part.exact is not None and part.span.start < exact}
        return too_slow(found, loading) - needed

    @property
    def _alone(self) -> bool:
        """Whether nothing else is computed or woven now.

        Else what loads holds up nobody, and what is computed in its place costs others their time.
        """
        return self._idle and len(self._queue) == 1

    def _read_ahead(self, request: WeaveRequest) -> Prefetch | None:
        """Begin to read what a waiting request will read from slow tiers; None if that is nothing. From any thread."""
        plan = self._usual_plan(request, self._store.lookup(request.prompt))
        prefetch = self._weaving_store.prefetch(plan, from_memory=False)
        if prefetch.nbytes:
            return prefetch
        prefetch.close()
        return None

    def _usual_plan(self, request: WeaveRequest, found: PromptLookup) -> Plan:
        return make_method(request.method, request.reuse).plan(found, self._layers.geometry)

    def _counted(self) -> dict[str, object]:
        return {"store": store_counts(self._store), "eviction": eviction_order(self._store)}

    def _counting(self, asked: AskedOrder) -> Iterator[object]:
        yield self._in_background(partial(self._count, asked))

    def _removing(self, order: RemovalOrder) -> Iterator[object]:
        yield self._in_background(partial(self._removals.run, order))

    def _hits(self, plan: Plan, local: int) -> dict[str, int]:
        """Tokens of stored parts that were found, by tier: the first `local` of the prompt in vLLM's own cache."""
        hits: Counter[str] = Counter()
        for part in plan.parts:
            own = len(part.span.within(0, local))
            if part.part.id is not None:
                hits["vllm"] += own
            if part.segment is not None:
                hits[self._store.tier_of(part.segment) or "host"] += len(part.span) - own
        return dict(hits)

    def _count(self, asked: AskedOrder) -> None:
        """Count a request that vLLM computes; of what its own cache has of it, the segments here are used."""
        found = self._store.lookup(asked.prompt)
        if asked.woven is None:
            exact = (entry.exact for entry in found.parts if entry.span.start < asked.local)
            saved = {record.id: float(len(record)) for record in exact if record is not None}
            used = list(saved)
        else:  # from which segments it was woven nobody knows any more: from these it would be now
            plan = self._usual_plan(asked.woven, found)
            used = [part.segment for part in plan.parts if part.segment is not None and part.span.stop <= asked.local]
            saved = plan.saved()
        self._store.note_request(RequestUse.of(found, used, saved))

    def _weave(self, weave: QueuedWeave, work: float) -> int:
        """Go on with a weave, for about so much work; returns what was done."""
        order, done = weave.order, 0
        try:
            if weave.error is not None:
                raise weave.error
            with self._layers.adapters.using(order.adapter):
                if weave.job is None:
                    assert weave.planned is not None
                    weave.job = self._begin(order, weave.planned)
                done = weave.job.run(weave.layers, work)
            if weave.job.done:
                self._queue.remove(order.request_id)
                self._finish(order, weave.job)
        except Exception as error:  # noqa: BLE001  (a cache may cost time, never an answer: vLLM computes it instead)
            self._queue.remove(order.request_id)
            self._fail(order, error)
        return done

    def _begin(self, order: WeaveOrder, woven: PreparedWeave) -> WeaveJob:
        self._woven[order.request_id] = woven
        request, plan, placements = order.request, woven.plan, woven.pinned.placements
        blocks = RequestBlocks(order.block_ids, self._layers.paged)
        captured: CapturedParts | None = None
        looked_at = woven.share_s is not None if request.mean is not None else request.kept.profiles
        if looked_at or not (blocks.whole or request.mean is not None):
            # Without profiles, only what has left a window is not in the blocks to be read afterwards.
            before = None if looked_at else min(blocks.begins, order.stop)
            config = request.reuse.capture if request.kept.profiles else None
            first = order.first if request.mean is None else max(order.first, plan.parts[-1].span.start)
            captured = CapturedParts(
                self._layers, request.prompt, plan, placements, self._store, config, first=first, before=before
            )
        return WeaveJob(
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

    def _keep_start(self, order: SaveOrder) -> None:
        """Keep the KV of what the prompt begins with, which no segment has, as vLLM computed it among many tokens."""
        blocks, start = RequestBlocks(order.block_ids, self._layers.paged), order.request.start
        key = order.adapter, start
        if not (order.exact and blocks.whole and 0 < len(start) <= _MOST_START_TOKENS) or key in self._starts:
            return
        span = Span(0, len(start))
        copy = PartCopy(StoredPart(ChunkId(""), start, span, ()), self._layers, self._memory, as_they_are=True)
        deque(copy.read(blocks, span), maxlen=0)
        self._starts[key] = copy
        if len(self._starts) > _STARTS:
            self._starts.popitem(last=False)

    def _place_start(self, order: WeaveOrder, blocks: RequestBlocks) -> int:
        """Put that KV into the blocks of a request by an exact method; returns from where on they are to be filled.

        Computed alone, it would be rounded otherwise than the first time, and an answer with it.
        """
        copy = self._starts.get((order.adapter, order.request.start))
        if order.first or copy is None or order.request.method not in EXACT_METHODS or not blocks.whole:
            return order.first
        copy.write(blocks)
        return len(order.request.start)

    def _finish(self, order: WeaveOrder, job: WeaveJob) -> None:
        woven = self._woven[order.request_id]
        plan = woven.plan
        if order.first <= order.exact:  # for requests like it of which vLLM's own cache has a woven part
            self._remember(_choice_key(order.request, plan), job.chosen)
        self._arrived.add(order.request_id)
        report = _report(plan, order, job, self._hits(plan, order.first))
        fraction = recompute_fraction(plan, job.recompute_work, self._num_layers)
        self._results.reports[order.request_id] = {**report, "recompute_fraction": fraction}
        for segment, whole in woven.pinned.loaded():
            self._store.promote(segment, whole)
        if self._ahead is not None:
            self._ahead.drop(order.request_id)
        fresh = {part.span for part in plan.parts if part.kv_source is KVSource.COMPUTED}
        if job.captured is not None:
            fresh -= job.captured.spans
            segments: Iterable[tuple[SegmentRecord, SegmentKV]] = job.captured.segments(woven.exact_to)
            if woven.behind:
                segments = ((replace(record, read=(ANYTHING,)), kv) for record, kv in segments)
            mean, share_s = order.request.mean, woven.share_s  # the scheduler's clock may be another machine's
            share = None if mean is None or share_s is None else replace(mean, begun_s=share_s)
            self._insert(order.request_id, segments, share)
        first = 0 if order.first <= order.exact else order.first  # what vLLM had is stored too, if it is exact
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
        """Store segments as they are read or captured, or the mean that one is the last share of.

        What cannot be stored costs time later.
        """
        if request_id in self._outdated:
            return
        try:
            if share is not None:
                self._means.store_shares(self._store, share, segments)
                return
            for record, kv in segments:
                self._store.insert(record, kv)
        except Exception:  # a cache may cost time, never the engine
            logger.exception("what request %s computed is not stored", request_id)

    def _copied(
        self, order: WeaveOrder, parts: Iterable[StoredPart], woven: PreparedWeave
    ) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
        """Copies of parts in a request's blocks, but for what is computed behind something that was removed."""
        blocks, reads = RequestBlocks(order.block_ids, self._layers.paged), self._reads(order.request, woven)
        for part in parts:
            copy, read = self._copy_of(part), reads[part.span]
            if read is not None and copy.follows(blocks, part.span):
                deque(copy.read(blocks, part.span), maxlen=0)
                yield copy.segment(woven.exact_to, read)

    def _reads(self, request: WeaveRequest, woven: PreparedWeave | None, *, exact: bool = False) -> _Reads:
        """By part, what the segments have read that it is computed behind or from; None is `reads_of`'s.

        Unless it is `exact`, nothing is known of what vLLM's own cache has of a request.
        """
        if woven is not None and not woven.behind:
            return {
                part.span: read for part, read in zip(woven.plan.parts, reads_of(woven.plan, self._store), strict=True)
            }
        read = frozenset[ChunkId]() if exact and woven is None else frozenset({ANYTHING})
        return dict.fromkeys((part.span for part in request.stored_parts()), read)

    def _woven_from(self, chunks: frozenset[ChunkId] | None) -> set[str]:
        """Requests that are woven from what has read one of these chunks."""
        gone = (chunks or frozenset()) | {ANYTHING}
        reads = ((name, [*reads_of(woven.plan, self._store)][-1]) for name, woven in self._woven.items())
        return {name for name, read in reads if read is not None and not gone.isdisjoint(read)}

    def _completed(self, order: SaveOrder, exact_to: int, reads: _Reads, written: Callable[[], None]) -> Iterator[None]:
        """Store the parts that a step has completed, with a pause after each layer; begin when the KV is `written`.

        Where blocks leave windows, of those that it has not completed too the beginning is read now.
        """
        written()
        blocks = RequestBlocks(order.block_ids, self._layers.paged)
        begun = self._begun.pop(order.request_id, {})
        prefix = [segment_id(part.id, part.context) for part in order.request.stored_parts()]
        for part in order.request.kept_parts(self._is_exact):
            first, stop = max(part.span.start, order.readable), min(part.span.stop, order.computed)
            complete = part.span.stop <= order.computed
            if part.span.stop <= order.saved or first >= stop or not (complete or order.windowed):
                continue
            read = reads[part.span]
            if read is None or self._is_exact(part):
                continue
            copy = None if first == part.span.start else begun.get(part.span)
            if copy is None:  # what lies before this step may be vLLM's own, and readable yet
                first, copy = part.span.start, self._copy_of(part)
            if not copy.follows(blocks, Span(first, stop)):
                continue
            yield from copy.read(blocks, Span(first, stop))
            if complete:
                with self._store.lease(prefix):  # what the request found is not evicted for what it adds
                    self._store.insert(*copy.segment(exact_to, read))
            else:
                self._begun.setdefault(order.request_id, {})[part.span] = copy

    def _copy_of(self, part: StoredPart) -> PartCopy:
        return PartCopy(part, self._layers, self._memory, as_they_are=self._lossless)

    def _is_exact(self, part: StoredPart) -> bool:
        """Whether an exact segment of a part is stored."""
        record = self._store.record(segment_id(part.id, part.context))
        return record is not None and record.exact

    def _expire(self) -> None:
        if self._expires and time.monotonic() - self._expired_s > _EXPIRE_S:
            self._expired_s = time.monotonic()
            self._lookups.run(self._store.expire)

    def _fail(self, order: WeaveOrder, error: Exception) -> None:
        if isinstance(error, NotWoven):
            logger.debug("request %s is not woven: %s", order.request_id, error)
        else:
            log = logger.warning if isinstance(error, SegmentLost) else logger.exception
            log("request %s could not be woven (%s); vLLM computes it", order.request_id, error)
        if isinstance(error, SegmentLost) and not isinstance(error, SegmentLate):
            self._store.remove(SegmentId(error.segment))
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


def _report(plan: Plan, order: WeaveOrder, job: WeaveJob, hits: Mapping[str, int]) -> dict[str, object]:
    """Of a weave that is done, between what vLLM's own cache had and what vLLM computes behind it.

    Where that cache had woven blocks, of this very prompt, the plan says what they are.
    """
    first = job.first if order.first <= order.exact else 0
    sources = {one: [span.within(first, order.stop) for span in plan.spans(one)] for one in KVSource}
    sources[KVSource.EXACT].append(Span(0, first))
    sources[KVSource.COMPUTED].append(Span(order.stop, plan.prompt_tokens))
    report = request_report(order.request, sources, recomputed=job.recomputed, local=order.first, hits=hits)
    return {
        **report,
        "parameters": dict(order.request.choice.parameters_raised(plan.raised_to)),
        "check_layers": check_layers_of(plan),
        "stopped_at_layer": job.stopped_at_layer,
        "reasons": [[part.span.start, reasons] for part in plan.parts if (reasons := reasons_of(part))],
        "contexts": [[part.span.start, part.contexts] for part in plan.parts if part.contexts],
    }
