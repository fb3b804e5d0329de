"""One pool of segments under a byte budget, found by path (exact prefixes) or by chunk (variants)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic

from chunkweave.chunking.prompt import Prompt, PromptPart
from chunkweave.errors import UsageError
from chunkweave.store.chunk_follower import ChunkFollower
from chunkweave.store.eviction import EvictionPolicy
from chunkweave.store.guarded_tier import GuardedTier
from chunkweave.store.lease import Lease
from chunkweave.store.ledger import Ledger
from chunkweave.store.lookup import PromptLookup, look_up
from chunkweave.store.path_request import PathRequest, path_request_of
from chunkweave.store.policies.lru import LRUPolicy
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.store.shared import DescribedPayload
from chunkweave.store.stats import StoreStats
from chunkweave.store.tier import PayloadT, Tier
from chunkweave.store.transfers import OnEvict, Transfers
from chunkweave.trees.knowledge_tree import KnowledgeTree
from chunkweave.types import ChunkId, SegmentId


class SegmentStore(Generic[PayloadT]):
    """Records, indexes, budget and pins of the segments whose payloads lie in one tier (DESIGN §3.4).

    Nothing of START or QUESTION parts comes in: a record needs the id that they lack. Thread-safe: what is known of the
    segments lies in a `Ledger` under one lock, and payloads are moved without it (`Transfers`).

    Bytes held never exceed the budget. Leaves of the path index and what is outside it are evicted first, whatever the
    policy; an inner node goes only if nothing else is unpinned, and its descendants then stay as variants.

    A change that is interrupted (Ctrl-C, a tier that raises) is put right by the next call; at most the segment being
    moved is lost.
    """

    def __init__(
        self,
        tier: Tier[PayloadT],
        *,
        budget_bytes: int,
        policy: EvictionPolicy | None = None,
        shared: bool = False,
        load: bool = True,
        kept: frozenset[SegmentId] = frozenset(),
    ) -> None:
        """A store of what `tier` holds, evicted down to the budget.

        Args:
            tier: where payloads go; in this process from now on this store's alone.
            budget_bytes: most bytes of payload held at any time; 0 stores nothing.
            policy: a fresh policy; LRU if None.
            shared: other processes fill and empty the tier too. Then the budget is for what is known here, and a
                payload that is not there (any more, or just now) is no broken invariant.
            kept: segments that are never evicted, whether they are there yet or not.
            load: list the tier now; without, a shared tier is learnt by `probe` alone.

        Raises:
            UsageError: the budget is negative, or the policy is in use already.
        """
        if budget_bytes < 0:
            raise UsageError(f"a store's budget cannot be negative: {budget_bytes} bytes")
        policy = LRUPolicy() if policy is None else policy
        if any(True for _ in policy.ids()):
            raise UsageError("a new store needs a fresh eviction policy")
        self.on_evict: OnEvict[PayloadT] | None = None
        """Called with each evicted segment, without the lock held; for tiers in memory, whose payloads live on."""
        self._tier = tier
        self._guarded = GuardedTier(tier, shared=shared)
        self._ledger: Ledger[PayloadT] = Ledger(self._guarded, policy, budget_bytes=budget_bytes, kept=kept)
        self._transfers = Transfers(self._ledger, self._guarded)
        if load:
            self._load()

    @property
    def tier(self) -> Tier[PayloadT]:
        """Where the payloads lie; only this store may change it."""
        return self._tier

    @property
    def probes(self) -> bool:
        """Whether `probe` can find anything."""
        return self._guarded.finder is not None

    @property
    def budget_bytes(self) -> int:
        """Most bytes of payload held at any time."""
        return self._ledger.budget_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of payload held now, without those on their way in."""
        with self._ledger.settled():
            return self._ledger.catalog.used_bytes

    @property
    def stats(self) -> StoreStats:
        """A snapshot of the counters."""
        return self._ledger.stats

    def __len__(self) -> int:
        with self._ledger.settled():
            return len(self._ledger.catalog.records)

    def __contains__(self, segment: SegmentId) -> bool:
        return self.record(segment) is not None

    def record(self, segment: SegmentId) -> SegmentRecord | None:
        """The record of a stored segment, or None."""
        with self._ledger.settled():
            return self._ledger.catalog.records.get(segment)

    def records(self) -> tuple[SegmentRecord, ...]:
        """A snapshot of all records, in no order."""
        with self._ledger.settled():
            return tuple(self._ledger.catalog.records.values())

    def lookup(self, prompt: Prompt) -> PromptLookup:
        """What is stored for each part of `prompt`; pins nothing and is no use in the policy's eyes.

        A stored segment counts only if its token ids are the part's, not on the strength of the hash
        (DESIGN §3.2). What is found may be evicted before it is leased: `get` then says so.
        """
        with self._ledger.settled():
            path = self._ledger.catalog.longest_exact_prefix(part.id for part in prompt.parts if part.id is not None)
            found = look_up(prompt, path, self.variants)
            self._ledger.count(hits=found.hits, misses=found.misses)
            self._ledger.catalog.note_request(path_request_of(found))
            return found

    def note_request(self, request: PathRequest) -> None:
        """Tell the eviction policy what a request asked of the hierarchy that this store is a level of."""
        with self._ledger.settled():
            self._ledger.catalog.note_request(request)

    def show_in(self, tree: KnowledgeTree[ChunkId], tier: str) -> None:
        """From now on `tree` shows, as `tier`, which exact segments are held here."""
        with self._ledger.settled():
            self._ledger.catalog.show_in(tree, tier)

    def tell(self, follower: ChunkFollower) -> None:
        """From now on `follower` hears of the chunks whose segments change here; first of those that are here."""
        with self._ledger.settled():
            self._ledger.catalog.tell(follower)

    def variants(self, part: PromptPart) -> tuple[SegmentRecord, ...]:
        """Stored segments with the part's id and token ids, most recently used first."""
        if part.id is None:
            return ()
        matching: list[SegmentRecord] = []
        equal: tuple[int, ...] | None = None  # variants share this object, so that most need no second comparison
        with self._ledger.settled():
            for record in self._ledger.catalog.variants(part.id):
                if record.token_ids is equal or record.token_ids == part.token_ids:
                    equal = record.token_ids
                    matching.append(record)
                else:
                    self._ledger.count_mismatch(record)
        return tuple(matching)

    def probe(self, segments: Sequence[SegmentId]) -> None:
        """Ask a tier that is shared with other processes for segments not known here; one call for all.

        What is found is entered as far as the budget allows; nothing is evicted for it.

        Raises:
            OSError: the tier cannot be asked.
        """
        if self._guarded.finder is None:
            return
        with self._ledger.settled():
            unknown = [s for s in segments if s not in self._ledger.catalog.records and s not in self._ledger.under_way]
        if not unknown:
            return
        for record in self._guarded.finder.find(unknown):
            if record.id in unknown and _is_sound(record):
                self._adopt(record)

    def lease(self, wanted: PromptLookup | Iterable[SegmentId]) -> Lease:
        """Pin segments until the lease is released, and count it as one use of each.

        A lookup stands for every segment that it names: for use before the plan is known. Ids are given in
        prompt order. Segments that are stored no longer are skipped; `Lease.ids` has the pinned ones.
        The deepest part is touched first, so that ancestors on a path are more recent than their descendants.
        """
        ids = dict.fromkeys(wanted.segments() if isinstance(wanted, PromptLookup) else wanted)
        with self._ledger.changing():
            lease = self._ledger.pins.lease(segment for segment in ids if segment in self._ledger.catalog.records)
            for segment in reversed(lease.ids):
                self._ledger.catalog.touch(self._ledger.catalog.records[segment])
            return lease

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload, or None if the segment is not stored (any more).

        A payload that the tier has lost is a miss too: its record is dropped, logged and counted (DESIGN §3.10), but
        nothing is deleted: a remote that did not answer may still have it. One that another process has replaced
        by a worse one is lost too.
        """
        record = self.record(segment)
        if record is None:
            return None
        payload = self._tier.get(segment)
        if payload is None or _is_replaced(payload, record):
            self._ledger.drop_lost(record)
            return None
        return payload

    def insert(self, record: SegmentRecord, payload: PayloadT, *, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Store a segment, evicting what must go; True if it, or a better one of its id, is stored afterwards.

        Better is exact before inexact: an exact segment replaces an inexact one, never the other way round.
        What is stored already is only refreshed. The record's bytes here are what the tier says. False, and
        nothing evicted, if there is no room because it is larger than the budget or the rest is pinned, or if the
        token ids stored under its id are others. False also if it is removed, or `wanted` turns false, before the
        payload is in; `wanted` is asked under the lock.

        Raises:
            UsageError: the record's id is not that of its chunk and context, or its payload has no bytes.
            OSError: the tier cannot take it.
        """
        record = replace(record, nbytes=self._tier.size_of(record, payload))
        if not _is_sound(record):
            raise UsageError(f"segment {record.id} has an id that is not its own, or no bytes ({record.nbytes})")
        self.probe([record.id])
        self._drop_vanished(record.id)
        return self._transfers.bring_in(record, payload, wanted=wanted, on_evict=self.on_evict)

    def remove(self, segment: SegmentId) -> bool:
        """Drop a segment, pinned or not; False if it was not stored.

        A pin guards against eviction, not against withdrawal: a request that has its payload keeps it,
        one that has not finds a miss.
        """
        return self.remove_where(lambda record: record.id == segment, among=[segment]) > 0

    def discard_chunk(self, chunk: ChunkId) -> int:
        """Drop all variants of a chunk, pinned or not; returns how many there were."""
        return self.remove_where(lambda record: record.chunk_id == chunk)

    def clear(self) -> None:
        """Drop everything, pinned or not. Counters go on."""
        self.remove_where(lambda _: True)

    def remove_where(self, doomed: Callable[[SegmentRecord], bool], *, among: Sequence[SegmentId] | None = None) -> int:
        """Drop every segment that `doomed` names (of those in `among`, if given), pinned or not; returns how many.

        What is just being written under such a record is not published. Unless told `among` which, a tier shared with
        other processes is searched as a whole, since it may hold what was never looked up here.
        """
        return self._transfers.take_out(doomed, among)

    def records_of(self, chunk: ChunkId) -> tuple[SegmentRecord, ...]:
        """All variants of a chunk, most recently used first."""
        with self._ledger.settled():
            return tuple(self._ledger.catalog.variants(chunk))

    def is_claimed(self, segment: SegmentId) -> bool:
        """Whether a lease, a pin, or somebody who is moving its payload keeps a segment from being evicted now."""
        with self._ledger.settled():
            return self._ledger.is_claimed(segment)

    def on_path(self, segment: SegmentId) -> bool:
        """Whether a segment is a node of the path index, so that an exact prefix may run over it."""
        with self._ledger.settled():
            return self._ledger.catalog.on_path(segment)

    def has_children(self, segment: SegmentId) -> bool:
        """Whether exact segments continue this one, so that it is an inner node of the path index."""
        with self._ledger.settled():
            return self._ledger.catalog.has_children(segment)

    def drop(self, segment: SegmentId) -> bool:
        """Evict a segment for another reason than room, without a word to `on_evict`; False if it may not go."""
        return self._transfers.drop(segment)

    def check(self) -> None:
        """Audit records, indexes, policy, pins and tier against each other.

        What lies in a tier shared with other processes is theirs to change, so it is not compared.

        Raises:
            StoreError: an invariant does not hold (or the tier lost a payload that no `get` has missed yet).
        """
        self._ledger.check()

    def _load(self) -> None:
        for record in self._guarded.listed():
            if _is_sound(record) and record.id not in self._ledger.catalog.records:
                self._ledger.catalog.add(record)
        self._transfers.trim()

    def _adopt(self, record: SegmentRecord) -> None:
        with self._ledger.changing():
            records = self._ledger.catalog.records
            if record.id in records or record.id in self._ledger.under_way or record.id in self._guarded.undeletable:
                return
            if self._ledger.taken_bytes + record.nbytes <= self._ledger.budget_bytes:
                self._ledger.catalog.add(record)

    def _drop_vanished(self, segment: SegmentId) -> None:
        record = self.record(segment)
        if record is not None and self._tier.nbytes(segment) != record.nbytes:
            self._ledger.drop_lost(record)


def _is_sound(record: SegmentRecord) -> bool:
    return record.nbytes > 0 and record.id == segment_id(record.chunk_id, record.context)


def _is_replaced(payload: object, record: SegmentRecord) -> bool:
    """Whether a payload says of itself that it is not, or no longer, as good as its record."""
    if not isinstance(payload, DescribedPayload):
        return False
    found = payload.header.record
    return (found.id, found.token_ids) != (record.id, record.token_ids) or (record.exact and not found.exact)
