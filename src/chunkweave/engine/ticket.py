"""One request of a batching engine, from its arrival to its end."""

from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from chunkweave.engine.answer import StreamEvent
from chunkweave.engine.prefetch import Prefetch
from chunkweave.engine.prefill_job import PrefillJob
from chunkweave.engine.preparation import PreparedRequest
from chunkweave.engine.running import DecodeState
from chunkweave.planning.plan import Plan
from chunkweave.scheduling.queue import Waiting
from chunkweave.types import ChunkId

Deliver = Callable[[StreamEvent | Exception], None]
"""Takes each event of a request as it comes; the last one has the answer, or is the reason why there is none."""


@dataclass(slots=True, eq=False)
class RequestState:
    """A request's state; only the core changes it.

    Times are those of the core's clock. It waits, or is prefilled (`job`), or decodes; it holds blocks unless it waits.
    `decode` is there from its first token on, preempted or not. `plan` is what it was woven by, if another plan could
    give other tokens. Once it has failed it runs `apart` from all others. `shown` is how much text was delivered.
    As long as it is `speculative` it yields to all that are not. Time in the queue counts from `waits_since_s`: its
    arrival, or when it was confirmed. `number` is its place in the order of arrival, or of confirmation; speculations
    have an order of their own. `prefetch` is what was read ahead for its prefill.
    `context` is that of its submission: what is done for it alone is done there, so that logs tell whose it is.
    """

    id: int
    prepared: PreparedRequest
    deliver: Deliver
    arrived_s: float
    deadline_s: float | None
    number: int = field(init=False)
    waiting: "Waiting[RequestState] | None" = None
    admitted_s: float | None = None
    first_token_s: float = 0.0
    job: PrefillJob | None = None
    decode: DecodeState | None = None
    plan: Plan | None = None
    passed_over: int = 0
    apart: bool = False
    shown: int = 0
    speculative: bool = False
    waits_since_s: float = field(init=False)
    prefetch: Prefetch | None = None
    context: Context = field(default_factory=copy_context)

    def __post_init__(self) -> None:
        self.waits_since_s = self.arrived_s

    @property
    def generated(self) -> tuple[int, ...]:
        """Its tokens so far."""
        return () if self.decode is None else self.decode.generated

    @property
    def tokens(self) -> int:
        """Tokens that it must have room for when it is admitted: what is known of it, and one to come."""
        return len(self.prepared.prompt) + len(self.generated) + 1

    @property
    def path(self) -> list[ChunkId]:
        """Ids of its stored parts, in prompt order."""
        return [part.id for part in self.prepared.prompt.parts if part.id is not None]

    def stop_reading(self) -> None:
        """End what is read for its prefill, and that with it; a second time is harmless."""
        if self.job is not None:
            self.job.close()
            self.job = None
        if self.prefetch is not None:
            self.prefetch.close()
            self.prefetch = None
