"""What segments leave of the process's memory once they are gone."""

import sys
from pathlib import Path

import pytest
import torch

from chunkweave.kv.segment import segment_memory

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
