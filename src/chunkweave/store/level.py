"""One level of the hierarchy, the background writer for slow levels, and the limits on variants (Cache-Craft §3.3)."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import Generic

from chunkweave.errors import UsageError
from chunkweave.prompt.parts import PromptPart
from chunkweave.store.eviction import ReuseFrequencies
from chunkweave.store.records import SegmentRecord, segment_id, union
from chunkweave.store.tier import ClosableTier, DatedTier, PayloadT
from chunkweave.store.tier_store import SegmentStore
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)


class Level(Generic[PayloadT]):
    """A segment store with a name ("host", "disk", ...) that tolerates failures of its tier.

    A tier that raises `OSError` several times in a row is paused: for a while nothing is found, read or written there.
    Then it is tried again, and the next failure pauses it again. A tier is also paused if as many layers arrive late
    within the length of a pause, because each read that hangs occupies a thread and its memory.
    """

    def __init__(
        self,
        name: str,
        store: SegmentStore[PayloadT],
        *,
        background: bool = False,
        patience: int = 3,
        pause_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A level in use, called `name` in reports; `patience` failures in a row pause it for `pause_s`.

        A `background` level has a slow tier: only the background writer writes to it. `clock` is monotonic.
        """
        self.name = name
        self.store = store
        self.background = background
        self._patience = patience
        self._pause_s = pause_s
        self._clock = clock
        self._failures_in_a_row = 0
        self._paused_until_s = float("-inf")
        self._late_s: deque[float] = deque(maxlen=patience)
        self.failures = 0
        """Number of `OSError`s that the tier has raised."""

    @property
    def available(self) -> bool:
        """Whether the level is in use now."""
        return self._clock() >= self._paused_until_s

    def record(self, segment: SegmentId) -> SegmentRecord | None:
        """The record of a stored segment; None while the level is paused."""
        return self.store.record(segment) if self.available else None

    def variants(self, part: PromptPart) -> tuple[SegmentRecord, ...]:
        """Segments for a part, most recently used first; none while the level is paused."""
        return self.store.variants(part) if self.available else ()

    def probe(self, segments: Sequence[SegmentId]) -> None:
        """Learn which of `segments` a shared tier holds. A failure is logged and counted."""
        if not segments or not self.available:
            return
        try:
            self.store.probe(segments)
        except OSError as error:
            self._failed(error)

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload; None if it is not stored, is lost, or cannot be read."""
        if not self.available:
            return None
        try:
            payload = self.store.get(segment)
        except OSError as error:
            self._failed(error)
            return None
        if payload is not None:
            self._failures_in_a_row = 0
        return payload

    def insert(self, record: SegmentRecord, payload: PayloadT, *, wanted: Callable[[], bool]) -> bool:
        """`SegmentStore.insert`, with failures counted.

        Raises:
            OSError: the tier cannot store it.
        """
        try:
            stored = self.store.insert(record, payload, wanted=wanted)
        except OSError as error:
            self._failed(error)
            raise
        self._failures_in_a_row = 0
        return stored

    def try_insert(self, record: SegmentRecord, payload: PayloadT, wanted: Callable[[], bool]) -> bool:
        """`insert`, but False instead of an error if the tier is paused or fails."""
        try:
            return self.available and self.insert(record, payload, wanted=wanted)
        except OSError:
            return False  # counted and logged

    def stored_at_s(self, segment: SegmentId) -> float | None:
        """When a segment was stored, in seconds since the epoch; None if the tier does not record it."""
        tier = self.store.tier
        return tier.stored_at_s(segment) if isinstance(tier, DatedTier) else None

    def close(self) -> None:
        """Close the tier's connections and files."""
        if isinstance(self.store.tier, ClosableTier):
            self.store.tier.close()

    def was_late(self) -> None:
        """Count a layer that arrived late."""
        now = self._clock()
        self._late_s.append(now)
        if len(self._late_s) == self._patience and now - self._late_s[0] <= self._pause_s:
            self._late_s.clear()
            self._pause()

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        logger.warning("the %s tier failed: %s", self.name, error)
        if self._failures_in_a_row >= self._patience:
            self._pause()

    def _pause(self) -> None:
        self._paused_until_s = self._clock() + self._pause_s
        logger.warning("the %s tier is paused for %.0f s", self.name, self._pause_s)


