"""One tier: its records and indexes under a byte budget, and payloads on their way in and out."""

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

_RETRIED_AT_ONCE = 8
_CLAIM_POLL_S = 0.05  # a claim that died with its thread notifies nobody


class SegmentStore(Generic[PayloadT]):
    """Records, indexes, budget and pins of the segments whose payloads lie in one tier.

    Nothing of START or QUESTION parts comes in: a record needs the id that they lack. Bytes held never exceed the
    budget. Leaves of the path index and what is outside it are evicted first, whatever the policy; an inner node goes
    only if nothing else is unpinned, and its descendants then stay as variants.

    Thread-safe. One lock guards index, policy, pins, claims and counters: they are read inside `_settled` and changed
    inside `_changing`, nowhere else. Payloads move without the lock, so that a slow tier blocks no other thread: a
    claim reserves room under the lock, the payload is moved, and the record is published under the lock again. Other
    threads that want to move the same segment wait.

    A change that is interrupted (Ctrl-C, a tier that raises) leaves the store unsettled, or a claim without a holder.
    The next call first brings indexes, policy and tier back in line with the records, so that no order of statements
    has to be safe by itself. At most the segment being moved is lost.
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
        removed: Tombstones | None = None,
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
            removed: where it is noted what was removed and is still there; in memory alone if None.

        Raises:
            UsageError: the budget is negative, or the policy is in use already.
        """
        if budget_bytes < 0:
            raise UsageError(f"a store's budget cannot be negative: {budget_bytes} bytes")
        policy = LRUPolicy() if policy is None else policy
        if any(True for _ in policy.ids()):
            raise UsageError("a new store needs a fresh eviction policy")
        self.tier = tier
        """Where the payloads lie; only this store may change it."""
        self.budget_bytes = budget_bytes
        self.on_evict: OnEvict[PayloadT] | None = None
        """Called with what was evicted together, without the lock held; for tiers in memory, whose payloads live on."""
        self.above: Callable[[SegmentId], bool] = lambda _: False
        """Whether a faster level holds a segment too; the copy here then goes after all others. Asked with the lock."""
        self.shares: Shares | None = None
        """The part of the budget that is an owner's, among others: who has more is evicted first. None: whoever."""
        self._shared = shared
        self._finder = tier if isinstance(tier, SharedTier) else None
        self._kept = kept
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
        """Bytes of payload held now, without those on their way in."""
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
        """Whether a segment is stored as things stand; waits for no lock."""
        return segment in self._index.records

    def is_claimed(self, segment: SegmentId) -> bool:
        """Whether a lease, a pin, or a thread that moves its payload keeps a segment from being evicted now."""
        with self._settled():
            return self._is_claimed(segment)

    def on_path(self, segment: SegmentId) -> bool:
        """Whether a segment is a node of the path index, so that an exact prefix may run over it."""
        with self._settled():
            return segment in self._index.paths

    def has_children(self, segment: SegmentId) -> bool:
        """Whether exact segments continue this one, so that it is an inner node of the path index."""
        with self._settled():
            return self._index.paths.has_children(segment)

    def lookup(self, prompt: Prompt) -> PromptLookup:
        """What is stored for each part of `prompt`; pins nothing, and the policy is not told (`note_request`).

        A stored segment counts only if its token ids are the part's, not on the strength of the hash.
        What is found may be evicted before it is leased: `get` then says so.
        """
        with self._settled():
            path = self._index.paths.longest_exact_prefix(part.id for part in prompt.parts if part.id is not None)
            found = look_up(prompt, path, self.variants)
            self._counts.update(hits=found.hits, misses=found.misses)
            return found

    def variants(self, part: PromptPart) -> tuple[SegmentRecord, ...]:
        """Stored segments with the part's id and token ids, most recently used first."""
        if part.id is None:
            return ()
        matching: list[SegmentRecord] = []
        equal: tuple[int, ...] | None = None  # variants share this object, so that most need no second comparison
        with self._settled():
            for record in self._index.variants(part.id):
                if record.token_ids is equal or record.token_ids == part.token_ids:
                    equal = record.token_ids
                    matching.append(record)
                else:
                    self._count_mismatch(record)
        return tuple(matching)

    def note_request(self, request: PathRequest, used: Sequence[SegmentId] = ()) -> None:
        """Tell the eviction policy what a request asked the whole hierarchy for, and which segments it `used`.

        Those come in prompt order. The deepest is touched first, so that ancestors on a path are more recent than
        their descendants; those that are stored no longer are skipped.
        """
        with self._changing():
            self._index.note_request(request)
            for segment in reversed(used):
                record = self._index.records.get(segment)
                if record is not None:
                    self._index.touch(record)

    def explained(self) -> list[tuple[SegmentRecord, dict[str, float]]]:
        """All records, in no order, each with the numbers by which the eviction policy ranks it, if it says any."""
        with self._settled():
            return [(record, self._index.explain(segment)) for segment, record in self._index.records.items()]

    def show_in(self, tree: KnowledgeTree[ChunkId], tier: str) -> None:
        """Keep `tree` current from now on: which exact segments are stored, as `tier`."""
        with self._settled():
            self._index.show_in(tree, tier)

    def report_to(self, follower: StoreFollower) -> None:
        """Report changes to `follower` from now on, beginning with all that is stored."""
        with self._settled():
            self._index.report_to(follower)

    def probe(self, segments: Sequence[SegmentId]) -> None:
        """Ask a tier that is shared with other processes for segments not known here; one call for all.

        What is found is entered as far as the budget allows; nothing is evicted for it.

        Raises:
            OSError: the tier cannot be asked.
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
                    known = record.id in self._index.records or record.id in self._claims
                    fits = self._taken_bytes() + record.nbytes <= self.budget_bytes
                    if fits and not known and not self._is_left(record.id):
                        self._index.add(record)

    def lease(self, wanted: PromptLookup | Iterable[SegmentId]) -> Lease:
        """Pin segments until the lease is released; that is no use of them (`note_request`).

        A lookup stands for every segment that it names: before the plan is known. Ids are given in prompt order.
        Segments that are stored no longer are skipped; `Lease.ids` has the pinned ones.
        """
        ids = dict.fromkeys(wanted.segments() if isinstance(wanted, PromptLookup) else wanted)
        with self._changing():
            return self._pins.lease(segment for segment in ids if segment in self._index.records)

    def get(self, segment: SegmentId) -> PayloadT | None:
        """The payload, or None if the segment is not stored (any more).

        A payload that the tier has lost is a miss too: its record is dropped, logged and counted, but
        nothing is deleted: a remote that did not answer may still have it. One that another process has replaced
        by a worse one is lost too, and so is one that another process was to remove.
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
        """Store a segment, evicting what must go; True if it, or a better one of its id, is stored afterwards.

        Better is exact before inexact: an exact segment replaces an inexact one, never the other way round.
        What is stored already stays as it is: that is no use of it. The record's bytes here are what the tier says.
        False, and nothing evicted, if there is no room because it is larger than the budget or the rest is pinned, or
        if the token ids stored under its id are others. False also if it is removed, or `wanted` turns false, before
        the payload is in; `wanted` is asked under the lock.

        Raises:
            UsageError: the record's id is not that of its chunk and context, or its payload has no bytes.
            OSError: the tier cannot take it.
        """
        record = replace(record, nbytes=self.tier.size_of(record, payload))
        if not _is_sound(record):
            raise UsageError(f"segment {record.id} has an id that is not its own, or no bytes ({record.nbytes})")
        self.probe([record.id])
        old = self.record(record.id)
        if old is not None and self.tier.nbytes(record.id) != old.nbytes:
            self._drop_lost(old)
        claim = Claim(record, record.nbytes)
        leaving: list[Claim] = []
        with _given_up_on_error([claim]), _given_up_on_error(leaving):
            stored = self._reserve(claim, leaving)
            if stored is not None:
                return stored
            self._delete_evicted(leaving)
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

        A pin guards against eviction, not against withdrawal: a request that has its payload keeps it,
        one that has not finds a miss.
        """
        return self.remove_where(lambda record: record.id == segment, among=[segment]) > 0

    def clear(self) -> None:
        """Drop everything, pinned or not. Counters go on."""
        self.remove_where(lambda _: True)

    def remove_where(self, doomed: Callable[[SegmentRecord], bool], *, among: Sequence[SegmentId] | None = None) -> int:
        """`withdraw`, of which only how many are gone matters."""
        return self.withdraw(doomed, among=among).removed

    def withdraw(self, doomed: Callable[[SegmentRecord], bool], *, among: Sequence[SegmentId] | None = None) -> Removal:
        """Drop every segment that `doomed` names (of those in `among`, if given), pinned or not.

        What is just being written under such a record is not published. Unless told `among` which, a tier shared with
        other processes is searched as a whole, since it may hold what was never looked up here.

        What the tier would not delete is not found again, here or by a store that is opened later, as far as that can
        be noted; if it was left before, it counts as left once more, or as removed.
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
            left = self._delete(leaving)
            tried = {record.id for record in left}
            again = [record for record in self._left_where(doomed) if among is None or record.id in among]
            found, complete = self._found(among) if self._shared else ([], True)
            unknown = [record for record in found if doomed(record)]
            more = {record.id: record for record in (*again, *unknown) if record.id not in tried}
            left += [record for record in more.values() if not self._delete_payload(record)]
            self._removed.add(left)
            self._removed.discard(more.keys() - {record.id for record in left})
            return Removal(len(dropped) + len(more) - len(left), tuple(left), complete)

    @property
    def removals_last(self) -> bool:
        """Whether a store that is opened later does not find what was removed and is still there."""
        return self._removed.lasting

    def drop(self, segment: SegmentId) -> bool:
        """Evict a segment for another reason than room, without a call of `on_evict`; False if it may not go."""
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

        What lies in a tier shared with other processes is theirs to change, so it is not compared.

        Raises:
            StoreError: an invariant does not hold (or the tier lost a payload that no `get` has missed yet).
        """
        with self._settled():
            self._index.check()
            records, busy = self._index.records, self._claims.ids()
            if not self._shared:
                known = {s: record.nbytes for s, record in records.items() if s not in busy}
                gone = busy | self._undeletable.keys()
                if {r.id: r.nbytes for r in self.tier.records() if r.id not in gone} != known:
                    raise StoreError("the tier does not hold exactly the recorded segments in their recorded sizes")
            if self._taken_bytes() > self.budget_bytes:
                raise StoreError(f"{self._taken_bytes()} bytes are held or reserved, the budget is {self.budget_bytes}")
            if not self._pins.ids() <= records.keys() | busy:
                raise StoreError("a pin names a segment that is not stored")

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """The lock, with everything in line."""
        with self._lock:
            if self._unsettled or self._claims.broken():
                self._rebuild()
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Every change happens inside one of these, and none starts inside another."""
        with self._settled():
            self._unsettled = True
            yield
            self._unsettled = False

    @contextmanager
    def _changing_alone(self, segment: SegmentId) -> Iterator[None]:
        """`_changing`, once nobody else is moving `segment`."""
        with self._lock:
            while segment in self._claims:
                with self._settled():
                    if segment in self._claims:
                        self._moved.wait(_CLAIM_POLL_S)
            with self._changing():
                yield

    def _load(self) -> None:
        """Enter what the tier holds, and evict down to the budget."""
        for record in self._found(None)[0]:
            if _is_sound(record) and record.id not in self._index.records and record.id not in self._removed:
                self._index.add(record)
        leaving: list[Claim] = []
        while self._index.used_bytes > self.budget_bytes and not self._index.records.keys() <= self._kept:
            self._evict(self._index.victim(kept=self._kept, spared=frozenset()), leaving)
        self._delete(leaving)
        self._try_again(None)

    def _rebuild(self) -> None:
        """Bring tier, index and pins in line with each other; may be interrupted and run again."""
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
        """Claim room for a payload, and withdraw what must leave for it; or the answer if it need not come in."""
        record = claim.record
        with self._changing_alone(record.id):
            old = self._index.records.get(record.id)
            if old is not None and old.token_ids != record.token_ids:
                self._count_mismatch(old)
                self._counts["rejected"] += 1
                return False
            if old is not None and (old.exact or not record.exact):
                return True  # no use of it: the request that computed it, too, counts by `note_request`
            if not self._make_room(record, leaving):
                self._counts["rejected"] += 1
                logger.debug("no room for segment %s of %d bytes", record.id, record.nbytes)
                return False
            self._claims.add(claim)
            return None

    def _make_room(self, record: SegmentRecord, leaving: list[Claim]) -> bool:
        """Evict until `record` fits in place of what is stored under its id; False, without evicting, if it cannot."""
        index, records = self._index, self._index.records
        replaced_bytes = records[record.id].nbytes if record.id in records else 0
        more_bytes = record.nbytes + self._claims.extra_bytes(records)
        if index.used_bytes - replaced_bytes + more_bytes <= self.budget_bytes:
            return True
        kept = self._pins.ids() | self._claims.ids() | self._kept
        staying_bytes = sum(records[segment].nbytes for segment in kept - {record.id} if segment in records)
        if staying_bytes + more_bytes > self.budget_bytes:
            return False
        ancestors = set(index.paths.longest_exact_prefix(record.context)) if record.exact else set()
        while index.used_bytes - replaced_bytes + more_bytes > self.budget_bytes:
            owner = self._owner_to_evict(record, more_bytes - replaced_bytes)
            self._evict(index.victim(kept=kept | {record.id}, spared=ancestors, owner=owner, above=self.above), leaving)
        return True

    def _owner_to_evict(self, record: SegmentRecord, more_bytes: int) -> str | None:
        """Who has more than its share once `record` is in: its owner first, then whoever is furthest above."""
        if self.shares is None:
            return None
        owned = Counter(self._index.owned_bytes)
        owned[record.owner] += more_bytes
        parts = {owner: nbytes / (self.budget_bytes * self.shares(owner, owned)) for owner, nbytes in owned.items()}
        return record.owner if parts[record.owner] > 1 else max(parts, key=parts.__getitem__)

    def _publish(self, claim: Claim, wanted: Callable[[], bool]) -> bool:
        """Enter a record whose payload is in the tier, unless it is unwanted by now or the tier holds too few bytes."""
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
            left = self._delete([claim])
            self._removed.add(left if claim.unwanted else [])
        return published

    def _take_back(self, claim: Claim) -> None:
        """End a write that failed. What it was to replace stays, if the tier still has that whole."""
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
            left = self._delete([claim])
            self._removed.add(left if claim.unwanted else [])

    def _evict(self, record: SegmentRecord, leaving: list[Claim]) -> None:
        self._withdraw(record, leaving, keep_room=False)
        self._counts["evictions"] += 1

    def _withdraw(self, record: SegmentRecord, leaving: list[Claim], *, keep_room: bool = True) -> None:
        """Take a record out; its payload is deleted by `_delete(leaving)`, outside the lock.

        Its room stays reserved until then, unless it goes to a payload that comes in after that. If its payload is
        just being replaced, the writer of the new one sees to what is in the tier.
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
        """Delete what leaves, and only then hand it to `on_evict`: another tier may need the room for it."""
        evicted: list[tuple[SegmentRecord, PayloadT]] = []
        if self.on_evict is not None:
            payloads = ((claim.record, self.tier.get(claim.record.id)) for claim in leaving)
            evicted = [(record, payload) for record, payload in payloads if payload is not None]
        self._delete(leaving)
        if self.on_evict is not None and evicted:
            self.on_evict(evicted)

    def _delete(self, leaving: Sequence[Claim]) -> list[SegmentRecord]:
        """Delete payloads whose records were taken out; returns those that the tier would not."""
        left = [claim.record for claim in leaving if not self._delete_payload(claim.record)]
        if leaving:
            self._end(leaving)
        return left

    def _end(self, claims: Iterable[Claim]) -> None:
        """Payloads are where they belong: threads that wait for these segments may go on."""
        with self._lock:
            for claim in claims:
                self._claims.remove(claim.record.id)
            self._moved.notify_all()

    def _delete_payload(self, record: SegmentRecord) -> bool:
        """Delete from the tier, or remember that the tier would not."""
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
        """Delete what the tier would not delete before: `at_most` so many, others each time."""
        left = self._left_where(lambda _: True)
        first = self._tried_again % len(left) if left else 0
        for record in [*left[first:], *left[:first]][:at_most]:
            self._tried_again += 1
            if self._delete_payload(record):
                self._removed.discard([record.id])

    def _left_where(self, doomed: Callable[[SegmentRecord], bool]) -> list[SegmentRecord]:
        left = {record.id: record for record in (*self._removed.records(), *tuple(self._undeletable.values()))}
        others = [record for record in left.values() if doomed(record) and record.id not in self._claims]
        return [record for record in others if record.id not in self._index.records]

    def _is_left(self, segment: SegmentId) -> bool:
        return segment in self._undeletable or segment in self._removed

    def _found(self, segments: Sequence[SegmentId] | None) -> tuple[list[SegmentRecord], bool]:
        """Records of those of `segments`, or of all, that the tier holds now, and whether it could say all of them."""
        found: list[SegmentRecord] = []
        try:
            if segments is None:
                found.extend(self.tier.records())
            elif self._finder is not None:
                found.extend(self._finder.find(segments))
        except OSError as error:
            logger.warning("the tier cannot say what it holds: %s", error)
            return found, False
        return found, True

    def _held_bytes(self, record: SegmentRecord) -> int:
        """Bytes that the tier holds of a record's payload, 0 if none.

        A shared tier is not asked: that would be a round trip, and another process may have replaced it by now.
        """
        return record.nbytes if self._shared else self.tier.nbytes(record.id)

    def _is_claimed(self, segment: SegmentId) -> bool:
        return segment in self._kept or segment in self._claims or segment in self._pins.ids()

    def _taken_bytes(self) -> int:
        """Bytes held, and reserved for what is on its way in."""
        return self._index.used_bytes + self._claims.extra_bytes(self._index.records)

    def _count_mismatch(self, record: SegmentRecord) -> None:
        logger.warning("segment %s holds other tokens than those asked for under its id; not used", record.id)
        self._counts["mismatched"] += 1


def _is_sound(record: SegmentRecord) -> bool:
    return record.nbytes > 0 and record.id == segment_id(record.chunk_id, record.context)


def _is_replaced(payload: object, record: SegmentRecord) -> bool:
    """Whether a payload says of itself that it is not, or no longer, as good as its record.

    Payloads from shared tiers have a header, read from the same bytes as the tensors; others have none.
    """
    header: Any = getattr(payload, "header", None)
    if header is None:
        return False
    found: SegmentRecord = header.record
    return (found.id, found.token_ids) != (record.id, record.token_ids) or (record.exact and not found.exact)


@contextmanager
def _given_up_on_error(claims: list[Claim]) -> Iterator[None]:
    """Whatever ends the block early, Ctrl-C included, `claims` do not outlive it."""
    try:
        yield
    except BaseException:
        for claim in claims:
            claim.given_up = True
        raise
