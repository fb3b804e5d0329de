"""Weaves that wait for their turn: looked up, planned and read in the background, begun by all ranks at once.

Segments of requests that are still in vLLM's own queue are read ahead.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any

import torch
from torch import distributed
from vllm.distributed import get_tp_group

from chunkweave.planning.method import without
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId
from chunkweave.vllm.orders import NotWoven, WeaveOrder
from chunkweave.vllm.request import WeaveRequest
from chunkweave.vllm.weave import WeaveJob
from chunkweave.weaving.segments import PlanSources, Prefetch

logger = logging.getLogger("vllm.chunkweave")

AHEAD = 4
"""Weaves that are prepared before their turn: more would only read against one another, and take memory."""


class Alone:
    """The agreement of one worker that has all heads. Of several ranks, each makes the same calls in the same order."""

    rank = 0
    size = 1

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number over all ranks; numbers of 63 bits and a sign."""
        return list(numbers)

    def gather(self, what: Any) -> list[Any]:
        """What each rank has, by rank."""
        return [what]


class RankAgreement(Alone):
    """The agreement of vLLM's tensor-parallel ranks, over their CPU channel: a few numbers for each weave."""

    def __init__(self) -> None:
        group = get_tp_group()
        self.rank, self.size = group.rank_in_group, group.world_size
        self._channel = group.cpu_group

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(tensor, distributed.ReduceOp.MIN, group=self._channel)
        return [int(number) for number in tensor]

    def gather(self, what: Any) -> list[Any]:
        """What each rank has, by rank."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, what, group=self._channel)
        return found


@dataclass(frozen=True, slots=True)
class PreparedWeave:
    """A plan, and its segments, pinned in the store until they are closed.

    Before the position `exact_to` nothing of the KV is approximate. `behind` says that it begins behind approximate KV
    of vLLM's own cache, which may have been woven from other segments than those of the plan. `share_s` says
    since when, by this worker's clock, it computes a share of a mean that is not stored yet; None: no share.
    """

    plan: Plan
    pinned: PlanSources
    exact_to: int
    behind: bool = False
    share_s: float | None = None


@dataclass(slots=True, eq=False)
class QueuedWeave:
    """One order on its way. `error` says why it will not be woven; `planned` is set once all ranks may begin.

    Of several ranks, each has at least `everywhere` layers in memory, as they last agreed; None: it is one alone.
    """

    order: WeaveOrder
    since_s: float = 0.0
    lookup: Future[PromptLookup] | None = None
    planning: Future[PreparedWeave] | None = None
    planned: PreparedWeave | None = None
    error: BaseException | None = None
    job: WeaveJob | None = None
    everywhere: float | None = None

    @property
    def layers(self) -> float:
        """How many layers may be woven now: those that are in memory."""
        assert self.planned is not None
        segments = self.planned.pinned
        if self.everywhere is not None:
            return self.everywhere - (0 if self.job is None else self.job.layer)
        if segments.complete or segments.failure is not None:  # reading a lost one raises
            return inf
        return segments.layers_in - (0 if self.job is None else self.job.layer)


class WeaveQueue:
    """Owns the orders of one worker until they are done. Called from the worker's thread only.

    A weave begins when the first layer of all segments is in memory, and continues as the others come. Several ranks
    agree first on what is stored, so that all plan alike, and then, before each slice, on how many layers all of them
    have: what is read can hold up no rank in the middle of a layer in which the others wait for it.
    """

    def __init__(
        self,
        look_up: Callable[[WeaveOrder], PromptLookup],
        plan: Callable[[WeaveOrder, PromptLookup], PreparedWeave],
        ranks: Alone,
        *,
        background: bool,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look_up` finds what is stored for an order's prompt, `plan` plans with that and begins to read.

        Both are called on threads with `background`, for slow tiers. All `ranks` must agree. An order that is not ready
        after `timeout_s` is given up.
        """
        self._look_up, self._plan = look_up, plan
        self._ranks = ranks
        self._executor: Executor = ThreadPoolExecutor(AHEAD, "chunkweave-plan") if background else _Inline()
        self._timeout_s = timeout_s
        self._clock = clock
        self._weaves: dict[str, QueuedWeave] = {}

    def __len__(self) -> int:
        return len(self._weaves)

    def add(self, order: WeaveOrder, planned: PreparedWeave | None = None) -> None:
        """Queue an order; one that was woven before, and preempted, with the same plan again."""
        weave = QueuedWeave(order)
        if planned is not None:
            weave.planning = Future()
            weave.planning.set_result(planned)
        self._weaves[order.request_id] = weave

    def remove(self, request_id: str) -> bool:
        """Take an order out, done or not; what was prepared for one that never began is closed."""
        weave = self._weaves.pop(request_id, None)
        if weave is None:
            return False
        if weave.job is None and weave.planning is not None:
            weave.planning.add_done_callback(_close_segments)
        return True

    def next(self) -> QueuedWeave | None:
        """Prepare what is due, and return the first weave that can continue, or has failed; None while all wait."""
        self._start()
        if self._ranks.size > 1:
            self._agree_on_lookups()
        self._agree_on_plans()
        if self._ranks.size > 1:
            self._agree_on_layers()
        return next((weave for weave in self._weaves.values() if self._can_go_on(weave)), None)

    def close(self) -> None:
        """Give up what waits."""
        for request_id in tuple(self._weaves):
            self.remove(request_id)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        for weave in islice(self._weaves.values(), AHEAD):
            if weave.error is not None or weave.lookup is not None or weave.planning is not None:
                continue
            weave.since_s = self._clock()
            if self._ranks.size > 1:
                weave.lookup = self._executor.submit(self._look_up, weave.order)
            else:
                weave.planning = self._executor.submit(self._look_up_and_plan, weave.order)

    def _look_up_and_plan(self, order: WeaveOrder) -> PreparedWeave:
        return self._plan(order, self._look_up(order))

    def _agree_on_lookups(self) -> None:
        """Plan those that all ranks have looked up, with what all of them found."""
        waiting = [(weave, weave.lookup) for weave in self._unsettled() if weave.lookup and weave.planning is None]
        for weave, found, same in self._agreed(waiting, lambda found: sorted(_known(found))):
            if not same:
                found = _held_by_all(found, self._ranks.gather(_known(found)))
            weave.since_s = self._clock()
            weave.planning = self._executor.submit(self._plan, weave.order, _by_id(found))

    def _agree_on_plans(self) -> None:
        """Let those begin that all ranks have planned alike, and whose segments are in memory as far as needed."""
        waiting = [(weave, weave.planning) for weave in self._unsettled() if weave.planning]
        for weave, planned, same in self._agreed(waiting, lambda planned: planned.plan):
            if same:
                weave.planned = planned
            else:
                weave.error = NotWoven("its plan is not the same on every rank")

    def _agree_on_layers(self) -> None:
        """Let weaves that have begun continue by the layers that every rank has, or give them up on all."""
        under_way = [weave for weave in self._weaves.values() if weave.error is None and weave.planned is not None]
        coming = [(weave, weave.planned.pinned) for weave in under_way if weave.planned and weave.everywhere != inf]
        if not coming:
            return
        numbers: list[int] = []
        for weave, segments in coming:
            weave.error = segments.failure
            if weave.error is None and weave.everywhere is not None and weave.layers <= 0:
                self._give_up_late(weave)
            numbers += [weave.error is None, segments.complete, segments.layers_in]
        least = self._ranks.least(numbers)
        for number, (weave, _) in enumerate(coming):
            sound, complete, layers = least[3 * number : 3 * number + 3]
            if not sound:
                weave.error = weave.error or NotWoven("another rank cannot weave it")
            weave.everywhere = inf if complete else layers

    def _agreed(
        self, waiting: "Sequence[tuple[QueuedWeave, Future[Any]]]", what: Callable[[Any], object]
    ) -> Iterator[tuple[QueuedWeave, Any, bool]]:
        """Each weave whose result all ranks have, with the result, and whether `what` of it is the same on all."""
        if not waiting:
            return
        ready = [self._is_ready(weave, future) for weave, future in waiting]
        if self._ranks.size == 1:
            yield from (
                (weave, future.result(), True) for (weave, future), one in zip(waiting, ready, strict=True) if one
            )
            return
        numbers: list[int] = []
        for (weave, future), one in zip(waiting, ready, strict=True):
            digest = _digest_of(what(future.result())) if one else 0
            numbers += [weave.error is None, one, digest, -digest]
        least = self._ranks.least(numbers)
        for number, (weave, future) in enumerate(waiting):
            sound, everywhere, low, high = least[4 * number : 4 * number + 4]
            if not sound:
                weave.error = weave.error or NotWoven("another rank cannot weave it")
            elif everywhere:
                yield weave, future.result(), low == -high

    def _is_ready(self, weave: QueuedWeave, future: "Future[Any]") -> bool:
        """Whether this rank has what it waits for; an error of it is noted."""
        if not future.done():
            self._give_up_late(weave)
            return False
        weave.error = future.exception()
        if weave.error is not None or future is weave.lookup:
            return weave.error is None
        segments: PlanSources = future.result().pinned
        weave.error = segments.failure
        ready = segments.layers_in > 0
        if not ready and weave.error is None:
            self._give_up_late(weave)
        return ready and weave.error is None

    def _can_go_on(self, weave: QueuedWeave) -> bool:
        if weave.error is None and weave.planned is not None:
            if weave.layers > 0:
                return True
            if self._ranks.size == 1:  # several agree on that too
                self._give_up_late(weave)
        return weave.error is not None

    def _give_up_late(self, weave: QueuedWeave) -> None:
        if self._clock() - weave.since_s > self._timeout_s:
            weave.error = NotWoven(f"its segments were not read within {self._timeout_s:.3g} s")

    def _unsettled(self) -> Iterator[QueuedWeave]:
        return (weave for weave in self._weaves.values() if weave.planned is None and weave.error is None)


