"""Reading a paged KV cache whose layout is learnt, against fakes that lay it out in every which way."""

from types import SimpleNamespace

import pytest
import torch

from chunkweave.errors import UnsupportedModelError
from chunkweave.vllm.paged_kv import KV_DTYPES, PagedKV

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 6, 16, 2, 8, 3


class FakeBackend:
    """Stores a block's elements in an order of its own, as the kernels of a backend please."""

    def __init__(self, order: torch.Tensor, broken: str = "") -> None:
        self.order = order
        self.broken = broken
        self.calls = 0

    def do_kv_cache_update(self, layer, keys, values, cache, slots) -> None:
        self.calls += 1
        flat = cache.view(cache.shape[0], -1)
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            block, row = divmod(slot, TOKENS)
            logical = torch.arange(row * 2 * HEADS * DIM, (row + 1) * 2 * HEADS * DIM)
            if self.broken == "drops values":
                value = torch.zeros_like(value)
            if self.broken == "rounds":
                key, value = key.half().to(key.dtype), value.half().to(value.dtype)
            if self.broken == "forgets a slot" and self.calls > 2 and row % 2:
                continue
            flat[block, self.order[logical]] = torch.cat((key.flatten(), value.flatten())).to(cache.dtype)


def layers(order=None, *, dtype=torch.float32, broken="", shape=None):
    count = TOKENS * 2 * HEADS * DIM
    order = torch.arange(count) if order is None else order
    generator = torch.Generator().manual_seed(5)
    cache = shape or (BLOCKS, HEADS, TOKENS, 2 * DIM)
    backend = FakeBackend(order, broken)
    return [
        SimpleNamespace(
            kv_cache=torch.randn(cache, generator=generator).to(dtype), num_kv_heads=HEADS, head_size=DIM, impl=backend
        )
        for _ in range(LAYERS)
    ]


def orders():
    count = TOKENS * 2 * HEADS * DIM
    numbers = torch.arange(count).view(TOKENS, 2, HEADS, DIM)
    yield "token-major", numbers.flatten()
    yield "head-major", numbers.permute(2, 0, 1, 3).flatten().argsort()
    yield "halves", numbers.permute(1, 2, 3, 0).flatten().argsort()
    yield "shuffled", torch.randperm(count, generator=torch.Generator().manual_seed(3))


ORDERS = dict(orders())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ORDERS)
def test_what_is_written_is_read(name, dtype):
    made = layers(ORDERS[name], dtype=dtype)
    paged = PagedKV(made, TOKENS)
    slots = torch.tensor([5, 80, 17, 18, 95, 0])
    kv = torch.randn(2, len(slots), HEADS, DIM).to(dtype)
    for layer in range(LAYERS):
        paged.write(layer, slots, kv[0] + layer, kv[1] - layer)
    for layer in range(LAYERS):
        found = paged.read(layer, slots)
        assert torch.equal(found[0], kv[0] + layer)
        assert torch.equal(found[1], kv[1] - layer)


@pytest.mark.parametrize("name", ORDERS)
def test_learning_leaves_the_cache_as_it_was(name):
    made = layers(ORDERS[name])
    before = [layer.kv_cache.clone() for layer in made]
    PagedKV(made, TOKENS)
    assert all(torch.equal(layer.kv_cache, kept) for layer, kept in zip(made, before, strict=True))


def test_a_cache_of_one_block_can_be_learnt():
    paged = PagedKV(layers(shape=(1, HEADS, TOKENS, 2 * DIM)), TOKENS)
    slots = torch.arange(TOKENS)
    keys, values = torch.randn(2, TOKENS, HEADS, DIM)
    paged.write(1, slots, keys, values)
    for written, found in zip((keys, values), paged.read(1, slots), strict=True):
        assert torch.equal(written, found)


def test_preserved_blocks_are_put_back_whole_and_others_left_alone():
    made = layers()
    paged = PagedKV(made, TOKENS)
    before = [layer.kv_cache.clone() for layer in made]
    ones = torch.ones(2, HEADS, DIM)
    with paged.preserved(torch.tensor([3 * TOKENS + 1])):
        paged.write(1, torch.tensor([3 * TOKENS, 4 * TOKENS]), ones, ones)
    assert torch.equal(made[1].kv_cache[3], before[1][3])
    assert not torch.equal(made[1].kv_cache[4], before[1][4])


