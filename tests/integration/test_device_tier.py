"""Segments on a torch device, and their way back to the host."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.config import StoreConfig
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.store.level import Level
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.device import DeviceTier, host_memory_for, moved_into
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId
from chunkweave.weaving.stores import open_store
from tests.integration.segments import layers_of
from tests.unit.tier_fakes import id_of, record_of


def _segment() -> SegmentKV:
    return SegmentKV(torch.arange(2 * 2 * 2 * 1 * 4, dtype=torch.float32).reshape(2, 2, 2, 1, 4))


def test_a_segment_moves_to_the_device_and_counts_the_bytes_of_its_blocks():
    segment, record = _segment(), record_of("A")
    tier = DeviceTier("meta", budget_bytes=4 * segment.nbytes, block_tokens=4)
    tier.put(record, segment)
    held = tier.get(record.id)
    assert held.device.type == "meta"
    assert held.nbytes == segment.nbytes
    assert tier.nbytes(record.id) == tier.size_of(record, segment) == 2 * segment.nbytes  # 2 tokens in a block of 4
    assert [r.nbytes for r in tier.records()] == [2 * segment.nbytes]
    tier.delete(record.id)
    assert tier.get(record.id) is None


def test_blocks_of_what_is_forgotten_are_free_once_nobody_reads_them():
    segment = _segment()
    tier = DeviceTier("cpu", budget_bytes=segment.nbytes, block_tokens=2)
    tier.put(record_of("A"), segment)
    read = tier.get(id_of("A"))
    tier.delete(id_of("A"))
    with pytest.raises(OSError, match="no free blocks"):
        tier.put(record_of("B"), segment)
    assert torch.equal(read.layer(1), segment.kv[1])
    del read
    tier.put(record_of("B"), segment)
    assert tier.get(id_of("B")) is not None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ABCD"), st.integers(0, 9)), max_size=30))
def test_segments_of_any_length_come_and_go(steps):
    """Against a dict: what is held reads as it was put, over blocks in whatever order they were free."""
    tier = DeviceTier("cpu", budget_bytes=8 * 3 * 32, block_tokens=3)
    held: dict[str, torch.Tensor] = {}
    for count, (name, tokens) in enumerate(steps):
        if not tokens:
            tier.delete(id_of(name))
            held.pop(name, None)
            continue
        kv = torch.full((2, 2, tokens, 1, 2), float(count)) + torch.arange(tokens)[:, None, None] / 16
        try:
            tier.put(record_of(name), SegmentKV(kv))
            held[name] = kv
        except OSError:
            held.pop(name, None)
            assert sum(-(-one.shape[2] // 3) for one in held.values()) + -(-tokens // 3) > 8
        for other, expected in held.items():
            found = tier.get(id_of(other))
            assert found.nbytes == expected.nbytes
            assert torch.equal(found.whole(), expected)
            del found  # who reads a segment keeps its blocks
        assert {record.id for record in tier.records()} == {id_of(other) for other in held}


def test_what_put_the_first_segment_without_gradients_needs_not_put_the_others():
    segment = _segment()
    tier = DeviceTier("cpu", budget_bytes=2 * segment.nbytes, block_tokens=2)
    with torch.inference_mode():
        tier.put(record_of("A"), segment)
    tier.put(record_of("B"), segment)
    assert torch.equal(tier.get(id_of("B")).whole(), segment.kv)


def test_only_whole_segments_go_to_a_device():
    class Lazy:
        tokens, nbytes, keys_at = 2, 64, None

        def layer(self, index):
            raise AssertionError

    with pytest.raises(TypeError, match="wholly in memory"):
        DeviceTier("cpu", budget_bytes=64).put(record_of("A"), Lazy())


def _two_levels(device: str) -> tuple[TieredStore[SegmentSource], int]:
    nbytes = _segment().nbytes
    host: HostTier[SegmentSource] = HostTier(partial(moved_into, host_memory_for(torch.device(device), 1 << 20)))
    levels = [
        Level(
            "device",
            SegmentStore(DeviceTier(device, budget_bytes=nbytes, block_tokens=2), budget_bytes=nbytes),
        ),
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
    assert torch.equal(layers_of(second.get(record.id), 2), segment.kv)
    assert second.remove_where(lambda record: record.document == "a.txt") == 2
    assert second.close()
    assert open_store(config, "model", torch.device("cpu")).record(record.id) is None
