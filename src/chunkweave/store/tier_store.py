"""One tier: its records and indexes under a byte budget, and payloads on their way in and out."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Condition, RLock
from typing import Generic

from chunkweave.chunking.prompt import Prompt, PromptPart
from chunkweave.errors import StoreError, UsageError
from chunkweave.store.eviction import EvictionPolicy, PathRequest
from chunkweave.store.index import Catalog, ChunkFollower, PromptLookup, look_up, path_request_of
from chunkweave.store.lease import Claim, Lease, Pins, UnderWay
from chunkweave.store.policies.lru import LRUPolicy
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.store.tier import ClosableTier, DatedTier, DescribedPayload, PayloadT, SharedTier, Tier
from chunkweave.trees.prefix_trie import KnowledgeTree
from chunkweave.types import ChunkId, SegmentId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds now, and what has happened in it since it was made.

    `hits` and `misses` count looked-up prompt parts (system and chunks) for which something, or nothing, was
    stored. `rejected` counts inserts that did not fit or contradicted what is stored, `lost` payloads that
    the tier no longer had, `mismatched` segments whose token ids differed under an equal id, `undeletable` payloads
    that were dropped here but that the tier could not delete.
    """

    segments: int = 0
    chunks: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    inserts: int = 0
    evictions: int = 0
    rejected: int = 0
    lost: int = 0
    mismatched: int = 0
    undeletable: int = 0


@dataclass(frozen=True, slots=True)
class TieredStats(StoreStats):
    """A hierarchy's totals, and `levels` by name.

    `segments` and `chunks` count what is anywhere, once; `bytes`, `inserts`, `evictions`, `rejected`, `lost`,
    `mismatched` and `undeletable` sum over the levels. `promotions` are copies to a faster level, `demotions`
    evictions from memory that went on to a slower one. Of the writes in the background `writes_queued` were accepted,
    `writes_skipped` found no room in the queue or a paused level, `writes_failed` raised. `expired` outlived
    their time. `variants` says how many chunks have 1, 2, ... variants (Cache-Craft Figure 25), `variants_dropped` how
    many were dropped because there were too many.
    """

    promotions: int = 0
    demotions: int = 0
    expired: int = 0
    writes_queued: int = 0
    writes_done: int = 0
    writes_skipped: int = 0
    writes_rejected: int = 0
    writes_failed: int = 0
    variants: Mapping[int, int] = field(default_factory=dict)
    variants_dropped: int = 0
    levels: Mapping[str, StoreStats] = field(default_factory=dict)


class GuardedTier(Generic[PayloadT]):
    """What a tier holds, as far as it can be learnt, and what it would not delete. Called without the store's lock.

    A tier that is `shared` is filled and emptied by other processes too: a payload that is not there (any more, or just
    now) is no broken invariant, and what this process left there in time is not asked for again.
    """

    def __init__(self, tier: Tier[PayloadT], *, shared: bool) -> None:
        self.tier = tier
        self.shared = shared
        self.finder = tier if isinstance(tier, SharedTier) else None
        """Finds segments that were never looked up here; None if the tier cannot be asked."""
        self.undeletable: set[SegmentId] = set()
        """Dropped here, but the tier could not delete them."""

    def held_bytes(self, record: SegmentRecord) -> int:
        """Bytes that the tier holds of a record's payload, 0 if none."""
        return record.nbytes if self.shared else self.tier.nbytes(record.id)

    def listed(self) -> list[SegmentRecord]:
        """Everything held; nothing if the tier cannot say."""
        try:
            return list(self.tier.records())
        except OSError as error:
            logger.warning("the tier cannot say what it holds: %s", error)
            return []

    def found(self, segments: Sequence[SegmentId]) -> list[SegmentRecord]:
        """Records of those of `segments` that are held now; none if the tier cannot be asked."""
        try:
            return [] if self.finder is None else list(self.finder.find(segments))
        except OSError as error:
            logger.warning("the tier cannot be asked for segments to delete: %s", error)
            return []

    def delete(self, segment: SegmentId) -> None:
        """Delete a payload, or remember that the tier would not."""
        try:
            self.tier.delete(segment)
        except OSError as error:
            self.undeletable.add(segment)
            logger.warning("segment %s cannot be deleted from its tier: %s", segment, error)


