"""Queue of weaves: looked up, planned and read in the background, and started by all ranks at once.

Segments of requests that are still in vLLM's own queue are prefetched.
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

from chunkweave.conversation.weave_request import WeaveRequest
from chunkweave.planning.method import without
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId
from chunkweave.vllm.orders import NotWoven, WeaveOrder
from chunkweave.vllm.weave import WeaveJob
from chunkweave.weaving.segments import PlanSources, Prefetch

logger = logging.getLogger("vllm.chunkweave")

AHEAD = 4
"""Weaves prepared before their turn; more would compete for reads and take memory."""


class Alone:
    """Agreement of a single worker with all heads. With several ranks, all make the same calls in the same order."""

    rank = 0
    size = 1

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Minimum of each number over all ranks; numbers have 63 bits and a sign."""
        return list(numbers)

    def gather(self, what: Any) -> list[Any]:
        """Each rank's object, by rank."""
        return [what]


class RankAgreement(Alone):
    """Agreement of vLLM's tensor-parallel ranks, over their CPU channel: a few numbers per weave."""

    def __init__(self) -> None:
        group = get_tp_group()
        self.rank, self.size = group.rank_in_group, group.world_size
        self._channel = group.cpu_group

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Minimum of each number over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(tensor, distributed.ReduceOp.MIN, group=self._channel)
        return [int(number) for number in tensor]

    def gather(self, what: Any) -> list[Any]:
        """Each rank's object, by rank."""
        by_rank: list[Any] = [None] * self.size
        distributed.all_gather_object(by_rank, what, group=self._channel)
        return by_rank


class RankFailedError(SystemExit):
    """One rank failed while others may wait for it in a collective.

    It ends the worker's process, and with it vLLM's engine. vLLM would answer an `Exception` and wait for the other
    ranks, which wait for this one.
    """


@dataclass(frozen=True, slots=True)
class PreparedWeave:
    """A plan with its segments, pinned in the store until closed.

    No KV before position `exact_to` is approximate. `behind`: it starts after approximate KV in vLLM's own cache, which
    may be woven from other segments than the plan's. `share_s` is the start, by this worker's clock, of computing a
    share of a mean that is not stored yet; None: no share.
    """

    plan: Plan
    pinned: PlanSources
    exact_to: int
    behind: bool = False
    share_s: float | None = None


