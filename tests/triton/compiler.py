"""Runs where Triton compiles (its interpreter is chosen for a whole process): `python compiler.py keys` or `stalls`."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import torch
from compile_matrix import AbsentGpu, driver, requested_kernels

from chunkweave.models import triton_attention
from chunkweave.models.attention import KeyParts, OwnQueries, ScatteredQueries
from chunkweave.models.kernels import device_code
from chunkweave.models.kernels.compiles import KERNEL_COMPILES
from chunkweave.models.triton_attention import FlatQueries, KeyPlaces, TritonAttention, attend, write_rows
from chunkweave.types import Geometry

DTYPE, DIM = torch.bfloat16, 64
BATCHES = (((1,), 90, None), ((3, 1), 700, 40), ((70,), 1100, None), ((900, 5), 2000, 300))
OF_KEYS = ((0, True, 0), (0, False, 1), (1, False, 0), (40, True, 1), (200, False, 3))
"""Parts, whether keys are hidden, and how many rows are cut off before the queries."""


def keys() -> list[tuple[int, int, int, int]]:
    """By heads: kernels of start-up, of prefill, of decoding, and how many of these start-up does not have."""
    found = []
    for heads, kv_heads in ((32, 8), (8, 1), (3, 3)):
        with requested_kernels(90) as at_start:
            geometry = Geometry(1, heads * DIM, heads, kv_heads, DIM, 1, 1, 4096)
            triton_attention.compile_and_compare(geometry, DTYPE, torch.device("cpu"))
        with requested_kernels(90) as prefill:
            for processors in (4, 132):
                triton_attention.processors = lambda device, processors=processors: processors
                attend_batches(heads, kv_heads)
        with requested_kernels(90) as decoding:
            decode(heads, kv_heads)
        missing = (prefill | decoding).keys() - at_start.keys()
        found.append((len(at_start), len(prefill), len(decoding), len(missing)))
    return found


def attend_batches(heads: int, kv_heads: int) -> None:
    """As `fusion.loop` and the connector do."""
    attention = TritonAttention()
    for counts, stop, window in BATCHES:
        for parts, hidden, first in OF_KEYS:
            owners = []
            for count in counts:
                positions = torch.arange(stop - count - first, stop)[first:]  # at any multiple of 8 bytes
                flags = torch.zeros(stop, dtype=torch.bool) if hidden else None
                where = list(range(0, 2 * count, 2))
                scattered = ScatteredQueries(positions, DTYPE, hidden=flags, where=where, window=window)
                table = KeyParts(torch.zeros(stop, dtype=torch.int32), parts) if parts else None
                owners.append(OwnQueries(scattered, *torch.zeros(2, stop, kv_heads, DIM, dtype=DTYPE), table))
            attention.attend(torch.zeros(sum(counts) + first, heads, DIM, dtype=DTYPE)[first:], owners)


def decode(heads: int, kv_heads: int) -> None:
    """As `fusion.graphed_decode` does."""
    for requests in (1, 2, 7, 33):
        inputs = torch.zeros(2, requests, dtype=torch.long)
        places = torch.zeros(3, requests, 4, dtype=torch.long)
        for stop in (128, 1024, 8192):
            queries = torch.zeros(requests, heads, DIM, dtype=DTYPE)
            attend(FlatQueries(queries, inputs[1], (1,) * requests, stop), KeyPlaces(places[1], kv_heads))
            write_rows(queries[:, :kv_heads], queries[:, :kv_heads], inputs[1], places[1])


def stalls() -> list[int]:
    """The count of stalls after a kernel at start-up, the same kernel again, and another one."""
    driver.set_active(AbsentGpu(90))
    rows, places = torch.zeros(1, 2, 16), torch.zeros(1, 4, dtype=torch.long)

    def launch(block: int) -> int:
        device_code.write_rows.warmup(rows, rows, places[0], places, 32, WIDTH=32, BLOCK=block, grid=(1,))
        assert (KERNEL_COMPILES.stall_s > 0.0) == (KERNEL_COMPILES.stalls > 0)
        return KERNEL_COMPILES.stalls

    with KERNEL_COMPILES.at_start(1):
        first = launch(32)
    return [first, launch(32), launch(64)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"keys": keys, "stalls": stalls}[sys.argv[1]]()))
