"""Turning keys with the tables of vLLM's rotary modules, and back."""

from types import SimpleNamespace

import pytest
import torch

from chunkweave.errors import UnsupportedModelError
from chunkweave.vllm.rotation import BEFORE_ROPE, Rotation, Rotations, SharedRotary

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


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.2772588722239782])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
def test_turning_goes_from_any_position_to_any_other(keys, positions, neox, factor, table):
    rotation = Rotation(rotary(neox=neox, factor=factor, dtype=table))
    there, none = positions.roll(7), torch.full_like(positions, BEFORE_ROPE)
    at, to = rotation.forward(keys, positions), rotation.forward(keys, there)
    torch.testing.assert_close(rotation.turn(at, positions, there), to, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotation.turn(at, positions, none), keys, atol=1e-5, rtol=0)
    assert torch.equal(rotation.turn(keys, none, there), to)
    some = torch.where(torch.arange(len(positions)) % 3 == 0, none, positions)
    mixed = torch.where((some == BEFORE_ROPE)[:, None, None], keys, at)
    torch.testing.assert_close(rotation.turn(mixed, some, there), to, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
def test_keys_that_stay_where_they_are_keep_every_bit(positions, dtype, table):
    rotation = Rotation(rotary(factor=1.2772588722239782, dtype=table))
    keys = torch.randn(50, HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(rotation.turn(keys, positions, positions), keys)


@pytest.mark.parametrize("neox", [True, False])
def test_dims_beyond_the_table_stay(keys, positions, neox):
    wide = torch.cat((keys, keys + 1), -1)
    rotation = Rotation(rotary(neox=neox, head_size=2 * DIM))
    turned = rotation.forward(wide, positions)
    expected = by_complex_numbers(keys, positions, neox=neox, factor=1.0)
    torch.testing.assert_close(turned[..., :DIM], expected, atol=1e-5, rtol=0)
    assert torch.equal(turned[..., DIM:], wide[..., DIM:])
    torch.testing.assert_close(rotation.inverse(turned, positions), wide, atol=1e-5, rtol=0)


def test_every_layer_has_a_rotation_of_its_own_or_none(keys, positions):
    one, other = rotary(), rotary(factor=2.0)
    rotations = Rotations([one, None, other])
    for layer, factor in ((0, 1.0), (2, 2.0)):
        expected = by_complex_numbers(keys, positions, neox=True, factor=factor)
        torch.testing.assert_close(rotations.forward(layer, keys, positions), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(rotations.inverse(layer, expected, positions), keys, atol=1e-5, rtol=0)
    assert rotations.forward(1, keys, positions) is keys
    assert rotations.inverse(1, keys, positions) is keys


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotary_module_that_layers_share_gives_the_same_angles_as_a_table(keys, positions, interleaved):
    def module(_probe, wanted):
        angles = (wanted[0].float()[:, None] * 1e4 ** (-torch.arange(0, DIM, 2) / DIM)).repeat(1, 2)
        return angles.cos()[None], angles.sin()[None]

    shared = SharedRotary(module, ["", ""], POSITIONS, torch.empty(0), interleaved=interleaved)
    rotations = Rotations([shared.table(layer, DIM) for layer in range(2)])
    expected = by_complex_numbers(keys, positions, neox=not interleaved, factor=1.0)
    torch.testing.assert_close(rotations.forward(1, keys, positions), expected, atol=1e-3, rtol=0)


def test_a_shared_rotary_module_is_asked_by_the_type_of_the_layer():
    asked = []

    def module(_probe, wanted, kind):
        asked.append(kind)
        angles = wanted[0].float()[:, None].repeat(1, DIM) * (2.0 if kind == "full" else 1.0)
        return angles.cos()[None], angles.sin()[None]

    shared = SharedRotary(module, ["sliding", "full", "sliding"], 8, torch.empty(0))
    tables = [shared.table(layer, DIM).cos_sin_cache for layer in range(3)]
    assert asked == ["sliding", "full"]
    assert tables[0] is tables[2]
    assert not torch.equal(tables[0], tables[1])
    cos, _ = shared.angles(1, torch.tensor([3]))
    torch.testing.assert_close(cos, torch.full((1, 1, DIM), 6.0).cos())


def test_long_rope_turns_by_the_angles_of_short_contexts(keys, positions):
    table = rotary().cos_sin_cache
    module = SimpleNamespace(long_short_cos_sin_cache=torch.cat((table, -table)), head_size=DIM)
    torch.testing.assert_close(
        Rotation(module).forward(keys, positions), Rotation(rotary()).forward(keys, positions), atol=0, rtol=0
    )


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
    [rotary(head_size=DIM // 2), rotary(dim=1), SimpleNamespace(head_size=DIM, is_neox_style=True)],
    ids=["more than a head", "no row a position", "no table"],
)
def test_what_is_no_rotation_by_position_is_refused(module):
    with pytest.raises(UnsupportedModelError, match="keys can be shifted only where they are rotated by the position"):
        Rotation(module)
