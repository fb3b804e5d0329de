"""The hierarchy of levels, from fast to slow, behind the interface of one store."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Generic

from chunkweave.errors import ChunkweaveError, NotRemovedError, StoreError, UsageError
from chunkweave.prompt.parts import Prompt, PromptPart, RunView
from chunkweave.store.index import PromptLookup, RequestUse, StoreFollower, TieredLease, look_up
from chunkweave.store.level import BackgroundWriter, Level, VariantKeeper, VariantLimits, Write
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.store.records import (
    Ages,
    Removal,
    RemovedTexts,
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
"""Number of requests between two replications of the hottest nodes."""

_OWN = ("hits", "misses", "promotions", "demotions", "expired")
_SUMMED = ("bytes", "inserts", "evictions", "rejected", "lost", "mismatched", "undeletable")


class TieredStore(Generic[PayloadT]):
    """Levels from fast to slow behind the interface of one store (CacheBlend §5, Cache-Craft §3.5, RAGCache §5.1).

    A computed segment is stored in the fastest level and, once it was seen often enough, written to the slow levels in
    the background. A segment evicted from memory is copied one level down unless it is there already (RAGCache §5.1,
    swap-out-only-once). A segment used from a lower level is promoted. A segment evicted from a slow level is gone
    unless another level has it.

    A failing level counts as empty: the next level is tried, and finally the segment is computed. An exact segment is
    never replaced by an inexact copy from another level. A segment that is removed while a copy moves between levels
    does not return.

    Thread-safe. Its lock guards counters, ages, sightings and the queueing of writes, and is never held while a payload
    moves.
    """

    def __init__(
        self,
        levels: Sequence[Level[PayloadT]],
        *,
        admission: int = 1,
        ttl_s: float | None = None,
        limits: VariantLimits | None = None,
        clock: Callable[[], float] = time.time,
        writer: BackgroundWriter[PayloadT] | None = None,
        replicas: int = 0,
        cut: Callable[[PayloadT, int, int], PayloadT | None] | None = None,
    ) -> None:
        """A hierarchy of `levels`, which only this store may use from now on.

        Args:
            levels: from fast to slow: first those in memory, then those written in the background.
            admission: how often a segment must have been seen (stored or used) to be written to a slow level; a novel
                one once more.
            ttl_s: segments older than this are dropped; None keeps them.
            limits: maximum number of variants; None sets no limit.
            clock: seconds since the epoch.
            writer: writes to the slow levels; a new one if None. The store closes it.
            replicas: how many of the hottest upper nodes of the fastest memory are copied to the next one (RAGCache
                §6).
            cut: copies the tokens from one offset up to another out of a payload, or returns None if that cannot be
                read. Without it, parts are not cut out of runs.

        Raises:
            UsageError: no level in memory, two levels of one name, a slow level before a fast one, an admission below
                1, or a TTL that is not positive.
        """
        slow = [level.background for level in levels]
        if not levels or slow[0] or slow != sorted(slow) or len({level.name for level in levels}) < len(levels):
            raise UsageError("a hierarchy needs levels with different names, levels in memory first")
        if admission < 1 or (ttl_s is not None and ttl_s <= 0):
            raise UsageError(f"admission must be at least 1 (is {admission}) and the TTL positive (is {ttl_s})")
        self.levels = tuple(levels)
        self._memory = tuple(level for level in levels if not level.background)
        self._slow = tuple(level for level in levels if level.background)
        self._writer: BackgroundWriter[PayloadT] = BackgroundWriter() if writer is None else writer
        self._admission = admission
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._sightings = Sightings()
        self._ages = None if ttl_s is None else Ages(ttl_s, clock, self._stored_at_s)
        limited = limits is not None and limits != VariantLimits()
        self._keeper = VariantKeeper(self.levels, self._writer, limits) if limits is not None and limited else None
        self._removals = self._removals_done = 0
        self._moving_now = threading.local()
        self.tree: KnowledgeTree[ChunkId] = KnowledgeTree([level.name for level in levels])
        """The levels that hold each exact path. The levels keep it up to date; paused levels are listed as before."""
        for level in levels:
            level.store.show_in(self.tree, level.name)
        for index, level in enumerate(self._memory):
            level.store.on_evict = self._demoter(self._memory[index + 1 :])
            faster = [level.store for level in self._memory[:index]]
            level.store.above = partial(_held_by_any, faster)
        self._replicas = replicas if len(self._memory) > 1 else 0
        self._cut = cut
        self._requests = 0

    @property
    def budget_bytes(self) -> int:
        """Maximum bytes held in memory."""
        return sum(level.store.budget_bytes for level in self._memory)

    @property
    def used_bytes(self) -> int:
        """Bytes held in memory, without those in the write queue."""
        return sum(level.store.used_bytes for level in self._memory)

    @property
    def stats(self) -> TieredStats:
        """A snapshot of the counters of all levels."""
        with self._lock:
            counts = self._counts.copy()
        writer = self._writer.counts
        records = self.records()
        by_name = {level.name: level.store.stats for level in self.levels}
        sums = {
            name: counts[name] + sum(getattr(level_stats, name) for level_stats in by_name.values()) for name in _SUMMED
        }
        variants = Counter(record.chunk_id for record in records)
        return TieredStats(
            segments=len(records),
            chunks=len(variants),
            variants=dict(sorted(Counter(variants.values()).items())),
            variants_dropped=0 if self._keeper is None else self._keeper.dropped,
            writes_skipped=counts["writes_skipped"] + writer["skipped"],
            levels=by_name,
            **{f"writes_{name}": writer[name] for name in ("queued", "done", "rejected", "failed")},
            **sums,
            **{name: counts[name] for name in _OWN},
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
        """Number of tokens of a chunk, 0 if no segment of it is stored."""
        held = (record for level in self.levels for record in level.store.records_of(chunk)[:1])
        return next(map(len, held), 0)

    def means(self, chunk: ChunkId) -> tuple[SegmentRecord, ...]:
        """The stored means of a chunk: at most one, or two while one is replaced."""
        return union(record for level in self.levels for record in level.store.records_of(chunk) if record.contexts)

    def tier_of(self, segment: SegmentId) -> str | None:
        """Name of the level that `get` tries first, or None."""
        holders = self._holders(segment)
        return holders[0][0].name if holders else None

    @property
    def shared(self) -> bool:
        """Whether a level is shared with other processes, so that `probe` may find more segments."""
        return any(level.store.probes for level in self._slow)

    def share_by(self, shares: Shares) -> None:
        """From now on, evict segments of owners that exceed their share of a level's budget first."""
        for level in self.levels:
            level.store.shares = shares

    def follow(self) -> StoreFollower:
        """A follower that reports what is added and removed, starting with everything stored. One at a time.

        Segments on a paused level count as stored, since the end of a pause is not reported.
        """

        def holds(key: ChunkId | SegmentId) -> bool:
            chunk, _, mark = key.partition(":")
            records = [record for level in self.levels for record in level.store.records_of(ChunkId(chunk))]
            if mark:
                return any(key in record.marks for record in records)
            copies = [level.store.record(SegmentId(key)) for level in self.levels]
            exact = any(copy is not None and copy.exact for copy in copies)
            return exact or bool(records)

        follower = StoreFollower(holds)
        for level in self.levels:
            level.store.report_to(follower)
        return follower

    def probe(self, prompt: Prompt) -> None:
        """Ask the shared levels for parts of a prompt that the faster ones lack, as `lookup` does."""
        self._probe(_path_of(prompt))

    def lookup(self, prompt: Prompt) -> PromptLookup:
        """Find the segments on any level for each part of `prompt`. Pins nothing; `note_request` counts the use.

        The exact prefix may span several levels. A shared level is probed once for segments that the faster ones lack:
        the exact path and the context-free variants. Expired segments are dropped and not found.
        """
        path = _path_of(prompt)
        self._probe(path)
        self._cut_views(prompt)
        expired: set[SegmentId] = set()
        lookup = look_up(prompt, tuple(path), lambda part: self._variants(part, expired))
        self._expire(expired)
        return lookup

    def note_request(self, use: RequestUse) -> None:
        """Count one request, however often it was looked up (reading ahead, planning again, preemption).

        Each segment that it used counts one use and one sighting (RAGCache §5.1). Speculations that are not confirmed,
        and segments computed ahead of requests, are not counted.
        """
        self._count(hits=use.hits, misses=use.misses)
        for level in self.levels:
            level.store.note_request(use.path, use.used)
        if self._keeper is not None:
            self._keeper.note_reuse(use.path.saved)
        self.tree.used(use.chunks)
        self._requests += 1  # without the lock: a count can get lost
        if self._requests % REPLICATED_EVERY == 0:
            self.replicate()
        if self._slow:
            for segment in use.used:
                self._note_use(segment)

    def lease(self, wanted: PromptLookup | Iterable[SegmentId]) -> TieredLease:
        """Pin segments on every level that has them. This does not count as a use (`note_request` does).

        A lookup pins all segments that it found. Ids are given in prompt order; unknown ones are skipped.
        """
        ids = tuple(dict.fromkeys(wanted.segments() if isinstance(wanted, PromptLookup) else wanted))
        return TieredLease(ids, [level.store.lease(ids) for level in self.levels])

    def get(self, segment: SegmentId, *, exact: bool = False) -> PayloadT | None:
        """The payload from the fastest level that has it and does not fail, or None.

        With `exact` only exact copies count. Without, a copy is returned only if it is as good as the best known one.
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
        """Store a computed segment; True if it, or a better one with its id, is stored or queued for writing.

        Beyond the variant limits, the variant with the lowest f_r is dropped first; if none may be dropped, the new one
        is not stored. A mean replaces the chunk's earlier mean.

        Raises:
            UsageError: the record's id is not that of its chunk and context, or its payload has no bytes.
        """
        stored = self._insert(record, payload)
        if stored and record.contexts:
            replaced = tuple(mean.id for mean in self.means(record.chunk_id) if mean.id != record.id)
            if replaced:
                self.remove_where(lambda held: held.id in replaced, among=replaced)
        return stored

    def _insert(self, record: SegmentRecord, payload: PayloadT) -> bool:
        held = self.record(record.id)
        if held is not None and held.token_ids != record.token_ids:
            logger.warning("segment %s is already stored with other tokens; not replaced", record.id)
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
        """Copy a segment that was wholly read from a lower level to faster memory. Call it after the answer.

        False if it is already in the fastest memory, is no longer stored, or does not fit.
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
        """Queue copies of the hottest upper nodes to the second level in memory; returns how many were queued.

        Without a second level in memory it does nothing: copies on disk or remote survive anyway.
        """
        if not self._replicas:
            return 0
        source, target = self._memory[:2]
        queued = 0
        for path in self.tree.missing_replicas(self._replicas, source.name, target.name):
            segment = segment_id(path[-1], path[:-1])
            with self._moving() as unchanged:
                record = source.record(segment)
                payload = source.get(segment)
                if record is not None and payload is not None:
                    queued += self._offer(Write(target, record, payload, record.nbytes), unchanged)
        return queued

    def was_late(self, segment: SegmentId) -> None:
        """Count a layer of a segment that arrived late. A level with repeated late layers is paused."""
        for level, _ in self._holders(segment)[:1]:
            level.was_late()

    def remove(self, segment: SegmentId) -> bool:
        """Drop a segment on every level, pinned or not; False if no level had it."""
        return self.remove_where(lambda record: record.id == segment, among=[segment]) > 0

    def drop_damaged(self, segment: SegmentId) -> None:
        """Drop a segment whose payload is damaged or gone, on every level, and count it as lost where it was read."""
        for level, _ in self._holders(segment)[:1]:
            level.store.count_lost()
        self.remove(segment)

    def remove_where(self, doomed: Callable[[SegmentRecord], bool], *, among: Sequence[SegmentId] | None = None) -> int:
        """Drop every segment for which `doomed` is true (only those in `among`, if given), pinned or not.

        Includes all levels and pending writes; returns the number of copies. A copy that cannot be deleted now
        (`undeletable` in the stats) is not found again, and its deletion is retried.
        """
        return sum(removal.removed for _, removal in self._withdraw(doomed, among))

    def forget_chunks(self, chunks: Iterable[ChunkId], texts: RemovedTexts | None = None) -> int:
        """Drop all variants of `chunks`, and all segments whose KV depends on one of them (`SegmentRecord.sources`).

        With `texts` the chunks that hold one of them are such chunks too. Includes all levels, pinned or not; returns
        the number of copies.

        Raises:
            NotRemovedError: a copy is still there, or may be. All others were dropped.
        """
        gone = frozenset(chunks)
        if texts is None:
            return self._remove_all(lambda record: record.depends_on(gone))
        stored = (*self.records(), *self._writer.records())
        gone = gone.union(record.chunk_id for record in stored if texts(record))
        return self._remove_all(lambda record: record.depends_on(gone) or texts(record))

    def drop_first_passes(self, chunks: Collection[ChunkId], *, alone: bool = False) -> int:
        """Remove the first-pass segments of those of `chunks` that have a stored mean.

        First-pass segments were computed behind neutral passages; with `alone` also those computed without context.
        Returns the number of removed copies.
        """
        means = {record.chunk_id for record in self.records() if record.contexts and record.chunk_id in chunks}
        return self.remove_where(
            lambda record: record.chunk_id in means and (record.neutral or (alone and record.alone))
        )

    def clear(self) -> None:
        """Drop everything on every level, pinned or not. Counters are kept. Raises the errors of `forget_chunks`."""
        self._remove_all(lambda _: True)

    def leave_slow_levels(self) -> None:
        """Drop everything in memory, and write nothing to slow levels from now on. They keep what they have.

        For a model whose weights have changed: the slow levels are named by the old ones.
        """
        self._slow = ()
        for level in self._memory:
            level.store.withdraw(lambda _: True)

    def expire(self, now_s: float | None = None) -> int:
        """Drop segments that exceed the time to live; returns how many. O(segments)."""
        if self._ages is None:
            return 0
        ids = {record.id for record in (*self.records(), *self._writer.records())}
        with self._lock:
            expired = self._ages.expired(ids, now_s)
            self._ages.keep_only(ids)
        self._expire(set(expired))
        return len(expired)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the writes queued so far; False on timeout."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float | None = 30.0) -> bool:
        """Flush, stop the writer and close the tiers; False if the timeout dropped writes."""
        done = self._writer.close(timeout_s)
        for level in self.levels:
            level.close()
        return done

    def check(self) -> None:
        """Audit every level, and that an id names the same segment on all levels.

        Raises:
            StoreError: an invariant does not hold.
        """
        seen: dict[SegmentId, SegmentRecord] = {}
        for level in self.levels:
            level.store.check()
            for record in level.store.records():
                earlier = seen.setdefault(record.id, record)
                if (earlier.chunk_id, earlier.context) != (record.chunk_id, record.context):
                    raise StoreError(f"segment {record.id} differs between levels")

    def _remove_all(self, doomed: Callable[[SegmentRecord], bool]) -> int:
        removals = self._withdraw(doomed)
        removed = sum(removal.removed for _, removal in removals)
        left_by_level = {level: len(removal.left) for level, removal in removals if removal.left}
        unasked = [level.name for level, removal in removals if not removal.complete]
        if left_by_level or unasked:
            lasting = all(level.store.removals_last for level in left_by_level)
            tiers = [level.name for level in left_by_level]
            raise NotRemovedError(removed, sum(left_by_level.values()), unasked, tiers=tiers, lasting=lasting)
        return removed

    def _withdraw(
        self, doomed: Callable[[SegmentRecord], bool], among: Sequence[SegmentId] | None = None
    ) -> list[tuple[Level[PayloadT], Removal]]:
        # From slow to fast, and after the count: a thread that moves a copy up or down sees the changed count.
        with self._lock:
            self._removals += 1
            self._writer.cancel(doomed)
        try:
            return [(level, _withdrawn(level, doomed, among)) for level in reversed(self.levels)]
        finally:
            with self._lock:
                self._removals_done += 1

    def _holders(self, segment: SegmentId) -> list[tuple[Level[PayloadT], SegmentRecord]]:
        """Levels that have a segment: those with exact copies first, each group from fast to slow."""
        holders = [(level, record) for level in self.levels if (record := level.record(segment)) is not None]
        return sorted(holders, key=lambda pair: not pair[1].exact)

    def _probe(self, path: Mapping[SegmentId, ChunkId]) -> None:
        wanted = dict.fromkeys((*path, *(segment_id(chunk, ()) for chunk in path.values())))
        for level in self._slow:
            if level.store.probes and level.available:
                level.probe([segment for segment in wanted if self.record(segment) is None])

    def _variants(self, part: PromptPart, expired: set[SegmentId]) -> tuple[SegmentRecord, ...]:
        variants = union(*(level.variants(part) for level in self.levels))
        if self._ages is None:
            return variants
        with self._lock:
            expired.update(self._ages.expired(record.id for record in variants))
        return tuple(record for record in variants if record.id not in expired)

    def _cut_views(self, prompt: Prompt) -> None:
        """Store the parts of a prompt that are in runs, as they are there. The runs stay.

        The beginning of a run that is stored behind the same parts comes first: it is as good as the run. Of other runs
        one segment is enough, a mean if there is one.
        """
        if self._cut is None or all(part.view is None for part in prompt.parts):
            return
        for part, context in zip(prompt.parts, prompt.contexts(), strict=True):
            view = part.view
            if part.id is None or view is None or segment_id(part.id, context) in self:
                continue
            here = self.record(segment_id(view.run, context)) if not view.offset else None
            if here is None and (part.in_place or self.chunk_tokens(part.id)):
                continue
            others = union(*(level.store.records_of(view.run) for level in self.levels))
            run = here or next((record for record in others if record.contexts), next(iter(others), None))
            if run is not None and run.token_ids[view.offset : view.offset + len(part)] == part.token_ids:
                self._cut_out(part, view, run)

    def _cut_out(self, part: PromptPart, view: RunView, run: SegmentRecord) -> None:
        cut = run.cut(part, view.offset)
        with (
            nullcontext(True) if self._keeper is None else self._keeper.place_for(cut) as placed,
            self._moving() as quiet,
        ):
            if not placed or self._cut is None or (self._ages is not None and self._ages.expired([run.id])):
                return
            whole = self.get(run.id, exact=run.exact)
            payload = None if whole is None else self._cut(whole, view.offset, view.offset + len(part))
            if payload is not None and any(level.try_insert(cut, payload, quiet) for level in self._memory):
                if self._ages is not None:
                    self._ages.copied(run.id, cut.id)
                if cut.exact:
                    self._drop_inexact(cut.id)
        if whole is not None and payload is None:
            self.drop_damaged(run.id)

    def _expire(self, expired: set[SegmentId]) -> None:
        if expired:
            self.remove_where(lambda record: record.id in expired, among=tuple(expired))
            self._count(expired=len(expired))

    def _stored_at_s(self, segment: SegmentId) -> float | None:
        times = [level.stored_at_s(segment) for level in self.levels]
        return min((stored_at_s for stored_at_s in times if stored_at_s is not None), default=None)

    def _store_new(self, record: SegmentRecord, payload: PayloadT) -> bool:
        """Store a computed segment in memory, and on slow levels if it was seen often enough."""
        with self._moving(computed=True) as unchanged:
            stored = any(level.try_insert(record, payload, unchanged) for level in self._memory)
            if self._ages is not None:
                self._ages.born(record.id)
            if record.exact:
                self._drop_inexact(record.id)
            seen_enough = bool(self._slow) and self._see(record.id) >= self._admission + record.novel
            written = seen_enough and self._write_through(record, payload, unchanged)
            return written or stored

    def _note_use(self, segment: SegmentId) -> None:
        """Count a sighting; write the segment to slow levels once it was seen often enough."""
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
        """The `on_evict` callback of a level in memory; `below` are the slower levels in memory.

        Segments evicted together do not evict each other's copies there.
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
            elif self._slow and self._sightings.count(record.id) >= self._admission + record.novel:
                demoted = self._write_through(record, payload, unchanged)
            self._count(demotions=int(demoted))

        return demote_all

    def _write_through(self, record: SegmentRecord, payload: PayloadT, unchanged: Callable[[], bool]) -> bool:
        """Queue a write to every slow level that lacks the segment or has a worse copy; True if one was accepted."""
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
        with self._lock:  # a removal either sees this write in the queue, or this call sees the removal
            return unchanged() and self._writer.offer(write)

    def _drop_inexact(self, segment: SegmentId) -> None:
        """Drop inexact copies of a segment that was just stored exactly, so that none is used in its place."""
        if self._slow:
            self._writer.cancel(lambda record: record.id == segment and not record.exact)
        for level in self.levels:
            record = level.store.record(segment)
            if record is not None and not record.exact:
                level.store.remove_where(lambda held: held.id == segment and not held.exact, among=[segment])

    @contextmanager
    def _moving(self, *, computed: bool = False) -> Iterator[Callable[[], bool]]:
        """Guards a payload's move between levels; yields a function: whether no removal started or is running.

        The removed segment may be the one that moves, and must not return: a running removal may already have passed
        the target level. A segment that was just `computed` moves from no level, so removals that started earlier do
        not affect it.
        """
        begun = self._removals
        done = self._removals_done

        def unchanged() -> bool:
            return self._removals == begun

        def quiet() -> bool:
            return begun == done == self._removals_done and unchanged()

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
    """The segments of the prompt's exact path, in prompt order, with their chunks."""
    pairs = zip(prompt.parts, prompt.contexts(), strict=True)
    return {segment_id(part.id, context): part.id for part, context in pairs if part.id is not None}


def _withdrawn(
    level: Level[PayloadT], doomed: Callable[[SegmentRecord], bool], among: Sequence[SegmentId] | None
) -> Removal:
    """The removal from one level. If it fails, what the level holds is unknown; the other levels must not notice."""
    try:
        return level.store.withdraw(doomed, among=among)
    except (OSError, ChunkweaveError):
        logger.exception("segments could not be removed from the %s tier", level.name)
        return Removal(0, (), complete=False)