@dataclass(slots=True, eq=False)
class QueuedWeave:
    """One pending order. `error` says why it is not woven; `planned` is set once all ranks may start.

    With several ranks, each has at least `everywhere` layers in memory, as last agreed; None with one rank.
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
        """Number of layers that can be woven now: those in memory."""
        assert self.planned is not None
        segments = self.planned.pinned
        if self.everywhere is not None:
            return self.everywhere - (0 if self.job is None else self.job.layer)
        if segments.complete or segments.failure is not None:  # reading a lost one raises
            return inf
        return segments.layers_in - (0 if self.job is None else self.job.layer)


class WeaveQueue:
    """Owns the orders of one worker until they are done. Called from the worker's thread only.

    A weave starts when the first layer of all segments is in memory, and continues as others arrive. Several ranks
    first agree on what is stored, so that all make the same plan, and before each slice on how many layers all of them
    have, so that no rank waits for a read within a layer in which the others wait for it.
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
        """`look_up` finds what is stored for an order's prompt; `plan` makes the plan and starts reading.

        With `background` both run in threads, for slow tiers. All `ranks` must agree. An order that is not ready after
        `timeout_s` is given up.
        """
        self._look_up, self._plan = look_up, plan
        self._ranks = ranks
        self._executor: Executor = ThreadPoolExecutor(AHEAD, "chunkweave-plan") if background else _Inline()
        self._timeout_s = timeout_s
        self._clock = clock
        self._weaves: dict[str, QueuedWeave] = {}

    def __len__(self) -> int:
        return len(self._weaves)

    @property
    def orders(self) -> list[WeaveOrder]:
        """The queued orders, oldest first."""
        return [weave.order for weave in self._weaves.values()]

    def add(self, order: WeaveOrder, planned: PreparedWeave | None = None) -> None:
        """Queue an order; a preempted one is queued again with its earlier plan."""
        weave = QueuedWeave(order)
        if planned is not None:
            weave.planning = Future()
            weave.planning.set_result(planned)
        self._weaves[order.request_id] = weave

    def remove(self, request_id: str) -> bool:
        """Remove an order, finished or not; segments prepared for a weave that never started are closed."""
        weave = self._weaves.pop(request_id, None)
        if weave is None:
            return False
        if weave.job is None and weave.planning is not None:
            weave.planning.add_done_callback(_close_segments)
        return True

    def next(self) -> QueuedWeave | None:
        """Prepare due orders, and return the first weave that can continue or has failed; None if all wait."""
        self._start()
        if self._ranks.size > 1:
            self._agree_on_lookups()
        self._agree_on_plans()
        if self._ranks.size > 1:
            self._agree_on_layers()
        return next((weave for weave in self._weaves.values() if self._can_continue(weave)), None)

    @property
    def ranks(self) -> int:
        """Number of ranks that weave together."""
        return self._ranks.size

    @property
    def device_bytes(self) -> int:
        """Device memory of the weaves that have begun."""
        return sum(weave.job.device_bytes for weave in self._weaves.values() if weave.job is not None)

    def begin(self, weave: QueuedWeave, make: Callable[[], WeaveJob]) -> None:
        """Begin a weave with the job that `make` returns, or set its error, alike on all ranks.

        `make` runs no collective. The job begins if every rank could make it and all will run the same collectives.
        """
        try:
            job = make()
            digest = _digest_of(job.outline) if self.ranks > 1 else 0
        except Exception as error:  # noqa: BLE001  (any failure of one rank is agreed on)
            weave.error, digest = error, 0
        sound, low, high = self._ranks.least([weave.error is None, digest, -digest])
        if not sound:
            weave.error = weave.error or NotWoven("another rank cannot begin it")
        elif low != -high:
            weave.error = NotWoven("its start or what it captures differs between ranks")
        else:
            weave.job = job

    def close(self) -> None:
        """Remove all orders."""
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
        """Plan orders that all ranks have looked up, with what all of them found."""
        waiting = [(weave, weave.lookup) for weave in self._unsettled() if weave.lookup and weave.planning is None]
        for weave, lookup, same in self._agreed(waiting, lambda lookup: sorted(_known(lookup))):
            if not same:
                lookup = _held_by_all(lookup, self._ranks.gather(_known(lookup)))
            weave.since_s = self._clock()
            weave.planning = self._executor.submit(self._plan, weave.order, _by_id(lookup))

    def _agree_on_plans(self) -> None:
        """Start weaves that all ranks planned alike and whose segments are in memory as far as needed."""
        waiting = [(weave, weave.planning) for weave in self._unsettled() if weave.planning]
        for weave, planned, same in self._agreed(waiting, lambda planned: planned.plan):
            if same:
                weave.planned = planned
            else:
                weave.error = NotWoven("its plan differs between ranks")

    def _agree_on_layers(self) -> None:
        """Let started weaves continue by the layers that every rank has, or give them up on all ranks."""
        started = [weave for weave in self._weaves.values() if weave.error is None and weave.planned is not None]
        coming = [(weave, weave.planned.pinned) for weave in started if weave.planned and weave.everywhere != inf]
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
        """Weaves whose result all ranks have, with the result, and whether `what` of it is equal on all ranks."""
        if not waiting:
            return
        ready = [self._is_ready(weave, future) for weave, future in waiting]
        if self._ranks.size == 1:
            yield from (
                (weave, future.result(), True)
                for (weave, future), is_ready in zip(waiting, ready, strict=True)
                if is_ready
            )
            return
        numbers: list[int] = []
        for (weave, future), is_ready in zip(waiting, ready, strict=True):
            digest = _digest_of(what(future.result())) if is_ready else 0
            numbers += [weave.error is None, is_ready, digest, -digest]
        least = self._ranks.least(numbers)
        for number, (weave, future) in enumerate(waiting):
            sound, everywhere, low, high = least[4 * number : 4 * number + 4]
            if not sound:
                weave.error = weave.error or NotWoven("another rank cannot weave it")
            elif everywhere:
                yield weave, future.result(), low == -high

    def _is_ready(self, weave: QueuedWeave, future: "Future[Any]") -> bool:
        """Whether this rank has the result that it waits for; records an error."""
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

    def _can_continue(self, weave: QueuedWeave) -> bool:
        if weave.error is None and weave.planned is not None:
            if weave.layers > 0:
                return True
            if self._ranks.size == 1:  # several ranks agree on this in `_agree_on_layers`
                self._give_up_late(weave)
        return weave.error is not None

    def _give_up_late(self, weave: QueuedWeave) -> None:
        if self._clock() - weave.since_s > self._timeout_s:
            weave.error = NotWoven(f"its segments were not read within {self._timeout_s:.3g} s")

    def _unsettled(self) -> Iterator[QueuedWeave]:
        return (weave for weave in self._weaves.values() if weave.planned is None and weave.error is None)