_IDLE_S = 5.0


@dataclass(slots=True, eq=False)
class Write(Generic[PayloadT]):
    """A pending write of one segment to one level. `nbytes` is the memory that its payload occupies until then."""

    level: Level[PayloadT]
    record: SegmentRecord
    payload: PayloadT
    nbytes: int
    cancelled: bool = False

    def wanted(self) -> bool:
        """Whether it may still be published."""
        return not self.cancelled


class BackgroundWriter(Generic[PayloadT]):
    """A bounded queue of writes and one thread that performs them. `offer` never blocks on a write.

    The thread starts with the first write and ends when it has been idle for a while. It is a daemon: a process that
    ends without `close` loses the queued writes, which costs time but not correctness. Thread-safe.
    """

    def __init__(self, *, max_items: int = 256, max_bytes: int = 1 << 30, threaded: bool = True) -> None:
        """An empty queue.

        Args:
            max_items: maximum number of queued writes.
            max_bytes: maximum payload bytes of the queued writes and the running one.
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
    def counts(self) -> Counter[str]:
        """Writes that were `queued`, `done`, `rejected`, `failed`, and `skipped` so far.

        A write is rejected if the level has no room for it or it was cancelled, and skipped if the queue is full or the
        level is paused.
        """
        with self._changed:
            return self._counts.copy()

    def offer(self, write: Write[PayloadT]) -> bool:
        """Queue a write; False, without blocking, if the queue is full or closed. Duplicates are not queued."""
        with self._changed:
            waiting = self._all()
            if any(_same(write, queued) for queued in waiting):
                return True
            held_bytes = sum(queued.nbytes for queued in waiting)
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
        """Records of the queued writes and the running one."""
        with self._changed:
            return [write.record for write in self._all()]

    def cancel(self, doomed: Callable[[SegmentRecord], bool]) -> int:
        """Cancel the writes of matching records; a running one is not published. Returns how many were cancelled."""
        with self._changed:
            cancelled = [write for write in self._all() if doomed(write.record)]
            for write in cancelled:
                write.cancelled = True
            kept = deque(write for write in self._queue if not write.cancelled)
            self._counts["rejected"] += len(self._queue) - len(kept)
            self._queue = kept
            self._changed.notify_all()
            return len(cancelled)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all writes offered so far are done; False on timeout."""
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
                    logger.warning("%d segment writes are pending", len(pending))
                    return False
                self._changed.wait(min(left_s, _IDLE_S))

    def close(self, timeout_s: float | None = 30.0) -> bool:
        """Flush and accept no more writes; False if the timeout dropped some."""
        with self._changed:
            self._closed = True
        try:
            return self.flush(timeout_s)
        finally:
            with self._changed:
                self._queue.clear()
                self._changed.notify_all()

    def write_one(self) -> bool:
        """Perform the oldest write in the calling thread; False if there is none."""
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
    """Perform a write; returns the name of `BackgroundWriter.counts` that it counts under."""
    level = write.level
    if not level.available:
        return "skipped"
    try:
        return "done" if level.insert(write.record, write.payload, wanted=write.wanted) else "rejected"
    except OSError:
        return "failed"  # the level has logged it
    except Exception:  # this thread has no caller, and a payload may fail in any way
        logger.warning("segment %s could not be written to %s", write.record.id, level.name, exc_info=True)
        return "failed"


def _same(write: Write[PayloadT], second: Write[PayloadT]) -> bool:
    return (
        write.level is second.level
        and write.record.id == second.record.id
        and not second.cancelled
        and (second.record.exact or not write.record.exact)
    )


@dataclass(frozen=True, slots=True)
class VariantLimits:
    """Maximum variants of one chunk (M of the paper) and segments in all (its N x M); None: as many as fit.

    Nodes of the path index are not variants: they serve exact prefixes and count only towards `in_all`. An exact
    segment whose ancestors are gone has left the path index and is a variant. A segment counts once, however many
    levels hold it. The instruction counts as a chunk of its own.

    Raises:
        UsageError: a limit below 1.
    """

    per_chunk: int | None = None
    in_all: int | None = None

    def __post_init__(self) -> None:
        for limit in (self.per_chunk, self.in_all):
            if limit is not None and limit < 1:
                raise UsageError(f"at least one variant must be allowed, not {limit}; None sets no limit")


