"""Weaving on a GPU against the same model on the CPU: logits, tiers, no synchronization, graphs."""

from copy import copy

import pytest
import torch

from chunkweave.config import AttentionKernel, ComputeConfig, StoreConfig
from chunkweave.engine.runner import Runner
from chunkweave.fusion.loop import PassRun
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method import make_method
from chunkweave.weaving.stores import open_store
from tests.integration.weaving import alone, make_bench, make_prompt
from tests.toys import toy_model

SIZES = [60, 44, 70]


def on_gpu(loaded) -> HuggingFaceModel:
    """The same weights; the toy on the CPU must not be used afterwards."""
    return HuggingFaceModel(loaded.model.model.to("cuda"))


def gpu_runner(store=None, **compute) -> Runner:
    loaded = toy_model()
    model = on_gpu(loaded)
    return Runner(
        model,
        open_store(store or StoreConfig(1 << 30), loaded.fingerprint, model.device),
        compute=ComputeConfig(**compute),
    )


def warm(runner, prompt) -> None:
    for part in prompt.parts:
        if part.kind == "chunk":
            runner.store_new(runner.prefill(alone(part), make_method("full")))
    runner.store.flush(10)


@pytest.mark.parametrize("attention", [AttentionKernel.TRITON, AttentionKernel.SDPA])
@pytest.mark.parametrize("method", ["full", "prefix", "full-reuse", "cacheblend", "epic", "query", "cachecraft"])
def test_logits_are_those_of_the_cpu(method, attention):
    prompt = make_prompt(SIZES, system=6)
    bench = make_bench(toy_model())
    bench.precompute(prompt)
    expected = bench.log_probs(prompt, method)
    runner = gpu_runner(attention=attention)
    warm(runner, prompt)
    found = runner.prefill(prompt, make_method(method)).logits
    torch.testing.assert_close(torch.log_softmax(found, -1).cpu(), expected, atol=2e-2, rtol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("method", ["full", "full-reuse", "cacheblend", "query"])
def test_the_layer_loop_does_not_synchronize(method, monkeypatch):
    """PyTorch itself raises at whatever waits for the device."""
    prompt = make_prompt(SIZES, system=6)
    runner = gpu_runner(attention=AttentionKernel.TRITON)
    warm(runner, prompt)
    runner.prefill(prompt, make_method(method), capture=False)  # kernels are compiled by now
    next_layer = PassRun.next_layer

    def strict(run: PassRun) -> None:
        try:
            torch.cuda.set_sync_debug_mode("error")
            next_layer(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(PassRun, "next_layer", strict)
    runner.prefill(prompt, make_method(method), capture=False)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_segments_of_every_tier_give_the_same_logits(tier, tmp_path):
    prompt = make_prompt(SIZES, system=6)
    configs = {
        "device": StoreConfig(1 << 30, device_budget_bytes=1 << 24),
        "host": StoreConfig(1 << 30),
        "disk": StoreConfig(0, cache_dir=tmp_path),
    }
    reference = gpu_runner()
    warm(reference, prompt)
    expected = reference.prefill(prompt, make_method("cacheblend"), capture=False).logits
    runner = gpu_runner(configs[tier])
    warm(runner, prompt)
    prefilled = runner.prefill(prompt, make_method("cacheblend"), capture=False)
    assert {runner.store.tier_of(segment) for segment in prefilled.plan.segments()} == {tier}
    torch.testing.assert_close(prefilled.logits, expected, atol=1e-3, rtol=0)
    runner.store.close()


def test_host_segments_lie_in_page_locked_memory():
    prompt = make_prompt(SIZES)
    runner = gpu_runner()
    warm(runner, prompt)
    segments = [runner.store.get(record.id) for record in runner.store.records()]
    assert segments
    assert all(segment.kv.is_pinned() for segment in segments)


def test_recorded_decode_steps_give_the_tokens_of_the_loop():
    prompts = [make_prompt([30], seed=seed) for seed in range(3)]

    def tokens(**compute) -> list[list[int]]:
        runner = gpu_runner(**compute)
        prefilled = [runner.prefill(prompt, make_method("full"), new_tokens=12) for prompt in prompts]
        out = [[int(one.logits.argmax())] for one in prefilled]
        for step in range(10):
            at = [len(prompt) + step for prompt in prompts]
            logits = runner.decode([one.cache for one in prefilled], [own[-1] for own in out], at)
            for own, row in zip(out, logits, strict=True):
                own.append(int(row.argmax()))
        assert bool(runner.graphed and runner.graphed.in_use) is bool(compute["decode_graphs"])
        return out

    assert tokens(decode_graphs=True) == tokens(decode_graphs=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_rope_and_norms_in_one_launch_are_those_of_the_model(dtype):
    model = HuggingFaceModel(toy_model().model.model.to("cuda", dtype))
    plain = copy(model)
    plain._turn_halves = None
    positions = torch.tensor([0, 5, 90], device="cuda")
    heads = model.geometry.num_heads
    states = torch.randn(3, heads, model.geometry.head_dim, device="cuda", dtype=dtype)
    assert model._turn_halves is not None
    turned = [one.rotate_queries(0, states, positions) for one in (model, plain)]
    torch.testing.assert_close(*turned, atol=0, rtol=2 * torch.finfo(dtype).eps)
    block = model.model.model.layers[0]
    step = model._layers[0]._before_attention
    assert step is not block.input_layernorm
    hidden = torch.randn(7, block.input_layernorm.weight.shape[0], device="cuda", dtype=dtype)
    expected = block.input_layernorm(hidden)
    torch.testing.assert_close(
        step(hidden), expected, atol=2 * torch.finfo(dtype).eps * float(expected.abs().max()), rtol=0
    )


@torch.inference_mode()
def test_projections_are_one_product_and_the_model_computes_as_before():
    bare = toy_model().model.model.to("cuda")
    ids = torch.arange(9, device="cuda")[None]
    expected = bare(ids, use_cache=False).logits
    model = HuggingFaceModel(bare)
    (together,) = model._layers[0]._projections
    assert bare.model.layers[0].self_attn.q_proj.weight.data_ptr() == together.weight.data_ptr()
    torch.testing.assert_close(bare(ids, use_cache=False).logits, expected, atol=1e-5, rtol=0)
    model.verify()
