"""Calls to another machine that end in time, and stop for a while when it does not answer."""

import logging
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Lock, Thread
from typing import TypeVar

from chunkweave.errors import UsageError
from chunkweave.tiers.blobs import BlobRefused

logger = logging.getLogger(__name__)


ResultT = TypeVar("ResultT")


class BreakerState(Enum):
    """What happens to the next call."""

    CLOSED = "closed"
    """It is made."""
    OPEN = "open"
    """It is refused at once."""
    HALF_OPEN = "half-open"
    """One call, the probe, is under way; others are refused until it has ended."""


Permit = int
"""Leave to make one call: how often the breaker had changed its state. If it has since, the outcome does not count."""


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
        self.state = BreakerState.CLOSED
        """What it was after the last call; an open one stays so until the next `ask`."""
        self.times_opened = 0
        """How often it went from working to not working."""
        self._era: Permit = 0
        self._failures = 0
        self._since_s = 0.0

    def ask(self) -> Permit | None:
        """Leave to call, or None if the call must not be made.

        Every permit is handed back with `succeeded` or `failed`. The permit of a probe that is not handed back
        within the cool-down is void, and another probe may start.
        """
        with self._lock:
            if self.state is BreakerState.CLOSED:
                return self._era
            if self._clock() - self._since_s < self._cool_down_s:
                return None
            self._change(BreakerState.HALF_OPEN)
            return self._era

    def succeeded(self, permit: Permit, elapsed_s: float) -> None:
        """The call was answered after `elapsed_s`."""
        if self._slow_s is not None and elapsed_s > self._slow_s:
            self.failed(permit, f"took {elapsed_s:.3f} s, the limit is {self._slow_s:.3f} s")
            return
        with self._lock:
            if permit != self._era:
                return
            self._failures = 0
            if self.state is BreakerState.HALF_OPEN:
                self._change(BreakerState.CLOSED)
                logger.info("%s works again", self.name)

    def failed(self, permit: Permit, reason: str) -> None:
        """The call was not answered, or not with anything of use."""
        with self._lock:
            if permit != self._era:
                return
            self._failures += 1
            if self.state is BreakerState.HALF_OPEN:
                self._change(BreakerState.OPEN)
                logger.debug("%s still does not work: %s", self.name, reason)
            elif self._failures >= self._failures_to_open:
                self._change(BreakerState.OPEN)
                self.times_opened += 1
                logger.warning(
                    "%s failed %d times in a row and is left alone for %.1f s at a time: %s",
                    self.name,
                    self._failures,
                    self._cool_down_s,
                    reason,
                )

    def _change(self, state: BreakerState) -> None:
        self.state = state
        self._era += 1
        self._since_s = self._clock()


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
        """Nothing is called yet. Raises `UsageError` if the deadline or the number of calls is not positive."""
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
        deadline, retries, made = self._clock() + self.deadline_s, self._backoff.retries if retry else 0, 0
        while True:
            try:
                return self._attempt(operation, deadline)
            except (RemoteUnavailable, RemoteGarbage, BlobRefused, PermissionError):
                raise
            except OSError:
                pause = self._backoff.pause_s(made, self._rng)
                if made == retries or self._clock() + pause >= deadline:
                    raise
            self._sleep(pause)
            made += 1

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
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.breaker.failed(permit, reason)
            if isinstance(error, Abandoned):
                self._cut()
            raise
        self.breaker.succeeded(permit, self._clock() - began)
        return result


_IDLE_S = 10.0
"""A worker with nothing to do for so long ends."""


class Abandoned(TimeoutError):  # noqa: N818  (what happened to the call)
    """Nobody waits for the call any more; it may still run."""


class DaemonWorkers:
    """Runs calls in at most `max_workers` daemon threads, and gives up waiting for one at its time limit.

    Not a `ThreadPoolExecutor`, which makes the interpreter wait at exit for a call that is stuck, and queues without
    bound behind it. Threads are kept between calls: with one started for each a call took 0.3 ms, one in ten 4 ms,
    with kept ones 0.1 ms. A forked child starts with none. Thread-safe.
    """

    def __init__(self, max_workers: int) -> None:
        """No thread is started yet. Raises `UsageError` if `max_workers` is not positive."""
        if max_workers < 1:
            raise UsageError(f"calls need at least one thread, not {max_workers}")
        self._max_workers = max_workers
        self._start_afresh()

    @property
    def under_way(self) -> int:
        """Calls that run now, abandoned ones included."""
        return self._busy

    def run(self, operation: Callable[[], ResultT], limit_s: float) -> ResultT:
        """What `operation` returns or raises, if it does so within `limit_s` seconds; else it runs on, unheeded.

        Raises:
            Abandoned: it did not, or all workers were busy for that long.
            OSError: no thread can be started.
        """
        if os.getpid() != self._pid:
            self._start_afresh()
        ends_s = time.monotonic() + limit_s
        if limit_s <= 0 or not self._free.acquire(timeout=limit_s):
            raise Abandoned("all calls under way are stuck")
        outcome: Future[ResultT] = Future()

        def job() -> None:
            try:
                outcome.set_result(operation())
            except BaseException as error:  # noqa: BLE001  (carried over to the thread that waits for it)
                outcome.set_exception(error)

        self._reserve_worker()
        self._jobs.put(job)
        try:
            return outcome.result(timeout=max(0.0, ends_s - time.monotonic()))
        except TimeoutError:
            if not outcome.done():
                raise Abandoned(f"no answer within {limit_s:.3f} s") from None
            return outcome.result()  # a time-out of the operation itself, or it ended at the last moment

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._free = BoundedSemaphore(self._max_workers)
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = 0  # workers that wait, less jobs that are on their way to one
        self._busy = 0

    def _reserve_worker(self) -> None:
        with self._lock:
            self._busy += 1
            if self._idle:
                self._idle -= 1
                return
        try:
            Thread(target=self._work, name="chunkweave-remote", daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._busy -= 1
            self._free.release()
            raise OSError(str(error)) from error

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        return
                continue
            job()
            del job  # it holds what it worked on
            with self._lock:
                self._busy -= 1
                self._idle += 1
            self._free.release()
