"""Removing a chunk from a store with means: what has read it goes too, on every level, also where a copy cannot."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from chunkweave.errors import NotRemovedError
from chunkweave.store.records import ANYTHING, SegmentRecord
from chunkweave.store.shared_folder import REMOVED_FILE, Tombstones
from chunkweave.store.store import TieredStore
from chunkweave.types import ChunkId, SegmentId
from tests.unit.test_store_tiered import OnDisk, Stack
from tests.unit.tier_fakes import Payload, payload_of, record_of

HEX = {letter: ChunkId(letter * 32) for letter in "abcdef"}
A, B, C, D, E, F = HEX.values()


def plain(chunk: ChunkId, *context: ChunkId, exact: bool = True, read: Sequence[ChunkId] = ()) -> SegmentRecord:
    return SegmentRecord.of(chunk, context, (1, 2), exact=exact, nbytes=10, read=read)


def mean(chunk: ChunkId, *contexts: Sequence[ChunkId], read: Sequence[ChunkId] = ()) -> SegmentRecord:
    return plain(chunk).mean_over(map(tuple, contexts), nbytes=10, attention=None, read=read)


STORED = {
    "a mean that read D": mean(A, (B,), (C, D)),
    "one that was woven from what read D": mean(C, (A,), (B,), read=[D]),
    "one that did not": mean(B, (A,), (C,)),
    "D": plain(D),
    "D behind others": plain(D, A, B),
    "D's mean": mean(D, (A,), (C,)),
    "behind D": plain(E, D),
    "woven from what read D": plain(E, A, exact=False, read=[D, F]),
    "woven from what did not": plain(E, B, exact=False, read=[F]),
    "who knows what it read": plain(F, B, exact=False, read=[ANYTHING]),
}


def put(store: TieredStore[Payload], *records: SegmentRecord) -> None:
    for record in records:
        assert store.insert(record, payload_of(record))
    store.flush()
    store.check()


def left(store: TieredStore[Payload]) -> set[str]:
    store.check()
    names = {record.id: name for name, record in STORED.items()}
    return {names[record.id] for record in store.records()}


def test_all_that_has_read_a_chunk_is_removed_with_it_and_nothing_else():
    stack = Stack(host_bytes=1000, disk_bytes=1000)
    put(stack.store, *STORED.values())
    assert stack.store.forget_chunks([D]) == 3 * 8, "on three levels"
    assert left(stack.store) == {"one that did not", "woven from what did not"}
    assert stack.store.forget_chunks([D]) == 0


def test_a_chunk_that_nothing_has_read_takes_what_may_have_read_anything():
    stack = Stack(host_bytes=1000, disk_bytes=1000)
    put(stack.store, *STORED.values())
    assert stack.store.forget_chunks([ChunkId("0" * 32)]) == 3
    assert left(stack.store) == STORED.keys() - {"who knows what it read"}


def test_a_mean_that_was_pushed_out_of_memory_is_found_below():
    stack = Stack(host_bytes=10, disk_bytes=1000)
    put(stack.store, *STORED.values())
    assert stack.store.forget_chunks([D]) > 8
    assert left(stack.store) == {"one that did not", "woven from what did not"}


@pytest.mark.parametrize("gone", [A, D, F])
def test_a_mean_that_cannot_be_removed_is_not_used_any_more_also_by_another_process(tmp_path: Path, gone: ChunkId):
    """A itself, a chunk of its contexts, and one that these were woven from."""
    stack, one = OnDisk(tmp_path), mean(A, (B,), (C, D), read=[F])
    store = stack.open()
    put(store, one, STORED["one that did not"] if gone is not A else plain(E))
    for copies in (1, 0):
        with pytest.raises(NotRemovedError) as error:
            store.forget_chunks([gone])
        assert (error.value.removed, error.value.left, error.value.lasting) == (copies, 1, True)
    again = stack.open()
    for opened in (store, again):
        assert opened.record(one.id) is None
        assert opened.get(one.id) is None
        assert opened.stats.undeletable == 1
    stack.disk.stuck = False
    assert again.forget_chunks([gone]) == 1
    assert stack.open().stats.undeletable == 0
    assert one.id not in stack.disk.payloads()


def test_what_else_a_copy_that_is_left_has_read_is_not_said_to_be_gone(tmp_path: Path):
    """It was to go for D; F, which went into it too, is removed now: that copy is still there."""
    stack, woven = OnDisk(tmp_path), plain(E, A, exact=False, read=[D, F])
    store = stack.open()
    put(store, mean(A, (B,), (C, D), read=[F]), woven)
    with pytest.raises(NotRemovedError):
        store.forget_chunks([D])
    for opened in (store, stack.open()):
        with pytest.raises(NotRemovedError) as error:
            opened.forget_chunks([F])
        assert error.value.left == 2
        assert opened.forget_chunks([ChunkId("0" * 32)]) == 0


def test_a_removed_mean_is_noted_by_ids_alone(tmp_path: Path):
    one, woven = mean(A, (B,), (C, D), read=[F]), plain(E, A, exact=False, read=[D])
    for record in (one, woven):
        removed = Tombstones(tmp_path, "model", "disk")
        removed.add([replace(record, source="contract.md")])
        assert record.id in Tombstones(tmp_path, "model", "disk")
    found = {record.id: record for record in Tombstones(tmp_path, "model", "disk").records()}
    assert {segment: record.chunk_id for segment, record in found.items()} == {one.id: A, woven.id: E}
    assert found[one.id].sources == one.sources
    assert found[woven.id].sources == woven.sources
    assert "contract" not in (tmp_path / REMOVED_FILE).read_text()
    removed.discard([one.id, woven.id])
    assert Tombstones(tmp_path, "model", "disk").records() == []


def test_what_an_older_version_noted_is_read(tmp_path: Path):
    exact = record_of("AB")
    paths = {exact.id: ["A", "B"]}
    whole = {"format": 1, "removed": {"model": {"disk": paths}}}
    (tmp_path / REMOVED_FILE).write_text(json.dumps(whole))
    (found,) = Tombstones(tmp_path, "model", "disk").records()
    assert (found.id, found.chunk_id, found.context) == (exact.id, ChunkId("B"), (ChunkId("A"),))
    Tombstones(tmp_path, "model", "disk").discard([SegmentId(exact.id)])
    Tombstones(tmp_path, "model", "disk").add([exact])
    assert json.loads((tmp_path / REMOVED_FILE).read_text()) == whole, "what is exact is noted as before"
