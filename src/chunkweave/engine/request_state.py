"""A request of the step loop, from its arrival to its end. Imports no torch."""

from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from chunkweave.conversation.answer import StreamEvent
from chunkweave.planning.method import reuses_nothing
from chunkweave.planning.plan import Plan
from chunkweave.scheduling.queue import Waiting
from chunkweave.scheduling.waiting import waiting_path
from chunkweave.store.index import RequestUse
from chunkweave.types import ChunkId

if TYPE_CHECKING:  # they import torch
    from chunkweave.engine.decode import DecodeState
    from chunkweave.engine.prefill import PrefillJob
    from chunkweave.engine.prepare import PreparedRequest
    from chunkweave.weaving.sources import Prefetch

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
    prepared: "PreparedRequest"
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
    """Whether the store was told of it."""
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
        choice = self.prepared.choice
        if reuses_nothing(choice.method, choice.reuse):
            return ()
        ids = [part.id for part in self.prepared.prompt.parts if part.id is not None]
        share = choice.recomputed_share
        return waiting_path(ids, weaves=share is not None, recomputed=share or 0.0)

    def stop_reading(self) -> None:
        """End what is read for its prefill, and that with it; a second time is harmless."""
        self.looked_ahead = False
        if self.job is not None:
            self.job.close()
            self.job = None
        if self.prefetch is not None:
            self.prefetch.close()
            self.prefetch = None