_CLAIM_POLL_S = 0.05  # a claim that died with its thread notifies nobody


class Ledger(Generic[PayloadT]):
    """Owns a store's lock, and with it catalog, policy, pins, claims and counters.

    These are read inside `settled` and changed inside `changing`, nowhere else. A change that is interrupted (Ctrl-C, a
    tier that raises) leaves the ledger unsettled, or a claim that nobody holds, and whoever comes next first brings
    indexes, policy and tier back in line with the records. So no order of statements has to be safe by itself.
    """

    def __init__(
        self,
        tier: GuardedTier[PayloadT],
        policy: EvictionPolicy,
        *,
        budget_bytes: int,
        kept: frozenset[SegmentId] = frozenset(),
    ) -> None:
        """An empty ledger; segments in `kept` always count as claimed."""
        self.catalog = Catalog(policy)
        self.pins = Pins()
        self.under_way = UnderWay()
        self.budget_bytes = budget_bytes
        self.kept = kept
        self._tier = tier
        self._lock = RLock()
        self._moved = Condition(self._lock)
        self._unsettled = False
        self._counts = StoreStats()

    @property
    def stats(self) -> StoreStats:
        """A snapshot of the counters."""
        with self.settled():
            return replace(
                self._counts,
                segments=len(self.catalog.records),
                chunks=self.catalog.num_chunks,
                bytes=self.catalog.used_bytes,
                undeletable=len(self._tier.undeletable),
            )

    @property
    def taken_bytes(self) -> int:
        """Bytes held, and reserved for what is on its way in."""
        return self.catalog.used_bytes + self.under_way.extra_bytes(self.catalog.records)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """The lock, with everything in line."""
        with self._lock:
            if self._unsettled or self.under_way.broken():
                self._rebuild()
            yield

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Every change happens inside one of these, and none starts inside another."""
        with self.settled():
            self._unsettled = True
            yield
            self._unsettled = False

    @contextmanager
    def changing_alone(self, segment: SegmentId) -> Iterator[None]:
        """`changing`, once nobody else is moving `segment`."""
        with self._lock:
            while segment in self.under_way:
                with self.settled():
                    if segment in self.under_way:
                        self._moved.wait(_CLAIM_POLL_S)
            with self.changing():
                yield

    def is_claimed(self, segment: SegmentId) -> bool:
        """Whether a lease, a pin, or somebody who is moving its payload keeps a segment from being evicted now."""
        return segment in self.kept or segment in self.under_way or segment in self.pins.ids()

    def remove(self, record: SegmentRecord) -> None:
        """Take a record out, and with it what pins it."""
        self.catalog.remove(record)
        self.pins.forget(record.id)

    def drop_lost(self, record: SegmentRecord) -> None:
        """Forget a record whose payload the tier no longer has; nothing is deleted."""
        with self.changing():
            if self.catalog.records.get(record.id) is not record or record.id in self.under_way:
                return
            logger.warning("the tier lost segment %s; it will be recomputed", record.id)
            self.remove(record)
            self.count(lost=1)

    def moved(self, claims: Iterable[Claim]) -> None:
        """Payloads are where they belong: whoever waits for one of these segments may go on."""
        with self._lock:
            for claim in claims:
                self.under_way.remove(claim.record.id)
            self._moved.notify_all()

    def count_mismatch(self, record: SegmentRecord) -> None:
        """A stored segment has other tokens than those asked for under its id."""
        logger.warning("segment %s holds other tokens than those asked for under its id; not used", record.id)
        self.count(mismatched=1)

    def count(self, **more: int) -> None:
        """Add to counters of `StoreStats`."""
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})

    def check(self) -> None:
        """Audit records, indexes, policy, pins and tier against each other.

        What lies in a tier shared with other processes is theirs to change, so it is not compared.

        Raises:
            StoreError: an invariant does not hold (or the tier lost a payload that no `get` has missed yet).
        """
        with self.settled():
            self.catalog.check()
            records, busy = self.catalog.records, self.under_way.ids()
            if not self._tier.shared:
                known = {s: record.nbytes for s, record in records.items() if s not in busy}
                gone = busy | self._tier.undeletable
                held = {r.id: r.nbytes for r in self._tier.tier.records() if r.id not in gone}
                if held != known:
                    raise StoreError("the tier does not hold exactly the recorded segments in their recorded sizes")
            if self.taken_bytes > self.budget_bytes:
                raise StoreError(f"{self.taken_bytes} bytes are held or reserved, the budget is {self.budget_bytes}")
            if not self.pins.ids() <= records.keys() | busy:
                raise StoreError("a pin names a segment that is not stored")

    def _rebuild(self) -> None:
        """Bring tier, catalog and pins in line with each other; may be interrupted and run again."""
        logger.warning("a change of the segment store was interrupted; rebuilding its indexes")
        self.catalog.rebuild({s: self._tier.held_bytes(record) for s, record in self.catalog.records.items()})
        records = self.catalog.records
        for segment in self.under_way.broken():
            if segment not in records:
                self._tier.delete(segment)
            self.under_way.remove(segment)
        for segment in self.pins.ids() - records.keys() - self.under_way.ids():
            self.pins.forget(segment)
        self._moved.notify_all()
        self._unsettled = False


OnEvict = Callable[[SegmentRecord, PayloadT], None]


class Transfers(Generic[PayloadT]):
    """Moves payloads without the lock, so that a slow tier keeps nobody else waiting.

    Room is reserved by a claim under the lock, the payload moved outside, and the record published under the lock
    again. Who wants to move the same segment waits. Bytes held never exceed the budget: what is evicted is deleted
    before the payload comes in. If a move is interrupted, at most the segment being moved is lost.
    """

    def __init__(self, ledger: Ledger[PayloadT], tier: GuardedTier[PayloadT]) -> None:
        self._ledger = ledger
        self._tier = tier

    def bring_in(
        self,
        record: SegmentRecord,
        payload: PayloadT,
        *,
        wanted: Callable[[], bool],
        on_evict: OnEvict[PayloadT] | None,
    ) -> bool:
        """Put a payload into the tier and publish its record; `SegmentStore.insert` says what comes of it.

        Raises:
            OSError: the tier cannot take it.
        """
        claim = Claim(record, record.nbytes)
        leaving: list[Claim] = []
        with _given_up_on_error([claim]), _given_up_on_error(leaving):
            stored = self._reserve(claim, leaving)
            if stored is not None:
                return stored
            self._let_go(leaving, on_evict)
            self._tier.tier.put(record, payload)
            return self._publish(claim, wanted)

    def take_out(self, doomed: Callable[[SegmentRecord], bool], among: Sequence[SegmentId] | None = None) -> int:
        """Drop every segment that `doomed` names, claimed or not; `SegmentStore.remove_where`."""
        leaving: list[Claim] = []
        with _given_up_on_error(leaving):
            with self._ledger.changing():
                self._ledger.under_way.cancel_where(doomed)
                records = self._ledger.catalog.records
                candidates = tuple(records.values()) if among is None else [records[s] for s in among if s in records]
                dropped = [record for record in candidates if doomed(record)]
                for record in dropped:
                    self._withdraw(record, leaving)
            self._bury(leaving)
            return len(dropped) + (self._delete_unknown(doomed, among) if self._tier.shared else 0)

    def drop(self, segment: SegmentId) -> bool:
        """Drop a segment that nobody claims; False if somebody does, or if it is not stored."""
        leaving: list[Claim] = []
        with _given_up_on_error(leaving):
            with self._ledger.changing():
                record = self._ledger.catalog.records.get(segment)
                if record is None or self._ledger.is_claimed(segment):
                    return False
                self._withdraw(record, leaving)
            self._bury(leaving)
            return True

    def trim(self) -> None:
        """Evict down to the budget, as far as there is anything that may go."""
        ledger, leaving = self._ledger, list[Claim]()
        kept, records = ledger.kept, ledger.catalog.records
        while ledger.catalog.used_bytes > ledger.budget_bytes and not records.keys() <= kept:
            self._evict(ledger.catalog.victim(kept=kept, spared=frozenset()), leaving)
        self._bury(leaving)

    def _reserve(self, claim: Claim, leaving: list[Claim]) -> bool | None:
        """Claim room for a payload, and withdraw what must leave for it; or the answer if it need not come in."""
        ledger, record = self._ledger, claim.record
        with ledger.changing_alone(record.id):
            old = ledger.catalog.records.get(record.id)
            if old is not None and old.token_ids != record.token_ids:
                ledger.count_mismatch(old)
                ledger.count(rejected=1)
                return False
            if old is not None and (old.exact or not record.exact):
                ledger.catalog.touch(old)
                return True
            if not self._make_room(record, leaving):
                ledger.count(rejected=1)
                logger.debug("no room for segment %s of %d bytes", record.id, record.nbytes)
                return False
            ledger.under_way.add(claim)
            return None

    def _publish(self, claim: Claim, wanted: Callable[[], bool]) -> bool:
        """Enter a record whose payload is in the tier, unless nobody wants it any more or it is not what was said."""
        ledger, record = self._ledger, claim.record
        # A shared tier that was left in time says nothing worth a round trip; another process may have replaced it.
        held_bytes = self._tier.held_bytes(record)
        with ledger.changing():
            old = ledger.catalog.records.get(record.id)
            if old is not None:
                ledger.catalog.remove(old)
            fits = 0 < held_bytes <= record.nbytes
            published = fits and not claim.unwanted and wanted()
            if published:
                ledger.catalog.add(record if held_bytes == record.nbytes else replace(record, nbytes=held_bytes))
                ledger.count(inserts=1)
                self._tier.undeletable.discard(record.id)
                ledger.moved([claim])
            else:
                ledger.pins.forget(record.id)
            if not fits:
                logger.warning("the tier holds %d bytes of segment %s, not %d", held_bytes, record.id, record.nbytes)
                ledger.count(rejected=1)
        if not published:
            self._bury([claim])
        return published

    def _make_room(self, record: SegmentRecord, leaving: list[Claim]) -> bool:
        """Evict until `record` fits in place of what is stored under its id; False, without evicting, if it cannot."""
        ledger, records = self._ledger, self._ledger.catalog.records
        replaced_bytes = records[record.id].nbytes if record.id in records else 0
        more_bytes = record.nbytes + ledger.under_way.extra_bytes(records)
        if ledger.catalog.used_bytes - replaced_bytes + more_bytes <= ledger.budget_bytes:
            return True
        kept = ledger.pins.ids() | ledger.under_way.ids() | ledger.kept
        staying_bytes = sum(records[segment].nbytes for segment in kept - {record.id} if segment in records)
        if staying_bytes + more_bytes > ledger.budget_bytes:
            return False
        ancestors = set(ledger.catalog.longest_exact_prefix(record.context)) if record.exact else set()
        while ledger.catalog.used_bytes - replaced_bytes + more_bytes > ledger.budget_bytes:
            self._evict(ledger.catalog.victim(kept=kept | {record.id}, spared=ancestors), leaving)
        return True

    def _evict(self, record: SegmentRecord, leaving: list[Claim]) -> None:
        self._withdraw(record, leaving, keep_room=False)
        self._ledger.count(evictions=1)

    def _withdraw(self, record: SegmentRecord, leaving: list[Claim], *, keep_room: bool = True) -> None:
        """Take a record out; its payload is deleted by `_bury(leaving)`, outside the lock.

        Its room stays reserved until then, unless it goes to a payload that comes in after that. If its payload is
        just being replaced, the writer of the new one sees to what is in the tier.
        """
        if record.id not in self._ledger.under_way:
            claim = Claim(record, record.nbytes if keep_room else 0)
            leaving.append(claim)
            self._ledger.under_way.add(claim)
        self._ledger.remove(record)

    def _let_go(self, leaving: Sequence[Claim], on_evict: OnEvict[PayloadT] | None) -> None:
        """Delete what leaves, and hand its payloads on; a tier may have room for others only once nobody has these."""
        evicted = self._payloads(leaving) if on_evict is not None else []
        self._bury(leaving)
        for record, payload in evicted:
            if on_evict is not None:
                on_evict(record, payload)

    def _bury(self, leaving: Sequence[Claim]) -> None:
        if not leaving:
            return
        for claim in leaving:
            self._tier.delete(claim.record.id)
        self._ledger.moved(leaving)

    def _delete_unknown(self, doomed: Callable[[SegmentRecord], bool], among: Sequence[SegmentId] | None) -> int:
        """Delete from a shared tier what was never looked up here."""
        found = self._tier.listed() if among is None else self._tier.found(among)
        unknown = [record.id for record in found if doomed(record)]
        for segment in unknown:
            self._tier.delete(segment)
        return len(unknown)

    def _payloads(self, leaving: Sequence[Claim]) -> list[tuple[SegmentRecord, PayloadT]]:
        payloads = ((claim.record, self._tier.tier.get(claim.record.id)) for claim in leaving)
        return [(record, payload) for record, payload in payloads if payload is not None]


@contextmanager
def _given_up_on_error(claims: list[Claim]) -> Iterator[None]:
    """Whatever ends the block early, Ctrl-C included, `claims` do not outlive it."""
    try:
        yield
    except BaseException:
        for claim in claims:
            claim.given_up = True
        raise


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

    def report_to(self, follower: ChunkFollower) -> None:
        """From now on `follower` is told of the chunks whose segments change here; first of those that are here."""
        with self._ledger.settled():
            self._ledger.catalog.report_to(follower)

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


class Level(Generic[PayloadT]):
    """A segment store with a name ("host", "disk", ...) that survives its tier's failures.

    A tier that raises `OSError` several times in a row is left alone for a while: nothing is found, read or written
    here meanwhile. Then it is tried again, and one more failure pauses it anew.
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
        """A level in use.

        Args:
            name: what reports call it.
            store: records, budget and tier of this level.
            background: written to by the background writer, not by requests: its tier is slow.
            patience: failures in a row that pause it.
            pause_s: for how long.
            clock: seconds, monotonic.
        """
        self.name = name
        self.store = store
        self.background = background
        self._patience = patience
        self._pause_s = pause_s
        self._clock = clock
        self._failures_in_a_row = 0
        self._paused_until_s = float("-inf")
        self.failures = 0
        """`OSError`s of the tier since the level was made."""

    @property
    def available(self) -> bool:
        """Whether the level is in use now."""
        return self._clock() >= self._paused_until_s

    @property
    def probes(self) -> bool:
        """Whether segments not known here may be there all the same."""
        return self.available and self.store.probes

    def record(self, segment: SegmentId) -> SegmentRecord | None:
        """The record held here; None too while the level is paused."""
        return self.store.record(segment) if self.available else None

    def variants(self, part: PromptPart) -> tuple[SegmentRecord, ...]:
        """Segments for a part, most recently used first; none while the level is paused."""
        return self.store.variants(part) if self.available else ()

    def records(self) -> tuple[SegmentRecord, ...]:
        """All records held here; none while the level is paused."""
        return self.store.records() if self.available else ()

    def records_of(self, chunk: ChunkId) -> tuple[SegmentRecord, ...]:
        """All variants of a chunk held here; none while the level is paused."""
        return self.store.records_of(chunk) if self.available else ()

    def drop(self, segment: SegmentId) -> bool:
        """Evict a segment that nobody claims; False if it stays, as it does while the level is paused."""
        return self.available and self.store.drop(segment)

    def probe(self, segments: Sequence[SegmentId]) -> None:
        """Learn which of `segments` a shared tier holds. A failure is logged and counted."""
        if not segments or not self.available:
            return
        try:
            self.store.probe(segments)
        except OSError as error:
            self._failed(error)

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload, or None if it is not here, is lost, or cannot be read now."""
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
        """`SegmentStore.insert`; failures are counted here too.

        Raises:
            OSError: the tier cannot take it.
        """
        try:
            stored = self.store.insert(record, payload, wanted=wanted)
        except OSError as error:
            self._failed(error)
            raise
        self._failures_in_a_row = 0
        return stored

    def stored_at_s(self, segment: SegmentId) -> float | None:
        """When a segment came into a tier that remembers it, in seconds since the epoch."""
        tier = self.store.tier
        return tier.stored_at_s(segment) if isinstance(tier, DatedTier) else None

    def close(self) -> None:
        """Give back what the tier holds open."""
        if isinstance(self.store.tier, ClosableTier):
            self.store.tier.close()

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        logger.warning("the %s tier failed: %s", self.name, error)
        if self._failures_in_a_row >= self._patience:
            self._paused_until_s = self._clock() + self._pause_s
            logger.warning("the %s tier is left alone for %.0f s", self.name, self._pause_s)
