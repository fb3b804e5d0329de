"""Writes to slow levels, in the background and in order."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from typing import TYPE_CHECKING, Generic

from chunkweave.store.records import SegmentRecord
from chunkweave.store.tier import PayloadT

if TYPE_CHECKING:
    from chunkweave.store.level import Level

logger = logging.getLogger(__name__)

_IDLE_S = 5.0


@dataclass(slots=True, eq=False)
class Write(Generic[PayloadT]):
    """One segment on its way to one level. `nbytes` is what its payload holds in memory meanwhile."""

    level: "Level[PayloadT]"
    record: SegmentRecord
    payload: PayloadT
    nbytes: int
    cancelled: bool = False

    def wanted(self) -> bool:
        """Whether it is still to be published."""
        return not self.cancelled


@dataclass(frozen=True, slots=True)
class WriterStats:
    """Writes accepted, done, refused for want of room in the queue, refused by the level, and failed."""

    queued: int = 0
    written: int = 0
    skipped: int = 0
    rejected: int = 0
    failed: int = 0


class BackgroundWriter(Generic[PayloadT]):
    """A bounded queue and one thread that empties it. Offering a write never waits for one.

    The thread starts with the first write, ends when it has been idle for a while, and is a daemon: a process that
    ends without `close` loses what is queued, which costs time and no correctness. Thread-safe.
    """

    def __init__(self, *, max_items: int = 256, max_bytes: int = 1 << 30, threaded: bool = True) -> None:
        """An empty queue.

        Args:
            max_items: most writes waiting.
            max_bytes: most bytes of payload held by them and by the one being done.
            threaded: False for a queue that only `write_one` and `flush` empty.
        """
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._threaded = threaded
        self._thread: Thread | None = None
        self._changed = Condition()
        self._queue: deque[Write[PayloadT]] = deque()
        self._current: Write[PayloadT] | None = None
        self._closed = False
        self._counts: Counter[str] = Counter()

    @property
    def stats(self) -> WriterStats:
        """A snapshot of the counters."""
        with self._changed:
            return WriterStats(**self._counts)

    def offer(self, write: Write[PayloadT]) -> bool:
        """Queue a write; False, and no wait, if the queue is full or closed. One of the same segment is enough."""
        with self._changed:
            waiting = self._all()
            if any(_same(write, other) for other in waiting):
                return True
            held_bytes = sum(other.nbytes for other in waiting)
            full = len(self._queue) >= self._max_items or held_bytes + write.nbytes > self._max_bytes
            if self._closed or full:
                self._counts["skipped"] += 1
                return False
            self._queue.append(write)
            self._counts["queued"] += 1
            self._changed.notify_all()
            self._start()
            return True

    def records(self) -> list[SegmentRecord]:
        """What is waiting or being written."""
        with self._changed:
            return [write.record for write in self._all()]

    def cancel(self, doomed: Callable[[SegmentRecord], bool]) -> int:
        """Forget the writes of such records; one that is being done is not published. Returns how many."""
        with self._changed:
            cancelled = [write for write in self._all() if doomed(write.record)]
            for write in cancelled:
                write.cancelled = True
            self._queue = deque(write for write in self._queue if not write.cancelled)
            self._changed.notify_all()
            return len(cancelled)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything offered so far is done; False if time ran out."""
        if not self._threaded:
            while self.write_one():
                pass
            return True
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._start()
                if not (pending := self._all()):
                    return True
                left_s = _IDLE_S if deadline_s is None else deadline_s - time.monotonic()
                if left_s <= 0:
                    logger.warning("%d segments are still to be written", len(pending))
                    return False
                self._changed.wait(min(left_s, _IDLE_S))

    def close(self, timeout_s: float | None = 30.0) -> bool:
        """Flush, and take no more; False if time ran out and writes were dropped."""
        with self._changed:
            self._closed = True
        try:
            return self.flush(timeout_s)
        finally:
            with self._changed:
                self._queue.clear()
                self._changed.notify_all()

    def write_one(self) -> bool:
        """Do the oldest write in the calling thread; False if there is none."""
        with self._changed:
            if not self._queue:
                return False
            write = self._current = self._queue.popleft()
        outcome = "failed"
        try:
            outcome = _perform(write)
        finally:
            with self._changed:
                self._current = None
                self._counts[outcome] += 1
                self._changed.notify_all()
        return True

    def _all(self) -> list[Write[PayloadT]]:
        return [*([self._current] if self._current is not None else []), *self._queue]

    def _start(self) -> None:
        # A forked child has the thread object but not the thread.
        if self._threaded and (self._thread is None or not self._thread.is_alive()):
            self._current = None
            if not self._queue:
                return
            self._thread = Thread(target=self._run, name="chunkweave-writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue and not self._closed:
                    self._changed.wait(_IDLE_S)
                if not self._queue:
                    self._thread = None
                    return
            self.write_one()


def _perform(write: Write[PayloadT]) -> str:
    """Do a write and say under which name of `WriterStats` it counts."""
    level = write.level
    if not level.available:
        return "skipped"
    try:
        return "written" if level.insert(write.record, write.payload, wanted=write.wanted) else "rejected"
    except OSError:
        return "failed"  # the level has logged it
    except Exception:  # this thread has no caller to tell, and a payload may be lost in its own way
        logger.warning("segment %s could not be written to %s", write.record.id, level.name, exc_info=True)
        return "failed"


def _same(write: Write[PayloadT], other: Write[PayloadT]) -> bool:
    return (
        write.level is other.level
        and write.record.id == other.record.id
        and not other.cancelled
        and (other.record.exact or not write.record.exact)
    )