MOST_READ = 4
"""Requests whose segments are read before their turn; more would compete for reads and take memory."""


class ReadAhead:
    """Owns prefetches of waiting requests until their weaves have ended. `find` is thread-safe."""

    def __init__(self, prefetch: Callable[[WeaveRequest], Prefetch | None]) -> None:
        """`prefetch` finds what a request would read and starts reading; None if nothing. Called in threads."""
        self._prefetch = prefetch
        self._waiting: dict[str, WeaveRequest] = {}
        self._reading: dict[str, Future[Prefetch | None]] = {}
        self._executor = ThreadPoolExecutor(MOST_READ, "chunkweave-ahead")

    def begin(self, waiting: Mapping[str, WeaveRequest], placed: Iterable[str]) -> None:
        """Prefetch for arrived requests, oldest first; those that are `placed` read for themselves."""
        if not waiting and not self._waiting:
            return
        self._waiting.update(waiting)
        for request_id in placed:
            self._waiting.pop(request_id, None)
        while self._waiting and len(self._reading) < MOST_READ:
            request_id = next(iter(self._waiting))
            self._reading[request_id] = self._executor.submit(self._prefetch, self._waiting.pop(request_id))

    def find(self, request_id: str) -> Prefetch | None:
        """The prefetch of a request whose turn has come; None if there is none, or it is not known yet."""
        reading = self._reading.get(request_id)
        if reading is None or not reading.done() or reading.cancelled() or reading.exception() is not None:
            return None
        return reading.result()

    def drop(self, request_id: str) -> None:
        """Release the prefetch of a request that is woven, or will not be; loaded layers stay in memory, unpinned."""
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
            logger.warning("prefetch failed for request %s: %s", request_id, error)
        elif not done.cancelled() and (prefetch := done.result()) is not None:
            with suppress(RuntimeError):  # the executor is shut down: close it in this thread
                self._executor.submit(prefetch.close)
                return
            prefetch.close()


class _Inline(Executor):
    """Runs submitted calls at once: with memory tiers only, a thread would only cost time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run the call; returns its outcome."""
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


def _known(lookup: PromptLookup) -> set[_Known]:
    """The segments that one rank found."""
    return {(record.id, record.exact) for record in _records(lookup)}


def _held_by_all(lookup: PromptLookup, ranks: Sequence[Collection[_Known]]) -> PromptLookup:
    """The lookup restricted to segments that every rank has, with the same exactness."""
    everywhere = set.intersection(*map(set, ranks))
    return without(lookup, {record.id for record in _records(lookup) if (record.id, record.exact) not in everywhere})


def _by_id(lookup: PromptLookup) -> PromptLookup:
    """The lookup with variants sorted by id, because the order of last use differs between ranks."""
    parts = (replace(part, variants=tuple(sorted(part.variants, key=lambda r: r.id))) for part in lookup.parts)
    return PromptLookup(tuple(parts))


def _records(lookup: PromptLookup) -> list[SegmentRecord]:
    records = [record for part in lookup.parts for record in part.variants]
    return records + [part.exact for part in lookup.parts if part.exact is not None]


def _digest_of(what: object) -> int:
    """62 bits of a hash of `repr`; equal objects need equal `repr`, which sets do not guarantee."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest()) >> 2
