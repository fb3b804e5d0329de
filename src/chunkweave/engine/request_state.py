"""State of one request in the step loop, and the queue of pending requests. No torch here."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
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
"""Receives each event of a request; the last one has the answer or is the error."""


class Siblings:
    """Joins several answers to one prompt in one stream. Used by one thread.

    The `first` request prefills. Then the others begin with copies of its KV and decode as requests of their own. Each
    answer's end is delivered with its piece; the whole `Answer` with the end of the last one.
    """

    def __init__(self, first: "RequestState", ids: Sequence[int]) -> None:
        """`ids` are those of the further requests, which do not exist yet. Changes the deliverer of `first`."""
        self.first = first
        self.ids = tuple(ids)
        self.running = [first]
        """The requests that have begun and not ended."""
        self._deliver = first.deliver
        self._left = 1 + len(ids)
        self._new_tokens = 0
        first.deliver = partial(self.deliver, 0)

    def made(self) -> "Iterator[RequestState]":
        """Make the further requests, once the first one is prefilled."""
        first = self.first
        for index, number in enumerate(self.ids, 1):
            prepared = first.prepared.sampled_as(index)
            deliver = partial(self.deliver, index)
            yield RequestState(
                number,
                prepared,
                deliver,
                first.arrived_s,
                first.deadline_s,
                speculative=first.speculative,
                tenant=first.tenant,
                admitted_s=first.admitted_s,
                first_token_s=first.first_token_s,
                last_token_s=first.last_token_s,
                plan=first.plan,
                counted=True,
                context=first.context.copy(),
                siblings=self,
            )

    def deliver(self, index: int, event: StreamEvent | Exception) -> None:
        """Deliver an event of one answer."""
        if isinstance(event, Exception):
            self._deliver(event)
            return
        if event.answer is None:
            self._deliver(replace(event, index=index))
            return
        self._left -= 1
        self._new_tokens += event.answer.report.new_tokens
        report = replace(event.answer.report, new_tokens=self._new_tokens)
        if self._left:
            rest = replace(event, index=index, answer=None, prompt=None, finish_reason=event.answer.finish_reason)
            self._deliver(rest)
        else:
            self._deliver(replace(event, index=index, answer=replace(event.answer, report=report)))


class RequestStatus(Enum):
    """Status of a request. Only the scheduler and the core change it."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request of a batching engine, from arrival to end.

    It is pending, prefilling (`job`) or decoding, and holds `blocks` of KV memory unless pending. Times are in seconds
    of the core's clock.
    """

    id: int
    prepared: PreparedRequest
    deliver: Deliver
    arrived_s: float
    deadline_s: float | None = None
    speculative: bool = False
    """Started before retrieval confirmed its chunks; yields to all ordinary requests."""
    tenant: str = ""
    """The tenant that owns the request."""
    background: bool = False
    """Background request: it computes segments to store, has no reader, and yields to all ordinary requests."""
    unwanted: Callable[[], bool] = bool
    """Whether it must end without an answer; asked before each step, in the engine's thread."""
    status: RequestStatus = RequestStatus.WAITING
    number: int = -1
    """Order of arrival, or of confirmation; background requests are numbered after all others."""
    queue_entry: "Waiting[RequestState] | None" = None
    """Its entry in the cache-aware queue, kept while it runs."""
    waits_since_s: float = field(init=False)
    """Start of its time in the queue: arrival or confirmation."""
    admitted_s: float | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    owner: "RequestState | None" = None
    """The running request that computes parts which this one waits for, outside the queue."""
    awaited: frozenset[ChunkId] = frozenset()
    """The parts that it waits for."""
    waited_for: frozenset[ChunkId] = frozenset()
    """Parts that it waited for until they were done. If the store refused them, it does not wait again."""
    prefetch: "Prefetch | None" = None
    looked_ahead: bool = False
    """Whether its segments were considered for prefetching while it was pending."""
    blocks: int = 0
    job: "PrefillJob | None" = None
    passed_over: int = 0
    """Consecutive steps in which its prefill got no tokens."""
    decode: "DecodeState | None" = None
    """Decoding state, from the first token on; kept across preemption."""
    plan: Plan | None = None
    """The plan of its first prefill, if another plan could give other tokens."""
    use: RequestUse | None = None
    """Its use of the store, from its first plan on."""
    counted: bool = False
    """Whether the store has counted `use`."""
    discarded_tokens: float = 0.0
    """Tokens computed for others and discarded for this request; its tenant is charged for them."""
    retry_alone: bool = False
    """It failed once, and its retry runs apart from all others."""
    delivered_chars: int = 0
    """Characters of its text that were delivered."""
    siblings: Siblings | None = None
    """The other answers to the same prompt."""
    context: Context = field(default_factory=copy_context)
    """Context of its submission. Work for this request alone runs in it, so that logs name the request."""

    def __post_init__(self) -> None:
        self.waits_since_s = self.arrived_s

    @property
    def preemptible(self) -> bool:
        """Whether any ordinary request may take its slot and memory."""
        return self.speculative or self.background

    @property
    def runs(self) -> bool:
        """Whether it is admitted and unfinished."""
        return self.status in (RequestStatus.PREFILLING, RequestStatus.DECODING)

    @property
    def waits(self) -> bool:
        """Whether it is pending."""
        return self.status is RequestStatus.WAITING

    @property
    def generated(self) -> tuple[int, ...]:
        """Its tokens after the prompt so far."""
        return () if self.decode is None else self.decode.generated

    @property
    def tokens(self) -> int:
        """Tokens to reserve at admission: all known ones and one to come."""
        return len(self.prepared.prompt) + len(self.generated) + 1

    @property
    def path(self) -> tuple[ChunkId, ...]:
        """Queue key: ids of its cacheable parts, as far as its method may reuse them."""
        wanted = self.wanted
        weaves = wanted.woven is not None and bool(wanted.chunks)
        return waiting_path(wanted.chunks, weaves=weaves, recomputed=1.0 - (wanted.woven or 0.0))

    @property
    def wanted(self) -> Wanted:
        """What it could read from the store, as far as its method may reuse it."""
        prompt = self.prepared.prompt
        choice = self.prepared.choice
        parts = [] if reuses_nothing(choice.made) else [part for part in prompt.parts if part.id]
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
        """Close its prefill and prefetch, and stop reading for them; idempotent."""
        self.looked_ahead = False
        if self.job is not None:
            self.job.close()
            self.job = None
        if self.prefetch is not None:
            self.prefetch.close()
            self.prefetch = None