class Truncating(FakeBackend):
    """Keeps a byte for each number, cut off as vLLM's CPU kernel does."""

    def do_kv_cache_update(self, layer, keys, values, cache, slots) -> None:
        scaled = [states.float() / scale for states, scale in ((keys, layer._k_scale), (values, layer._v_scale))]
        near = [states.to(KV_DTYPES[layer.kv_cache_dtype]) for states in scaled]
        above = [one.float().abs() > states.abs() for one, states in zip(near, scaled, strict=True)]
        cut = [one.view(torch.uint8) - over.to(torch.uint8) for one, over in zip(near, above, strict=True)]
        super().do_kv_cache_update(layer, *cut, cache, slots)


def quantized(name, kept, scales=(1.0, 1.0)):
    made = layers(ORDERS[name])
    for one in made:
        one.kv_cache, one.kv_cache_dtype = one.kv_cache.to(torch.uint8), kept
        one._k_scale, one._v_scale = map(torch.tensor, scales)
        one._k_scale_float, one._v_scale_float = scales
        one.impl = Truncating(ORDERS[name])
    return made


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 2.9)])
@pytest.mark.parametrize("kept", KV_DTYPES)
@pytest.mark.parametrize("name", ORDERS)
def test_bytes_of_a_quantized_cache_are_placed_as_they_are_and_others_rounded_to_the_nearest(name, kept, scales):
    paged = PagedKV(quantized(name, kept, scales), TOKENS, dtype=torch.bfloat16)
    slots, others = torch.tensor([5, 80, 17, 18]), torch.tensor([40, 2, 3, 77])
    keys, values = torch.randn(2, len(slots), HEADS, DIM)
    paged.write(1, slots, keys.bfloat16(), values.bfloat16())
    stored = paged.read_stored(1, slots)
    assert stored.dtype == paged.stored_dtype == KV_DTYPES[kept]
    assert paged.read(1, slots).dtype == paged.dtype == torch.bfloat16
    paged.place(1, others, *paged.opened(1, stored))
    assert torch.equal(paged.read_stored(1, others).view(torch.uint8), stored.view(torch.uint8))
    paged.place(1, others, keys, values)
    nearest = torch.stack(
        [(one / scale).to(KV_DTYPES[kept]) for one, scale in zip((keys, values), scales, strict=True)]
    )
    assert torch.equal(paged.read_stored(1, others).view(torch.uint8), nearest.view(torch.uint8))
    assert torch.equal(paged.rounded(1, keys), paged.read(1, others)[0])


def test_scales_are_part_of_the_stores_name():
    names = [
        PagedKV(quantized("halves", "fp8", scales), TOKENS).scales_name
        for scales in ((1.0, 1.0), (1.0, 0.5), (2.0, 1.0))
    ]
    assert names[0] == ""
    assert len(set(names)) == 3


def test_scales_by_head_and_layers_of_several_types_are_refused():
    made = quantized("halves", "fp8")
    made[1]._v_scale = torch.ones(HEADS)
    with pytest.raises(UnsupportedModelError, match="a scale for every head"):
        PagedKV(made, TOKENS)
    made[1].kv_cache_dtype = "fp8_e5m2"
    with pytest.raises(UnsupportedModelError, match="different shapes or types"):
        PagedKV(made, TOKENS)


@pytest.mark.parametrize("broken", ["drops values", "rounds", "forgets a slot"])
def test_a_cache_that_does_not_give_back_what_was_written_is_refused(broken):
    with pytest.raises(UnsupportedModelError, match=r"layout could not be learnt|does not read back"):
        PagedKV(layers(ORDERS["shuffled"], broken=broken), TOKENS)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, BLOCKS, TOKENS, HEADS, DIM), torch.float32),
        ((BLOCKS, HEADS, TOKENS, DIM), torch.float32),
        ((BLOCKS, HEADS, TOKENS, 2 * DIM), torch.uint8),
    ],
    ids=["other dims", "latent", "quantized"],
)
def test_caches_that_hold_no_plain_keys_and_values_are_refused(shape, dtype):
    with pytest.raises(UnsupportedModelError, match="cannot be read; chunkweave needs"):
        PagedKV(layers(shape=shape, dtype=dtype), TOKENS)
