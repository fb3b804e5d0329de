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


NODES = ["CX", "!X", "!A", "!AX", "!B", "!BX", "!AB", "!ABX"]


@pytest.mark.parametrize(
    ("limits", "steps", "left"),
    [
        ({}, [f"{context}X" for context in "ABCDEFGH"], {f"{context}X" for context in "ABCDEFGH"}),
        ({"per_chunk": 2}, ["AX", "BX", "Y", ("AX", 0.5), "CX"], {"AX", "CX", "Y"}),
        ({"per_chunk": 2}, ["AX", "BX", ("AX", 1), ("AX", 1), ("BX", 0.5), ("BX", 0.9), "CX"], {"BX", "CX"}),
        ({"per_chunk": 2}, ["AX", "BX", ("AX", 1), ("BX", 1), ("BX", 1), "CX", "DX"], {"BX", "DX"}),
        ({"per_chunk": 1, "host_bytes": 10}, ["AX", "Y", "BX"], {"Y", "BX"}),
        ({"per_chunk": 2}, ["AX", "BX", "AX", "!AX"], {"AX", "BX"}),
        ({"per_chunk": 1}, NODES, {"X", "A", "AX", "B", "BX", "AB", "ABX", "CX"}),
        ({"per_chunk": 1}, [*NODES, "DX"], {"X", "A", "AX", "B", "BX", "AB", "ABX", "DX"}),
        ({"per_chunk": 1}, [("AX", 0.5), "AX", "BX"], {"BX"}),
        ({"in_all": 3}, ["A", "B", "C", ("A", 1), ("C", 1), "D"], {"A", "C", "D"}),
        ({"in_all": 2}, ["!X", "!XY", ("XY", 0.1), "BZ"], {"X", "BZ"}),
        ({"in_all": 2}, ["!X", "!XY", ("XY", 0.1), "BZ", ("BZ", 1), "CZ"], {"BZ", "CZ"}),
    ],
    ids=[
        "without limits everything stays",
        "the least reused variant of the chunk goes off every level",
        "reuse that saved more counts more: 2 against 2 + 1/.9",
        "the new one never goes, and is next if it stays unused",
        "what is queued counts and does not come back",
        "storing again what is held drops nothing",
        "nodes of the path index are no variants",
        "but what is beside them is one",
        "reuse of the unknown is ignored",
        "in all the least reused of any chunk goes",
        "in all inner nodes of the path index go last",
        "and then they go",
    ],
)
def test_what_a_limit_drops(limits: dict[str, int], steps: list, left: set[str]):
    """Steps: a path comes (after `!` exact), or is reused with an impact."""
    shelf = Shelf(**limits)
    for step in steps:
        if isinstance(step, tuple):
            shelf.store.note_request(reuse_of(*step))
        else:
            shelf.put(step.lstrip("!"), exact=step.startswith("!"))
    assert shelf.held() == left
    paths = {step.lstrip("!") for step in steps if isinstance(step, str)}
    assert shelf.store.stats.variants_dropped == len(paths) - len(left)


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


# --- in all, and with byte budgets


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
