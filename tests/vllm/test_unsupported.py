"""Models and set-ups that cannot be woven: served by vLLM alone, with the reason in the log."""

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from chunkweave.config import StoreConfig
from chunkweave.errors import ModelError, UnsupportedModelError
from chunkweave.models.anatomy import anatomy_of
from chunkweave.settings import GIB
from chunkweave.types import Geometry
from chunkweave.vllm.architectures import ARCHITECTURES, MULTIMODAL, RUN_BY_TRANSFORMERS, narrowed
from chunkweave.vllm.model_check import WOVEN_DRAFTS, check_supported, room_for_weaves, spare_bytes
from chunkweave.vllm.stock_layers import BACKENDS
from tests.vllm.prompts import Scenario, computed_alone
from tests.vllm.serving import IN_PROCESS, Served, serving

LLAMA_3_8B = Geometry(32, 4096, 32, 8, 128, 14336, 128256, 131072)


@pytest.fixture
def log(monkeypatch, caplog, capfd) -> Callable[[], str]:
    """What vLLM has said: the first one of a process sets up its log again."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return lambda: caplog.text + capfd.readouterr().out


def served_alone(served: Served, scenario: Scenario, wanted: torch.Tensor, method: str, ratio: float | None) -> None:
    """Assert that vLLM computes all of a prompt."""
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask(method, ratio))[0]
    assert (got.log_probs[0] - wanted).abs().max().item() <= 5e-4
    assert (got.report["effective_method"], got.report["computed_tokens"]) == ("full", len(scenario.prompt.ids))
    assert served.blocks_are_free()


def test_a_model_that_cannot_be_woven_is_served_by_vllm_alone(checkpoint, log):
    folder = checkpoint("olmo")
    scenario = computed_alone()
    # before vLLM changes classes of transformers in this process
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([scenario.prompt.ids])).logits[0, -1]
    with serving(folder, **IN_PROCESS) as served:
        served_alone(served, scenario, torch.log_softmax(logits, -1), "cacheblend", 0.15)
        served_alone(served, scenario, torch.log_softmax(logits, -1), "cachecraft", None)
        assert served.worker("chunkweave_state") == [{"weaves": False}]
    why = "chunkweave weaves nothing, requests are served by vLLM alone: TransformersForCausalLM cannot be woven"
    assert why in log()


def test_beside_another_connector_vllm_serves_alone(checkpoint, reference, log):
    stub = {"kv_connector": "StubConnector", "kv_connector_module_path": "tests.vllm.stub_connector"}
    both = [{**one, "kv_role": "kv_both"} for one in (stub, {"kv_connector": "ChunkweaveConnector"})]
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": both},
    }
    scenario = computed_alone()
    with serving(checkpoint("llama"), plugged=False, kv_transfer_config=several, **IN_PROCESS) as served:
        served_alone(served, scenario, reference.log_probs(scenario.prompt.ids), "cacheblend", 0.15)
    assert "it is one of several connectors (MultiConnector)" in log()


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOWED = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
)


def fakes(name="LlamaForCausalLM", family="llama", rotary="RotaryEmbedding", impl=None, **changes):
    """A model, a configuration and KV cache groups that pass, but for what is changed."""
    usual = {"backend": "FLASH_ATTN", "projection": "qkv_proj", "rope": "default", "spec": FULL}
    changes = defaultdict(type(None), usual | changes)
    turn = type(rotary, (), {"use_long_rope": changes["long"], "original_max_position_embeddings": 4096})()
    place = "attn" if name == "GptOssForCausalLM" else "self_attn"
    norms = anatomy_of(SimpleNamespace(model_type=family)).norms
    modules = changes["modules"] or (*norms, "mlp", "block_sparse_moe")
    layers = []
    for backend in (changes["backend"], changes["other_backend"] or changes["backend"]):
        named = SimpleNamespace(get_name=lambda backend=backend: backend)
        attention = SimpleNamespace(
            rotary_emb=turn,
            attn=SimpleNamespace(impl=SimpleNamespace(**(impl or {})), get_attn_backend=lambda named=named: named),
            do_llama_4_scaling=changes["scaled"],
            **dict.fromkeys((changes["projection"], "o_proj", "dense")),
        )
        layers.append(SimpleNamespace(**{place: attention}, **dict.fromkeys(modules)))
    model = type(name, (), {"model": SimpleNamespace(layers=layers)})()
    if changes["inside"]:
        model = type(changes["inside"], (), {"language_model": model})()
    text = SimpleNamespace(
        model_type=family,
        num_hidden_layers=2,
        sliding_window=changes["window"],
        layer_types=None,
        rope_parameters={"rope_type": changes["rope"]},
        **(changes["more_config"] or {}),
    )
    parallel = ("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size", "decode_context_parallel_size")
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{size: changes[size] or 1 for size in parallel}, prefill_context_parallel_size=1
        ),
        speculative_config=changes["speculative"],
        model_config=SimpleNamespace(
            is_multimodal_model=bool(changes["multimodal"] or changes["inside"]),
            is_hybrid=bool(changes["hybrid"]),
            is_attention_free=False,
            use_mla=bool(changes["mla"]),
            max_model_len=1024,
            hf_text_config=text,
        ),
    )
    specs = [changes["spec"]] if changes["more"] is None else [changes["spec"], changes["more"]]
    return model, config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("said", "window"), [(None, None), (-1, None), ((-1, -1), None), (64, 64), ((63, 0), 64), (None, 1024)]
)
def test_what_is_supported_passes(name, said, window):
    check_supported(*fakes(name, impl={"sliding_window": said}, window=window))


SUPPORTED: dict[str, dict[str, Any]] = {
    **{f"backend {name}": {"backend": name} for name in BACKENDS},
    **{f"drafts by {method}": {"speculative": SimpleNamespace(method=method)} for method in WOVEN_DRAFTS},
    "blocks for a window": {"spec": WINDOWED},
    "blocks for the whole context and for a window": {"more": WINDOWED},
    **{
        f"text of {inside}": {
            "name": "Qwen2ForCausalLM",
            "family": "qwen2",
            "inside": inside,
            "rotary": "MRotaryEmbedding",
        }
        for inside in MULTIMODAL
    },
    **{
        f"{family} by transformers": {"name": "TransformersForCausalLM", "family": family}
        for family in RUN_BY_TRANSFORMERS
    },
}


@pytest.mark.parametrize("changes", SUPPORTED.values(), ids=SUPPORTED)
def test_what_else_is_supported_passes(changes):
    check_supported(*fakes(**changes))


def test_a_window_is_narrowed_wherever_a_backend_looks_for_it():
    """FlashInfer's builders plan with `sliding_window`, and its layers compare the plan with `window_left`."""
    flashinfer = SimpleNamespace(sliding_window=(63, 0), window_left=63)
    cpu, without = SimpleNamespace(sliding_window=64), SimpleNamespace(sliding_window=(-1, -1), window_left=-1)
    before = [dict(vars(impl)) for impl in (flashinfer, cpu, without)]
    with narrowed([SimpleNamespace(impl=impl) for impl in (flashinfer, cpu, without)], 20):
        assert vars(flashinfer) == {"sliding_window": (19, 0), "window_left": 19}
        assert (vars(cpu), vars(without)) == ({"sliding_window": 20}, before[2])
    assert [vars(impl) for impl in (flashinfer, cpu, without)] == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "Grok1ForCausalLM"}, "the architecture is not one of LlamaForCausalLM"),
        ({"name": "DeepseekV3ForCausalLM"}, "the architecture is not one of"),
        ({"name": "DeepseekV3ForCausalLM", "mla": True}, "multi-head latent attention (MLA) caches latents"),
        ({"name": "GlmMoeDsaForCausalLM", "mla": True, "more_config": {"index_topk": 8}}, "its sparse attention choo"),
        ({"name": "Qwen3NextForCausalLM", "hybrid": True}, "layers of linear attention or Mamba keep a state"),
        ({"name": "TransformersForCausalLM"}, "of those that vLLM runs by transformers, arcee, cwm"),
        ({"name": "TransformersForCausalLM", "family": "olmo2", "rope": "dynamic"}, "RoPE type dynamic depend on more"),
        ({"name": "Gemma3ForCausalLM", "family": "gemma3_text", "projection": "q_proj"}, "its layers have no qkv_proj"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism would need hidden-state transfer"),
        ({"data_parallel_size": 2}, "with data parallelism its experts wait"),
        ({"decode_context_parallel_size": 2}, "with context parallelism a rank has only some of a prompt's tokens"),
        ({"backend": "TURBOQUANT"}, "how its attention backend TURBOQUANT keeps metadata and KV is not known"),
        ({"backend": "B12X"}, "choose one with --attention-backend: FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATT"),
        ({"other_backend": "TRITON_ATTN"}, "several attention backends, FLASH_ATTN, TRITON_ATTN; choose one with"),
        ({"speculative": SimpleNamespace(method="eagle")}, "with speculative decoding by eagle, drafts come from"),
        ({"speculative": SimpleNamespace(method="draft_model")}, "these methods are woven: ngram, suffix"),
        ({"multimodal": True}, "of the models whose prompts may have images only these are known: Gemma3ForCond"),
        ({"name": "DeepseekV3ForCausalLM", "inside": "Mistral3ForConditionalGeneration"}, "is not one of LlamaForC"),
        ({"spec": CHUNKED}, "neither for the whole context nor for a window (ChunkedLocalAttentionSpec)"),
        ({"more": replace(FULL, block_size=32)}, "its layers have blocks of 16, 32 tokens"),
        ({"rotary": "DynamicNTKScalingRotaryEmbedding"}, "DynamicNTKScalingRotaryEmbedding depends on more than"),
        ({"long": True}, "it is woven with --max-model-len 4096 or less"),
        ({"rotary": "DualChunkRotaryEmbedding"}, "depends on more than a token's position"),
        ({"scaled": True}, "its queries are scaled by their position"),
        ({"impl": {"sliding_window": (63, 63)}}, "its attention has a limit of an unknown form"),
        ({"impl": {"sliding_window": 65}, "window": 64}, "vLLM attends within 65 keys, the checkpoint says 64"),
        ({"impl": {"sliding_window": 65}}, "vLLM attends within 65 keys, the checkpoint says None"),
        ({"window": 64}, "vLLM attends within None keys, the checkpoint says 64"),
        ({"name": "CohereForCausalLM", "family": "cohere", "tensor_parallel_size": 2}, "sum over tensor-parallel"),
        ({"impl": {"sinks": object()}}, "its family is not known to have attention sinks"),
        ({"impl": {"logits_soft_cap": 50.0}}, "vLLM caps attention scores at 50.0, the checkpoint at None"),
        ({"name": "Gemma3ForCausalLM", "family": "gemma3_text", "modules": ("mlp",)}, "its layers have no input_layer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_named(changes, reason):
    with pytest.raises(UnsupportedModelError, match="cannot be woven here") as caught:
        check_supported(*fakes(**changes))
    assert reason in str(caught.value)


def test_memory_that_is_not_there_is_a_reason_with_its_number():
    """Of Llama-3-8B: 1 GiB sent ahead, 0.5 GiB kept, and 0.7 GiB for 8192 tokens."""
    layers = SimpleNamespace(own_geometry=LLAMA_3_8B, dtype=torch.bfloat16)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192), model_config=SimpleNamespace(max_model_len=32768)
    )
    store = StoreConfig(device_budget_bytes=256 << 20)
    reason = r"needs 2.41 GiB .* 8192 tokens and 4.38 GiB for 32768, with 1.75 GiB .*; 2.40 GiB are there: lower --gpu"
    with pytest.raises(ModelError, match=reason):
        room_for_weaves(layers, config, store, kept=GIB // 2, spare=int(2.4 * GIB))
    assert room_for_weaves(layers, config, store, kept=GIB // 2, spare=3 * GIB) == 1.25 * GIB
    assert room_for_weaves(layers, config, StoreConfig(device_staging_bytes=0), kept=0, spare=GIB) == GIB


@pytest.mark.parametrize(
    ("free", "kv_bytes", "spare"),
    [(9, None, 8), (3, None, 5), (9, 40, 11)],
    ids=["its share", "what is free", "a KV cache of a given size"],
)
def test_spare_memory_is_what_vllms_share_leaves(monkeypatch, free, kv_bytes, spare):
    for name, value in {"mem_get_info": (free, 100), "memory_reserved": 12, "memory_allocated": 10}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    cache = SimpleNamespace(kv_cache_memory_bytes=kv_bytes, gpu_memory_utilization=0.92)
    assert spare_bytes(SimpleNamespace(cache_config=cache), torch.device("cuda")) in (spare, spare - 1)