MOST_READ = 4
"""Requests whose segments are read before their turn: more would only read against one another, and take memory."""


class ReadAhead:
    """Owns what is read for waiting requests until their weaves have ended. `find` is called from any thread."""

    def __init__(self, prefetch: Callable[[WeaveRequest], Prefetch | None]) -> None:
        """`prefetch` finds what a request would read and begins to; None if that is nothing. Called on threads."""
        self._prefetch = prefetch
        self._waiting: dict[str, WeaveRequest] = {}
        self._reading: dict[str, Future[Prefetch | None]] = {}
        self._executor = ThreadPoolExecutor(MOST_READ, "chunkweave-ahead")

    def begin(self, waiting: Mapping[str, WeaveRequest], placed: Iterable[str]) -> None:
        """Read for requests that have come in, the first ones first; those that are `placed` read for themselves."""
        if not waiting and not self._waiting:
            return
        self._waiting.update(waiting)
        for request_id in placed:
            self._waiting.pop(request_id, None)
        while self._waiting and len(self._reading) < MOST_READ:
            request_id = next(iter(self._waiting))
            self._reading[request_id] = self._executor.submit(self._prefetch, self._waiting.pop(request_id))

    def find(self, request_id: str) -> Prefetch | None:
        """What is being read for a request whose turn has come; None if it is nothing, or not known yet."""
        reading = self._reading.get(request_id)
        if reading is None or not reading.done() or reading.cancelled() or reading.exception() is not None:
            return None
        return reading.result()

    def drop(self, request_id: str) -> None:
        """A request is woven, or will not be: what was read stays where it was put, and is pinned no longer."""
        self._waiting.pop(request_id, None)
        reading = self._reading.pop(request_id, None)
        if reading is not None and not reading.cancel():
            reading.add_done_callback(lambda done: self._close(request_id, done))

    def close(self) -> None:
        """Stop reading."""
        for request_id in [*self._waiting, *self._reading]:
            self.drop(request_id)
        self._executor.shutdown(wait=True)

    def _close(self, request_id: str, done: "Future[Prefetch | None]") -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            logger.warning("nothing is read ahead for request %s: %s", request_id, error)
        elif not done.cancelled() and (prefetch := done.result()) is not None:
            with suppress(RuntimeError):  # at shutdown: it is closed here then
                self._executor.submit(prefetch.close)
                return
            prefetch.close()


