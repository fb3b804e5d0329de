"""One pool of segments under a byte budget, found by path (exact prefixes) or by chunk (variants)."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import Generic
from weakref import ref

from chunkweave.chunking.prompt import Prompt
from chunkweave.errors import StoreError, UsageError
from chunkweave.store.catalog import Catalog
from chunkweave.store.eviction import EvictionPolicy
from chunkweave.store.lease import Lease
from chunkweave.store.lookup import PartLookup, PromptLookup
from chunkweave.store.policies.lru import LRUPolicy
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.store.stats import StoreStats
from chunkweave.store.tier import PayloadT, Tier
from chunkweave.types import ChunkId, SegmentId

logger = logging.getLogger(__name__)


class SegmentStore(Generic[PayloadT]):
    """Records, indexes, budget and pins of the segments whose payloads lie in one tier (DESIGN §3.4).

    Owns the catalog, the policy, and what is in the tier; nobody else writes to the tier. Nothing of START or
    QUESTION parts comes in: a record needs the id that they lack. Thread-safe: one lock, the store's own,
    is held through every method; tier and policy are called with it held and must not call back.

    Bytes held never exceed the budget: room is made before a payload comes in. Leaves of the path index and
    what is outside it are evicted first, whatever the policy; an inner node goes only if nothing else
    is unpinned, and its descendants then stay as variants.

    A change that is interrupted (Ctrl-C, a tier that raises) leaves the store marked as unsettled, and the next
    call on it first brings indexes, policy and tier back in line with the records. So no order of
    statements has to be safe by itself, and at most the segment being moved is lost.
    """

    def __init__(self, tier: Tier[PayloadT], *, budget_bytes: int, policy: EvictionPolicy | None = None) -> None:
        """An empty store.

        Args:
            tier: where payloads go; empty, and from now on this store's alone.
            budget_bytes: most bytes of payload held at any time; 0 stores nothing.
            policy: a fresh policy; LRU if None.

        Raises:
            UsageError: the budget is negative, or the tier or the policy is in use already.
        """
        if budget_bytes < 0:
            raise UsageError(f"a store's budget cannot be negative: {budget_bytes} bytes")
        policy = LRUPolicy() if policy is None else policy
        if any(True for _ in tier.ids()) or any(True for _ in policy.ids()):
            raise UsageError("a new store needs an empty tier and a fresh eviction policy")
        self._tier = tier
        self._budget_bytes = budget_bytes
        self._lock = RLock()
        self._unsettled = False
        self._catalog = Catalog(policy)
        self._leases: list[ref[Lease]] = []
        self._counts = StoreStats()

    @property
    def budget_bytes(self) -> int:
        """Most bytes of payload held at any time."""
        return self._budget_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of payload held now."""
        with self._settled():
            return self._catalog.used_bytes

    @property
    def stats(self) -> StoreStats:
        """A snapshot of the counters."""
        with self._settled():
            return replace(
                self._counts,
                segments=len(self._catalog.records),
                chunks=self._catalog.num_chunks,
                bytes=self._catalog.used_bytes,
            )

    def __len__(self) -> int:
        with self._settled():
            return len(self._catalog.records)

    def __contains__(self, segment: SegmentId) -> bool:
        with self._settled():
            return segment in self._catalog.records

    def records(self) -> tuple[SegmentRecord, ...]:
        """A snapshot of all records, in no order."""
        with self._settled():
            return tuple(self._catalog.records.values())

    def lookup(self, prompt: Prompt) -> PromptLookup:
        """What is stored for each part of `prompt`; pins nothing and is no use in the policy's eyes.

        A stored segment counts only if its token ids are the part's, not on the strength of the hash
        (DESIGN §3.2). What is found may be evicted before it is leased: `get` then says so.
        """
        with self._settled():
            path = self._catalog.longest_exact_prefix(part.id for part in prompt.parts if part.id is not None)
            parts: list[PartLookup] = []
            hits = misses = 0
            for part, span in zip(prompt.parts, prompt.spans(), strict=True):
                if part.id is None:
                    parts.append(PartLookup(part, span))
                    continue
                variants = self._matching_variants(part.id, part.token_ids)
                exact = next((record for record in variants if path and record.id == path[0]), None)
                path = path[1:] if exact else []
                parts.append(PartLookup(part, span, exact, variants))
                hits += bool(variants)
                misses += not variants
            self._count(hits=hits, misses=misses)
            return PromptLookup(tuple(parts))

    def lease(self, wanted: PromptLookup | Iterable[SegmentId]) -> Lease:
        """Pin segments until the lease is released, and count it as one use of each.

        A lookup stands for every segment that it names: for use before the plan is known. Ids are given in
        prompt order. Segments that are stored no longer are skipped; `Lease.ids` has the pinned ones.
        The deepest part is touched first, so that ancestors on a path are more recent than their descendants.
        """
        ids = dict.fromkeys(_candidates(wanted) if isinstance(wanted, PromptLookup) else wanted)
        with self._changing():
            lease = Lease(segment for segment in ids if segment in self._catalog.records)
            self._leases = [ref(other) for other in (*self._live_leases(), lease)]
            for segment in reversed(lease.ids):
                self._catalog.touch(self._catalog.records[segment])
            return lease

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload, or None if the segment is not stored (any more).

        A payload that the tier has lost is a miss too: its record is dropped, logged and counted (DESIGN §3.10).
        """
        with self._settled():
            record = self._catalog.records.get(segment)
            if record is None:
                return None
            payload = self._tier.get(segment)
            if payload is None:
                with self._changing():
                    self._drop_lost(record)
            return payload

    def insert(self, record: SegmentRecord, payload: PayloadT) -> bool:
        """Store a segment, evicting what must go; True if it, or a better one of its id, is stored afterwards.

        Better is exact before inexact: an exact segment replaces an inexact one, never the other way round.
        What is stored already is only refreshed. False, and nothing evicted, if there is no room because it is
        larger than the budget or the rest is pinned, or if the token ids stored under its id are others.

        Raises:
            UsageError: the record's id or size is not that of its chunk and context, or of the payload.
        """
        if record.nbytes <= 0 or record.id != segment_id(record.chunk_id, record.context):
            raise UsageError(f"segment {record.id} has an id that is not its own, or no bytes ({record.nbytes})")
        with self._changing():
            old = self._still_held(record.id)
            if old is not None and old.token_ids != record.token_ids:
                self._count_mismatch(old)
                self._count(rejected=1)
                return False
            if old is not None and (old.exact or not record.exact):
                self._catalog.touch(old)
                return True
            if not self._make_room(record):
                self._count(rejected=1)
                logger.debug("no room for segment %s of %d bytes", record.id, record.nbytes)
                return False
            if old is not None:
                self._catalog.remove(old)
            self._put(record, payload)
            self._catalog.add(record)
            self._count(inserts=1)
            return True

    def remove(self, segment: SegmentId) -> bool:
        """Drop a segment, pinned or not; False if it was not stored.

        A pin guards against eviction, not against withdrawal: a request that has its payload keeps it,
        one that has not finds a miss.
        """
        with self._changing():
            record = self._catalog.records.get(segment)
            if record is not None:
                self._drop(record)
            return record is not None

    def discard_chunk(self, chunk: ChunkId) -> int:
        """Drop all variants of a chunk, pinned or not; returns how many there were."""
        with self._changing():
            variants = self._catalog.variants(chunk)
            for record in variants:
                self._drop(record)
            return len(variants)

    def clear(self) -> None:
        """Drop everything, pinned or not. Counters go on."""
        with self._changing():
            for record in tuple(self._catalog.records.values()):
                self._drop(record)

    def check(self) -> None:
        """Audit records, indexes, policy, pins and tier against each other.

        Raises:
            StoreError: an invariant does not hold (or the tier lost a payload that no `get` has missed yet).
        """
        with self._settled():
            self._catalog.check()
            if self._held_bytes() != {record.id: record.nbytes for record in self._catalog.records.values()}:
                raise StoreError("the tier does not hold exactly the recorded segments in their recorded sizes")
            if self._catalog.used_bytes > self._budget_bytes:
                raise StoreError(f"{self._catalog.used_bytes} bytes are held, the budget is {self._budget_bytes}")
            if not self._pinned() <= self._catalog.records.keys():
                raise StoreError("a pin names a segment that is not stored")

    @contextmanager
    def _settled(self) -> Iterator[None]:
        with self._lock:
            if self._unsettled:
                self._rebuild()
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Every change happens inside one of these, and none starts inside another."""
        with self._settled():
            self._unsettled = True
            yield
            self._unsettled = False

    def _rebuild(self) -> None:
        """Bring tier, catalog and pins in line with each other; may be interrupted and run again."""
        logger.warning("a change of the segment store was interrupted; rebuilding its indexes")
        self._catalog.rebuild(self._held_bytes())
        for segment in tuple(self._tier.ids()):
            if segment not in self._catalog.records:
                self._tier.delete(segment)
        for segment in self._pinned() - self._catalog.records.keys():
            self._unpin(segment)
        self._unsettled = False

    def _make_room(self, record: SegmentRecord) -> bool:
        """Evict until `record` fits in place of what is stored under its id; False, without evicting, if it cannot."""
        records = self._catalog.records
        replaced_bytes = records[record.id].nbytes if record.id in records else 0
        if self._catalog.used_bytes - replaced_bytes + record.nbytes <= self._budget_bytes:
            return True
        pinned = self._pinned()
        staying_bytes = sum(records[segment].nbytes for segment in pinned - {record.id})
        if staying_bytes + record.nbytes > self._budget_bytes:
            return False
        ancestors = set(self._catalog.longest_exact_prefix(record.context)) if record.exact else set()
        while self._catalog.used_bytes - replaced_bytes + record.nbytes > self._budget_bytes:
            self._drop(self._catalog.victim(kept=pinned | {record.id}, spared=ancestors))
            self._count(evictions=1)
        return True

    def _put(self, record: SegmentRecord, payload: PayloadT) -> None:
        self._tier.put(record.id, payload)
        if self._tier.nbytes(record.id) != record.nbytes:
            self._tier.delete(record.id)
            raise UsageError(f"the payload of segment {record.id} is not of {record.nbytes} bytes, as recorded")

    def _drop(self, record: SegmentRecord) -> None:
        self._catalog.remove(record)
        self._unpin(record.id)
        self._tier.delete(record.id)

    def _drop_lost(self, record: SegmentRecord) -> None:
        logger.warning("the tier lost segment %s; it will be recomputed", record.id)
        self._drop(record)
        self._count(lost=1)

    def _still_held(self, segment: SegmentId) -> SegmentRecord | None:
        record = self._catalog.records.get(segment)
        if record is not None and self._tier.nbytes(segment) != record.nbytes:
            self._drop_lost(record)
            return None
        return record

    def _matching_variants(self, chunk: ChunkId, token_ids: tuple[int, ...]) -> tuple[SegmentRecord, ...]:
        matching: list[SegmentRecord] = []
        equal: tuple[int, ...] | None = None  # variants share this object, so that most need no second comparison
        for record in self._catalog.variants(chunk):
            if record.token_ids is equal or record.token_ids == token_ids:
                equal = record.token_ids
                matching.append(record)
            else:
                self._count_mismatch(record)
        return tuple(matching)

    def _count_mismatch(self, record: SegmentRecord) -> None:
        logger.warning("segment %s holds other tokens than those asked for under its id; not used", record.id)
        self._count(mismatched=1)

    def _count(self, **more: int) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})

    def _held_bytes(self) -> dict[SegmentId, int]:
        return {segment: self._tier.nbytes(segment) for segment in self._tier.ids()}

    def _live_leases(self) -> list[Lease]:
        # Not a WeakSet: an object collected by another thread may change that while it is iterated over.
        return [lease for lease in (weak() for weak in self._leases) if lease is not None and lease.ids]

    def _pinned(self) -> set[SegmentId]:
        return {segment for lease in self._live_leases() for segment in lease.ids}

    def _unpin(self, segment: SegmentId) -> None:
        for lease in self._live_leases():
            lease.forget(segment)


def _candidates(lookup: PromptLookup) -> Iterator[SegmentId]:
    for part in lookup.parts:
        if part.exact is not None:
            yield part.exact.id
        for variant in part.variants:
            yield variant.id
