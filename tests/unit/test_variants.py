"""Limits on variants: the least reused goes first, off every level, and nothing that somebody still needs."""

from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Barrier

import pytest

from chunkweave.errors import UsageError
from chunkweave.store.eviction import ReuseFrequencies
from chunkweave.store.level import BackgroundWriter, Level, VariantLimits
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.types import ChunkId
from tests.unit.tier_fakes import FaultyTier, Payload, SharedFaultyTier, id_of, payload_of, record_of, reuse_of, saved


class Shelf:
    """Host and disk over fakes; every record has 10 bytes and 2 tokens, writes happen when the test says so."""

    def __init__(
        self,
        per_chunk: int | None = None,
        in_all: int | None = None,
        *,
        host_bytes: int = 1000,
        disk: SharedFaultyTier | None = None,
    ) -> None:
        self.disk = disk or SharedFaultyTier()
        self.writer: BackgroundWriter[Payload] = BackgroundWriter(threaded=False)
        host = SegmentStore(FaultyTier(), budget_bytes=host_bytes)
        disk_store = SegmentStore(self.disk, budget_bytes=1000, shared=True)
        levels = [Level("host", host), Level("disk", disk_store, background=True)]
        self.store: TieredStore[Payload] = TieredStore(
            levels, limits=VariantLimits(per_chunk, in_all), writer=self.writer
        )

    def put(self, *paths: str, exact: bool = False) -> list[bool]:
        done = []
        for path in paths:
            record = record_of(path, exact=exact)
            done.append(self.store.insert(record, payload_of(record)))
            self.store.check()
        return done

    def held(self, chunk: str = "") -> set[str]:
        """Paths of what is anywhere, on disk and in the queue included."""
        self.store.flush()
        records = [*self.store.records(), *self.disk.records()]
        return {"".join((*r.context, r.chunk_id)) for r in records if r.chunk_id == (chunk or r.chunk_id)}


# --- f_r


def test_each_reuse_adds_one_over_the_impact_and_no_more_than_the_tokens():
    record = record_of("AB")
    frequencies = ReuseFrequencies()
    assert frequencies.of(record.id) == 0.0
    frequencies.add(record.id, saved(0.8))
    assert frequencies.of(record.id) == pytest.approx(1 / 0.8)
    frequencies.add(record.id, saved(0.0))
    assert frequencies.of(record.id) == pytest.approx(1 / 0.8 + 2), "two tokens"
    frequencies.start(record.id)
    assert frequencies.of(record.id) == 0.0


def test_the_least_first_and_of_equal_ones_the_longest_unheard_of():
    a, b, c, d = (record_of(path) for path in ("A", "B", "C", "D"))
    frequencies = ReuseFrequencies()
    for record in (a, b, c):
        frequencies.start(record.id)
    frequencies.add(a.id, saved(1.0))
    assert frequencies.least_first([a, c, d, b]) == [d, b, c, a]
    frequencies.add(b.id, saved(1.0))
    assert frequencies.least_first([a, b, c]) == [c, a, b]


def test_what_was_heard_of_longest_ago_is_forgotten():
    a, b, c = (record_of(path) for path in ("A", "B", "C"))
    frequencies = ReuseFrequencies(capacity=2)
    for record in (a, b, a, c):
        frequencies.add(record.id, saved(1.0))
    assert [frequencies.of(record.id) for record in (a, b, c)] == [2.0, 0.0, 1.0]


def test_limits_below_one_are_refused():
    for limits in ({"per_chunk": 0}, {"in_all": -1}):
        with pytest.raises(UsageError, match="at least one"):
            VariantLimits(**limits)


# --- per chunk


def test_without_limits_everything_stays():
    shelf = Shelf()
    shelf.put(*(f"{context}X" for context in "ABCDEFGH"))
    assert len(shelf.held("X")) == 8


def test_the_least_reused_variant_of_the_chunk_goes_off_every_level():
    shelf = Shelf(per_chunk=2)
    shelf.put("AX", "BX", "Y")
    shelf.store.flush()
    shelf.store.note_request(reuse_of("AX", 0.5))
    assert shelf.put("CX") == [True]
    assert shelf.held("X") == {"AX", "CX"}
    assert shelf.held() == {"AX", "CX", "Y"}, "other chunks are not concerned"
    assert shelf.store.stats.variants_dropped == 1


