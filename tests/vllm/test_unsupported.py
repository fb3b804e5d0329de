"""Models and set-ups that cannot be woven: served by vLLM alone, with the reason in the log."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from chunkweave.errors import UnsupportedModelError
from chunkweave.models.anatomy import anatomy_of
from chunkweave.vllm.architectures import ARCHITECTURES, RUN_BY_TRANSFORMERS
from chunkweave.vllm.model_check import check_supported
from tests.vllm.prompts import computed_alone
from tests.vllm.serving import IN_PROCESS, serving


def test_a_model_that_cannot_be_woven_is_served_by_vllm_alone(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    folder = checkpoint("granite")
    scenario = computed_alone()
    with serving(folder, **IN_PROCESS) as served:
        scenario.precompute(served)
        got = served.answer(scenario.prompt.ask("cacheblend", 0.15))[0]
        captured = served.answer(scenario.prompt.ask("cachecraft"))[0]
        assert served.worker("chunkweave_state") == [{"weaves": False}]
        assert served.blocks_are_free()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([scenario.prompt.ids])).logits[0, -1]
    assert (got.log_probs[0] - torch.log_softmax(logits, -1)).abs().max().item() <= 5e-4
    assert (captured.log_probs - got.log_probs).abs().max().item() <= 5e-4
    for report in (got.report, captured.report):
        assert (report["effective_method"], report["computed_tokens"]) == ("full", len(scenario.prompt.ids))
    why = "chunkweave weaves nothing, requests are served by vLLM alone: GraniteForCausalLM cannot be woven"
    assert why in caplog.text


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOWED = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
)


def fakes(name="LlamaForCausalLM", family="llama", rotary="RotaryEmbedding", impl=None, **changes):
    """A model, a configuration and KV cache groups that pass, but for what is changed."""
    values = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "speculative": None,
        "multimodal": False,
        "window": None,
        "spec": FULL,
        "more": None,
        "modules": (*anatomy_of(SimpleNamespace(model_type=family)).norms, "mlp", "block_sparse_moe"),
        "scaled": False,
        "long": False,
        "rope": "default",
        "projection": "qkv_proj",
        **changes,
    }
    turn = type(rotary, (), {"use_long_rope": values["long"], "original_max_position_embeddings": 4096})()
    inner = SimpleNamespace(impl=SimpleNamespace(**(impl or {})))
    attention = SimpleNamespace(
        rotary_emb=turn,
        attn=inner,
        do_llama_4_scaling=values["scaled"],
        **dict.fromkeys((values["projection"], "o_proj", "dense")),
    )
    place = "attn" if name == "GptOssForCausalLM" else "self_attn"
    layers = [SimpleNamespace(**{place: attention}, **dict.fromkeys(values["modules"])) for _ in range(2)]
    model = type(name, (), {"model": SimpleNamespace(layers=layers)})()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=values["pipeline_parallel_size"],
            data_parallel_size=values["data_parallel_size"],
            tensor_parallel_size=values["tensor_parallel_size"],
        ),
        speculative_config=values["speculative"],
        model_config=SimpleNamespace(
            is_multimodal_model=values["multimodal"],
            max_model_len=1024,
            hf_config=SimpleNamespace(
                model_type=family,
                num_hidden_layers=2,
                sliding_window=values["window"],
                layer_types=None,
                rope_parameters={"rope_type": values["rope"]},
            ),
        ),
    )
    group = SimpleNamespace(kv_cache_spec=values["spec"])
    return (
        model,
        config,
        SimpleNamespace(
            kv_cache_groups=[group]
            if values["more"] is None
            else [group, SimpleNamespace(kv_cache_spec=values["more"])]
        ),
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("said", "window"), [(None, None), (-1, None), ((-1, -1), None), (64, 64), ((63, 0), 64), (None, 1024)]
)
def test_what_is_supported_passes(name, said, window):
    check_supported(*fakes(name, impl={"sliding_window": said}, window=window))


@pytest.mark.parametrize("changes", [{"spec": WINDOWED}, {"more": WINDOWED}])
def test_blocks_for_the_whole_context_or_for_a_window_pass(changes):
    check_supported(*fakes(**changes))


@pytest.mark.parametrize("family", RUN_BY_TRANSFORMERS)
def test_what_transformers_runs_and_is_supported_passes(family):
    check_supported(*fakes("TransformersForCausalLM", family))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "Grok1ForCausalLM"}, "the architecture is not one of LlamaForCausalLM"),
        ({"name": "DeepseekV3ForCausalLM"}, "the architecture is not one of"),
        ({"name": "TransformersForCausalLM"}, "of those that vLLM runs by transformers, glm, olmo2"),
        ({"name": "TransformersForCausalLM", "family": "olmo2", "rope": "dynamic"}, "RoPE type dynamic depend on more"),
        ({"name": "Gemma3ForCausalLM", "family": "gemma3_text", "projection": "q_proj"}, "its layers have no qkv_proj"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism would need hidden-state transfer"),
        ({"data_parallel_size": 2}, "with data parallelism its experts wait"),
        ({"speculative": object()}, "with speculative decoding drafts have a KV cache of their own"),
        ({"multimodal": True}, "multimodal prompts have parts that are not tokens"),
        ({"spec": CHUNKED}, "neither for the whole context nor for a window (ChunkedLocalAttentionSpec)"),
        ({"more": replace(FULL, block_size=32)}, "its layers have blocks of 16, 32 tokens"),
        ({"rotary": "DynamicNTKScalingRotaryEmbedding"}, "DynamicNTKScalingRotaryEmbedding depends on more than"),
        ({"rotary": "MRotaryEmbedding"}, "MRotaryEmbedding depends on more than a token's position"),
        ({"long": True}, "it is woven with --max-model-len 4096 or less"),
        ({"rotary": "DualChunkRotaryEmbedding"}, "depends on more than a token's position"),
        ({"scaled": True}, "its queries are scaled by their position"),
        ({"impl": {"sliding_window": (63, 63)}}, "its attention is limited in a way that is not known"),
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
