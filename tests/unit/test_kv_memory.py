"""What KV leaves of the process's memory once it is gone, and what of it is used again."""

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from chunkweave.kv.request_cache import ReusedMemory, segment_memory

MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_segments_that_go_leave_no_holes_between_what_stays():
    torch.empty(30 * MIB, dtype=torch.uint8).fill_(1)  # from now on the allocator keeps what is smaller on its heap
    before, stays = resident(), []
    segments = []
    for _ in range(40):
        segments.append(segment_memory((2, 2, MIB), torch.bfloat16).fill_(1.0))
        stays.append(torch.ones(20_000, dtype=torch.uint8))
    assert resident() - before > 300 * MIB
    kept = segments[0][1]
    del segments
    assert resident() - before < 40 * MIB
    assert kept.min() == 1.0, "a view keeps its pages"


@pytest.mark.parametrize("shape", [(2, 2, 1), (3, 2, 70_000)])
def test_it_is_a_tensor_like_others(shape):
    memory = segment_memory(shape, torch.float32)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == (torch.Size(shape), torch.float32, True)
    memory.fill_(2.0)
    assert memory.sum() == 2.0 * memory.numel()


def test_memory_is_used_again_once_the_last_view_is_gone():
    memory = ReusedMemory()
    first = memory.tensor((4, MIB), torch.float32)
    view = first[2, 10:20]
    view.fill_(7.0)
    address = first.data_ptr()
    del first
    assert memory.waiting_bytes == 0, "a view is left"
    other = memory.tensor((4, MIB), torch.float32)
    other.fill_(1.0)
    assert view.tolist() == [7.0] * 10
    del view
    assert memory.waiting_bytes == 16 * MIB
    again = memory.tensor((3, 2 * MIB), torch.bfloat16)  # another shape that needs as many pages
    assert again.data_ptr() == address
    assert (again.shape, again.dtype, memory.waiting_bytes) == ((3, 2 * MIB), torch.bfloat16, 0)
    again.fill_(2.0)
    assert other.unique().tolist() == [1.0]


def test_what_waits_is_bounded_and_what_is_small_comes_from_the_heap():
    memory = ReusedMemory(most_bytes=20 * MIB)
    tensors = [memory.tensor((size, MIB), torch.uint8) for size in (16, 16, 8, 4, 1)]
    assert memory.tensor((3, 5), torch.float32).shape == (3, 5)
    tensors.clear()
    assert memory.waiting_bytes <= 20 * MIB
    assert memory.tensor((0, 5), torch.float32).numel() == 0


def test_many_threads_never_share_memory():
    memory = ReusedMemory()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(100):
            mine = memory.tensor((MIB // 2,), torch.int32)
            mine.fill_(number)
            gc.collect(0)
            if not bool((mine == number).all()):
                wrong.append(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert not wrong
    assert 0 < memory.waiting_bytes <= 2 * 6 * 2 * MIB, "each held two at a time"


FAULTS = """
import resource, torch
from chunkweave.kv.request_cache import keep_freed_memory
torch.set_num_threads(1)
keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(40):
        for size in (3, 9, 5):
            torch.empty(size << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of the GNU C library")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise():
    def faults(**environment: str) -> int:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        call = [sys.executable, "-c", FAULTS]
        return int(subprocess.run(call, env={**ours, **environment}, capture_output=True, check=True, text=True).stdout)

    assert faults() < 100  # 680 MB are written: 170,000 pages of 4 KiB, or 340 of 2 MiB
    assert faults(MALLOC_TRIM_THRESHOLD_="100000", MALLOC_MMAP_THRESHOLD_="100000") > 300