def test_reuse_that_saved_more_counts_more():
    shelf = Shelf(per_chunk=2)
    shelf.put("AX", "BX")
    for _ in range(2):
        shelf.store.note_request(reuse_of("AX", 1.0))
    shelf.store.note_request(reuse_of("BX", 0.5))
    shelf.store.note_request(reuse_of("BX", 0.9))
    shelf.put("CX")
    assert shelf.held("X") == {"BX", "CX"}, "2 against 2 + 1/.9"


def test_the_new_one_never_goes_and_is_next_if_it_stays_unused():
    shelf = Shelf(per_chunk=2)
    shelf.put("AX", "BX")
    for path in ("AX", "BX"):
        shelf.store.note_request(reuse_of(path, 1.0))
    shelf.store.note_request(reuse_of("BX", 1.0))
    shelf.put("CX", "DX")
    assert shelf.held("X") == {"BX", "DX"}, "AX went for CX, which went unused for DX"


def test_what_is_queued_counts_and_does_not_come_back():
    shelf = Shelf(per_chunk=1, host_bytes=10)
    shelf.put("AX", "Y")
    assert shelf.store.record(id_of("AX")) is None, "evicted by Y, still to be written"
    shelf.put("BX")
    assert shelf.held("X") == {"BX"}


def test_storing_again_what_is_held_drops_nothing():
    shelf = Shelf(per_chunk=2)
    shelf.put("AX", "BX")
    assert shelf.put("AX") == [True]
    assert shelf.put("AX", exact=True) == [True], "and exact replaces inexact"
    assert shelf.held("X") == {"AX", "BX"}


def test_a_found_folder_over_the_limit_shrinks_with_the_next_one():
    full = Shelf()
    full.put("AX", "BX", "CX", "DX")
    full.store.flush()
    shelf = Shelf(per_chunk=2, disk=full.disk)
    assert len(shelf.held("X")) == 4
    shelf.put("EX")
    assert len(shelf.held("X")) == 2
    assert "EX" in shelf.held("X")


# --- what may not go


def test_leased_variants_stay_and_the_new_one_is_not_stored_if_all_are():
    shelf = Shelf(per_chunk=2)
    shelf.put("AX", "BX")
    with shelf.store.lease([id_of("AX")]):
        shelf.put("CX")
        assert shelf.held("X") == {"AX", "CX"}
    lease = shelf.store.lease([id_of("AX"), id_of("CX")])
    assert shelf.put("DX") == [False]
    assert shelf.store.stats.rejected == 1
    lease.release()
    assert shelf.put("DX") == [True]


def test_nodes_of_the_path_index_are_no_variants():
    shelf = Shelf(per_chunk=1)
    paths = ("X", "A", "AX", "B", "BX", "ABX", "AB")
    shelf.put("CX")
    shelf.put(*paths[:5], *reversed(paths[5:]), exact=True)
    assert shelf.held("X") == {"X", "AX", "BX", "ABX", "CX"}, "four exact paths end in X, and one variant is left"
    shelf.put("DX")
    assert shelf.held("X") == {"X", "AX", "BX", "ABX", "DX"}
    assert shelf.store.stats.variants_dropped == 1


def test_an_exact_segment_without_its_ancestors_is_a_variant():
    shelf = Shelf(per_chunk=1)
    shelf.put("AX", exact=True)
    shelf.put("BX")
    assert shelf.held("X") == {"BX"}, "nothing can run over AX while A is not there"
    shelf.put("A", "AX", exact=True)
    assert shelf.held("X") == {"AX", "BX"}
    shelf.store.remove(id_of("A"))
    assert shelf.held("X") == {"AX", "BX"}, "it left the path index, and counts from the next one on"
    shelf.store.note_request(reuse_of("BX", 0.5))
    shelf.put("CX")
    assert shelf.held("X") == {"CX"}


def test_a_path_may_run_over_several_levels():
    shelf = Shelf(per_chunk=1, host_bytes=10)
    shelf.put("A", exact=True)
    shelf.store.flush()
    shelf.put("AX", exact=True)
    shelf.put("BX")
    assert shelf.held("X") == {"AX", "BX"}, "A is on disk, AX was in memory when BX came"


