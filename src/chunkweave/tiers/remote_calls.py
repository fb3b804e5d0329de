"""Calls to another machine with a deadline, retries and a circuit breaker."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import BoundedSemaphore, Lock, Thread
from typing import TypeVar

from chunkweave.errors import UsageError
from chunkweave.tiers.blobs import BlobRefused

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_RETRIES = 2
_RETRY_PAUSE_S = 0.05
"""A connection that broke between two calls fails at its next use; a retry opens a new one."""


class CircuitBreaker:
    """Refuses calls to a remote after failures in a row; while it is open, allows one call per cool-down.

    Any success closes it. Thread-safe. Each change between working and not working is logged once; single failures and
    failed probes are not.
    """

    def __init__(
        self,
        name: str,
        *,
        failures_to_open: int = 3,
        cool_down_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A closed breaker. `name` is the remote's name for the log (no secrets).

        Raises:
            UsageError: a number that is not positive.
        """
        if failures_to_open < 1 or cool_down_s <= 0:
            raise UsageError("a circuit breaker's failures_to_open and cool_down_s must be positive")
        self.name = name
        self.times_opened = 0
        """Number of changes from working to not working."""
        self._failures_to_open, self._cool_down_s = failures_to_open, cool_down_s
        self._clock = clock
        self._lock = Lock()
        self._failures = 0
        self._next_probe_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, but for one per cool-down."""
        return self._failures >= self._failures_to_open

    def allows_call(self) -> bool:
        """Whether a call may be made now. Report its outcome with `succeeded` or `failed`."""
        with self._lock:
            if not self.is_open:
                return True
            now_s = self._clock()
            if now_s < self._next_probe_s:
                return False
            self._next_probe_s = now_s + self._cool_down_s
            return True

    def succeeded(self) -> None:
        """Report that a call was answered."""
        with self._lock:
            was_open = self.is_open
            self._failures = 0
        if was_open:
            logger.info("%s works again", self.name)

    def failed(self, reason: str) -> None:
        """Report that a call got no answer or an invalid one."""
        with self._lock:
            self._failures += 1
            opens = self._failures == self._failures_to_open
            if opens:
                self._next_probe_s = self._clock() + self._cool_down_s
                self.times_opened += 1
        if opens:
            message = "%s failed %d times in a row and is not called for %.1f s at a time: %s"
            logger.warning(message, self.name, self._failures_to_open, self._cool_down_s, reason)


class RemoteGarbage(OSError):  # noqa: N818  (a state of the remote, not a mistake)
    """The remote returned invalid bytes. The breaker counts it as a failure; it is not retried."""


class RemoteUnavailable(OSError):  # noqa: N818  (a state of the remote, not a mistake)
    """The call was not made: the breaker is open."""


class Abandoned(TimeoutError):  # noqa: N818  (named for the call's outcome)
    """The call was abandoned at its time limit; it may still run."""


class RemoteCalls:
    """Makes calls under a deadline that includes retries, and asks a circuit breaker before each attempt.

    A call runs in a thread of its own and is abandoned at the deadline: socket timeouts limit one read but not a slow
    trickle of bytes, and most fsspec drivers have none. At most `max_calls` run at once, abandoned ones included; a
    further call fails if none ends before its deadline. `cut` is called after an abandoned call, to end it.
    """

    def __init__(
        self,
        *,
        deadline_s: float,
        breaker: CircuitBreaker,
        cut: Callable[[], None] = lambda: None,
        max_calls: int = 8,
    ) -> None:
        """Makes no call yet. Raises `UsageError` if the deadline is not positive."""
        if deadline_s <= 0:
            raise UsageError(f"the deadline must be positive, but is {deadline_s} s")
        self.deadline_s, self.breaker = deadline_s, breaker
        self._cut = cut
        self._free = BoundedSemaphore(max_calls)

    def call(self, operation: Callable[[], ResultT], *, retry: bool = True) -> ResultT:
        """The result of `operation`, which may be run several times and may still run after the deadline.

        Raises:
            RemoteUnavailable: the breaker is open.
            PermissionError: access was denied (not retried).
            RemoteGarbage: raised by `operation` for invalid bytes (not retried).
            BlobRefused: the remote refused (neither retried nor counted by the breaker).
            OSError: no answer before the deadline; `TimeoutError` if the last attempt took too long.
        """
        ends_s = time.monotonic() + self.deadline_s
        retries = _RETRIES if retry else 0
        while True:
            try:
                return self._attempt(operation, ends_s)
            except (RemoteUnavailable, RemoteGarbage, BlobRefused, PermissionError):
                raise
            except OSError:
                if retries == 0 or time.monotonic() + _RETRY_PAUSE_S >= ends_s:
                    raise
            retries -= 1
            time.sleep(_RETRY_PAUSE_S)

    def _attempt(self, operation: Callable[[], ResultT], ends_s: float) -> ResultT:
        if not self.breaker.allows_call():
            raise RemoteUnavailable(f"{self.breaker.name} is not called for a while after failures")
        try:
            result = self._bounded(operation, ends_s - time.monotonic())
        except BlobRefused:
            self.breaker.succeeded()
            raise
        except OSError as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.breaker.failed(reason)
            if isinstance(error, Abandoned):
                self._cut()
            raise
        self.breaker.succeeded()
        return result

    def _bounded(self, operation: Callable[[], ResultT], limit_s: float) -> ResultT:
        """The result of `operation` in a daemon thread: the interpreter does not wait for a stuck one at its exit.

        Raises:
            Abandoned: it did not end within `limit_s`, or other calls took all threads for as long.
            OSError: no thread can be started.
        """
        ends_s = time.monotonic() + limit_s
        if limit_s <= 0 or not self._free.acquire(timeout=limit_s):
            raise Abandoned("all running calls are stuck")
        outcome: Future[ResultT] = Future()

        def run() -> None:
            try:
                outcome.set_result(operation())
            except BaseException as error:  # noqa: BLE001  (carried over to the thread that waits for it)
                outcome.set_exception(error)
            finally:
                self._free.release()

        try:
            Thread(target=run, name="chunkweave-remote", daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            raise OSError(str(error)) from error
        try:
            return outcome.result(timeout=max(0.0, ends_s - time.monotonic()))
        except TimeoutError:
            if not outcome.done():
                raise Abandoned(f"no answer within {limit_s:.3f} s") from None
            return outcome.result()  # a timeout raised by the operation itself, or it ended at the last moment
