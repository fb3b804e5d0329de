"""One request of a batching engine, from its arrival to its end."""

from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from chunkweave.engine.answer import StreamEvent
from chunkweave.engine.prefill_job import PrefillJob
from chunkweave.engine.preparation import Prepared
from chunkweave.engine.running import RunningRequest
from chunkweave.planning.plan import Plan
from chunkweave.scheduling.queue import Waiting

Deliver = Callable[[StreamEvent | Exception], None]
"""Takes each event of a request as it comes; the last one has the answer, or is the reason why there is none."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's state; only the core changes it.

    Times are those of the core's clock. It waits, or is prefilled (`job`), or decodes; it holds blocks unless it waits.
    `running` is there from its first token on, preempted or not. `plan` is what it was woven by, if another plan could
    give other tokens. Once it has failed it runs `apart` from all others. `shown` is how much text was delivered.
    `context` is that of its submission: what is done for it alone is done there, so that logs tell whose it is.
    """

    id: int
    prepared: Prepared
    deliver: Deliver
    arrived_s: float
    deadline_s: float | None
    waiting: "Waiting[Ticket] | None" = None
    admitted_s: float | None = None
    first_token_s: float = 0.0
    job: PrefillJob | None = None
    running: RunningRequest | None = None
    plan: Plan | None = None
    passed_over: int = 0
    apart: bool = False
    shown: int = 0
    context: Context = field(default_factory=copy_context)

    @property
    def number(self) -> int:
        """Its place in the order of arrival."""
        assert self.waiting is not None, "a submitted request has a place in the queue"
        return self.waiting.number

    @property
    def generated(self) -> tuple[int, ...]:
        """Its tokens so far."""
        return () if self.running is None else self.running.generated

    @property
    def tokens(self) -> int:
        """Tokens that it must have room for when it is admitted: what is known of it, and one to come."""
        return len(self.prepared.prompt) + len(self.generated) + 1
