"""Copies beside computing: what waits for what, by stand-ins for streams; and host memory that is page-locked."""

import gc
import threading
from contextlib import contextmanager

import pytest
import torch

from chunkweave.kv.segment import SegmentKV, SegmentLate
from chunkweave.tiers.device import DeviceTier, HostMemory, PinnedMemory, Streams, moved_into
from chunkweave.tiers.preload import LayerLoader
from tests.unit.tier_fakes import id_of, record_of


class LoggedStreams(Streams):
    """Streams of a pretended device, that note what was asked of them and on which queue."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._queue = "compute"

    @contextmanager
    def _on(self, queue: str):
        before, self._queue = self._queue, queue
        yield
        self._queue = before

    def copying(self):
        return self._on("copy")

    def computing(self):
        return self._on("compute")

    def elsewhere(self):
        """The stream of a thread that does not compute."""
        return self._on("other")

    def mark(self) -> int:
        event = sum(what.startswith("mark") for what, _ in self.log)
        self.log.append((f"mark {self._queue}", event))
        return event

    def wait_for(self, event: int) -> None:
        self.log.append((f"wait {self._queue}", event))

    def keep(self, tensor: torch.Tensor) -> None:
        self.log.append((f"keep {self._queue}", 0))


def segment_of(layers: int = 4) -> SegmentKV:
    return SegmentKV(torch.randn(layers, 2, 3, 1, 2))


def test_what_is_computed_waits_for_the_copy_that_has_its_layer_and_for_nothing_else():
    streams, source = LoggedStreams(), segment_of()
    loader = LayerLoader([("a", source)], 4, send=streams.send)
    loader.release(4)
    assert streams.log == [("mark copy", copy) for copy in range(3)]  # sent at once; nothing has waited
    del streams.log[:]
    for layer in range(4):
        assert torch.equal(loader.segments[0].layer(layer), source.kv[layer])
    waits = [(("wait compute", copy), ("keep compute", 0)) for copy in range(3)]  # layers 2 and 3 are one copy
    assert streams.log == [entry for pair in waits for entry in pair]
    loader.close()


@pytest.mark.parametrize(("memory", "sender"), [(HostMemory(), "here"), (PinnedMemory(0), "chunkweave-loader")])
def test_the_computing_thread_sends_only_what_it_need_not_wait_for(memory, sender):
    """With a pool of page-locked memory, a segment elsewhere may take as long as its copy."""
    threads = []

    def send(tensors):
        threads.append("here" if threading.current_thread() is here else threading.current_thread().name)
        return Streams().send(tensors)

    here = threading.current_thread()
    loader = LayerLoader([("a", segment_of())], 4, send=send, memory=memory)
    loader.release(4)
    loader.close()
    assert set(threads) == {sender}


def test_a_layer_is_sent_once_and_then_read_from_the_host():
    streams, source = LoggedStreams(), segment_of()
    loader = LayerLoader([("a", source)], 4, send=streams.send)
    loader.release(4)
    first, second = loader.segments[0].layer(2), loader.segments[0].layer(2)
    assert torch.equal(first, second)
    assert [what for what, _ in streams.log].count("wait compute") == 1
    loader.close()


def test_a_segment_in_memory_is_not_copied_on_the_host():
    source = segment_of()
    loader = LayerLoader([("a", source)], 4)
    loader.release(4)
    assert loader.segments[0].layer(1).data_ptr() == source.kv[1].data_ptr()
    assert loader.segments[0].whole() is source
    loader.close()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("CUDA error"), ValueError("shape")])
def test_a_copy_that_fails_leaves_the_segment_out_and_nobody_waiting(error):
    """Not lost: what is stored may be sound, and another request may have the memory."""

    def send(tensors):
        raise error

    loader = LayerLoader([("a", segment_of())], 4, send=send)
    with pytest.raises(SegmentLate, match="layer 0 could not be read"):
        loader.segments[0].layer(0)
    loader.close()


def test_the_cpu_copies_nothing():
    tensor = torch.randn(3)
    (sent,) = Streams().send([tensor])
    assert sent.receive() is tensor


class Locked:
    """Stands in for page-locked memory, which a machine without a GPU has not."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, shape, dtype):
        self.shapes.append(shape)
        return torch.empty(shape, dtype=dtype)