class VariantKeeper(Generic[PayloadT]):
    """Keeps the segments on some levels, and pending writes to them, within limits.

    A dropped segment is dropped on all levels. Segments that are leased, pinned or being moved stay. The limit per
    chunk drops no node of the path index. The limit `in_all` drops inner nodes last, and does not prefer exact segments
    or those computed alone. Segments of other processes in a shared tier, and those that left the path index, are not
    dropped at once but count when the next variant is stored. Thread-safe.
    """

    def __init__(
        self, levels: Sequence[Level[PayloadT]], writer: BackgroundWriter[PayloadT], limits: VariantLimits
    ) -> None:
        """Enforce `limits` on `levels` and on the pending writes of `writer`."""
        self._levels = levels
        self._writer = writer
        self._limits = limits
        self._placing = Lock()
        self._lock = Lock()
        self._frequencies = ReuseFrequencies()
        self.dropped = 0
        """Variants dropped because there were too many."""

    def note_reuse(self, saved: Mapping[SegmentId, float]) -> None:
        """Count one reuse of each of these segments: adds its value in `saved` to its f_r."""
        with self._lock:
            for segment, more in saved.items():
                self._frequencies.add(segment, more)

    @contextmanager
    def place_for(self, record: SegmentRecord) -> Iterator[bool]:
        """Drop variants until a new segment fits the limits; yields False if not enough of them may be dropped.

        One caller at a time, so that two segments do not take the same place.
        """
        with self._lock:
            self._frequencies.start(record.id)
        with self._placing:
            yield self._make_place(record)

    def _make_place(self, new: SegmentRecord) -> bool:
        in_use = [level.store for level in self._levels if level.available]
        if self._limits.per_chunk is not None and not self._on_path(new):
            waiting = [record for record in self._writer.records() if record.chunk_id == new.chunk_id]
            siblings = union(*(store.records_of(new.chunk_id) for store in in_use), waiting)
            variants = [record for record in siblings if not self._on_path(record)]
            if not self._drop_beyond(self._limits.per_chunk - 1, new, variants):
                return False
        if self._limits.in_all is not None:
            stored = union(*(store.records() for store in in_use), self._writer.records())
            return self._drop_beyond(self._limits.in_all - 1, new, stored)
        return True

    def _drop_beyond(self, limit: int, new: SegmentRecord, held: Sequence[SegmentRecord]) -> bool:
        """Drop the segments of lowest f_r until `limit` are left. `held` is sorted by use, most recent first."""
        evictable = [record for record in reversed(held) if record.id != new.id]
        with self._lock:
            ranked = self._frequencies.least_first(evictable)
        ranked.sort(key=lambda record: self._has_children(record.id))
        excess = len(evictable) - limit
        for record in ranked:
            if excess <= 0:
                break
            excess -= self._drop(record.id)
        return excess <= 0

    def _on_path(self, record: SegmentRecord) -> bool:
        """Whether the segment is a node of the path index on any level, or would become one."""
        if not record.exact or not record.context or any(level.store.on_path(record.id) for level in self._levels):
            return record.exact
        parent = segment_id(record.context[-1], record.context[:-1])
        return any(level.store.on_path(parent) for level in self._levels)

    def _has_children(self, segment: SegmentId) -> bool:
        return any(level.store.has_children(segment) for level in self._levels)

    def _drop(self, segment: SegmentId) -> bool:
        """Remove a segment from every level and from the queue, unless it is claimed; True if it is gone."""
        if any(level.store.is_claimed(segment) for level in self._levels):
            return False
        self._writer.cancel(lambda record: record.id == segment)
        in_use = [level.store for level in reversed(self._levels) if level.available]
        for store in in_use:
            store.drop(segment)
        gone = all(segment not in store for store in in_use)
        self.dropped += gone
        return gone
