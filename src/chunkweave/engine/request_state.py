"""A request of the step loop, from its arrival to its end, and where it waits. Imports no torch."""

import itertools
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from chunkweave.conversation.answer import StreamEvent
from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.planning.method import reuses_nothing
from chunkweave.planning.plan import Plan
from chunkweave.scheduling.in_progress import PartInProgress, Wanted
from chunkweave.scheduling.queue import FairQueue, StoredPrefixes, VirtualTime, Waiting, waiting_path
from chunkweave.store.index import RequestUse
from chunkweave.types import ChunkId

if TYPE_CHECKING:  # they import torch
    from chunkweave.engine.decode import DecodeState
    from chunkweave.engine.prefill import PrefillJob
    from chunkweave.weaving.segments import Prefetch

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
    prepared: PreparedRequest
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
    owner: "RequestState | None" = None
    """The running request that computes parts which it waits for. Until then it is not in the queue."""
    awaited: frozenset[ChunkId] = frozenset()
    """The parts that it waits for."""
    waited_for: frozenset[ChunkId] = frozenset()
    """Parts that it has waited for to the end: if the store did not take them, it does not wait again."""
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
    """Whether the store has counted it."""
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
        wanted = self.wanted
        weaves = wanted.woven is not None and bool(wanted.chunks)
        return waiting_path(wanted.chunks, weaves=weaves, recomputed=1.0 - (wanted.woven or 0.0))

    @property
    def wanted(self) -> Wanted:
        """What it could take from the store, as far as its method may reuse it."""
        prompt, choice = self.prepared.prompt, self.prepared.choice
        parts = [] if reuses_nothing(choice.method, choice.reuse) else [part for part in prompt.parts if part.id]
        share = choice.recomputed_share
        return Wanted(
            chunks=[part.id for part in parts if part.id is not None],
            tokens=[len(part) for part in parts],
            prompt_tokens=len(prompt),
            woven=None if share is None else 1.0 - share,
        )

    @property
    def in_progress(self) -> list[PartInProgress]:
        """The parts that its prefill computes and will store."""
        return [] if self.job is None else self.job.in_progress()

    def stop_reading(self) -> None:
        """End what is read for its prefill, and that with it; idempotent."""
        self.looked_ahead = False
        if self.job is not None:
            self.job.close()
            self.job = None
        if self.prefetch is not None:
            self.prefetch.close()
            self.prefetch = None


Fits = Callable[[RequestState], bool]

_BEHIND_ALL = 1 << 60
"""Numbers of requests in the background: they are younger than all others."""


class RequestQueue:
    """The tenants' cache-aware queues; behind them speculations, then what is computed in the background, by arrival.

    A speculation that is confirmed takes its place in the queue then, as if it had arrived only now, so speculation
    never lets a request overtake others. Used by one thread.
    """

    def __init__(self, tree: StoredPrefixes, time: VirtualTime, *, window: int) -> None:
        self._queue: FairQueue[RequestState] = FairQueue(tree, time, window=window)
        self._speculations: dict[int, RequestState] = {}
        self._background: dict[int, RequestState] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._queue) + len(self._speculations) + len(self._background)

    @property
    def requests(self) -> int:
        """How many of those that wait are confirmed."""
        return len(self._queue)

    def add(self, request: RequestState) -> None:
        """Let a request wait, and give it its number."""
        request.number = next(self._numbers) + (_BEHIND_ALL if request.background else 0)
        if request.yields:
            self._yielding(request)[request.number] = request
        else:
            queue = self._queue.of(request.tenant)
            request.place = queue.submit(request, request.path, len(request.prepared.prompt))

    def put_back(self, request: RequestState) -> None:
        """Let a request that was taken out wait again in its old place."""
        if request.yields:
            self._yielding(request)[request.number] = request
        else:
            assert request.place is not None, "it had a place in the queue"
            self._queue.of(request.tenant).put_back(request.place)

    def confirm(self, request: RequestState) -> None:
        """A speculation becomes a request like others, whether it waits or runs."""
        waits = self._speculations.pop(request.number, None) is not None
        request.speculative = False
        if waits:
            self.add(request)
        else:
            queue = self._queue.of(request.tenant)
            request.place = queue.place(request, request.path, len(request.prepared.prompt))
            request.number = next(self._numbers)

    def remove(self, request: RequestState) -> None:
        """A request is given up; one that does not wait is left alone."""
        if request.yields:
            self._yielding(request).pop(request.number, None)
        else:
            self._queue.of(request.tenant).remove(request)

    def forget(self, tenant: str) -> None:
        """A tenant has no confirmed request any more."""
        self._queue.forget(tenant)

    def pop(self, fits: Fits, promised: Mapping[str, float], may: Callable[[str], bool]) -> RequestState | None:
        """Take out the confirmed request that is served next among those that fit; see `FairQueue.pop`."""
        place = self._queue.pop(lambda one: fits(one.request), promised, may)
        return None if place is None else place.request

    def pop_yielding(self, fits: Fits) -> RequestState | None:
        """Take out the oldest speculation, or else what waits longest in the background, if no confirmed request waits.

        None also if that does not fit.
        """
        waiting = self._speculations or self._background
        oldest = min(waiting, default=None)
        if oldest is None or len(self._queue) or not fits(waiting[oldest]):
            return None
        return waiting.pop(oldest)

    def next(self, count: int) -> list[RequestState]:
        """The confirmed requests that would be served next now."""
        return [place.request for place in self._queue.next(count)]

    def close(self) -> None:
        """Follow the tree no longer; the queue is of no use afterwards."""
        self._queue.close()

    def _yielding(self, request: RequestState) -> dict[int, RequestState]:
        return self._background if request.background else self._speculations
