"""The hierarchy: levels from fast to slow that look like one store."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Generic

from chunkweave.errors import NotRemovedError, StoreError, UsageError
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.store.index import PromptLookup, RequestUse, StoreFollower, TieredLease, look_up
from chunkweave.store.level import BackgroundWriter, Level, VariantKeeper, VariantLimits, Write
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.store.records import (
    ANYTHING,
    Ages,
    Removal,
    SegmentRecord,
    Sightings,
    TieredStats,
    segment_id,
    union,
)
from chunkweave.store.tier import PayloadT
from chunkweave.store.tier_store import OnEvict, SegmentStore, Shares
from chunkweave.types import ChunkId, SegmentId

logger = logging.getLogger(__name__)

REPLICATED_EVERY = 100
"""Requests after which it is looked which nodes are the hottest."""

_OWN = ("hits", "misses", "promotions", "demotions", "expired")
_SUMMED = ("bytes", "inserts", "evictions", "rejected", "lost", "mismatched", "undeletable")


class TieredStore(Generic[PayloadT]):
    """Levels from fast to slow behind the interface of one store (CacheBlend §5, Cache-Craft §3.5, RAGCache §5.1).

    What is computed goes into the fastest level, and through a background writer into the slow ones once it was seen
    often enough. What memory evicts goes one level down unless it is there already (RAGCache §5.1,
    swap-out-only-once); what is used from below is promoted. What a slow level evicts is gone unless another has it.

    A level that fails counts as empty: the next one is tried, at last the segment is computed. An exact segment is
    never replaced by an inexact copy from another level. A segment that is removed while a copy of it moves between
    levels does not come back.

    Thread-safe. Its own lock guards counters, ages, sightings and the moment at which a write is queued, and is never
    held while a payload moves.
    """

    def __init__(
        self,
        levels: Sequence[Level[PayloadT]],
        *,
        admission: int = 1,
        ttl_s: float | None = None,
        ageless: frozenset[SegmentId] = frozenset(),
        limits: VariantLimits | None = None,
        clock: Callable[[], float] = time.time,
        writer: BackgroundWriter[PayloadT] | None = None,
        replicas: int = 0,
    ) -> None:
        """A hierarchy of `levels`, which from now on are this store's alone.

        Args:
            levels: from fast to slow; those in memory come before those that are written in the background.
            admission: how often a segment must have been seen (stored or used) to be written to a slow level.
            ttl_s: segments older than that are dropped; None keeps them.
            ageless: segments that a time to live does not concern.
            limits: how many variants there may be; None sets no limit.
            clock: seconds since the epoch.
            writer: writes to the slow levels; a new one if None. The store closes it.
            replicas: so many hottest upper nodes of the fastest memory are copied to the next one (RAGCache §6).

        Raises:
            UsageError: no level in memory, two of one name, a slow one before a fast one, or an odd admission or TTL.
        """
        slow = [level.background for level in levels]
        if not levels or slow[0] or slow != sorted(slow) or len({level.name for level in levels}) < len(levels):
            raise UsageError("a hierarchy needs levels of different names, memory first, slow ones after it")
        if admission < 1 or (ttl_s is not None and ttl_s <= 0):
            raise UsageError(f"admission must be at least 1 ({admission}) and a TTL positive ({ttl_s})")
        self.levels = tuple(levels)
        self._memory = tuple(level for level in levels if not level.background)
        self._slow = tuple(level for level in levels if level.background)
        self._writer: BackgroundWriter[PayloadT] = BackgroundWriter() if writer is None else writer
        self._admission = admission
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._sightings = Sightings()
        self._ages = None if ttl_s is None else Ages(ttl_s, clock, self._stored_at_s, ageless)
        limited = limits is not None and limits != VariantLimits()
        self._keeper = VariantKeeper(self.levels, self._writer, limits) if limits is not None and limited else None
        self._removals = self._removals_done = 0
        self._moving_now = threading.local()
        self.tree: KnowledgeTree[ChunkId] = KnowledgeTree([level.name for level in levels])
        """Where each exact path lies, kept current by the levels; paused levels are shown as they were."""
        for level in levels:
            level.store.show_in(self.tree, level.name)
        for index, level in enumerate(self._memory):
            level.store.on_evict = self._demoter(self._memory[index + 1 :])
            faster = [other.store for other in self._memory[:index]]
            level.store.above = partial(_held_by_any, faster)
        self._replicas = replicas if len(self._memory) > 1 else 0
        self._requests = 0

    @property
    def budget_bytes(self) -> int:
        """Most bytes held in memory."""
        return sum(level.store.budget_bytes for level in self._memory)

    @property
    def room_bytes(self) -> int:
        """Most bytes that are found, as a slow level may encode them: the largest of memory and the slow levels.

        What is computed goes to all of them, so that the largest has what the others have.
        """
        return max(self.budget_bytes, *(level.store.budget_bytes for level in self._slow), 0)

    @property
    def used_bytes(self) -> int:
        """Bytes held in memory now, without those in the write queue."""
        return sum(level.store.used_bytes for level in self._memory)

    @property
    def stats(self) -> TieredStats:
        """A snapshot of the counters of all levels."""
        with self._lock:
            own = self._counts.copy()
        writer, records = self._writer.counts, self.records()
        by_name = {level.name: level.store.stats for level in self.levels}
        sums = {name: own[name] + sum(getattr(one, name) for one in by_name.values()) for name in _SUMMED}
        variants = Counter(record.chunk_id for record in records)
        return TieredStats(
            segments=len(records),
            chunks=len(variants),
            variants=dict(sorted(Counter(variants.values()).items())),
            variants_dropped=0 if self._keeper is None else self._keeper.dropped,
            writes_skipped=own["writes_skipped"] + writer["skipped"],
            levels=by_name,
            **{f"writes_{name}": writer[name] for name in ("queued", "done", "rejected", "failed")},
            **sums,
            **{name: own[name] for name in _OWN},
        )

    def __len__(self) -> int:
        return len(self.records())

    def __contains__(self, segment: SegmentId) -> bool:
        return self.record(segment) is not None

    def record(self, segment: SegmentId) -> SegmentRecord | None:
        """The best record of a segment on any level: exact before inexact, then the fastest."""
        holders = self._holders(segment)
        return holders[0][1] if holders else None

    def records(self) -> tuple[SegmentRecord, ...]:
        """A snapshot of all records, each segment once."""
        return union(*(level.store.records() for level in self.levels))

    def chunk_tokens(self, chunk: ChunkId) -> int:
        """Tokens of a chunk of which a segment is stored in any context; 0 if none is."""
        held = (record for level in self.levels for record in level.store.records_of(chunk)[:1])
        return next(map(len, held), 0)

    def means(self, chunk: ChunkId) -> tuple[SegmentRecord, ...]:
        """The means of a chunk that are known to be stored: one, or for a moment two."""
        return union(record for level in self.levels for record in level.store.records_of(chunk) if record.contexts)

    def tier_of(self, segment: SegmentId) -> str | None:
        """Name of the level that `get` would try first, or None."""
        holders = self._holders(segment)
        return holders[0][0].name if holders else None

    @property
    def shared(self) -> bool:
        """Whether a level may hold what other processes have put there, so that `probe` may learn of more."""
        return any(level.store.probes for level in self._slow)

    def share_by(self, shares: Shares) -> None:
        """From now on who has more than its share of a level's budget is evicted first, if there is no room."""
        for level in self.levels:
            level.store.shares = shares

    def follow(self) -> StoreFollower:
        """Reports from now on what comes and goes, beginning with all that is stored. One follower at a time.

        What a paused level holds counts as stored: nobody would say that it is back.
        """

        def holds(one: ChunkId | SegmentId) -> bool:
            chunk, _, mark = one.partition(":")
            records = [record for level in self.levels for record in level.store.records_of(ChunkId(chunk))]
            if mark:
                return any(one in record.marks for record in records)
            copies = [level.store.record(SegmentId(one)) for level in self.levels]
            exact = any(copy is not None and copy.exact for copy in copies)
            return exact or bool(records)

        follower = StoreFollower(holds)
        for level in self.levels:
            level.store.report_to(follower)
        return follower

    def probe(self, prompt: Prompt) -> None:
        """Ask the shared levels for what the faster ones lack of a prompt, as `lookup` does."""
        self._probe(_path_of(prompt))

    def lookup(self, prompt: Prompt) -> PromptLookup:
        """What is stored anywhere for each part of `prompt`; pins nothing and counts for nothing (`note_request`).

        The exact prefix may run over several levels. A shared level is probed once for what the faster ones lack: the
        exact path and the context-free variants. What has expired is dropped and not found.
        """
        path = _path_of(prompt)
        self._probe(path)
        expired: set[SegmentId] = set()
        found = look_up(prompt, tuple(path), lambda part: self._variants(part, expired))
        self._expire(expired)
        return found

    def note_request(self, use: RequestUse) -> None:
        """Count a request, once, however often it is looked up: read ahead for, planned again, preempted.

        It is one use and one sighting of each segment that it used (RAGCache §5.1). Speculations that nobody confirms,
        and what is computed ahead of any request, do not count.
        """
        self._count(hits=use.hits, misses=use.misses)
        for level in self.levels:
            level.store.note_request(use.path, use.used)
        if self._keeper is not None:
            self._keeper.note_reuse(use.path.saved)
        self.tree.used(use.chunks)
        self._requests += 1  # without the lock: a count may be lost
        if self._requests % REPLICATED_EVERY == 0:
            self.replicate()
        if self._slow:
            for segment in use.used:
                self._note_use(segment)

    def lease(self, wanted: PromptLookup | Iterable[SegmentId]) -> TieredLease:
        """Pin segments on every level that has them; that is no use of them (`note_request`).

        A lookup stands for every segment that it names. Ids are given in prompt order; unknown ones are skipped.
        """
        ids = tuple(dict.fromkeys(wanted.segments() if isinstance(wanted, PromptLookup) else wanted))
        return TieredLease(ids, [level.store.lease(ids) for level in self.levels])

    def get(self, segment: SegmentId, *, exact: bool = False) -> PayloadT | None:
        """The payload from the fastest level that has it and does not fail; None if there is none.

        With `exact` only an exact copy will do. Without, the copies are as good as the best known one.
        """
        holders = self._holders(segment)
        exact = exact or (bool(holders) and holders[0][1].exact)
        for level, record in holders:
            if (record.exact or not exact) and record.token_ids == holders[0][1].token_ids:
                payload = level.get(segment)
                if payload is not None:
                    return payload
        return None

    def insert(self, record: SegmentRecord, payload: PayloadT) -> bool:
        """Store what was just computed; True if it, or a better one of its id, is held or about to be written.

        For one variant more than the limits allow, that with the least f_r goes first; if none may go, the new one
        is not stored. A mean takes the place of the chunk's earlier one.

        Raises:
            UsageError: the record's id is not that of its chunk and context, or its payload has no bytes.
        """
        stored = self._insert(record, payload)
        if stored and record.contexts:
            others = tuple(mean.id for mean in self.means(record.chunk_id) if mean.id != record.id)
            if others:
                self.remove_where(lambda held: held.id in others, among=others)
        return stored

    def _insert(self, record: SegmentRecord, payload: PayloadT) -> bool:
        held = self.record(record.id)
        if held is not None and held.token_ids != record.token_ids:
            logger.warning("segment %s is stored with other tokens; not replaced", record.id)
            self._count(rejected=1, mismatched=1)
            return False
        if held is not None and held.exact and not record.exact:
            return True
        if held is not None or self._keeper is None:
            return self._store_new(record, payload)
        with self._keeper.place_for(record) as placed:
            if placed:
                return self._store_new(record, payload)
        self._count(rejected=1)
        return False

    def promote(self, segment: SegmentId, payload: PayloadT) -> bool:
        """Keep in faster memory what was read, whole, from a level below. Never needed for an answer: call it after.

        False if it was in the fastest memory already, is stored nowhere any more, or does not fit.
        """
        holders = self._holders(segment)
        faster = self._memory[: self.levels.index(holders[0][0])] if holders else ()
        if not faster:
            return False
        record = holders[0][1]
        with self._moving() as unchanged:
            promoted = any(level.try_insert(record, payload, unchanged) for level in faster)
            self._count(promotions=int(promoted))
            self._write_through(record, payload, unchanged)
            return promoted

    def replicate(self) -> int:
        """Have the hottest upper nodes copied to the second memory now; returns how many copies were queued.

        Without a second level in memory there is nothing to do: what is on disk or remote survives anyway.
        """
        if not self._replicas:
            return 0
        source, target = self._memory[:2]
        queued = 0
        for path in self.tree.missing_replicas(self._replicas, source.name, target.name):
            segment = segment_id(path[-1], path[:-1])
            with self._moving() as unchanged:
                record, payload = source.record(segment), source.get(segment)
                if record is not None and payload is not None:
                    queued += self._offer(Write(target, record, payload, record.nbytes), unchanged)
        return queued

    def hold(self, segments: Iterable[SegmentId]) -> None:
        """Do not count these as variants of their chunks: a conversation goes on from them. They are evicted as all."""
        if self._keeper is not None:
            self._keeper.hold(segments)

    def let_go(self, segments: Iterable[SegmentId]) -> None:
        """Drop on every level what only a conversation needed that has ended (`hold`)."""
        gone = tuple(segments)
        if self._keeper is not None:
            self._keeper.let_go(gone)
        self.remove_where(lambda record: record.id in gone, among=gone)

    def was_late(self, segment: SegmentId) -> None:
        """Count that a layer of it did not come in time: a level where that happens again and again is paused."""
        for level, _ in self._holders(segment)[:1]:
            level.was_late()

    def remove(self, segment: SegmentId) -> bool:
        """Drop a segment on every level, pinned or not; False if it was on none."""
        return self.remove_where(lambda record: record.id == segment, among=[segment]) > 0

    def remove_where(self, doomed: Callable[[SegmentRecord], bool], *, among: Sequence[SegmentId] | None = None) -> int:
        """Drop every segment that `doomed` names (of those in `among`, if given), pinned or not.

        On every level, and on its way there; returns how many copies there were. A copy that cannot be dropped now
        (`undeletable` in the stats) is not found again, and is dropped once it can be.
        """
        return sum(removal.removed for _, removal in self._withdraw(doomed, among))

    def forget_chunks(self, chunks: Iterable[ChunkId]) -> int:
        """Drop all variants of chunks, and of others what has read one of them (`SegmentRecord.sources`).

        On every level, pinned or not; returns how many copies there were.

        Raises:
            NotRemovedError: a copy is still there, or may be. What could be dropped is.
        """
        gone = frozenset(chunks) | {ANYTHING}
        return self._remove_all(lambda record: record.chunk_id in gone or not gone.isdisjoint(record.sources))

    def drop_first_passes(self, chunks: Collection[ChunkId], *, alone: bool = False) -> int:
        """Remove what contexts were woven from, of those of the chunks of which a mean is stored.

        That is what was computed behind neutral passages, or with `alone` also behind nothing. Returns how many copies
        of segments there were.
        """
        means = {record.chunk_id for record in self.records() if record.contexts and record.chunk_id in chunks}
        return self.remove_where(
            lambda record: record.chunk_id in means and (record.neutral or (alone and record.alone))
        )

    def clear(self) -> None:
        """Drop everything on every level, pinned or not. Counters go on. Raises what `forget_chunks` does."""
        self._remove_all(lambda _: True)

    def expire(self, now_s: float | None = None) -> int:
        """Drop what has outlived its time to live; returns how many segments. Slow: it looks at all of them."""
        if self._ages is None:
            return 0
        ids = {record.id for record in (*self.records(), *self._writer.records())}
        with self._lock:
            expired = self._ages.expired(ids, now_s)
            self._ages.keep_only(ids)
        self._expire(set(expired))
        return len(expired)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the writes queued so far; False if time ran out."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float | None = 30.0) -> bool:
        """Flush, stop writing, and close the tiers; False if writes were dropped for want of time."""
        done = self._writer.close(timeout_s)
        for level in self.levels:
            level.close()
        return done

    def check(self) -> None:
        """Audit every level, and that they mean the same by an id.

        Raises:
            StoreError: an invariant does not hold.
        """
        seen: dict[SegmentId, SegmentRecord] = {}
        for level in self.levels:
            level.store.check()
            for record in level.store.records():
                other = seen.setdefault(record.id, record)
                if (other.chunk_id, other.context) != (record.chunk_id, record.context):
                    raise StoreError(f"segment {record.id} is not the same on every level")

    def _remove_all(self, doomed: Callable[[SegmentRecord], bool]) -> int:
        removals = self._withdraw(doomed)
        removed = sum(removal.removed for _, removal in removals)
        left = [level for level, removal in removals for _ in removal.left]
        unasked = [level.name for level, removal in removals if not removal.complete]
        if left or unasked:
            lasting = all(level.store.removals_last for level in left)
            raise NotRemovedError(removed, len(left), unasked, lasting=lasting)
        return removed

    def _withdraw(
        self, doomed: Callable[[SegmentRecord], bool], among: Sequence[SegmentId] | None = None
    ) -> list[tuple[Level[PayloadT], Removal]]:
        # From slow to fast, and after the count: a thread that moves a copy up or down meanwhile finds it changed.
        with self._lock:
            self._removals += 1
            self._writer.cancel(doomed)
        try:
            return [(level, level.store.withdraw(doomed, among=among)) for level in reversed(self.levels)]
        finally:
            with self._lock:
                self._removals_done += 1

    def _holders(self, segment: SegmentId) -> list[tuple[Level[PayloadT], SegmentRecord]]:
        """Levels that have it, the exact copies first, then from fast to slow."""
        found = [(level, record) for level in self.levels if (record := level.record(segment)) is not None]
        return sorted(found, key=lambda pair: not pair[1].exact)

    def _probe(self, path: Mapping[SegmentId, ChunkId]) -> None:
        wanted = dict.fromkeys((*path, *(segment_id(chunk, ()) for chunk in path.values())))
        for level in self._slow:
            if level.store.probes and level.available:
                level.probe([segment for segment in wanted if self.record(segment) is None])

    def _variants(self, part: PromptPart, expired: set[SegmentId]) -> tuple[SegmentRecord, ...]:
        found = union(*(level.variants(part) for level in self.levels))
        if self._ages is None:
            return found
        with self._lock:
            expired.update(self._ages.expired(record.id for record in found))
        return tuple(record for record in found if record.id not in expired)

    def _expire(self, expired: set[SegmentId]) -> None:
        if expired:
            self.remove_where(lambda record: record.id in expired, among=tuple(expired))
            self._count(expired=len(expired))

    def _stored_at_s(self, segment: SegmentId) -> float | None:
        times = [level.stored_at_s(segment) for level in self.levels]
        return min((stored_at_s for stored_at_s in times if stored_at_s is not None), default=None)

    def _store_new(self, record: SegmentRecord, payload: PayloadT) -> bool:
        """Keep what was just computed: in memory, and on slow levels if it has been seen often enough."""
        with self._moving(computed=True) as unchanged:
            stored = any(level.try_insert(record, payload, unchanged) for level in self._memory)
            if self._ages is not None:
                self._ages.born(record.id)
            if record.exact:
                self._drop_inexact(record.id)
            seen_enough = bool(self._slow) and self._see(record.id) >= self._admission
            written = seen_enough and self._write_through(record, payload, unchanged)
            return written or stored

    def _note_use(self, segment: SegmentId) -> None:
        """Count a sighting by use, and write what has thereby been seen often enough."""
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

    def _see(self, segment: SegmentId) -> int:
        with self._lock:
            return self._sightings.see(segment)

    def _demoter(self, below: Sequence[Level[PayloadT]]) -> OnEvict[PayloadT]:
        """What a level in memory calls with what it evicts together; `below` is the memory under it.

        None of these pushes out the copy of another one there.
        """

        def demote_all(evicted: Sequence[tuple[SegmentRecord, PayloadT]]) -> None:
            copies = below[0].store.lease(record.id for record, _ in evicted) if below else nullcontext()
            with copies:
                for record, payload in evicted:
                    demote(record, payload)

        def demote(record: SegmentRecord, payload: PayloadT) -> None:
            unchanged: Callable[[], bool] = getattr(self._moving_now, "unchanged", lambda: True)
            demoted = False
            if below:
                demoted = below[0].record(record.id) is None and below[0].try_insert(record, payload, unchanged)
            elif self._slow and self._sightings.count(record.id) >= self._admission:
                demoted = self._write_through(record, payload, unchanged)
            self._count(demotions=int(demoted))

        return demote_all

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
            taken = self._offer(Write(level, record, payload, nbytes), unchanged) or taken
        return taken

    def _offer(self, write: Write[PayloadT], unchanged: Callable[[], bool]) -> bool:
        with self._lock:  # so that a removal either sees this write in the queue or is seen here
            return unchanged() and self._writer.offer(write)

    def _drop_inexact(self, segment: SegmentId) -> None:
        """An exact segment has come in: slow levels must not keep an inexact copy that could stand in for it."""
        if self._slow:
            self._writer.cancel(lambda record: record.id == segment and not record.exact)
        for level in self.levels:
            record = level.store.record(segment)
            if record is not None and not record.exact:
                level.store.remove_where(lambda held: held.id == segment and not held.exact, among=[segment])

    @contextmanager
    def _moving(self, *, computed: bool = False) -> Iterator[Callable[[], bool]]:
        """While a payload moves between levels: says whether nothing was removed since it began, or is being removed.

        What is removed may be the very segment that moves, which then must not come back: a removal that has begun may
        be past the level that it moves to. What is just `computed` moves from none, and no removal concerns it that had
        begun before.
        """
        before, done = self._removals, self._removals_done

        def unchanged() -> bool:
            return self._removals == before

        def quiet() -> bool:
            return before == done == self._removals_done and unchanged()

        self._moving_now.unchanged = quiet
        try:
            yield unchanged if computed else quiet
        finally:
            del self._moving_now.unchanged

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)


def _held_by_any(stores: Sequence[SegmentStore[PayloadT]], segment: SegmentId) -> bool:
    return any(store.holds(segment) for store in stores)


def _path_of(prompt: Prompt) -> dict[SegmentId, ChunkId]:
    """The segments that an exact prefix would run over, in prompt order, and their chunks."""
    pairs = zip(prompt.parts, prompt.contexts(), strict=True)
    return {segment_id(part.id, context): part.id for part, context in pairs if part.id is not None}
