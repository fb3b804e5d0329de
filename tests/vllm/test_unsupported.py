"""Models and set-ups that cannot be woven: served by vLLM alone, with the reason in the log."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from chunkweave.errors import UnsupportedModelError
from chunkweave.vllm.model_check import SUPPORTED, check_supported
from tests.vllm.prompts import computed_alone
from tests.vllm.serving import serving


def test_a_model_with_a_sliding_window_is_served_by_vllm_alone(checkpoint, capfd):
    folder = checkpoint("mistral", sliding_window=64)
    scenario = computed_alone()
    with serving(folder) as served:
        scenario.precompute(served)
        got = served.answer(scenario.prompt.ask("cacheblend", 0.15))[0]
        captured = served.answer(scenario.prompt.ask("cachecraft"))[0]
        assert served.worker("chunkweave_state") == [{"weaves": False}]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([scenario.prompt.ids])).logits[0, -1]
    assert (got.log_probs[0] - torch.log_softmax(logits, -1)).abs().max().item() <= 5e-4
    assert (captured.log_probs - got.log_probs).abs().max().item() <= 5e-4
    assert captured.report == got.report
    assert got.report == {"method": "prefix", "prompt_tokens": len(scenario.prompt.ids)} | {
        "computed_tokens": len(scenario.prompt.ids)
    }
    said = "".join(capfd.readouterr())
    assert "chunkweave weaves nothing, requests are served by vLLM alone: MistralForCausalLM cannot be woven" in said


def fakes(name="LlamaForCausalLM", rotary="RotaryEmbedding", window=None, own_rotary=False, scaled=False, **changes):
    """A model, a configuration and KV cache groups that pass, but for what is changed."""
    values = {
        "pipeline_parallel_size": 1,
        "speculative": None,
        "multimodal": False,
        "spec": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32),
        "groups": 1,
        **changes,
    }
    turn = type(rotary, (), {})()
    layers = [
        SimpleNamespace(
            self_attn=SimpleNamespace(
                rotary_emb=type(rotary, (), {})() if own_rotary else turn,
                attn=SimpleNamespace(impl=SimpleNamespace(sliding_window=window)),
                do_llama_4_scaling=scaled,
            )
        )
        for _ in range(2)
    ]
    model = type(name, (), {"model": SimpleNamespace(layers=layers)})()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=values["pipeline_parallel_size"]),
        speculative_config=values["speculative"],
        model_config=SimpleNamespace(is_multimodal_model=values["multimodal"]),
    )
    group = SimpleNamespace(kv_cache_spec=values["spec"])
    return model, config, SimpleNamespace(kv_cache_groups=[group] * values["groups"])


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("window", [None, -1, (-1, -1)])
def test_what_is_supported_passes(name, window):
    check_supported(*fakes(name, window=window))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "Gemma3ForCausalLM"}, "the architecture is not one of LlamaForCausalLM"),
        ({"name": "DeepseekV3ForCausalLM"}, "the architecture is not one of"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism would need hidden-state transfer"),
        ({"speculative": object()}, "with speculative decoding drafts have a KV cache of their own"),
        ({"multimodal": True}, "multimodal prompts have parts that are not tokens"),
        ({"groups": 2}, "hybrid KV cache groups are not uniform over layers"),
        (
            {
                "spec": SlidingWindowSpec(
                    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
                )
            },
            "SlidingWindowSpec is not full attention",
        ),
        ({"own_rotary": True}, "its layers rotate by different angles"),
        ({"rotary": "DynamicNTKScalingRotaryEmbedding"}, "DynamicNTKScalingRotaryEmbedding depends on more than"),
        ({"rotary": "MRotaryEmbedding"}, "MRotaryEmbedding depends on more than a token's position"),
        ({"rotary": "Phi3LongRoPEScaledRotaryEmbedding"}, "depends on more than a token's position"),
        ({"rotary": "DualChunkRotaryEmbedding"}, "depends on more than a token's position"),
        ({"scaled": True}, "its queries are scaled by their position"),
        ({"window": 64}, "it attends within a sliding window"),
        ({"window": (63, 0)}, "it attends within a sliding window"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_named(changes, reason):
    with pytest.raises(UnsupportedModelError, match="cannot be woven here") as caught:
        check_supported(*fakes(**changes))
    assert reason in str(caught.value)
