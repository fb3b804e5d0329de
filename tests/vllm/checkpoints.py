"""Tiny checkpoints with random weights, so large that tokens differ and attention is not flat."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_WINDOWS = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 2}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.5,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "cwm": {**_WINDOWS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
    "granite": _MULTIPLIERS,
    "granitemoe": {**_MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "cohere": {"tie_word_embeddings": True, "logit_scale": 1.0},
    "exaone4": {**_WINDOWS, "sliding_window_pattern": "LG"},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {
        **_WINDOWS,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gpt_oss": {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": _WINDOWS,
    "smollm3": {"no_rope_layer_interval": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": _EXPERTS,
    "gemma3_text": _WINDOWS,
}
"""What a family's configuration needs beside the sizes. A window is less than two chunks of the tests."""

VOCAB = 1000
BOS = 0
FIRST_TOKEN = 3
"""Ids below are special."""


def make_checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """A 4-layer float32 model of `family` with grouped-query attention, saved to `folder`."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": BOS,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(family, **{**values, **_FAMILIES.get(family, {}), **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # else all zero and all one, which would hide mistakes
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path, *, adds_bos: bool) -> None:
    """Give a checkpoint of 4096 tokens the bundled tokenizer, or one that puts nothing before a text."""
    bundled = Path(str(files("chunkweave") / "assets" / "tokenizer"))
    for path in bundled.iterdir():
        shutil.copy(path, folder)
    if not adds_bos:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
