"""Every reuse method against an oracle: full prefill, the model's own forward, a rotation of our own, brute force."""

import pytest
import torch
from transformers import DynamicCache

from chunkweave.planning.method import RATIO, parameter_of
from chunkweave.planning.plan import KVSource
from chunkweave.plugins import METHODS
from tests.integration.weaving import BOS, Bench, close, make_bench, make_prompt
from tests.toys import TOY_FAMILIES, toy_model

SIZES = (17, 23, 9, 31)
WITH_RATIO = [name for name in METHODS.names if parameter_of(name) == RATIO]
BF16 = 0.12
"""bfloat16 has 8 bits of precision: two orders of computing the same sum differ by about 0.4 % a layer."""


@pytest.mark.parametrize("held", range(len(SIZES) + 1))
def test_prefix_equals_full_for_every_split_point(bench, held):
    prompt = make_prompt(SIZES, system=6)
    other = make_prompt((40,), system=0, seed=99)
    for part in prompt.parts[: 2 + held]:
        assert part.token_ids
    beginning = type(prompt)((*prompt.parts[: 2 + held], other.parts[-1]))
    bench.prefill(beginning, "full", keep=True)
    woven = bench.prefill(prompt, "prefix")
    assert woven.plan.tokens(KVSource.EXACT) == sum(len(p) for p in prompt.parts[1 : 2 + held])
    close(torch.log_softmax(woven.logits, -1), bench.log_probs(prompt, "full"))


@pytest.mark.parametrize("method", WITH_RATIO)
@pytest.mark.parametrize("missing", [(), (1,), (0, 3)])
def test_ratio_one_equals_full(bench, method, missing):
    prompt = bench.precompute(make_prompt(SIZES, system=6), without=missing)
    close(bench.log_probs(prompt, method, ratio=1.0), bench.own_log_probs(prompt))


def test_gradual_filtering_at_ratio_one_equals_full(bench):
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    close(bench.log_probs(prompt, "cacheblend", ratio=1.0, check_layers=(1, 2, 3)), bench.own_log_probs(prompt))


@pytest.mark.parametrize("method", WITH_RATIO)
def test_ratio_zero_equals_full_reuse(bench, method):
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    close(bench.log_probs(prompt, method, ratio=0.0), bench.log_probs(prompt, "full-reuse"))


def test_full_reuse_equals_an_independent_rotation(bench):
    prompt = bench.precompute(make_prompt(SIZES))
    close(bench.log_probs(prompt, "full-reuse"), rotation_reference(bench, prompt))


def rotation_reference(bench: Bench, prompt) -> torch.Tensor:
    """Chunks computed alone by the model's own forward, their keys turned by complex numbers, the question on top."""
    model = bench.loaded.model.model
    theta, dim = model.config.rope_parameters["rope_theta"], bench.loaded.model.geometry.head_dim
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    layers = bench.loaded.model.geometry.num_layers
    keys: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    values: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    with torch.inference_mode():
        start = model(torch.tensor([[BOS]]), use_cache=True).past_key_values
        for layer in range(layers):
            keys[layer].append(start.layers[layer].keys)
            values[layer].append(start.layers[layer].values)
        for part, span in zip(prompt.parts, prompt.spans(), strict=True):
            if part.id is None:
                continue
            own = model(torch.tensor([[BOS, *part.token_ids]]), use_cache=True).past_key_values
            for layer in range(layers):
                keys[layer].append(shift(own.layers[layer].keys[:, :, 1:], span.start - 1, frequencies))
                values[layer].append(own.layers[layer].values[:, :, 1:])
        past = DynamicCache()
        for layer in range(layers):
            past.update(torch.cat(keys[layer], 2), torch.cat(values[layer], 2), layer)
        question = torch.tensor([prompt.parts[-1].token_ids])
        return torch.log_softmax(model(question, past_key_values=past).logits[0, -1], -1)


def shift(keys: torch.Tensor, by: int, frequencies: torch.Tensor) -> torch.Tensor:
    """Keys `[1, heads, tokens, dim]` moved by `by` positions: each pair (i, i + dim/2) is a complex number."""
    half = keys.shape[-1] // 2
    pairs = torch.complex(keys[..., :half].double(), keys[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(frequencies), by * frequencies)
    return torch.cat((turned.real, turned.imag), -1).float()


@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.5])
def test_chosen_tokens_are_those_of_a_brute_force_search(bench, ratio):
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    woven = bench.prefill(prompt, "cacheblend", ratio=ratio)
    chunks = [(part, span) for part, span in zip(prompt.parts, prompt.spans(), strict=True) if part.kind == "chunk"]
    fresh = kv_before_rope(bench, prompt.token_ids, layer=1)
    deviation = {}
    for part, span in chunks:
        cached = kv_before_rope(bench, (BOS, *part.token_ids), layer=1)[1:]
        gap = (fresh[span.start : span.stop] - cached).double().pow(2).sum((1, 2)).sqrt()
        deviation |= {span.start + i: gap[i].item() for i in range(len(span))}
    count = -int(-ratio * len(deviation) // 1)
    brute = sorted(sorted(deviation, key=lambda p: (-deviation[p], p))[:count])
    assert [p for span in woven.recomputed for p in span.positions()] == brute


def kv_before_rope(bench: Bench, ids, layer: int) -> torch.Tensor:
    """What the model's own forward feeds into RoPE at one layer, by hooks: `[tokens, heads, 2 * dim]`."""
    attention = bench.loaded.model.model.model.layers[layer].self_attn
    seen: dict[str, torch.Tensor] = {}

    def keep(name):
        return lambda _module, _inputs, output: seen.__setitem__(name, output[0])

    hooks = [
        getattr(attention, "k_norm", attention.k_proj).register_forward_hook(keep("k")),
        attention.v_proj.register_forward_hook(keep("v")),
    ]
    with torch.inference_mode():
        bench.loaded.model.model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    g = bench.loaded.model.geometry
    shape = (len(ids), g.num_kv_heads, g.head_dim)
    return torch.cat((seen["k"].reshape(shape), seen["v"].reshape(shape)), -1)


def test_gradual_filtering_narrows_at_each_check_layer(bench):
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    woven = bench.prefill(prompt, "cacheblend", ratio=0.3, check_layers=(1, 2, 3))
    kept = [work.kept_tokens for work in woven.work]
    entered = [work.entered_tokens for work in woven.work]
    assert kept[0] == len(prompt)
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert entered[1:] == kept[:-1]
    assert [work.finished_tokens for work in woven.work] == [*kept[:-1], 1]
    last = woven.plan.passes[0].rules[-1].count
    assert sum(len(span) for span in woven.recomputed) == last


@pytest.mark.parametrize("family", sorted(TOY_FAMILIES))
def test_bfloat16_within_its_rounding(family):
    bench = make_bench(toy_model(family, dtype=torch.bfloat16, initializer_range=0.05))
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    own = bench.own_log_probs(prompt)
    close(bench.log_probs(prompt, "full"), own, BF16)
    close(bench.log_probs(prompt, "cacheblend", ratio=1.0), own, BF16)
    close(bench.log_probs(prompt, "cacheblend", ratio=0.0), bench.log_probs(prompt, "full-reuse"), BF16)


def test_shifting_twice_is_shifting_once(bench):
    rotate = bench.loaded.model.rotate_keys
    states = torch.randn(7, 2, 16, generator=torch.Generator().manual_seed(3))
    at = torch.arange(7)
    by_a_then_b = rotate(0, rotate(0, states, at + 11), torch.full((7,), 30))
    close(by_a_then_b, rotate(0, states, at + 41))