class _Inline(Executor):
    """Runs at once what is submitted: where there is memory only, a thread would only cost time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """The call's outcome."""
        outcome: Future[Any] = Future()
        try:
            outcome.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  (raised by `Future.result`)
            outcome.set_exception(error)
        return outcome


def _close_segments(planning: "Future[PreparedWeave]") -> None:
    if not planning.cancelled() and planning.exception() is None:
        planning.result().pinned.close()


_Known = tuple[SegmentId, bool]
"""A segment, and whether it is exact."""


def _known(found: PromptLookup) -> set[_Known]:
    """What one rank has."""
    return {(record.id, record.exact) for record in _records(found)}


def _held_by_all(found: PromptLookup, ranks: Sequence[Collection[_Known]]) -> PromptLookup:
    """The lookup as if only that were stored which every rank has, and has as exact (or not) as the others."""
    everywhere = set.intersection(*map(set, ranks))
    return without(found, {record.id for record in _records(found) if (record.id, record.exact) not in everywhere})


def _by_id(found: PromptLookup) -> PromptLookup:
    """The same with variants by id: which was used last is not the same on every rank."""
    parts = (replace(part, variants=tuple(sorted(part.variants, key=lambda r: r.id))) for part in found.parts)
    return PromptLookup(tuple(parts))


def _records(found: PromptLookup) -> list[SegmentRecord]:
    records = [record for part in found.parts for record in part.variants]
    return records + [part.exact for part in found.parts if part.exact is not None]


def _digest_of(what: object) -> int:
    """62 bits of what `repr` says; equal if that is, which sets do not promise."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest()) >> 2
