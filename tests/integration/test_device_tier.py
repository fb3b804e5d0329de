"""Segments on a torch device, and their way back to the host."""

import pytest
import torch

from chunkweave.config import StoreConfig
from chunkweave.engine.stores import open_store
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.store.level import Level
from chunkweave.store.records import SegmentRecord
from chunkweave.store.segment_store import SegmentStore
from chunkweave.store.tiered import TieredStore
from chunkweave.tiers.device import DeviceTier, on_host
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId
from tests.unit.tier_fakes import id_of, record_of


def _segment() -> SegmentKV:
    return SegmentKV(torch.arange(2 * 2 * 2 * 1 * 4, dtype=torch.float32).reshape(2, 2, 2, 1, 4))


def test_a_segment_moves_to_the_device_and_counts_its_bytes_there():
    tier = DeviceTier("meta")
    segment, record = _segment(), record_of("A")
    tier.put(record, segment)
    held = tier.get(record.id)
    assert isinstance(held, SegmentKV)
    assert held.kv.device.type == "meta"
    assert tier.nbytes(record.id) == tier.size_of(record, segment) == segment.nbytes
    assert [r.nbytes for r in tier.records()] == [segment.nbytes]
    tier.delete(record.id)
    assert tier.get(record.id) is None


def test_a_segment_that_is_there_is_not_copied():
    tier = DeviceTier("cpu")
    segment = _segment()
    tier.put(record_of("A"), segment)
    assert tier.get(id_of("A")) is segment
    assert on_host(segment) is segment


def test_only_whole_segments_go_to_a_device():
    class Lazy:
        tokens, nbytes = 2, 64

        def layer(self, index):
            raise AssertionError

    with pytest.raises(TypeError, match="whole"):
        DeviceTier("cpu").put(record_of("A"), Lazy())


def _two_levels(device: str) -> tuple[TieredStore[SegmentSource], int]:
    nbytes = _segment().nbytes
    host: HostTier[SegmentSource] = HostTier(on_host)
    levels = [
        Level("device", SegmentStore(DeviceTier(device), budget_bytes=nbytes)),
        Level("host", SegmentStore(host, budget_bytes=10 * nbytes)),
    ]
    return TieredStore(levels), nbytes


def test_the_device_swaps_out_once():
    store, _ = _two_levels("cpu")
    for path in ("A", "B"):
        assert store.insert(record_of(path), _segment())
    assert (store.tier_of(id_of("A")), store.tier_of(id_of("B"))) == ("host", "device")
    assert store.stats.demotions == 1
    store.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_leaves_a_gpu_is_the_same_on_the_host():
    store, _ = _two_levels("cuda")
    for path in ("A", "B"):
        assert store.insert(record_of(path), _segment())
    back = store.get(id_of("A"))
    assert isinstance(back, SegmentKV)
    assert back.kv.device.type == "cpu"
    assert torch.equal(back.kv, _segment().kv)


def test_a_configuration_opens_its_levels_and_a_second_process_finds_the_first_ones_segments(tmp_path):
    config = StoreConfig(1 << 20, cache_dir=tmp_path / "cache", remote_url=f"file://{tmp_path}/remote")
    segment = _segment()
    record = SegmentRecord.of(ChunkId("a" * 32), (), (1, 2), exact=True, nbytes=segment.nbytes, source="a.txt")
    first = open_store(config, "model", torch.device("cpu"))
    assert [level.name for level in first.levels] == ["host", "disk", "remote"]
    assert first.insert(record, segment)
    assert first.close()
    second = open_store(config, "model", torch.device("cpu"))
    assert second.tier_of(record.id) == "disk"
    found = second.get(record.id)
    assert found is not None
    assert torch.equal(torch.stack([found.layer(i) for i in range(2)]), segment.kv)
    assert second.discard_source("a.txt") == 2
    assert second.close()
    assert open_store(config, "model", torch.device("cpu")).record(record.id) is None
