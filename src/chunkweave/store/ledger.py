"""Which segments a store has, who uses them and which are being moved: all that its one lock guards."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Condition, RLock
from typing import Generic

from chunkweave.errors import StoreError
from chunkweave.store.catalog import Catalog
from chunkweave.store.eviction import EvictionPolicy
from chunkweave.store.guarded_tier import GuardedTier
from chunkweave.store.pins import Pins
from chunkweave.store.records import SegmentRecord
from chunkweave.store.stats import StoreStats
from chunkweave.store.tier import PayloadT
from chunkweave.store.under_way import Claim, UnderWay
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)

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
