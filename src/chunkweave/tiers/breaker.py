"""When to stop asking somebody who does not answer."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from threading import Lock

from chunkweave.errors import UsageError

logger = logging.getLogger(__name__)


class BreakerState(Enum):
    """What happens to the next call."""

    CLOSED = "closed"
    """It is made."""
    OPEN = "open"
    """It is refused at once."""
    HALF_OPEN = "half-open"
    """One call, the probe, is under way; others are refused until it has ended."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to make one call. Its outcome counts only if the breaker has not changed its state since."""

    era: int


class CircuitBreaker:
    """Refuses calls to a remote after failures in a row, and lets one probe through after a while.

    A call that succeeds but takes longer than `slow_s` counts as a failure: a cache that answers later than
    the answer could be computed is of no use. Thread-safe. Changes between working and not working are logged
    once each; single failures and failed probes are not.
    """

    def __init__(
        self,
        name: str,
        *,
        failures_to_open: int = 3,
        slow_s: float | None = None,
        cool_down_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A closed breaker.

        Args:
            name: what it guards, for the log (no secrets).
            failures_to_open: failures in a row that open it.
            slow_s: a call that takes longer is a failure; None for no such limit.
            cool_down_s: time from opening to the next probe, and the longest that a probe keeps others out.
            clock: monotonic seconds.

        Raises:
            UsageError: a number that is not positive.
        """
        if failures_to_open < 1 or cool_down_s <= 0 or (slow_s is not None and slow_s <= 0):
            raise UsageError("a circuit breaker's failures, limit and cool-down must be positive")
        self.name = name
        self._failures_to_open, self._slow_s, self._cool_down_s = failures_to_open, slow_s, cool_down_s
        self._clock = clock
        self._lock = Lock()
        self._state = BreakerState.CLOSED
        self._era = 0
        self._failures = 0
        self._since_s = 0.0
        self._times_opened = 0

    @property
    def state(self) -> BreakerState:
        """What it was after the last call; an open one stays so until somebody asks to call."""
        with self._lock:
            return self._state

    @property
    def times_opened(self) -> int:
        """How often it went from working to not working."""
        with self._lock:
            return self._times_opened

    def ask(self) -> Permit | None:
        """Leave to call, or None if the call must not be made.

        Every permit is handed back with `succeeded` or `failed`. The permit of a probe that is not handed back
        within the cool-down is void, and another probe may start.
        """
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return Permit(self._era)
            if self._clock() - self._since_s < self._cool_down_s:
                return None
            self._change(BreakerState.HALF_OPEN)
            return Permit(self._era)

    def succeeded(self, permit: Permit, elapsed_s: float) -> None:
        """The call was answered after `elapsed_s`."""
        if self._slow_s is not None and elapsed_s > self._slow_s:
            self.failed(permit, f"took {elapsed_s:.3f} s, the limit is {self._slow_s:.3f} s")
            return
        with self._lock:
            if permit.era != self._era:
                return
            self._failures = 0
            if self._state is BreakerState.HALF_OPEN:
                self._change(BreakerState.CLOSED)
                logger.info("%s works again", self.name)

    def failed(self, permit: Permit, reason: str) -> None:
        """The call was not answered, or not with anything of use."""
        with self._lock:
            if permit.era != self._era:
                return
            self._failures += 1
            if self._state is BreakerState.HALF_OPEN:
                self._change(BreakerState.OPEN)
                logger.debug("%s still does not work: %s", self.name, reason)
            elif self._failures >= self._failures_to_open:
                self._change(BreakerState.OPEN)
                self._times_opened += 1
                logger.warning(
                    "%s failed %d times in a row and is left alone for %.1f s at a time: %s",
                    self.name,
                    self._failures,
                    self._cool_down_s,
                    reason,
                )

    def _change(self, state: BreakerState) -> None:
        self._state = state
        self._era += 1
        self._since_s = self._clock()
