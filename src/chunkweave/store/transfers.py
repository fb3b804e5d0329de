"""Payloads on their way into a store's tier and out of it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic

from chunkweave.store.guarded_tier import GuardedTier
from chunkweave.store.ledger import Ledger
from chunkweave.store.records import SegmentRecord
from chunkweave.store.tier import PayloadT
from chunkweave.store.under_way import Claim
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)

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
