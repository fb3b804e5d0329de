"""The kernel compiled for a Hopper GPU, which takes no GPU: matrix units, and loads that run ahead of them."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from chunkweave.models.kernels.device_code import scattered_attention

constants = dict(HEADS=32, KV_HEADS=8, DIM=128, PADDED=128, PADDED_KEY=128, BLOCK_M=128, BLOCK_N=64, SPLITS=1,
                 ROTATE=False, HIDDEN=False, WINDOWED={windowed}, PARTS={parts}, WIDEN=False, PRECISION="tf32")
types = dict(queries_ptr="*bf16", out_ptr="*bf16", lse_ptr="*fp32", mass_ptr="*fp32", own_ptr="*fp32",
             positions_ptr="*i64", tiles_ptr="*i32", places_ptr="*i64", cos_ptr="*bf16", sin_ptr="*bf16",
             scale="fp32", rows="i32", token_stride="i32", window="i32")
aligned = {{(index,): [["tt.divisibility", 16]] for index in (*range(10), 12)}}
source = ASTSource(scattered_attention, {{**types, **dict.fromkeys(constants, "constexpr")}}, constants, aligned)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8, num_stages=3)).asm["ptx"]
print(ptx.count("wgmma.mma_async"), ptx.count("cp.async.c"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "windowed", "products"), [(0, False, 16), (16, False, 16), (0, True, 8)])
def test_it_uses_the_matrix_units_and_loads_ahead(parts, windowed, products):
    """Without the hint on the alignment of the keys' addresses, every element would be loaded by itself.

    With a window there is one loop instead of two, without masks and with.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = SCRIPT.format(parts=parts, windowed=windowed)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    matrix, ahead = map(int, done.stdout.split())
    assert matrix >= products
    assert ahead >= 30
