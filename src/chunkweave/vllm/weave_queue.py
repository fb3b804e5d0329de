"""Weaves that wait for their turn: looked up, planned and read in the background, begun by all ranks at once."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import distributed
from vllm.distributed import get_tp_group

from chunkweave.planning.cost import without
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId
from chunkweave.vllm.messages import WeaveOrder
from chunkweave.vllm.planned_segments import PlannedSegments
from chunkweave.vllm.weave import WeaveJob


class Agreement(Protocol):
    """The ranks that weave the same requests, each with its share of the heads. Every call is made by all of them."""

    @property
    def rank(self) -> int:
        """Which of them this is."""

    @property
    def size(self) -> int:
        """How many there are."""

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number over all ranks; numbers of 63 bits and a sign."""

    def gather(self, what: Any) -> list[Any]:
        """What each rank has, by rank."""


class Alone:
    """One worker that has all heads."""

    rank = 0
    size = 1

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Its own numbers."""
        return list(numbers)

    def gather(self, what: Any) -> list[Any]:
        """Its own alone."""
        return [what]


class RankAgreement:
    """vLLM's tensor-parallel group, over its CPU channel: what is agreed on are a few numbers a weave."""

    def __init__(self) -> None:
        self._group = get_tp_group()

    @property
    def rank(self) -> int:
        """Which of them this is."""
        rank: int = self._group.rank_in_group
        return rank

    @property
    def size(self) -> int:
        """How many there are."""
        size: int = self._group.world_size
        return size

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(tensor, distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return [int(number) for number in tensor]

    def gather(self, what: Any) -> list[Any]:
        """What each rank has, by rank."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, what, group=self._group.cpu_group)
        return found


def agreement_here() -> Agreement:
    """That of this worker's model."""
    ranks = RankAgreement()
    return ranks if ranks.size > 1 else Alone()


Known = tuple[SegmentId, bool]
"""A segment, and whether it is exact."""


def known_by(found: PromptLookup) -> set[Known]:
    """What one rank has."""
    return {(record.id, record.exact) for record in _records(found)}


def held_by_all(found: PromptLookup, ranks: Sequence[Collection[Known]]) -> PromptLookup:
    """The lookup as if only that were stored which every rank has, and has as exact (or not) as the others."""
    everywhere = set.intersection(*map(set, ranks))
    return without(found, {record.id for record in _records(found) if (record.id, record.exact) not in everywhere})


def in_order(found: PromptLookup) -> PromptLookup:
    """The same with variants by id: which was used last is not the same on every rank."""
    parts = (replace(part, variants=tuple(sorted(part.variants, key=lambda r: r.id))) for part in found.parts)
    return PromptLookup(tuple(parts))


def digest_of(what: object) -> int:
    """62 bits of what `repr` says; equal if that is, which sets do not promise."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest()) >> 2


def _records(found: PromptLookup) -> list[SegmentRecord]:
    records = [record for part in found.parts for record in part.variants]
    return records + [part.exact for part in found.parts if part.exact is not None]


AHEAD = 4
"""Weaves that are prepared before their turn: more would only read against one another, and take memory."""


class NotWoven(Exception):  # noqa: N818  (a signal within the worker, never seen by users)
    """Nothing is wrong, but vLLM had better compute this request."""


class Planned(Protocol):
    """What a prepared weave is: its plan, and where the KV comes from."""

    @property
    def plan(self) -> Plan: ...

    @property
    def pinned(self) -> PlannedSegments: ...


PlannedT = TypeVar("PlannedT", bound=Planned)
PlannedT_co = TypeVar("PlannedT_co", bound=Planned, covariant=True)


class Preparation(Protocol[PlannedT_co]):
    """What the queue asks of the worker, on threads of its own; neither may touch more than the store."""

    def look_up(self, order: WeaveOrder) -> PromptLookup:
        """What is stored for an order's prompt."""

    def plan(self, order: WeaveOrder, found: PromptLookup) -> PlannedT_co:
        """Plan with what was found and begin to read."""


@dataclass(slots=True, eq=False)
class QueuedWeave(Generic[PlannedT]):
    """One order on its way. `error` says why it will not be woven; `planned` is set once all ranks may begin."""

    order: WeaveOrder
    since_s: float = 0.0
    lookup: Future[PromptLookup] | None = None
    planning: Future[PlannedT] | None = None
    planned: PlannedT | None = None
    error: Exception | None = None
    job: WeaveJob | None = None

    @property
    def settled(self) -> bool:
        """Whether nothing is to be waited for any more before it may begin."""
        return self.planned is not None or self.error is not None

    @property
    def layers(self) -> float:
        """How many layers may be woven now: those that are in memory."""
        assert self.planned is not None
        segments = self.planned.pinned
        if segments.complete or segments.failure is not None:  # a lost one is told by whoever reads it
            return inf
        done = 0 if self.job is None else self.job.layer
        return segments.layers_in - done


class WeaveQueue(Generic[PlannedT]):
    """Owns the orders of one worker until they are done. Called from the worker's thread only.

    One worker alone begins when the first layer of all segments is in memory, and goes on as the others come. Several
    ranks agree first on what is stored, so that all plan alike, then on whether all have all of it: then nothing that
    is read can hold up one rank in the middle of a layer in which the others wait for it.
    """

    def __init__(
        self,
        preparation: Preparation[PlannedT],
        ranks: Agreement,
        *,
        background: bool,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An empty queue.

        Args:
            preparation: looks up and plans.
            ranks: who must agree.
            background: look up and plan on threads, since a tier may keep one waiting.
            timeout_s: an order that is not there after so long is given up.
            clock: seconds, monotonic.
        """
        self._preparation = preparation
        self._ranks = ranks
        self._executor: Executor = ThreadPoolExecutor(AHEAD, "chunkweave-plan") if background else _Inline()
        self._timeout_s = timeout_s
        self._clock = clock
        self._weaves: dict[str, QueuedWeave[PlannedT]] = {}

    def __len__(self) -> int:
        return len(self._weaves)

    def add(self, order: WeaveOrder, planned: PlannedT | None = None) -> None:
        """Queue an order; one that was woven before, and preempted, with the same plan again."""
        weave: QueuedWeave[PlannedT] = QueuedWeave(order)
        if planned is not None:
            weave.planning = Future()
            weave.planning.set_result(planned)
        self._weaves[order.request_id] = weave

    def remove(self, request_id: str) -> bool:
        """Take an order out, done or not; what was prepared for one that never began is given back."""
        weave = self._weaves.pop(request_id, None)
        if weave is None:
            return False
        if weave.job is None and weave.planning is not None:
            weave.planning.add_done_callback(_give_back)
        return True

    def next(self) -> QueuedWeave[PlannedT] | None:
        """Prepare what is due, and return the first weave that can go on, or has failed; None while all wait."""
        self._start()
        if self._ranks.size > 1:
            self._agree_on_lookups()
        self._agree_on_plans()
        return next((weave for weave in self._weaves.values() if self._can_go_on(weave)), None)

    def close(self) -> None:
        """Give up what waits."""
        for request_id in tuple(self._weaves):
            self.remove(request_id)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        for weave in islice(self._weaves.values(), AHEAD):
            if weave.settled or weave.lookup is not None or weave.planning is not None:
                continue
            weave.since_s = self._clock()
            order = weave.order
            if self._ranks.size > 1:
                weave.lookup = self._executor.submit(self._preparation.look_up, order)
            else:
                weave.planning = self._executor.submit(_prepare, self._preparation, order)

    def _agree_on_lookups(self) -> None:
        """Plan those that all ranks have looked up, with what all of them found."""
        waiting = [weave for weave in self._unsettled() if weave.lookup is not None and weave.planning is None]
        if not waiting:
            return
        standing = [self._standing(weave, weave.lookup) for weave in waiting]
        for weave, agreed, same in self._compare(waiting, standing, _known):
            if not agreed:
                continue
            assert weave.lookup is not None
            found = weave.lookup.result()
            if not same:
                found = held_by_all(found, self._ranks.gather(known_by(found)))
            weave.since_s = self._clock()
            weave.planning = self._executor.submit(self._preparation.plan, weave.order, in_order(found))

    def _agree_on_plans(self) -> None:
        waiting = [weave for weave in self._unsettled() if weave.planning is not None]
        if not waiting:
            return
        standing = [self._standing(weave, weave.planning) for weave in waiting]
        for weave, agreed, same in self._compare(waiting, standing, _plan_of):
            if not agreed:
                continue
            assert weave.planning is not None
            if same:
                weave.planned = weave.planning.result()
            else:
                weave.error = NotWoven("its plan is not the same on every rank")

    def _standing(self, weave: QueuedWeave[PlannedT], done: "Future[Any] | None") -> bool:
        """Whether this rank has what it waits for; what went wrong is noted."""
        assert done is not None
        if not done.done():
            self._give_up_late(weave)
            return False
        weave.error = done.exception()  # type: ignore[assignment]  # threads are not interrupted
        if weave.error is not None or done is weave.lookup:
            return weave.error is None
        segments: PlannedSegments = done.result().pinned
        weave.error = segments.failure
        ready = segments.complete if self._ranks.size > 1 else segments.layers_in > 0
        if not ready and weave.error is None:
            self._give_up_late(weave)
        return ready and weave.error is None

    def _compare(
        self,
        weaves: Sequence[QueuedWeave[PlannedT]],
        standing: Sequence[bool],
        what: Callable[[QueuedWeave[PlannedT]], object],
    ) -> Iterator[tuple[QueuedWeave[PlannedT], bool, bool]]:
        """Each weave, whether all ranks are ready for it, and whether all have the same `what`."""
        if self._ranks.size == 1:
            yield from ((weave, ready, True) for weave, ready in zip(weaves, standing, strict=True))
            return
        numbers: list[int] = []
        for weave, ready in zip(weaves, standing, strict=True):
            digest = digest_of(what(weave)) if ready else 0
            numbers += [weave.error is None, ready, digest, -digest]
        least = self._ranks.least(numbers)
        for number, weave in enumerate(weaves):
            sound, ready_everywhere, low, high = least[4 * number : 4 * number + 4]
            if not sound:
                weave.error = weave.error or NotWoven("another rank cannot weave it")
            yield weave, bool(sound and ready_everywhere), low == -high

    def _can_go_on(self, weave: QueuedWeave[PlannedT]) -> bool:
        if weave.error is not None:
            return True
        if weave.planned is None:
            return False
        if weave.layers > 0:
            return True
        self._give_up_late(weave)
        return weave.error is not None

    def _give_up_late(self, weave: QueuedWeave[PlannedT]) -> None:
        if self._clock() - weave.since_s > self._timeout_s:
            weave.error = NotWoven(f"its segments were not read within {self._timeout_s:.3g} s")

    def _unsettled(self) -> list[QueuedWeave[PlannedT]]:
        return [weave for weave in self._weaves.values() if not weave.settled]


class _Inline(Executor):
    """Runs at once what is submitted: where nothing but memory is asked, a thread would only cost time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """The call's outcome."""
        outcome: Future[Any] = Future()
        try:
            outcome.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  (carried over to whoever asks for the result)
            outcome.set_exception(error)
        return outcome


def _prepare(preparation: Preparation[PlannedT], order: WeaveOrder) -> PlannedT:
    return preparation.plan(order, preparation.look_up(order))


def _give_back(planning: "Future[Any]") -> None:
    if not planning.cancelled() and planning.exception() is None:
        planning.result().pinned.close()


def _known(weave: QueuedWeave[PlannedT]) -> object:
    assert weave.lookup is not None
    return sorted(known_by(weave.lookup.result()))


def _plan_of(weave: QueuedWeave[PlannedT]) -> object:
    assert weave.planning is not None
    return weave.planning.result().plan
