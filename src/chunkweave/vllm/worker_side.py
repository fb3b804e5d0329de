"""The half of the connector that lives in each worker: the segment store, the weaves under way, what is saved."""

import logging
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from chunkweave.config import StoreConfig
from chunkweave.engine.stores import open_store
from chunkweave.kv.segment import SegmentKV, SegmentLost, SegmentSource
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import Fate, Plan
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, Geometry, SegmentId, Span
from chunkweave.vllm.messages import StepOrders, StepResults, WeaveOrder
from chunkweave.vllm.request import StoredPart, WeaveRequest
from chunkweave.vllm.stock_layers import BlockTable, StockLayers
from chunkweave.vllm.weave_job import WeaveJob

logger = logging.getLogger("vllm.chunkweave")


_CHOICES = 4096
"""Prompts whose chosen positions are remembered: some hundred integers each."""

_Same = tuple[str, tuple[SegmentId, ...]]
"""Requests of the same chunks and method, woven from the same segments, choose the same positions.

What is exact does not count: stored or computed, it is the same.
"""


@dataclass(slots=True)
class _Woven:
    """A request whose KV was or is being woven: its plan, kept so that a preempted request is woven the same again.

    `pinned` keeps the plan's segments in the store until the request is finished. Before the position `exact_to`
    nothing of its KV is approximate.
    """

    plan: Plan
    sources: list[tuple[Span, SegmentSource]]
    pinned: ExitStack
    exact_to: int


@dataclass(slots=True)
class _Outcome:
    """What a step has brought so far; handed over and begun anew once a step."""

    arrived: set[str] = field(default_factory=set)
    broken_blocks: set[int] = field(default_factory=set)
    results: StepResults = field(default_factory=StepResults)


