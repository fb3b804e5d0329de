"""Which variants are kept, and for how long: limits and reuse frequencies (Cache-Craft §3.3), ages and sightings."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Generic

from chunkweave.errors import UsageError
from chunkweave.store.records import SegmentRecord, segment_id, union
from chunkweave.store.tier import PayloadT
from chunkweave.store.writer import BackgroundWriter
from chunkweave.types import SegmentId

if TYPE_CHECKING:
    from chunkweave.store.level import Level

_CAPACITY = 65_536
"""Segments whose uses are remembered: far more than are stored with payloads, a few MB."""


@dataclass(frozen=True, slots=True)
class VariantLimits:
    """Most variants of one chunk (M of the paper) and most segments in all (its N x M); None: as many as fit.

    A node of the path index is no variant: it is there for exact prefixes, as many as the byte budgets hold, and
    counts only in all. Neither is what a conversation goes on from. An exact segment whose ancestors are gone has left
    the path index and is a variant (DESIGN §3.4). A segment counts once, on however many levels it is. The instruction
    counts as a chunk of its own.

    Raises:
        UsageError: a limit below 1.
    """

    per_chunk: int | None = None
    in_all: int | None = None

    def __post_init__(self) -> None:
        for limit in (self.per_chunk, self.in_all):
            if limit is not None and limit < 1:
                raise UsageError(f"at least one variant must be allowed, not {limit}; None sets no limit")


class ReuseFrequencies:
    """What reuse of each segment has saved so far: f_r of Cache-Craft §3.3. Not thread-safe.

    Each reuse adds 1 / max(CCI (1 - beta'), 1/|C|): one for a segment that had to be recomputed whole, its number of
    tokens for one that needed nothing. A segment starts at 0 when it is stored, since nothing was reused yet (the
    paper says nothing of the start); so does one that this process found, or whose uses it has forgotten, and one
    that was evicted and is computed again. As in the paper, f_r does not age.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        """Remember at most `capacity` segments; of more, those that were heard of longest ago are forgotten."""
        self._capacity = capacity
        self._known: dict[SegmentId, tuple[float, int]] = {}
        self._ticks = 0

    def start(self, segment: SegmentId) -> None:
        """It is stored now; what was known of an earlier one under its id is over."""
        self._enter(segment, 0.0)

    def note(self, record: SegmentRecord, impact: float) -> None:
        """It was reused; `impact` is its CCI (1 - beta') in that prompt."""
        self._enter(record.id, self.of(record.id) + 1.0 / max(impact, 1.0 / len(record)))

    def of(self, segment: SegmentId) -> float:
        """The f_r of a segment, 0 if it is unknown."""
        return self._known.get(segment, (0.0, 0))[0]

    def least_first(self, records: Iterable[SegmentRecord]) -> list[SegmentRecord]:
        """`records` by rising f_r; of equal ones, the one first that was stored or reused longest ago.

        Those never heard of come first, in the order given.
        """
        return sorted(records, key=lambda record: self._known.get(record.id, (0.0, 0)))

    def _enter(self, segment: SegmentId, frequency: float) -> None:
        self._ticks += 1
        self._known.pop(segment, None)
        self._known[segment] = (frequency, self._ticks)
        if len(self._known) > self._capacity:
            del self._known[next(iter(self._known))]


class VariantKeeper(Generic[PayloadT]):
    """Keeps the segments on some levels, and on their way there, within limits.

    What is dropped is dropped on all levels. Segments that are leased, pinned or being moved stay. The limit per chunk
    drops no node of the path index; the one in all drops inner nodes last, and otherwise gives neither exact segments
    nor those computed alone a privilege. What leaves for want of bytes is simply no more there. What other processes
    put into a shared tier, and what left the path index, is not dropped at once, but counts when the next variant
    comes in. Thread-safe.
    """

    def __init__(
        self, levels: Sequence["Level[PayloadT]"], writer: BackgroundWriter[PayloadT], limits: VariantLimits
    ) -> None:
        """Watch over `levels`, and over what `writer` has yet to bring there."""
        self._levels = levels
        self._writer = writer
        self._limits = limits
        self._placing = Lock()
        self._lock = Lock()
        self._frequencies = ReuseFrequencies()
        self._held: set[SegmentId] = set()
        self.dropped = 0
        """Variants dropped because there were too many."""

    def note_reuse(self, record: SegmentRecord, impact: float) -> None:
        """Count one reuse of a stored segment whose CCI (1 - beta') was `impact`."""
        with self._lock:
            self._frequencies.note(record, impact)

    def hold(self, segments: Iterable[SegmentId]) -> None:
        """Do not count these as variants of their chunks: a conversation goes on from them."""
        with self._lock:
            self._held.update(segments)

    def let_go(self, segments: Iterable[SegmentId]) -> None:
        """They are variants again as all others."""
        with self._lock:
            self._held.difference_update(segments)

    @contextmanager
    def place_for(self, record: SegmentRecord) -> Iterator[bool]:
        """Drop what a segment not stored yet would be too many for; False if what is left may not go.

        Only one at a time comes in, or two would take the same place.
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
            variants = [record for record in siblings if record.id not in self._held and not self._on_path(record)]
            if not self._drop_beyond(self._limits.per_chunk - 1, new, variants):
                return False
        if self._limits.in_all is not None:
            stored = union(*(store.records() for store in in_use), self._writer.records())
            return self._drop_beyond(self._limits.in_all - 1, new, stored)
        return True

    def _drop_beyond(self, limit: int, new: SegmentRecord, held: Sequence[SegmentRecord]) -> bool:
        """Drop those of `held`, most recently used first, that have been least reusable until `limit` are left."""
        others = [record for record in reversed(held) if record.id != new.id]
        with self._lock:
            ranked = self._frequencies.least_first(others)
        ranked.sort(key=lambda record: self._has_children(record.id))
        excess = len(others) - limit
        for record in ranked:
            if excess <= 0:
                break
            excess -= self._drop(record.id)
        return excess <= 0

    def _on_path(self, record: SegmentRecord) -> bool:
        """Whether it is a node of the path index on some level, or would be one there."""
        if not record.exact or not record.context or any(level.store.on_path(record.id) for level in self._levels):
            return record.exact
        parent = segment_id(record.context[-1], record.context[:-1])
        return any(level.store.on_path(parent) for level in self._levels)

    def _has_children(self, segment: SegmentId) -> bool:
        return any(level.store.has_children(segment) for level in self._levels)

    def _drop(self, segment: SegmentId) -> bool:
        """Take a segment off every level and out of the queue, unless it is claimed; True if it is gone."""
        if any(level.store.is_claimed(segment) for level in self._levels):
            return False
        self._writer.cancel(lambda record: record.id == segment)
        in_use = [level.store for level in reversed(self._levels) if level.available]
        for store in in_use:
            store.drop(segment)
        gone = all(segment not in store for store in in_use)
        self.dropped += gone
        return gone


class Ages:
    """When each segment was computed, in seconds since the epoch; a segment moved between levels does not get younger.

    For what was stored before this process `stored_at_s` is called once; if that returns None, it counts from now, and
    so does what was computed while the clock was ahead. Not thread-safe; interrupted at any point, a segment may at
    worst get older.
    """

    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float],
        stored_at_s: Callable[[SegmentId], float | None],
        ageless: frozenset[SegmentId] = frozenset(),
    ) -> None:
        """No ages yet; `ageless` segments never expire."""
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored_at_s = stored_at_s
        self._ageless = ageless
        self._born_s: dict[SegmentId, float] = {}

    def born(self, segment: SegmentId) -> None:
        """It was computed now."""
        self._born_s[segment] = self._clock()

    def expired(self, segments: Iterable[SegmentId], now_s: float | None = None) -> list[SegmentId]:
        """Those of `segments` that have outlived their time."""
        oldest_s = (self._clock() if now_s is None else now_s) - self._ttl_s
        return [s for s in segments if s not in self._ageless and self._since_s(s) <= oldest_s]

    def keep_only(self, segments: Iterable[SegmentId]) -> None:
        """Forget all others."""
        kept = set(segments)
        self._born_s = {segment: born_s for segment, born_s in tuple(self._born_s.items()) if segment in kept}

    def _since_s(self, segment: SegmentId) -> float:
        now_s = self._clock()
        born_s = self._born_s[segment] if segment in self._born_s else self._stored_at_s(segment)
        born_s = self._born_s[segment] = now_s if born_s is None else min(born_s, now_s)
        return born_s


class Sightings:
    """Counters by segment, the least recently seen forgotten first. Not thread-safe."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[SegmentId, int] = OrderedDict()

    def see(self, segment: SegmentId) -> int:
        """Count one more sighting; returns how many there are."""
        count = self._counts.get(segment, 0) + 1
        self._counts[segment] = count
        self._counts.move_to_end(segment)
        if len(self._counts) > self._capacity:
            self._counts.popitem(last=False)
        return count

    def count(self, segment: SegmentId) -> int:
        """Sightings so far, 0 if it is unknown or forgotten."""
        return self._counts.get(segment, 0)
