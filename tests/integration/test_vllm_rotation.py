"""Turning keys with the tables of vLLM's rotary modules, and back."""

from types import SimpleNamespace

import pytest
import torch

from chunkweave.errors import UnsupportedModelError
from chunkweave.vllm.paged_kv import Rotation

HEADS, DIM, POSITIONS = 3, 16, 600


def rotary(*, neox=True, factor=1.0, dtype=torch.float32, head_size=DIM, rotary_dim=DIM, dim=2):
    """As vLLM's `RotaryEmbedding`: one row a position, cosines then sines, scaled by YaRN's attention factor."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequencies
    table = (torch.cat((angles.cos(), angles.sin()), -1) * factor).to(dtype)
    return SimpleNamespace(cos_sin_cache=table if dim == 2 else table[0], head_size=head_size, is_neox_style=neox)


def by_complex_numbers(keys, positions, *, neox, factor):
    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = positions.double()[:, None, None] * frequencies
    wide = keys.double()
    one, two = wide.chunk(2, -1) if neox else (wide[..., 0::2], wide[..., 1::2])
    turned = torch.complex(one, two) * torch.polar(torch.full_like(angles, factor), angles)
    parts = (turned.real, turned.imag)
    return (torch.cat(parts, -1) if neox else torch.stack(parts, -1).flatten(-2)).float()


@pytest.fixture
def keys():
    return torch.randn(50, HEADS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def positions():
    return torch.randperm(POSITIONS, generator=torch.Generator().manual_seed(1))[:50]


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.2772588722239782])
def test_forward_is_a_rotation_of_pairs(keys, positions, neox, factor):
    found = Rotation(rotary(neox=neox, factor=factor)).forward(keys, positions)
    torch.testing.assert_close(found, by_complex_numbers(keys, positions, neox=neox, factor=factor), atol=1e-5, rtol=0)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.2772588722239782])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
def test_inverse_undoes_forward_even_where_the_table_is_scaled_or_rounded(keys, positions, neox, factor, table):
    rotation = Rotation(rotary(neox=neox, factor=factor, dtype=table))
    back = rotation.inverse(rotation.forward(keys, positions), positions)
    torch.testing.assert_close(back, keys, atol=1e-5, rtol=0)


def test_moving_is_turning_back_and_forth(keys, positions):
    rotation = Rotation(rotary())
    there = positions.flip(0)
    moved = rotation.forward(rotation.inverse(rotation.forward(keys, positions), positions), there)
    torch.testing.assert_close(moved, rotation.forward(keys, there), atol=1e-5, rtol=0)


def test_the_dtype_stays(keys, positions):
    rotation = Rotation(rotary())
    assert rotation.forward(keys.bfloat16(), positions).dtype is torch.bfloat16
    assert rotation.inverse(keys.bfloat16(), positions).dtype is torch.bfloat16


def test_a_replaced_table_is_used(keys, positions):
    module = rotary()
    rotation = Rotation(module)
    module.cos_sin_cache = rotary(factor=2.0).cos_sin_cache
    torch.testing.assert_close(
        rotation.forward(keys, positions), 2 * Rotation(rotary()).forward(keys, positions), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    "module",
    [rotary(head_size=2 * DIM), rotary(dim=1), SimpleNamespace(head_size=DIM, is_neox_style=True)],
    ids=["half of each head", "no row a position", "no table"],
)
def test_what_is_no_rotation_of_whole_heads_is_refused(module):
    with pytest.raises(UnsupportedModelError, match="keys can be shifted only where whole heads are rotated"):
        Rotation(module)