def test_in_all_inner_nodes_of_the_path_index_go_last():
    shelf = Shelf(in_all=2)
    shelf.put("X", "XY", exact=True)
    shelf.store.note_request(reuse_of("XY", 0.1))
    shelf.put("BZ")
    assert shelf.held() == {"X", "BZ"}, "XY continues X, so that it goes though it was reused"
    shelf.store.note_request(reuse_of("BZ", 1.0))
    shelf.put("CZ")
    assert shelf.held() == {"BZ", "CZ"}


# --- in all, and with byte budgets


def test_in_all_the_least_reused_of_any_chunk_goes():
    shelf = Shelf(in_all=3)
    shelf.put("A", "B", "C")
    for path in "AC":
        shelf.store.note_request(reuse_of(path, 1.0))
    shelf.put("D")
    assert shelf.held() == {"A", "C", "D"}


def test_what_the_byte_budget_evicts_is_forgotten():
    host = Level("host", SegmentStore(FaultyTier(), budget_bytes=20))
    store: TieredStore[Payload] = TieredStore([host], limits=VariantLimits(per_chunk=2))

    def put(path: str) -> None:
        assert store.insert(record_of(path), payload_of(record_of(path)))

    put("AX")
    store.note_request(reuse_of("AX", 0.1))
    put("Y")
    put("Z")
    assert id_of("AX") not in store
    put("BX")
    put("AX")
    store.note_request(reuse_of("BX", 1.0))
    put("CX")
    assert {id_of("BX"), id_of("CX")} == {record.id for record in store.records()}, "AX began anew"


def test_the_limit_makes_the_room_that_the_budget_then_need_not():
    shelf = Shelf(per_chunk=2, host_bytes=30)
    shelf.put("Y", "AX", "BX")
    shelf.put("CX")
    assert shelf.store.tier_of(id_of("Y")) == "host", "LRU would have evicted it"
    assert shelf.store.stats.levels["host"].evictions == 0


def test_random_stores_and_uses_keep_to_the_limits():
    rng = Random(3)
    shelf = Shelf(per_chunk=3, in_all=8, host_bytes=60)
    leases = []
    for _ in range(150):
        path = "".join(rng.sample("ABCDEF", rng.randint(1, 3)))
        shelf.put(path, exact=rng.random() < 0.5)
        if rng.random() < 0.5:
            shelf.store.note_request(reuse_of(path, rng.random()))
        if rng.random() < 0.2:
            leases.append(shelf.store.lease([id_of(path)]))
        if rng.random() < 0.3 and leases:
            leases.pop(0).release()
        if rng.random() < 0.3:
            shelf.writer.write_one()
        held = {r.id: r for r in (*shelf.store.records(), *shelf.writer.records())}
        assert len(held) <= 8
        for chunk in "ABCDEF":
            assert sum(record.chunk_id == chunk and not record.exact for record in held.values()) <= 3
        for lease in leases:
            assert all(shelf.store.get(segment) is not None for segment in lease.ids)
    assert shelf.store.stats.variants_dropped > 20


def test_threads_together_keep_to_the_limit():
    shelf = Shelf(per_chunk=2)
    start = Barrier(8)

    def store(context: str) -> None:
        start.wait()
        for other in "QRSTUV":
            record = record_of(f"{context}{other}X", exact=False)
            shelf.store.insert(record, payload_of(record))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store, "ABCDEFGH"))
    assert len(shelf.held("X")) == 2
    shelf.store.check()


# --- statistics


def test_the_histogram_of_variants():
    shelf = Shelf()
    shelf.put("AX", "BX", "CX", "Y", "AZ", "BZ", "A")
    stats = shelf.store.stats
    assert stats.variants == {1: 2, 2: 1, 3: 1}, "A and Y, Z, X"
    assert (stats.chunks, stats.segments) == (4, 7)
    assert sum(count * chunks for count, chunks in stats.variants.items()) == stats.segments


def test_reuse_of_the_unknown_is_ignored():
    shelf = Shelf(per_chunk=1)
    shelf.store.note_request(reuse_of("AX", 0.5))
    shelf.put("AX", "BX")
    assert shelf.held("X") == {"BX"}
    assert shelf.store.remove_where(lambda record: record.chunk_id == ChunkId("X")) > 0
