"""Calls to another machine that end in time, whatever that machine does."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from chunkweave.errors import UsageError
from chunkweave.tiers.blobs import BlobRefused
from chunkweave.tiers.breaker import CircuitBreaker
from chunkweave.tiers.daemon_workers import Abandoned, DaemonWorkers

ResultT = TypeVar("ResultT")


class RemoteGarbage(OSError):  # noqa: N818  (a state of the world, not a mistake)
    """The remote answered with bytes that are not what was put there. A failure to the breaker, but not retried."""


class RemoteUnavailable(OSError):  # noqa: N818  (a state of the world, not a mistake)
    """The call was not made: the breaker is open."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with full jitter: before retry n (from 0) wait uniform(0, min(cap_s, base_s * 2**n))."""

    base_s: float = 0.02
    cap_s: float = 0.5
    retries: int = 2

    def __post_init__(self) -> None:
        if self.base_s < 0 or self.cap_s < 0 or self.retries < 0:
            raise UsageError(f"a back-off cannot be negative: {self}")

    def pause_s(self, retry: int, rng: random.Random) -> float:
        """How long to wait before this retry."""
        return rng.uniform(0.0, min(self.cap_s, self.base_s * 2.0**retry))


class RemoteCalls:
    """Makes calls under one deadline, retries included, and asks a breaker before each.

    A call runs in another thread and is abandoned at the deadline: socket time-outs bound one read and not a
    reply that trickles in, and most fsspec drivers have none. At most `max_calls` are under way; one more that does
    not get its turn before its deadline fails. `cut` is called after an abandoned call, to end it.
    """

    def __init__(
        self,
        *,
        deadline_s: float,
        breaker: CircuitBreaker,
        cut: Callable[[], None] = lambda: None,
        backoff: Backoff | None = None,
        max_calls: int = 8,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """Nothing is called yet.

        Raises:
            UsageError: the deadline or the number of calls is not positive.
        """
        if deadline_s <= 0:
            raise UsageError(f"no call can be made in {deadline_s} s")
        self.deadline_s, self.breaker = deadline_s, breaker
        self._cut = cut
        self._backoff = Backoff() if backoff is None else backoff
        self._workers = DaemonWorkers(max_calls)
        self._clock, self._sleep = clock, sleep
        self._rng = random.Random() if rng is None else rng

    @property
    def under_way(self) -> int:
        """Calls that run now, abandoned ones included."""
        return self._workers.under_way

    def call(self, operation: Callable[[], ResultT], *, retry: bool = True) -> ResultT:
        """What `operation` returns; it may be run several times, and may still run after the deadline.

        Raises:
            RemoteUnavailable: the breaker is open.
            PermissionError: not let in (not retried).
            RemoteGarbage: raised by `operation` on what it got (not retried).
            BlobRefused: answered with a no (neither retried nor a failure to the breaker).
            OSError: no answer before the deadline, `TimeoutError` if it was the last attempt that took too long.
        """
        deadline = self._clock() + self.deadline_s
        attempts = 1 + (self._backoff.retries if retry else 0)
        for attempt in range(attempts):
            try:
                return self._attempt(operation, deadline)
            except (RemoteUnavailable, RemoteGarbage, BlobRefused, PermissionError):
                raise
            except OSError:
                pause = self._backoff.pause_s(attempt, self._rng)
                if attempt + 1 == attempts or self._clock() + pause >= deadline:
                    raise
            self._sleep(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _attempt(self, operation: Callable[[], ResultT], deadline: float) -> ResultT:
        permit = self.breaker.ask()
        if permit is None:
            raise RemoteUnavailable(f"{self.breaker.name} is left alone after failures")
        began = self._clock()
        try:
            result = self._workers.run(operation, deadline - began)
        except BlobRefused:
            self.breaker.succeeded(permit, self._clock() - began)
            raise
        except OSError as error:
            self.breaker.failed(permit, _reason(error))
            if isinstance(error, Abandoned):
                self._cut()
            raise
        self.breaker.succeeded(permit, self._clock() - began)
        return result


def _reason(error: OSError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
