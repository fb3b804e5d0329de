"""One tier: its records and indexes under a byte budget, and the moves of payloads in and out."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Condition, RLock
from typing import Any, Generic

from chunkweave.errors import StoreError, UsageError
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.store.eviction import EvictionPolicy, LRUPolicy, PathRequest
from chunkweave.store.index import Claim, Claims, Lease, Pins, PromptLookup, SegmentIndex, StoreFollower, look_up
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.store.records import Removal, SegmentRecord, StoreStats, segment_id
from chunkweave.store.shared_folder import Tombstones
from chunkweave.store.tier import PayloadT, SharedTier, Tier
from chunkweave.types import ChunkId, SegmentId

logger = logging.getLogger(__name__)

Shares = Callable[[str, Iterable[str]], float]
OnEvict = Callable[[Sequence[tuple[SegmentRecord, PayloadT]]], None]

NOVEL_SHARE = 0.1
"""Share of a full budget that novel segments have at most."""

_RETRIED_AT_ONCE = 8
_CLAIM_POLL_S = 0.05  # the claim of a dead thread sends no notification


class SegmentStore(Generic[PayloadT]):
    """Records, indexes, budget and pins of the segments whose payloads one tier holds.

    START and QUESTION parts are never stored: they have no id. Stored bytes never exceed the budget. When it is full,
    novel segments beyond `NOVEL_SHARE` of it are evicted first, oldest first, and no others for a novel one. Leaves of
    the path index, and segments outside it, are evicted first, whatever the policy; an inner node is evicted only if
    everything else is pinned, and its descendants then stay as variants.

    Thread-safe. One lock guards index, policy, pins, claims and counters: they are read inside `_settled` and changed
    inside `_changing`, nowhere else. Payloads move without the lock, so a slow tier blocks no other thread: a claim
    reserves room under the lock, the payload is moved, and the record is published under the lock. Other threads that
    want to move the same segment wait.

    An interrupted change (Ctrl-C, a tier that raises) leaves the store unsettled, or a claim without a holder. The next
    call first repairs indexes, policy and tier from the records, so no order of statements has to be safe by itself. At
    most the segment being moved is lost.
    """

    def __init__(
        self,
        tier: Tier[PayloadT],
        *,
        budget_bytes: int,
        policy: EvictionPolicy | None = None,
        shared: bool = False,
        load: bool = True,
        removed: Tombstones | None = None,
    ) -> None:
        """A store of the segments in `tier`, evicted down to the budget.

        Args:
            tier: holds the payloads; in this process only this store may use it from now on.
            budget_bytes: maximum payload bytes at any time; 0 stores nothing.
            policy: a new policy; LRU if None.
            shared: other processes also change the tier. Then the budget applies to the segments known here, and a
                missing payload does not break an invariant.
            load: list the tier now; if False, only `probe` finds the segments of a shared tier.
            removed: records removed segments whose payloads could not be deleted; in memory only if None.

        Raises:
            UsageError: the budget is negative, or the policy is already in use.
        """
        if budget_bytes < 0:
            raise UsageError(f"a store's budget must not be negative, but is {budget_bytes} bytes")
        policy = LRUPolicy() if policy is None else policy
        if any(True for _ in policy.ids()):
            raise UsageError("a new store needs a new eviction policy")
        self.tier = tier
        """Holds the payloads; only this store may change it."""
        self.budget_bytes = budget_bytes
        self.on_evict: OnEvict[PayloadT] | None = None
        """Called, without the lock, with the segments evicted together; for tiers in memory."""
        self.above: Callable[[SegmentId], bool] = lambda _: False
        """Whether a faster level also holds a segment; such a copy is evicted last. Called under the lock."""
        self.shares: Shares | None = None
        """An owner's share of the budget; owners above theirs are evicted first. None: owners are ignored."""
        self._shared = shared
        self._finder = tier if isinstance(tier, SharedTier) else None
        self._index = SegmentIndex(policy)
        self._pins = Pins()
        self._claims = Claims()
        self._undeletable: dict[SegmentId, SegmentRecord] = {}
        self._removed = Tombstones() if removed is None else removed
        self._tried_again = 0
        self._counts: Counter[str] = Counter()
        self._lock = RLock()
        self._moved = Condition(self._lock)
        self._unsettled = False
        if load:
            self._load()

    @property
    def probes(self) -> bool:
        """Whether `probe` can find anything."""
        return self._finder is not None

    @property
    def used_bytes(self) -> int:
        """Payload bytes stored, without those of pending inserts."""
        with self._settled():
            return self._index.used_bytes

    @property
    def stats(self) -> StoreStats:
        """A snapshot of the counters."""
        with self._settled():
            return StoreStats(
                segments=len(self._index.records),
                chunks=self._index.num_chunks,
                bytes=self._index.used_bytes,
                undeletable=len(self._left_where(lambda _: True)),
                **self._counts,
            )

    def __len__(self) -> int:
        with self._settled():
            return len(self._index.records)

    def __contains__(self, segment: SegmentId) -> bool:
        return self.record(segment) is not None

    def record(self, segment: SegmentId) -> SegmentRecord | None:
        """The record of a stored segment, or None."""
        with self._settled():
            return self._index.records.get(segment)

    def records(self) -> tuple[SegmentRecord, ...]:
        """A snapshot of all records, in no order."""
        with self._settled():
            return tuple(self._index.records.values())

    def records_of(self, chunk: ChunkId) -> tuple[SegmentRecord, ...]:
        """All variants of a chunk, most recently used first."""
        with self._settled():
            return tuple(self._index.variants(chunk))

    def holds(self, segment: SegmentId) -> bool:
        """Whether a segment is stored now; takes no lock."""
        return segment in self._index.records

    def is_claimed(self, segment: SegmentId) -> bool:
        """Whether a lease, a pin or a move of its payload protects a segment from eviction."""
        with self._settled():
            return self._is_claimed(segment)

    def on_path(self, segment: SegmentId) -> bool:
        """Whether a segment is a node of the path index, so that it can be on an exact prefix."""
        with self._settled():
            return segment in self._index.paths

    def has_children(self, segment: SegmentId) -> bool:
        """Whether exact segments continue this one, so that it is an inner node of the path index."""
        with self._settled():
            return self._index.paths.has_children(segment)

    def lookup(self, prompt: Prompt) -> PromptLookup:
        """Find the stored segments for each part of `prompt`. Pins nothing; `note_request` counts the use.

        A segment matches only if its token ids equal the part's, not by the hash alone. It may be evicted before it is
        leased; `get` then returns None.
        """
        with self._settled():
            path = self._index.paths.longest_exact_prefix(part.id for part in prompt.parts if part.id is not None)
            lookup = look_up(prompt, path, self.variants)
            self._counts.update(hits=lookup.hits, misses=lookup.misses)
            return lookup

    def variants(self, part: PromptPart) -> tuple[SegmentRecord, ...]:
        """Stored segments with the part's id and token ids, most recently used first."""
        if part.id is None:
            return ()
        matching: list[SegmentRecord] = []
        equal: tuple[int, ...] | None = None  # variants share this object, so most comparisons are by identity
        with self._settled():
            for record in self._index.variants(part.id):
                if record.token_ids is equal or record.token_ids == part.token_ids:
                    equal = record.token_ids
                    matching.append(record)
                else:
                    self._count_mismatch(record)
        return tuple(matching)

    def note_request(self, request: PathRequest, used: Sequence[SegmentId] = ()) -> None:
        """Report to the eviction policy the path that a request asked for, and the segments that it `used`.

        `used` is in prompt order. The deepest is touched first, so ancestors on a path are more recent than their
        descendants. Segments that are no longer stored are skipped.
        """
        with self._changing():
            self._index.note_request(request)
            for segment in reversed(used):
                record = self._index.records.get(segment)
                if record is not None:
                    self._index.touch(record)

    def explained(self) -> list[tuple[SegmentRecord, dict[str, float]]]:
        """All records, in no order, each with the numbers by which the eviction policy ranks it, if any."""
        with self._settled():
            return [(record, self._index.explain(segment)) for segment, record in self._index.records.items()]

    def show_in(self, tree: KnowledgeTree[ChunkId], tier: str) -> None:
        """Keep `tree` up to date from now on: it lists the exact segments stored here under the name `tier`."""
        with self._settled():
            self._index.show_in(tree, tier)

    def report_to(self, follower: StoreFollower) -> None:
        """Report changes to `follower` from now on, starting with everything stored."""
        with self._settled():
            self._index.report_to(follower)

    def probe(self, segments: Sequence[SegmentId]) -> None:
        """Query a shared tier for segments not known here, in one call.

        Found segments are added as far as the budget allows; nothing is evicted for them.

        Raises:
            OSError: the tier cannot be queried.
        """
        if self._finder is None:
            return
        with self._settled():
            unknown = [s for s in segments if s not in self._index.records and s not in self._claims]
        if not unknown:
            return
        for record in self._finder.find(unknown):
            if record.id in unknown and _is_sound(record):
                with self._changing():
                    is_known = record.id in self._index.records or record.id in self._claims
                    fits = self._taken_bytes() + record.nbytes <= self.budget_bytes
                    if fits and not is_known and not self._is_left(record.id):
                        self._index.add(record)

    def lease(self, wanted: PromptLookup | Iterable[SegmentId]) -> Lease:
        """Pin segments until the lease is released. This does not count as a use (`note_request` does).

        A lookup pins all segments that it found, for use before the plan is known. Ids are given in prompt order.
        Segments that are no longer stored are skipped; `Lease.ids` lists the pinned ones.
        """
        ids = dict.fromkeys(wanted.segments() if isinstance(wanted, PromptLookup) else wanted)
        with self._changing():
            return self._pins.lease(segment for segment in ids if segment in self._index.records)

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload, or None if the segment is not stored.

        A payload that the tier has lost is also a miss: its record is dropped, logged and counted. Nothing is deleted,
        since a remote that did not answer may still have it. A payload counts as lost, too, if another process replaced
        it by a worse one or marked it as removed.
        """
        record = self.record(segment)
        if record is None:
            return None
        payload = None if segment in self._removed else self.tier.get(segment)
        if payload is None or _is_replaced(payload, record):
            self._drop_lost(record)
            return None
        return payload

    def insert(self, record: SegmentRecord, payload: PayloadT, *, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Store a segment, evicting others if needed; True if it, or a better one with its id, is stored afterwards.

        Exact is better than inexact: an exact segment replaces an inexact one, never the reverse. Otherwise a stored
        segment stays unchanged, and this does not count as a use. The stored record's bytes are those that the tier
        reports.

        Returns False, and evicts nothing, if there is no room (the segment exceeds the budget, or the rest is pinned)
        or if other token ids are stored under its id. Returns False also if the segment is removed, or `wanted` turns
        false, before the payload is stored; `wanted` is called under the lock.

        Raises:
            UsageError: the record's id is not that of its chunk and context, or its payload has no bytes.
            OSError: the tier cannot store it.
        """
        record = replace(record, nbytes=self.tier.size_of(record, payload))
        if not _is_sound(record):
            raise UsageError(f"segment {record.id} has a wrong id or no bytes ({record.nbytes})")
        self.probe([record.id])
        old = self.record(record.id)
        if old is not None and self.tier.nbytes(record.id) != old.nbytes:
            self._drop_lost(old)
        claim = Claim(record, record.nbytes)
        leaving: list[Claim] = []
        with _given_up_on_error([claim]), _given_up_on_error(leaving):
            stored = self._reserve(claim, leaving)
            self._delete_evicted(leaving)
            if stored is not None:
                return stored
            try:
                self.tier.put(record, payload)
            except Exception:
                self._take_back(claim)
                raise
            published = self._publish(claim, wanted)
        if published:
            self._removed.discard([record.id])
            self._try_again()
        return published

    def remove(self, segment: SegmentId) -> bool:
        """Drop a segment, pinned or not; False if it was not stored.

        A pin protects from eviction, not from removal: a request that already has the payload keeps it, others find a
        miss.
        """
        return self.remove_where(lambda record: record.id == segment, among=[segment]) > 0

    def clear(self) -> None:
        """Drop everything, pinned or not. Counters are kept."""
        self.remove_where(lambda _: True)

    def remove_where(self, doomed: Callable[[SegmentRecord], bool], *, among: Sequence[SegmentId] | None = None) -> int:
        """`withdraw`; returns only the number of removed copies."""
        return self.withdraw(doomed, among=among).removed

    def withdraw(self, doomed: Callable[[SegmentRecord], bool], *, among: Sequence[SegmentId] | None = None) -> Removal:
        """Drop every segment for which `doomed` is true (only those in `among`, if given), pinned or not.

        Pending writes of such records are not published. Without `among`, a shared tier is searched as a whole, since
        it may hold segments that were never looked up here.

        Copies that the tier failed to delete are not found again, here or by a store that is opened later, if that can
        be recorded. Copies left by an earlier call are tried again, and count as left or as removed.
        """
        leaving: list[Claim] = []
        with _given_up_on_error(leaving):
            with self._changing():
                self._claims.cancel_where(doomed)
                records = self._index.records
                candidates = tuple(records.values()) if among is None else [records[s] for s in among if s in records]
                dropped = [record for record in candidates if doomed(record)]
                for record in dropped:
                    self._withdraw(record, leaving)
            undeleted = self._delete(leaving)
            tried = {record.id for record in undeleted}
            again = [record for record in self._left_where(doomed) if among is None or record.id in among]
            found, complete = self._found(among) if self._shared else ([], True)
            unknown = [record for record in found if doomed(record)]
            more = {record.id: record for record in (*again, *unknown) if record.id not in tried}
            undeleted += [record for record in more.values() if not self._delete_payload(record)]
            self._removed.add(undeleted)
            self._removed.discard(more.keys() - {record.id for record in undeleted})
            return Removal(len(dropped) + len(more) - len(undeleted), tuple(undeleted), complete)

    @property
    def removals_last(self) -> bool:
        """Whether a store that is opened later ignores removed segments whose payloads are still there."""
        return self._removed.lasting

    def count_lost(self) -> None:
        """Count a payload that turned out to be damaged or gone when it was read."""
        with self._lock:
            self._counts["lost"] += 1

    def drop(self, segment: SegmentId) -> bool:
        """Evict a segment for another reason than room, without calling `on_evict`; False if it may not be evicted."""
        leaving: list[Claim] = []
        with _given_up_on_error(leaving):
            with self._changing():
                record = self._index.records.get(segment)
                if record is None or self._is_claimed(segment):
                    return False
                self._withdraw(record, leaving)
            self._delete(leaving)
            return True

    def check(self) -> None:
        """Audit records, indexes, policy, pins and tier against each other.

        The contents of a shared tier are not compared, since other processes change them.

        Raises:
            StoreError: an invariant does not hold, or the tier lost a payload and no `get` has noticed yet.
        """
        with self._settled():
            self._index.check()
            records = self._index.records
            busy = self._claims.ids()
            if not self._shared:
                sizes = {s: record.nbytes for s, record in records.items() if s not in busy}
                gone = busy | self._undeletable.keys()
                if {r.id: r.nbytes for r in self.tier.records() if r.id not in gone} != sizes:
                    raise StoreError("the tier does not hold exactly the recorded segments in their recorded sizes")
            if self._taken_bytes() > self.budget_bytes:
                raise StoreError(f"{self._taken_bytes()} bytes are held or reserved, the budget is {self.budget_bytes}")
            if not self._pins.ids() <= records.keys() | busy:
                raise StoreError("a pin names a segment that is not stored")

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Holds the lock, with the store repaired if a change was interrupted."""
        with self._lock:
            if self._unsettled or self._claims.broken():
                self._rebuild()
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds the lock for a change. Every change is inside one; they are never nested."""
        with self._settled():
            self._unsettled = True
            yield
            self._unsettled = False

    @contextmanager
    def _changing_alone(self, segment: SegmentId) -> Iterator[None]:
        """`_changing`, after waiting until no other thread moves `segment`."""
        with self._lock:
            while segment in self._claims:
                with self._settled():
                    if segment in self._claims:
                        self._moved.wait(_CLAIM_POLL_S)
            with self._changing():
                yield

    def _load(self) -> None:
        """Add the tier's segments, and evict down to the budget."""
        for record in self._found(None)[0]:
            if _is_sound(record) and record.id not in self._index.records and record.id not in self._removed:
                self._index.add(record)
        leaving: list[Claim] = []
        while self._index.used_bytes > self.budget_bytes:
            self._evict(self._index.victim(kept=frozenset(), spared=frozenset()), leaving)
        self._delete(leaving)
        self._try_again(None)

    def _rebuild(self) -> None:
        """Make tier, index and pins consistent; may be interrupted and run again."""
        logger.warning("a change of the segment store was interrupted; rebuilding its indexes")
        self._index.rebuild({s: self._held_bytes(record) for s, record in self._index.records.items()})
        records = self._index.records
        for record in self._claims.broken():
            if record.id not in records:
                self._delete_payload(record)
            self._claims.remove(record.id)
        for segment in self._pins.ids() - records.keys() - self._claims.ids():
            self._pins.forget(segment)
        self._moved.notify_all()
        self._unsettled = False

    def _reserve(self, claim: Claim, leaving: list[Claim]) -> bool | None:
        """Claim room for a payload, evicting others; returns the result of the insert if there is nothing to write."""
        record = claim.record
        with self._changing_alone(record.id):
            old = self._index.records.get(record.id)
            if old is not None and old.token_ids != record.token_ids:
                self._count_mismatch(old)
                self._counts["rejected"] += 1
                return False
            if old is not None and (old.exact or not record.exact):
                return True  # not a use: the request that computed it is counted by `note_request` too
            if not self._make_room(record, leaving):
                self._counts["rejected"] += 1
                logger.debug("no room for segment %s of %d bytes", record.id, record.nbytes)
                return False
            self._claims.add(claim)
            return None

    def _make_room(self, record: SegmentRecord, leaving: list[Claim]) -> bool:
        """Evict until `record` fits, replacing the one with its id; False, without evicting, if it cannot fit."""
        index = self._index
        records = self._index.records
        replaced_bytes = records[record.id].nbytes if record.id in records else 0
        more_bytes = record.nbytes + self._claims.extra_bytes(records)
        if index.used_bytes - replaced_bytes + more_bytes <= self.budget_bytes:
            return True
        protected_ids = self._pins.ids() | self._claims.ids()
        staying_bytes = sum(records[segment].nbytes for segment in protected_ids - {record.id} if segment in records)
        if staying_bytes + more_bytes > self.budget_bytes:
            return False
        ancestors = set(index.paths.longest_exact_prefix(record.context)) if record.exact else set()
        while index.used_bytes - replaced_bytes + more_bytes > self.budget_bytes:
            owner = self._owner_to_evict(record, more_bytes - replaced_bytes)
            protected = protected_ids | {record.id}
            victim: SegmentRecord | None = None
            if index.novel_bytes + (record.nbytes if record.novel else 0) > NOVEL_SHARE * self.budget_bytes:
                victim = index.oldest_novel(kept=protected, spared=ancestors, owner=owner)
                if victim is None and record.novel:
                    victim = index.oldest_novel(kept=protected, spared=ancestors)
                    if victim is None:
                        return False
            victim = victim or index.victim(kept=protected, spared=ancestors, owner=owner, above=self.above)
            self._evict(victim, leaving)
        return True

    def _owner_to_evict(self, record: SegmentRecord, more_bytes: int) -> str | None:
        """The owner to evict from: `record`'s if it would exceed its share, else the one furthest above its share."""
        if self.shares is None:
            return None
        owned = Counter(self._index.owned_bytes)
        owned[record.owner] += more_bytes
        parts = {owner: nbytes / (self.budget_bytes * self.shares(owner, owned)) for owner, nbytes in owned.items()}
        return record.owner if parts[record.owner] > 1 else max(parts, key=parts.__getitem__)

    def _publish(self, claim: Claim, wanted: Callable[[], bool]) -> bool:
        """Add a record whose payload is in the tier, unless it is unwanted or the payload's size is wrong."""
        record = claim.record
        held_bytes = self._held_bytes(record)
        with self._changing():
            old = self._index.records.get(record.id)
            if old is not None:
                self._index.remove(old)
            fits = 0 < held_bytes <= record.nbytes
            published = fits and not claim.unwanted and wanted()
            if published:
                self._index.add(record if held_bytes == record.nbytes else replace(record, nbytes=held_bytes))
                self._counts["inserts"] += 1
                self._undeletable.pop(record.id, None)
                self._end([claim])
            else:
                self._pins.forget(record.id)
            if not fits:
                logger.warning("the tier holds %d bytes of segment %s, not %d", held_bytes, record.id, record.nbytes)
                self._counts["rejected"] += 1
        if not published:
            undeleted = self._delete([claim])
            self._removed.add(undeleted if claim.unwanted else [])
        return published

    def _take_back(self, claim: Claim) -> None:
        """End a failed write. The record that it was to replace stays if the tier still has its whole payload."""
        segment = claim.record.id
        with self._changing():
            old = self._index.records.get(segment)
            if old is not None and self._held_bytes(old) != old.nbytes:
                self._index.remove(old)
                old = None
            if old is None:
                self._pins.forget(segment)
            else:
                self._end([claim])
        if old is None:
            undeleted = self._delete([claim])
            self._removed.add(undeleted if claim.unwanted else [])

    def _evict(self, record: SegmentRecord, leaving: list[Claim]) -> None:
        self._withdraw(record, leaving, keep_room=False)
        self._counts["evictions"] += 1

    def _withdraw(self, record: SegmentRecord, leaving: list[Claim], *, keep_room: bool = True) -> None:
        """Remove a record; `_delete(leaving)` deletes its payload outside the lock.

        With `keep_room` its bytes stay reserved until then. If its payload is being replaced, the thread that writes
        the new one cleans up the tier.
        """
        if record.id not in self._claims:
            claim = Claim(record, record.nbytes if keep_room else 0)
            leaving.append(claim)
            self._claims.add(claim)
        self._index.remove(record)
        self._pins.forget(record.id)

    def _drop_lost(self, record: SegmentRecord) -> None:
        """Forget a record whose payload the tier no longer has; nothing is deleted."""
        with self._changing():
            if self._index.records.get(record.id) is not record or record.id in self._claims:
                return
            logger.warning("the tier lost segment %s; it will be recomputed", record.id)
            self._index.remove(record)
            self._pins.forget(record.id)
            self._counts["lost"] += 1

    def _delete_evicted(self, leaving: Sequence[Claim]) -> None:
        """Delete evicted payloads, then pass them to `on_evict`: another tier may need the freed room for them."""
        evicted: list[tuple[SegmentRecord, PayloadT]] = []
        if self.on_evict is not None:
            payloads = ((claim.record, self.tier.get(claim.record.id)) for claim in leaving)
            evicted = [(record, payload) for record, payload in payloads if payload is not None]
        self._delete(leaving)
        if self.on_evict is not None and evicted:
            self.on_evict(evicted)

    def _delete(self, leaving: Sequence[Claim]) -> list[SegmentRecord]:
        """Delete payloads of removed records; returns the records that the tier failed to delete."""
        undeleted = [claim.record for claim in leaving if not self._delete_payload(claim.record)]
        if leaving:
            self._end(leaving)
        return undeleted

    def _end(self, claims: Iterable[Claim]) -> None:
        """End claims, and wake threads that wait for their segments."""
        with self._lock:
            for claim in claims:
                self._claims.remove(claim.record.id)
            self._moved.notify_all()

    def _delete_payload(self, record: SegmentRecord) -> bool:
        """Delete from the tier; on failure, remember the record and return False."""
        try:
            self.tier.delete(record.id)
        except OSError as error:
            if record.id not in self._undeletable:
                logger.warning("segment %s cannot be deleted from its tier: %s", record.id, error)
            self._undeletable[record.id] = record
            return False
        self._undeletable.pop(record.id, None)
        return True

    def _try_again(self, at_most: int | None = _RETRIED_AT_ONCE) -> None:
        """Retry deletions that failed before: at most `at_most`, different ones at each call."""
        undeleted = self._left_where(lambda _: True)
        first = self._tried_again % len(undeleted) if undeleted else 0
        for record in [*undeleted[first:], *undeleted[:first]][:at_most]:
            self._tried_again += 1
            if self._delete_payload(record):
                self._removed.discard([record.id])

    def _left_where(self, doomed: Callable[[SegmentRecord], bool]) -> list[SegmentRecord]:
        undeleted = {record.id: record for record in (*self._removed.records(), *tuple(self._undeletable.values()))}
        doomed_records = [record for record in undeleted.values() if doomed(record) and record.id not in self._claims]
        return [record for record in doomed_records if record.id not in self._index.records]

    def _is_left(self, segment: SegmentId) -> bool:
        return segment in self._undeletable or segment in self._removed

    def _found(self, segments: Sequence[SegmentId] | None) -> tuple[list[SegmentRecord], bool]:
        """Records of those of `segments` (all if None) that the tier holds, and whether the list is complete."""
        records: list[SegmentRecord] = []
        try:
            if segments is None:
                records.extend(self.tier.records())
            elif self._finder is not None:
                records.extend(self._finder.find(segments))
        except OSError as error:
            logger.warning("the tier cannot list its segments: %s", error)
            return records, False
        return records, True

    def _held_bytes(self, record: SegmentRecord) -> int:
        """Bytes that the tier holds of a record's payload, 0 if none.

        A shared tier is not asked: it would take a round trip, and another process may have replaced the payload.
        """
        return record.nbytes if self._shared else self.tier.nbytes(record.id)

    def _is_claimed(self, segment: SegmentId) -> bool:
        return segment in self._claims or segment in self._pins.ids()

    def _taken_bytes(self) -> int:
        """Bytes stored, and bytes reserved for pending inserts."""
        return self._index.used_bytes + self._claims.extra_bytes(self._index.records)

    def _count_mismatch(self, record: SegmentRecord) -> None:
        logger.warning("segment %s has other tokens than the requested ones with its id; not used", record.id)
        self._counts["mismatched"] += 1


def _is_sound(record: SegmentRecord) -> bool:
    return record.nbytes > 0 and record.id == segment_id(record.chunk_id, record.context)


def _is_replaced(payload: object, record: SegmentRecord) -> bool:
    """Whether a payload's own header shows that it is not as good as its record.

    Payloads from shared tiers have a header, read from the same bytes as the tensors; others have none.
    """
    header: Any = getattr(payload, "header", None)
    if header is None:
        return False
    found: SegmentRecord = header.record
    return (found.id, found.token_ids) != (record.id, record.token_ids) or (record.exact and not found.exact)


@contextmanager
def _given_up_on_error(claims: list[Claim]) -> Iterator[None]:
    """Give up `claims` if an exception, including KeyboardInterrupt, ends the block."""
    try:
        yield
    except BaseException:
        for claim in claims:
            claim.given_up = True
        raise