def test_page_locked_memory_is_bounded_and_counts_until_the_last_view_is_gone():
    locked = Locked()
    memory = PinnedMemory(1024, locked)
    first = memory.empty((100,), torch.float32)  # 400 bytes, 512 of them taken
    assert memory.used_bytes == 512
    view = first[10:]
    second = memory.empty((128,), torch.float32)
    assert memory.used_bytes == 1024
    beyond = memory.empty((1,), torch.float32)
    assert beyond.shape == (1,)
    assert locked.shapes == [(100,), (128,)]  # the third is plain
    del first
    gc.collect()
    assert memory.used_bytes == 1024  # the view lies in it
    del view, second
    gc.collect()
    assert memory.used_bytes == 0


def test_a_system_that_locks_no_more_pages_costs_speed_alone(caplog):
    def refuse(shape, dtype):
        raise RuntimeError("cudaHostAlloc")

    memory = PinnedMemory(1024, refuse)
    assert memory.empty((4, 2), torch.bfloat16).shape == (4, 2)
    assert memory.used_bytes == memory.max_bytes == 0
    assert "page-locked" in caplog.text


def test_the_host_tier_takes_a_copy_in_page_locked_memory_and_in_plain_memory_none():
    segment, locked = segment_of(), Locked()
    assert moved_into(HostMemory(), segment) is segment
    moved = moved_into(PinnedMemory(1 << 20, locked), segment)
    assert moved is not segment
    assert torch.equal(moved.kv, segment.kv)
    assert locked.shapes == [tuple(segment.kv.shape)]


def test_the_host_tier_keeps_what_lies_in_its_own_memory_and_copies_what_another_pool_locked():
    own, others = PinnedMemory(1 << 20, Locked()), PinnedMemory(1 << 20, Locked())
    kv = segment_of().kv
    here, there = (SegmentKV(memory.empty(kv.shape, kv.dtype).copy_(kv)) for memory in (own, others))
    assert moved_into(own, here) is here
    moved = moved_into(own, there)
    assert moved is not there
    assert torch.equal(moved.kv, kv)
    del there
    gc.collect()
    assert others.used_bytes == 0
    assert own.holds(moved.kv)
    begin = moved.kv.untyped_storage().data_ptr()
    del moved, here
    gc.collect()
    assert own.used_bytes == 0
    assert begin not in own._mine


def test_what_is_read_from_a_slow_tier_goes_into_that_memory():
    class Lazy:
        tokens, nbytes, keys_at = 3, 192, None

        def __init__(self, kv):
            self.kv_of = kv

        def layer(self, index, scratch=None):
            return self.kv_of[index].clone()

    source, locked = segment_of(), Locked()
    loader = LayerLoader([("a", Lazy(source.kv))], 4, memory=PinnedMemory(1 << 20, locked))
    loader.release(4)
    assert torch.equal(loader.segments[0].whole().kv, source.kv)
    assert locked.shapes == [tuple(source.kv.shape)]
    loader.close()


def test_blocks_of_a_device_are_written_where_it_computes_and_read_elsewhere_behind_that():
    streams, source = LoggedStreams(), segment_of(layers=1)
    tier = DeviceTier("cpu", budget_bytes=1 << 12, streams=streams)
    with streams.elsewhere():
        tier.put(record_of("A"), source)
        written = ("mark compute", 1)
        assert streams.log == [("mark other", 0), ("wait compute", 0), ("keep compute", 0), written]
        del streams.log[:]
        assert torch.equal(tier.get(id_of("A")).layer(0), source.kv[0])
        assert streams.log == [("wait other", 1)]
