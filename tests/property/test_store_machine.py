"""The store against a plain dict: any interleaving of inserts, hits, pins, evictions, removals and losses."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chunkweave.errors import StoreError
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.index import Lease, path_request_of
from chunkweave.store.records import SegmentRecord
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId, SegmentId
from tests.unit.tier_fakes import id_of

BUDGET_BYTES = 60


@dataclass(frozen=True, slots=True)
class Payload:
    """One without a header, as memory has them."""

    nbytes: int


# Few paths, so that different rules meet the same segments: all of up to three chunks from two, and some more.
chunks = st.sampled_from("ABC")
paths = st.text("AB", min_size=1, max_size=3) | st.sampled_from(["C", "CA", "AC", "ABAB"])
deep_paths = st.text("AB", min_size=3, max_size=4)
sizes = st.integers(3, 21).map(lambda nbytes: nbytes if nbytes < 21 else BUDGET_BYTES + 1)


def _tokens(chunk: str, *, collided: bool = False) -> tuple[int, ...]:
    return (ord(chunk), int(collided))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tier: HostTier[Payload] = HostTier()
        self.store: SegmentStore[Payload] = SegmentStore(self.tier, budget_bytes=BUDGET_BYTES)
        self.model: dict[SegmentId, tuple[SegmentRecord, Payload]] = {}
        self.lost: set[SegmentId] = set()
        self.leases: list[tuple[Lease, set[SegmentId]]] = []

    def pinned(self) -> set[SegmentId]:
        return set().union(*(ids for _, ids in self.leases))

    def forget(self, segment: SegmentId) -> None:
        self.model.pop(segment, None)
        self.lost.discard(segment)
        for _, ids in self.leases:
            ids.discard(segment)

    def used_bytes(self) -> int:
        return sum(record.nbytes for record, _ in self.model.values())

    @initialize(path=deep_paths, others=st.lists(paths, max_size=5))
    def warm(self, path: str, others: list[str]) -> None:
        for stop in range(1, len(path) + 1):
            self.insert(path[:stop], True, 8, False)
        for other in others:
            self.insert(other, False, 8, False)

    @rule(path=paths, exact=st.booleans(), nbytes=sizes, collided=st.sampled_from([False] * 6 + [True]))
    def insert(self, path: str, exact: bool, nbytes: int, collided: bool) -> None:
        tokens = _tokens(path[-1], collided=collided)
        context = tuple(map(ChunkId, path[:-1]))
        record = SegmentRecord.of(ChunkId(path[-1]), context, tokens, exact=exact, nbytes=nbytes)
        payload = Payload(nbytes)
        inserted = self.store.insert(record, payload)
        if record.id in self.lost:
            self.forget(record.id)
        old = self.model.get(record.id)
        if old is not None and old[0].token_ids != tokens:
            assert not inserted
        elif old is not None and (old[0].exact or not exact):
            assert inserted
        else:
            pinned_bytes = sum(self.model[segment][0].nbytes for segment in self.pinned() - {record.id})
            assert inserted == (nbytes + pinned_bytes <= BUDGET_BYTES)
            if inserted:
                self.stored(record, payload)
        assert {found.id for found in self.store.records()} == set(self.model)

    def stored(self, record: SegmentRecord, payload: Payload) -> None:
        """Follow the store's choice of what to evict, having checked that it was allowed and needed."""
        self.model.pop(record.id, None)
        before_bytes = self.used_bytes()
        held = {found.id for found in self.store.records()}
        evicted = {segment: self.model[segment][0] for segment in set(self.model) - held}
        assert not evicted.keys() & self.pinned()
        for segment in evicted:
            self.forget(segment)
        self.model[record.id] = (record, payload)
        if evicted:
            assert before_bytes + record.nbytes > BUDGET_BYTES
            assert self.used_bytes() + max(gone.nbytes for gone in evicted.values()) > BUDGET_BYTES

    @rule(path=paths | deep_paths, collided=st.sampled_from([None, None, 0, 1]), system=st.booleans())
    def lookup(self, path: str, collided: int | None, system: bool) -> None:
        found = self.store.lookup(self.prompt(path, collided, system)).parts[1:-1]
        on_path = True
        for i, part in enumerate(found):
            stored = [record for record, _ in self.model.values() if record.chunk_id == path[i]]
            matching = {record.id: record for record in stored if record.token_ids == part.part.token_ids}
            assert {record.id: record for record in part.variants} == matching
            assert len(part.variants) == len(matching)
            expected = matching.get(id_of(path[: i + 1]))
            on_path = on_path and expected is not None and expected.exact
            assert part.exact == (expected if on_path else None)

    def prompt(self, path: str, collided: int | None, system: bool) -> Prompt:
        parts = [
            PromptPart(
                PartKind.SYSTEM if system and i == 0 else PartKind.CHUNK,
                _tokens(chunk, collided=i == collided),
                ChunkId(chunk),
            )
            for i, chunk in enumerate(path)
        ]
        return Prompt((PromptPart(PartKind.START, (0,)), *parts, PromptPart(PartKind.QUESTION, (1,))))

    @rule(path=paths | deep_paths)
    def lease_what_a_lookup_found(self, path: str) -> None:
        lookup = self.store.lookup(self.prompt(path, None, False))
        named = {record.id for part in lookup.parts for record in part.variants}
        lease = self.store.lease(lookup)
        self.store.note_request(path_request_of(lookup), lookup.segments())
        assert set(lease.ids) == named
        self.leases.append((lease, named))

    @rule(wanted=st.lists(paths, max_size=4))
    def lease_ids(self, wanted: list[str]) -> None:
        lease = self.store.lease(id_of(path) for path in wanted)
        expected = {id_of(path) for path in wanted} & set(self.model)
        assert set(lease.ids) == expected
        self.leases.append((lease, expected))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), abandon=st.booleans())
    def release(self, data: st.DataObject, abandon: bool) -> None:
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if not abandon:
            lease.release()
            lease.release()
            assert lease.ids == ()

    @rule(path=paths)
    def get(self, path: str) -> None:
        segment = id_of(path)
        payload = self.store.get(segment)
        if segment in self.model and segment not in self.lost:
            assert payload is self.model[segment][1]
        else:
            assert payload is None
            self.forget(segment)

    @rule(path=paths)
    def remove(self, path: str) -> None:
        assert (id_of(path) in self.store) == (id_of(path) in self.model)
        assert self.store.remove(id_of(path)) == (id_of(path) in self.model)
        self.forget(id_of(path))

    @rule(chunk=chunks)
    def discard_chunk(self, chunk: str) -> None:
        gone = [segment for segment, (record, _) in self.model.items() if record.chunk_id == chunk]
        assert self.store.remove_where(lambda record: record.chunk_id == ChunkId(chunk)) == len(gone)
        for segment in gone:
            self.forget(segment)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def the_tier_loses_a_payload(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(sorted(self.model)))
        self.tier.delete(segment)
        self.lost.add(segment)

    @precondition(lambda self: len(self.model) > 4)
    @rule()
    def clear(self) -> None:
        self.store.clear()
        for segment in list(self.model):
            self.forget(segment)

    @invariant()
    def the_store_checks_unless_a_payload_is_missing(self) -> None:
        if self.lost:
            with pytest.raises(StoreError):
                self.store.check()
        else:
            self.store.check()

    @invariant()
    def bytes_and_records_are_those_of_the_model(self) -> None:
        assert {record.id: record for record in self.store.records()} == {
            segment: record for segment, (record, _) in self.model.items()
        }
        stats = self.store.stats
        assert self.store.used_bytes == stats.bytes == self.used_bytes() <= BUDGET_BYTES
        assert stats.segments == len(self.store) == len(self.model)
        assert stats.chunks == len({record.chunk_id for record, _ in self.model.values()})
        for lease, ids in self.leases:
            assert set(lease.ids) == ids


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
