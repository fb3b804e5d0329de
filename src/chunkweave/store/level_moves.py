"""Copies of segments on their way between the levels of a hierarchy."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic

from chunkweave.store.level import Level
from chunkweave.store.records import SegmentRecord
from chunkweave.store.sightings import Sightings
from chunkweave.store.tier import PayloadT
from chunkweave.store.writer import BackgroundWriter, Write
from chunkweave.types import SegmentId

Counter = Callable[..., None]
"""Adds to counters of `TieredStats` by name."""


class LevelMoves(Generic[PayloadT]):
    """Brings segments into memory, down from there, and through a background writer to the slow levels.

    What memory evicts goes one level down unless it is there already (RAGCache §5.1, swap-out-only-once). A segment
    that is removed while a copy of it is in hand does not come back. Thread-safe: its lock guards the sightings and the
    moment at which a write is queued, and is never held while a payload moves.
    """

    def __init__(
        self,
        levels: Sequence[Level[PayloadT]],
        writer: BackgroundWriter[PayloadT],
        *,
        admission: int,
        count: Counter,
    ) -> None:
        """Moves between `levels`, from fast to slow, which from now on tell this what they evict.

        Args:
            levels: those in memory come before those that are written in the background.
            writer: writes to the latter.
            admission: how often a segment must have been seen to be written to them.
            count: told of demotions and of writes that were not queued.
        """
        self._levels = tuple(levels)
        self._memory = tuple(level for level in levels if not level.background)
        self._slow = tuple(level for level in levels if level.background)
        self._writer = writer
        self._admission = admission
        self._count = count
        self._lock = threading.Lock()
        self._sightings = Sightings()
        self._removals = 0
        self._started = threading.local()
        for index, level in enumerate(self._memory):
            level.store.on_evict = self._demoter(index)

    def store_new(self, record: SegmentRecord, payload: PayloadT, born: Callable[[SegmentId], None]) -> bool:
        """Keep what was just computed: in memory, and on slow levels if it has been seen often enough.

        `born` is told as soon as it is somewhere. True if it is held or about to be written.
        """
        with self._moving() as unchanged:
            stored = self._into_memory(record, payload, unchanged)
            born(record.id)
            if record.exact:
                self._drop_inexact(record.id)
            seen = self._see(record.id)
            written = seen >= self._admission and self._write_through(record, payload, unchanged)
            return written or stored

    def promote(self, record: SegmentRecord, payload: PayloadT, faster: Sequence[Level[PayloadT]]) -> bool:
        """Keep in `faster` memory what was read from a level below, and bring it to the slow levels that lack it."""
        with self._moving() as unchanged:
            promoted = self._into_memory(record, payload, unchanged, faster)
            self._count(promotions=int(promoted))
            self._write_through(record, payload, unchanged)
            return promoted

    def note_use(self, segment: SegmentId) -> None:
        """Count a sighting by use, and write what has thereby been seen often enough."""
        if not self._slow:
            return
        seen = self._see(segment)
        if seen < self._admission or all(level.record(segment) is not None for level in self._slow):
            return
        with self._moving() as unchanged:
            for level in self._memory:
                record = level.record(segment)
                payload = None if record is None else level.get(segment)
                if record is not None and payload is not None:
                    self._write_through(record, payload, unchanged)
                    return

    def remove_where(self, doomed: Callable[[SegmentRecord], bool], among: Sequence[SegmentId] | None = None) -> int:
        """Drop every segment that `doomed` names on every level, and on its way there; returns how many copies."""
        # From slow to fast, after the count: whoever moves a copy up or down meanwhile finds it changed.
        with self._lock:
            self._removals += 1
            self._writer.cancel(doomed)
        return sum(level.store.remove_where(doomed, among=among) for level in reversed(self._levels))

    def _into_memory(
        self,
        record: SegmentRecord,
        payload: PayloadT,
        unchanged: Callable[[], bool],
        memory: Sequence[Level[PayloadT]] | None = None,
    ) -> bool:
        """Put it into the fastest memory (of `memory`, if given) that takes it."""
        levels = self._memory if memory is None else memory
        return any(level.available and _insert_quietly(level, record, payload, unchanged) for level in levels)

    def _demoter(self, index: int) -> Callable[[SegmentRecord, PayloadT], None]:
        below = self._memory[index + 1 :]

        def demote(record: SegmentRecord, payload: PayloadT) -> None:
            unchanged: Callable[[], bool] = getattr(self._started, "unchanged", lambda: True)
            demoted = False
            if below:
                demoted = below[0].record(record.id) is None and _insert_quietly(below[0], record, payload, unchanged)
            elif self._sightings.count(record.id) >= self._admission:
                demoted = self._write_through(record, payload, unchanged)
            self._count(demotions=int(demoted))

        return demote

    def _see(self, segment: SegmentId) -> int:
        with self._lock:
            return self._sightings.see(segment)

    def _write_through(self, record: SegmentRecord, payload: PayloadT, unchanged: Callable[[], bool]) -> bool:
        """Queue a write to every slow level that lacks it or has a worse copy; True if one was taken."""
        nbytes = self._memory[-1].store.tier.size_of(record, payload)
        taken = False
        for level in self._slow:
            held = level.store.record(record.id)
            if held is not None and (held.exact or not record.exact):
                continue
            if not level.available:
                self._count(writes_skipped=1)
                continue
            with self._lock:  # so that a removal either sees this write in the queue or is seen here
                taken = (unchanged() and self._writer.offer(Write(level, record, payload, nbytes))) or taken
        return taken

    def _drop_inexact(self, segment: SegmentId) -> None:
        """An exact segment has come in: slow levels must not keep an inexact copy that could stand in for it."""
        self._writer.cancel(lambda record: record.id == segment and not record.exact)
        for level in self._levels:
            record = level.store.record(segment)
            if record is not None and not record.exact:
                level.store.remove_where(lambda held: held.id == segment and not held.exact, among=[segment])

    @contextmanager
    def _moving(self) -> Iterator[Callable[[], bool]]:
        """While a payload in hand is moved between levels: tells whether nothing was removed since it began.

        What was removed meanwhile may be the very segment in hand, which then must not come back.
        """
        before = self._removals

        def unchanged() -> bool:
            return self._removals == before

        self._started.unchanged = unchanged
        try:
            yield unchanged
        finally:
            del self._started.unchanged


def _insert_quietly(
    level: Level[PayloadT], record: SegmentRecord, payload: PayloadT, wanted: Callable[[], bool]
) -> bool:
    try:
        return level.insert(record, payload, wanted=wanted)
    except OSError:
        return False  # counted and logged by the level
