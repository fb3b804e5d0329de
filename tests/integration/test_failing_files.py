"""File systems that fail at each call: no wrong KV, no use of what was removed, and each failure is named."""

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from chunkweave.config import StoreConfig
from chunkweave.errors import NotRemovedError
from chunkweave.kv.segment import SegmentLost, SegmentSource
from chunkweave.store.store import TieredStore
from chunkweave.types import SegmentId
from chunkweave.weaving.stores import open_store
from tests.integration.failing_files import READS, WRITES, FailingFiles, failing
from tests.integration.segments import FINGERPRINT, layers_of, make_segment

SEGMENTS = [make_segment(number, contexts=0) for number in range(3)]
KV = {record.id: payload.kv for record, payload in SEGMENTS}
(GONE, _), *KEPT = SEGMENTS
FAULTS = {
    "EROFS": (errno.EROFS, WRITES),
    "ENOSPC": (errno.ENOSPC, WRITES),
    "EIO": (errno.EIO, (*WRITES, *READS)),
    "EMFILE": (errno.EMFILE, ("open", "open for writing", "listdir", "scandir")),
}
MANY = 10**9


def opened(folder: Path) -> TieredStore[SegmentSource]:
    return open_store(StoreConfig(host_budget_bytes=1 << 20, cache_dir=folder), FINGERPRINT, torch.device("cpu"))


def read_all(store: TieredStore[SegmentSource]) -> dict[SegmentId, bool]:
    """By segment that a reader gets, whether its KV is right; a layer that cannot be read is a miss."""
    found: dict[SegmentId, bool] = {}
    for segment, kv in KV.items():
        payload = store.get(segment)
        with suppress(SegmentLost):
            if payload is not None:
                found[segment] = torch.equal(layers_of(payload), kv)
    return found


def settled(folder: Path) -> Iterator[TieredStore[SegmentSource]]:
    """A store with all segments in memory and on disk."""
    with_all = opened(folder)
    for record, payload in SEGMENTS:
        with_all.insert(record, payload)
    assert with_all.flush(10)
    yield with_all
    with suppress(OSError):
        with_all.close()


def calls_of(folder: Path, number: int, kinds: tuple[str, ...], work: str) -> int:
    """How many calls of a piece of work can fail."""
    counting = FailingFiles(folder, number, kinds, first=MANY)
    WORKS[work](folder, counting)
    return counting.calls


def removing(folder: Path, files: FailingFiles) -> None:
    """Remove a chunk while calls fail; afterwards nothing reads it, here or in a later process."""
    for store in settled(folder):
        with failing(files):
            try:
                store.forget_chunks([GONE.chunk_id])
                error = None
            except NotRemovedError as raised:
                error = raised
            assert GONE.id not in read_all(store), "this process does not use it"
        if files.failed and error is not None:
            assert "disk" in (*error.tiers, *error.unasked), "the tier that failed is named"
            assert "disk" in str(error)
        found = read_all(store)
        assert GONE.id not in found
        assert all(found.values())
        store.check()
        lasting = error is None or (error.lasting and not error.unasked)
        store.forget_chunks([GONE.chunk_id])  # the file system works again: a retry completes it
        again = opened(folder)
        assert GONE.id not in read_all(again), lasting
        assert {record.id for record, _ in KEPT} <= read_all(again).keys()
        again.close()


def removing_for_good(folder: Path, files: FailingFiles) -> None:
    """Remove a chunk while calls fail, and end: what was said to last is not used by the next process."""
    for store in settled(folder):
        with failing(files):
            try:
                store.forget_chunks([GONE.chunk_id])
                lasting = True
            except NotRemovedError as error:
                lasting = error.lasting and not error.unasked
        again = opened(folder)
        if lasting:
            assert GONE.id not in read_all(again)
        assert all(read_all(again).values())
        again.close()


def writing(folder: Path, files: FailingFiles) -> None:
    """Store segments while calls fail: what can be read, now or by the next process, is right."""
    store = opened(folder)
    with failing(files):
        for record, payload in SEGMENTS:
            store.insert(record, payload)
        store.flush(10)
        assert all(read_all(store).values())
    store.check()
    if files.failed:
        stats = store.stats
        assert stats.writes_failed + stats.writes_skipped > 0 or len(read_all(opened(folder))) == len(SEGMENTS)
    store.close()
    again = opened(folder)
    assert all(read_all(again).values())
    again.close()


def replacing(folder: Path, files: FailingFiles) -> None:
    """Clear everything while calls fail, and store it again."""
    for store in settled(folder):
        with failing(files), suppress(NotRemovedError):
            store.clear()
            assert not read_all(store)
        for record, payload in SEGMENTS:
            store.insert(record, payload)
        store.flush(10)
        found = read_all(store)
        assert found.keys() == KV.keys()
        assert all(found.values())
        store.check()


WORKS = {
    "removing": removing,
    "removing for good": removing_for_good,
    "writing": writing,
    "replacing": replacing,
}


@pytest.mark.parametrize("count", [1, MANY], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("work", WORKS)
def test_each_call_may_fail(tmp_path: Path, work: str, fault: str, count: int):
    number, kinds = FAULTS[fault]
    calls = calls_of(tmp_path / "counted", number, kinds, work)
    assert calls or fault == "EMFILE", "removing opens no file"
    for first in range(calls):
        files = FailingFiles(tmp_path / str(first), number, kinds, first=first, count=count)
        WORKS[work](tmp_path / str(first), files)
        assert files.failed


def test_damage_that_checksums_find_is_counted(tmp_path: Path):
    for store in settled(tmp_path):
        path = next((tmp_path / FINGERPRINT).glob(f"*/{GONE.id}.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        store.close()
        path.write_bytes(data)
        again = opened(tmp_path)
        payload = again.get(GONE.id)
        assert payload is not None
        with pytest.raises(SegmentLost):
            layers_of(payload)
        again.drop_damaged(GONE.id)
        assert again.stats.lost == 1
        assert again.get(GONE.id) is None
        again.close()