class WorkerSide:
    """Owns store and weaves of one worker. Called from the worker's thread only.

    Every rank of a tensor-parallel group is given the same orders in the same order and decides the same: nothing here
    looks at a clock.
    """

    def __init__(
        self,
        layers: StockLayers,
        geometry: Geometry,
        fingerprint: str,
        store: StoreConfig,
        *,
        layers_per_step: int,
    ) -> None:
        """`layers_per_step` layers are woven in a step in which other requests are computed too."""
        self._layers = layers
        self._geometry = geometry
        self._store = open_store(store, fingerprint, torch.device("cpu"))
        self._layers_per_step = layers_per_step
        self._jobs: deque[tuple[WeaveOrder, WeaveJob | None]] = deque()
        self._woven: dict[str, _Woven] = {}
        self._known: set[ChunkId] = set()
        self._choices: OrderedDict[_Same, dict[int, torch.Tensor]] = OrderedDict()
        self._outcome = _Outcome()

    def step(self, orders: StepOrders) -> None:
        """Call off what is cancelled, then weave on: a whole request if nothing else is to do, else a few layers.

        A whole weave is less work than the prefill slice that vLLM would run in the same place, so a request that
        comes in meanwhile waits no longer than it does without the plug-in.
        """
        self._jobs.extend((order, None) for order in orders.weaves)
        for request_id in orders.cancelled:
            self._cancel(request_id)
        if not self._jobs:
            return
        order, job = self._jobs.popleft()
        try:
            job = job or self._begin(order)
            if not job.run(self._geometry.num_layers if orders.idle else self._layers_per_step):
                self._jobs.appendleft((order, job))
                return
            self._finish(order, job)
        except Exception as error:  # noqa: BLE001  (a cache may cost time, never an answer: vLLM computes it instead)
            self._fail(order, error)

    def save(self, orders: StepOrders) -> None:
        """Store the parts whose KV this step's forward has completed."""
        for order in orders.saves:
            woven = self._woven.get(order.request_id)
            exact_to = (order.computed if order.exact else 0) if woven is None else woven.exact_to
            parts = [part for part in order.request.stored_parts() if order.saved < part.span.stop <= order.computed]
            self._save_parts(order.request_id, parts, order.block_ids, exact_to)

    def forget(self, finished: Collection[str]) -> None:
        """Requests that have ended need no plan any more."""
        for request_id in finished:
            woven = self._woven.pop(request_id, None)
            if woven is not None:
                woven.pinned.close()

    def take_outcome(self) -> tuple[set[str], set[int], StepResults]:
        """Requests whose KV has arrived, blocks that hold nothing of use, and what the scheduler is told."""
        outcome, self._outcome = self._outcome, _Outcome()
        return outcome.arrived, outcome.broken_blocks, outcome.results

    def close(self) -> None:
        """Give up the store."""
        self.forget(tuple(self._woven))
        self._store.close()

    def _begin(self, order: WeaveOrder) -> WeaveJob:
        woven = self._woven.get(order.request_id)
        if woven is None:
            woven = self._woven[order.request_id] = self._plan(order)
        return WeaveJob(
            self._layers,
            BlockTable(order.block_ids, self._layers.paged),
            woven.plan,
            woven.sources,
            order.request.prompt.token_ids,
            first=order.first,
            stop=order.stop,
            chosen=self._choices.get(_same(order.request, woven.plan)),
        )

    def _plan(self, order: WeaveOrder) -> _Woven:
        prompt, method = order.request.prompt, make_method(order.request.method, order.request.reuse)
        plan = method.plan(self._store.lookup(prompt), self._geometry)
        plan.validate(self._geometry.num_layers)
        pinned = ExitStack()
        pinned.enter_context(self._store.lease(plan.segments()))
        sources: list[tuple[Span, SegmentSource]] = []
        for part in plan.parts:
            if part.segment is None:
                continue
            source = self._store.get(part.segment, exact=part.fate is Fate.EXACT)
            if source is None:
                pinned.close()
                raise SegmentLost(part.segment, "it is not in the store any more")
            sources.append((part.span, source))
        approximate = [0] if order.first else [span.start for span in plan.spans(Fate.REUSED)]
        return _Woven(plan, sources, pinned, min(approximate, default=plan.prompt_tokens))

    def _finish(self, order: WeaveOrder, job: WeaveJob) -> None:
        woven = self._woven[order.request_id]
        self._remember(order, job)
        self._outcome.arrived.add(order.request_id)
        self._outcome.results.reports[order.request_id] = _report(woven.plan, order, job, self._geometry.num_layers)
        for part in woven.plan.parts:
            if part.segment is not None:
                self._store.note_reuse(part.segment, 0.0 if part.fate is Fate.EXACT else 1.0)
        fresh = {part.span for part in woven.plan.parts if part.fate is Fate.COMPUTED}
        parts = [
            part
            for part in order.request.stored_parts()
            if part.span in fresh and order.first <= part.span.start and part.span.stop <= order.stop
        ]
        self._save_parts(order.request_id, parts, order.block_ids, woven.exact_to)

    def _remember(self, order: WeaveOrder, job: WeaveJob) -> None:
        """Keep what a whole weave chose, for requests like it of which a part lies in vLLM's own cache."""
        if order.first:
            return
        key = _same(order.request, self._woven[order.request_id].plan)
        self._choices[key] = job.chosen
        self._choices.move_to_end(key)
        if len(self._choices) > _CHOICES:
            self._choices.popitem(last=False)

    def _save_parts(
        self, request_id: str, parts: Sequence[StoredPart], block_ids: tuple[int, ...], exact_to: int
    ) -> None:
        """Copy parts out of a request's blocks into the store; what cannot be stored costs time later.

        Those that end at `exact_to` or before are exact.
        """
        if not parts:
            return
        try:
            table = BlockTable(block_ids, self._layers.paged)
            for part in parts:
                kv = self._read(table, part.span)
                exact = part.span.stop <= exact_to
                record = SegmentRecord.of(part.id, part.context, part.token_ids, exact=exact, nbytes=kv.nbytes)
                self._store.insert(record, kv)
        except Exception:  # a cache may cost time, never the engine
            logger.exception("what request %s computed is not stored", request_id)
        self._tell_scheduler()

    def _read(self, table: BlockTable, span: Span) -> SegmentKV:
        """A part's KV from its blocks, keys turned back to before RoPE."""
        positions = torch.arange(span.start, span.stop, device=self._layers.device)
        slots = table.slots(positions)
        shape = (self._geometry.num_layers, 2, len(span), *self._layers.paged.shape)
        kv = torch.empty(shape, dtype=self._layers.paged.dtype)
        for layer in range(self._geometry.num_layers):
            keys, values = self._layers.paged.read(layer, slots)
            kv[layer, 0] = self._layers.rotation.inverse(keys, positions)
            kv[layer, 1] = values
        return SegmentKV(kv)

    def _tell_scheduler(self) -> None:
        held = {record.chunk_id for record in self._store.records()}
        results, came, went = self._outcome.results, held - self._known, self._known - held
        results.stored = (results.stored | came) - went
        results.dropped = (results.dropped | went) - came
        self._known = held

    def _cancel(self, request_id: str) -> None:
        for entry in tuple(self._jobs):
            if entry[0].request_id == request_id:
                self._jobs.remove(entry)
                self._outcome.arrived.add(request_id)

    def _fail(self, order: WeaveOrder, error: Exception) -> None:
        log = logger.warning if isinstance(error, SegmentLost) else logger.exception
        log("request %s could not be woven (%s); vLLM computes it", order.request_id, error)
        if isinstance(error, SegmentLost):
            self._store.remove(error.segment)  # type: ignore[arg-type]
            self._tell_scheduler()
        self.forget([order.request_id])
        self._outcome.arrived.add(order.request_id)
        self._outcome.results.failed.add(order.request_id)
        first = order.first // self._layers.paged.block_size
        self._outcome.broken_blocks |= set(order.block_ids[first:])


def _same(request: WeaveRequest, plan: Plan) -> _Same:
    woven_from = (part.segment for part in plan.parts if part.fate is Fate.REUSED)
    return request.salt(None), tuple(segment for segment in woven_from if segment is not None)


def _report(plan: Plan, order: WeaveOrder, job: WeaveJob, num_layers: int) -> dict[str, object]:
    """Tokens by fate, with the fields of the project's `ReuseReport`."""
    reused, recomputed = plan.tokens(Fate.REUSED), job.recomputed
    exact = plan.tokens(Fate.EXACT)
    return {
        "method": plan.method,
        "prompt_tokens": plan.prompt_tokens,
        "prefix_exact_tokens": exact,
        "reused_tokens": reused - len(recomputed),
        "recomputed_tokens": len(recomputed),
        "computed_tokens": plan.prompt_tokens - exact - reused,
        "recompute_fraction": job.recompute_work / (num_layers * reused) if reused else 0.0,
        "local_tokens": order.first,
        "recomputed": recomputed,
    }
