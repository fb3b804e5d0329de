"""Keys that benchmarks/gpu/limits.py lets our kernel read are those of its own tiles."""

import sys
from pathlib import Path

import pytest
import torch

from chunkweave.models.triton_attention import choose_blocks, tile_table

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import limits


@pytest.mark.parametrize("way", [way for way in limits.WAYS if way.tiled], ids=lambda way: way.name)
def test_a_tile_reads_the_keys_up_to_its_last_query(way):
    runs = limits.runs_of(way, 8192)
    positions = [position for start, stop in runs for position in range(start, stop)]
    blocks = choose_blocks([len(positions)], 8192, 32, 8, dtype=torch.bfloat16, processors=132)
    tiles = tile_table([len(positions)], blocks.rows // (32 // 8))
    assert limits.tiled_keys(runs) == sum(positions[stop - 1] + 1 for _, _, stop in tiles)
