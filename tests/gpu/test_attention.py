"""The compiled kernel against attention written out, and what it is chosen for."""

import pytest
import torch

from chunkweave.config import AttentionKernel
from chunkweave.models.attention import KeyParts, OwnQueries, ScatteredQueries
from chunkweave.models.kernels.choice import make_attention
from chunkweave.models.kernels.compiles import KERNEL_COMPILES
from chunkweave.types import Geometry
from tests.triton.oracle import make_case, written_out

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 4e-3}
CUDA = torch.device("cuda")


def attention_for(dtype, heads, kv_heads, dim):
    geometry = Geometry(1, heads * dim, heads, kv_heads, dim, 1, 1, 4096)
    return make_attention(AttentionKernel.TRITON, geometry, dtype=dtype, device=CUDA)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("heads", [(32, 8), (14, 2), (8, 8)])
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_scattered_queries_of_several_requests(dtype, dim, heads, share):
    generator = torch.Generator().manual_seed(dim)
    cases = []
    for stop in (700, 60, 1500):
        count = max(1, int(share * stop))
        positions = sorted({*torch.randperm(stop, generator=generator)[:count].tolist(), stop - 1})
        cases.append(make_case(generator, positions, *heads, dim, dtype=dtype, hidden=(3, 40) if stop == 700 else ()))
    owners = [
        OwnQueries(
            ScatteredQueries(
                torch.tensor(case.positions, device=CUDA),
                dtype,
                hidden=None if case.hidden is None else case.hidden.to(CUDA),
            ),
            case.keys.to(CUDA),
            case.values.to(CUDA),
            KeyParts(case.parts.to(CUDA), 3),
        )
        for case in cases
    ]
    found = attention_for(dtype, *heads, dim).attend(torch.cat([case.queries for case in cases]).to(CUDA), owners)
    row = 0
    for case, measured in zip(cases, found.measured, strict=True):
        expected = written_out(case, 3)
        mine = found.states[row : row + len(case.positions)].cpu().double()
        row += len(case.positions)
        assert (mine - expected.states).abs().max() < TOLERANCE[dtype]
        assert (measured.by_part.cpu().double() - expected.by_part).abs().max() < 5e-3
        assert (measured.own.cpu().double() - expected.own).abs().max() < 5e-3
        assert (measured.log_sum_exp.cpu().double() - expected.log_sum_exp).abs().max() < 2e-2


@pytest.mark.parametrize("heads", [(32, 8), (14, 2)])
def test_nothing_compiles_while_serving(heads):
    attention, stalls = attention_for(torch.bfloat16, *heads, 128), KERNEL_COMPILES.stalls
    for count, stop, parts in ((1, 90, 0), (1, 5000, 0), (7, 900, 40), (300, 4000, 0), (2000, 4000, 200)):
        shapes = (count, heads[0]), (stop, heads[1]), (stop, heads[1])
        q, k, v = (torch.zeros(*shape, 128, dtype=torch.bfloat16, device=CUDA) for shape in shapes)
        for window, first in ((None, 0), (300, 1)):
            positions = torch.arange(stop - count - first, stop, device=CUDA)[first:]
            where = list(range(0, 2 * count, 2))
            table = KeyParts(torch.zeros(stop, dtype=torch.int32, device=CUDA), parts) if parts else None
            scattered = ScatteredQueries(positions, q.dtype, where=where, window=window)
            attention.attend(q, [OwnQueries(scattered, k, v, table)])
    assert KERNEL_COMPILES.stalls == stalls


def test_it_is_what_a_gpu_gets_by_itself():
    geometry = Geometry(1, 4096, 32, 8, 128, 1, 1, 4096)
    attention = make_attention(AttentionKernel.AUTO, geometry, dtype=torch.bfloat16, device=CUDA)
    assert type(attention).__name__ == "TritonAttention"
