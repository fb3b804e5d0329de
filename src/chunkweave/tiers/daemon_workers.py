"""A few threads for calls that may never return."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Lock, Thread
from typing import Generic, TypeVar, cast

from chunkweave.errors import UsageError

ResultT = TypeVar("ResultT")

_IDLE_S = 10.0
"""A worker with nothing to do for so long ends."""


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[ResultT]):
    result: ResultT | None = None
    error: BaseException | None = None


class Abandoned(TimeoutError):  # noqa: N818  (what happened to the call)
    """Nobody waits for the call any more; it may still run."""


class DaemonWorkers:
    """Runs calls in at most `max_workers` daemon threads, and gives up waiting for one at its time limit.

    Not a `ThreadPoolExecutor`, which makes the interpreter wait at exit for a call that is stuck, and queues without
    bound behind it. Threads are kept between calls: with one started for each a call took 0.3 ms, one in ten 4 ms,
    with kept ones 0.1 ms. A forked child starts with none. Thread-safe.
    """

    def __init__(self, max_workers: int) -> None:
        """No thread is started yet.

        Raises:
            UsageError: `max_workers` is not positive.
        """
        if max_workers < 1:
            raise UsageError(f"calls need at least one thread, not {max_workers}")
        self._max_workers = max_workers
        self._start_afresh()

    @property
    def under_way(self) -> int:
        """Calls that run now, those that nobody waits for any more included."""
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
        outcomes: SimpleQueue[_Outcome[ResultT]] = SimpleQueue()

        def job() -> None:
            try:
                outcome: _Outcome[ResultT] = _Outcome(result=operation())
            except BaseException as error:  # noqa: BLE001  (carried over to the thread that waits for it)
                outcome = _Outcome(error=error)
            outcomes.put(outcome)

        self._reserve_worker()
        self._jobs.put(job)
        try:
            outcome = outcomes.get(timeout=max(0.0, ends_s - time.monotonic()))
        except Empty:
            raise Abandoned(f"no answer within {limit_s:.3f} s") from None
        if outcome.error is not None:
            raise outcome.error
        return cast("ResultT", outcome.result)  # which may be None

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
