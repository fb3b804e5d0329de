"""The hierarchy under any interleaving of uses, moves, removals and failures: never a wrong payload, always `check`."""

from contextlib import nullcontext, suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chunkweave.errors import NotRemovedError
from chunkweave.store.index import RequestUse, TieredLease
from chunkweave.store.level import BackgroundWriter, Level, VariantLimits
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.types import ChunkId, SegmentId
from tests.unit.tier_fakes import (
    Clock,
    FaultyTier,
    Payload,
    SharedFaultyTier,
    id_of,
    payload_of,
    prompt_of,
    record_of,
    reuse_of,
)

HOST_BYTES, DISK_BYTES, REMOTE_BYTES = 40, 60, 90
TTL_S = 50.0

paths = st.text("AB", min_size=1, max_size=3) | st.sampled_from(["C", "CA", "AC", "ABAB"])
prompts = st.text("AB", min_size=3, max_size=4) | st.sampled_from(["CAB", "BAC"])
sizes = st.integers(4, 16)


class TieredMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.host, self.disk, self.remote = FaultyTier(), SharedFaultyTier(0.5), SharedFaultyTier()
        self.leases: list[TieredLease] = []
        self.born_s: dict[SegmentId, float] = {}
        self.others: set[SegmentId] = set()
        """What another process put into the remote tier: nobody says when, so it is as old as its first sight."""
        self.removed: set[SegmentId] = set()
        self.ever_broken = False

    @initialize(
        admission=st.integers(1, 2),
        ttl=st.booleans(),
        max_items=st.integers(1, 6),
        limits=st.builds(VariantLimits, st.sampled_from([None, 1, 2]), st.sampled_from([None, 5])),
    )
    def open(self, admission: int, ttl: bool, max_items: int, limits: VariantLimits) -> None:
        self.ttl = ttl
        self.writer: BackgroundWriter[Payload] = BackgroundWriter(max_items=max_items, max_bytes=60, threaded=False)
        host, disk, remote = (
            SegmentStore(tier, budget_bytes=budget_bytes, shared=tier is not self.host)
            for tier, budget_bytes in ((self.host, HOST_BYTES), (self.disk, DISK_BYTES), (self.remote, REMOTE_BYTES))
        )
        levels = [
            Level("host", host, clock=self.clock),
            Level("disk", disk, background=True, patience=2, pause_s=5.0, clock=self.clock),
            Level("remote", remote, background=True, patience=2, pause_s=5.0, clock=self.clock),
        ]
        self.store: TieredStore[Payload] = TieredStore(
            levels,
            admission=admission,
            ttl_s=TTL_S if ttl else None,
            limits=limits,
            clock=self.clock,
            writer=self.writer,
        )
        self.follower = self.store.follow()
        self.told: set[ChunkId | SegmentId] = set()

    @rule(limit=st.sampled_from([1, 2, None]))
    def take_news(self, limit: int | None) -> None:
        news = self.follower.take(limit)
        assert news.added.isdisjoint(self.told)
        assert news.removed <= self.told
        assert limit is None or len(news.added) + len(news.removed) <= limit
        self.told = (self.told | news.added) - news.removed
        if not news.more:
            records = [record for level in self.store.levels for record in level.store.records()]
            assert self.told == {one.chunk_id for one in records} | {one.id for one in records if one.exact}

    @rule(path=paths, exact=st.booleans(), nbytes=sizes)
    def insert(self, path: str, exact: bool, nbytes: int) -> None:
        record = record_of(path, exact=exact, nbytes=nbytes)
        if self.store.insert(record, payload_of(record)):
            self.removed.discard(record.id)
            if record.id not in self.others:
                self.born_s[record.id] = self.clock()

    @rule(path=prompts, reused=st.integers(0, 3))
    def answer(self, path: str, reused: int) -> None:
        """What a request stores: every part that was not found, exact up to the first that was reused."""
        found = self.store.lookup(prompt_of(path)).parts[1:-1]
        for i, part in enumerate(found):
            if part.exact is None:
                self.insert(path[: i + 1], i < reused, 8)

    @rule(path=prompts, promote=st.booleans(), keep=st.sampled_from([False, False, True]))
    def use(self, path: str, promote: bool, keep: bool) -> None:
        lookup = self.store.lookup(prompt_of(path))
        lease = self.store.lease(lookup)
        self.store.note_request(RequestUse.of(lookup, lookup.segments()))
        for part in lookup.parts:
            wanted = ([part.exact] if part.exact is not None else []) + list(part.variants)
            for record in wanted:
                self.read(record, must_be_exact=record is part.exact, promote=promote)
        if keep:
            self.leases.append(lease)
        else:
            lease.release()

    def read(self, record: SegmentRecord, *, must_be_exact: bool, promote: bool) -> None:
        assert record.id not in self.removed, "what was removed is not found"
        if self.ttl and record.id in self.born_s:
            assert self.clock() - self.born_s[record.id] < TTL_S, "nor what is too old"
        tier = self.store.tier_of(record.id)
        payload = self.store.get(record.id, exact=must_be_exact)
        if payload is None:
            return
        assert payload.segment == record.id
        assert payload.exact or not must_be_exact
        if promote and tier != "host" and self.store.promote(record.id, payload):
            assert self.store.tier_of(record.id) == "host"

    @rule(path=paths, impact=st.floats(0, 1))
    def note_reuse(self, path: str, impact: float) -> None:
        self.store.note_request(reuse_of(path, impact))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), abandon=st.booleans())
    def release(self, data: st.DataObject, abandon: bool) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if not abandon:
            lease.release()
            assert lease.ids == ()

    @rule(times=st.integers(1, 3))
    def the_writer_works(self, times: int) -> None:
        for _ in range(times):
            self.writer.write_one()

    @rule()
    def flush(self) -> None:
        assert self.store.flush(1.0)

    @rule(path=prompts)
    def remove(self, path: str) -> None:
        self.store.remove(id_of(path))
        self.gone({id_of(path)})

    @precondition(lambda self: len(self.store.records()) > 4)
    @rule(chunk=st.sampled_from("ABC"), by_source=st.booleans())
    def discard(self, chunk: str, by_source: bool) -> None:
        ids = self.ids_of(chunk)
        if by_source:
            self.store.remove_where(lambda record: record.document == chunk)
        else:
            self.store.remove_where(lambda record: record.chunk_id == ChunkId(chunk))
        self.gone(ids)

    def ids_of(self, chunk: str) -> set[SegmentId]:
        return {segment for segment, record in self.everything().items() if record.chunk_id == chunk}

    @precondition(lambda self: len(self.store.records()) > 6)
    @rule()
    def clear(self) -> None:
        ids = set(self.everything())
        with suppress(NotRemovedError) if self.ever_broken else nullcontext():
            self.store.clear()
        self.gone(ids)

    def everything(self) -> dict[SegmentId, SegmentRecord]:
        held = {write.record.id: write.record for write in self.writer._all()}
        for tier in (self.host, self.disk, self.remote):
            held |= {segment: record for segment, (record, _) in tier._held.items()}
        return held

    def gone(self, ids: set[SegmentId]) -> None:
        assert not ids & {record.id for record in self.store.records()}
        assert not ids & {write.record.id for write in self.writer._all()}
        if not (self.disk.broken or self.remote.broken):
            assert not ids & self.everything().keys() or self.ever_broken
            self.removed |= ids
            self.others -= ids

    @rule(which=st.sampled_from(["disk", "remote"]), mode=st.sampled_from(["broken", "late", "works", "works"]))
    def a_tier_changes(self, which: str, mode: str) -> None:
        tier: FaultyTier = getattr(self, which)
        tier.broken, tier.late = mode == "broken", mode == "late"
        self.ever_broken = self.ever_broken or mode != "works"

    @rule(which=st.sampled_from(["disk", "remote"]), path=paths)
    def a_tier_loses_a_payload(self, which: str, path: str) -> None:
        getattr(self, which).lose(id_of(path))

    @rule(path=paths, exact=st.booleans())
    def another_process_stores(self, path: str, exact: bool) -> None:
        record = record_of(path, exact=exact)
        held = self.remote.payloads().get(record.id)
        if held is None or (exact and not held.exact):
            self.remote._held[record.id] = (record, payload_of(record))
            self.removed.discard(record.id)
            self.others.add(record.id)
            self.born_s.pop(record.id, None)

    @rule(seconds=st.sampled_from([1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def expire(self) -> None:
        self.store.expire()
        if self.ttl:
            for record in self.store.records():
                assert self.clock() - self.born_s.get(record.id, self.clock()) < TTL_S

    @invariant()
    def it_checks(self) -> None:
        self.store.check()
        for level in self.store.levels:
            assert level.store.used_bytes <= level.store.budget_bytes
            held = level.store.tier.payloads()  # type: ignore[attr-defined]
            for record in level.store.records():
                payload = held.get(record.id)
                assert payload is None or payload.segment == record.id
        assert sum(payload.nbytes for payload in self.host.payloads().values()) <= HOST_BYTES
        if not self.ever_broken:
            assert sum(map(self.disk.nbytes, self.disk.payloads())) <= DISK_BYTES
        assert sum(write.nbytes for write in self.writer._all()) <= 60

    @invariant()
    def what_is_pinned_stays(self) -> None:
        for lease in self.leases:
            for segment in lease.ids:
                assert any(segment in level.store for level in self.store.levels)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(
    max_examples=350,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