Fits = Callable[[RequestState], bool]

_BEHIND_ALL = 1 << 60
"""First number of background requests, which count as younger than all others."""


class RequestQueue:
    """Cache-aware queues of all tenants; after them speculations, then background requests, by arrival.

    A confirmed speculation enters the queue as if it arrived at that moment, so speculation never lets a request
    overtake others. Used by one thread.
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
        """Number of confirmed pending requests."""
        return len(self._queue)

    def add(self, request: RequestState) -> None:
        """Queue a request and assign its number."""
        request.number = next(self._numbers) + (_BEHIND_ALL if request.background else 0)
        if request.preemptible:
            self._yielding(request)[request.number] = request
        else:
            queue = self._queue.of(request.tenant)
            request.queue_entry = queue.submit(request, request.path, len(request.prepared.prompt))

    def put_back(self, request: RequestState) -> None:
        """Return a popped request to its old position."""
        if request.preemptible:
            self._yielding(request)[request.number] = request
        else:
            assert request.queue_entry is not None, "it had a place in the queue"
            self._queue.of(request.tenant).put_back(request.queue_entry)

    def confirm(self, request: RequestState) -> None:
        """Make a speculation an ordinary request, pending or running."""
        waits = self._speculations.pop(request.number, None) is not None
        request.speculative = False
        if waits:
            self.add(request)
        else:
            self.number(request)

    def number(self, request: RequestState) -> None:
        """Assign the next number to a running request, and its position if it is put back."""
        request.number = next(self._numbers)
        if not request.preemptible:
            queue = self._queue.of(request.tenant)
            request.queue_entry = queue.place(request, request.path, len(request.prepared.prompt))

    def remove(self, request: RequestState) -> None:
        """Remove a request; no effect if it is not pending."""
        if request.preemptible:
            self._yielding(request).pop(request.number, None)
        else:
            self._queue.of(request.tenant).remove(request)

    def forget(self, tenant: str) -> None:
        """Drop the queue of a tenant without confirmed requests."""
        self._queue.forget(tenant)

    def pop(self, fits: Fits, promised: Mapping[str, float], may: Callable[[str], bool]) -> RequestState | None:
        """Pop the next confirmed request among those that fit; see `FairQueue.pop`."""
        queue_entry = self._queue.pop(lambda waiting: fits(waiting.request), promised, may)
        return None if queue_entry is None else queue_entry.request

    def pop_yielding(self, fits: Fits) -> RequestState | None:
        """Pop the oldest speculation, or else the oldest background request, if no confirmed request is pending.

        Returns None if it does not fit.
        """
        waiting = self._speculations or self._background
        oldest = min(waiting, default=None)
        if oldest is None or len(self._queue) or not fits(waiting[oldest]):
            return None
        return waiting.pop(oldest)

    def next(self, count: int) -> list[RequestState]:
        """The next `count` confirmed requests in serving order."""
        return [queue_entry.request for queue_entry in self._queue.next(count)]

    def close(self) -> None:
        """Stop following the tree; the queue cannot be used afterwards."""
        self._queue.close()

    def _yielding(self, request: RequestState) -> dict[int, RequestState]:
        return self._background if request.background else self._speculations
