"""Tiny checkpoints with random weights, so large that tokens differ and attention is not flat."""

import json
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

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


_VALUES: dict[str, Any] = {
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
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
_QWEN_TOKENS = {
    "image_token_id": 990,
    "video_token_id": 991,
    "vision_start_token_id": 992,
    "vision_end_token_id": 993,
}
_THREE_POSITIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
MULTIMODAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"model_type": "gemma3_text", **_WINDOWS},
        {"vision_config": _TOWER, "mm_tokens_per_image": 4, "image_token_index": 990},
    ),
    "llava": (
        {"model_type": "llama"},
        {"vision_config": {**_TOWER, "model_type": "clip_vision_model"}, "image_token_index": 990},
    ),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": {**_TOWER, "model_type": "pixtral"}, "image_token_index": 990},
    ),
    "qwen2_5_vl": (
        {"rope_parameters": _THREE_POSITIONS},
        {"vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [0]}, **_QWEN_TOKENS},
    ),
    "qwen3_vl": (
        {"rope_parameters": {**_THREE_POSITIONS, "mrope_interleaved": True}},
        {
            "vision_config": {**_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **_QWEN_TOKENS,
        },
    ),
}
"""Families whose prompts may have images: what their language model's configuration needs, and the rest of theirs."""


def make_checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """A 4-layer float32 model of `family` with grouped-query attention, saved to `folder`."""
    torch.manual_seed(0)
    if family in MULTIMODAL:
        text, others = MULTIMODAL[family]
        config = AutoConfig.for_model(family, text_config={**_VALUES, **text}, tie_word_embeddings=False, **others)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        config = AutoConfig.for_model(family, **{**_VALUES, **_FAMILIES.get(family, {}), **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # else all zero and all one, which would hide mistakes
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return folder


_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}


_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}
_GROUP = 32
_FOUR_BITS = {"bits": 4, "group_size": _GROUP}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "compressed-tensors": _COMPRESSED,
    "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True, **_FOUR_BITS},
    "gptq": {"quant_method": "gptq", "desc_act": False, "sym": True, **_FOUR_BITS},
}
"""Configurations by their name in vLLM: weights of 8 bits with activations rounded to 8 bits, and weights of 4 bits."""

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def quantize_checkpoint(folder: Path, to: Path, kind: str) -> tuple[Path, Path]:
    """The same model with weights of few bits, and with the same rounded weights in float32."""
    weights: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = rounded[name] = weight
            continue
        packed, rounded[name] = _int8(weight) if kind == "compressed-tensors" else _four_bits(weight, kind)
        weights |= {name.removesuffix("weight") + part: packed[part] for part in packed}
    config = json.loads((folder / "config.json").read_text())
    folders = to / kind, to / f"{kind}-rounded"
    for made, tensors, more in (
        (folders[0], weights, {"quantization_config": QUANTIZATIONS[kind]}),
        (folders[1], rounded, {}),
    ):
        made.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, made / "model.safetensors")
        (made / "config.json").write_text(json.dumps({**config, **more}))
    return folders


def _int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    near = (weight / scale).round()
    return {"weight": near.to(torch.int8), "weight_scale": scale}, near * scale


def _four_bits(weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale for each output and each group of inputs; 8 is zero. Inputs come first in what is packed."""
    inputs, outputs = weight.T.shape
    groups = weight.T.reshape(-1, _GROUP, outputs)
    scale = (groups.abs().amax(1, keepdim=True) / 7).half().float()
    near = (groups / scale).round().clamp(-8, 7)
    levels = (near + 8).reshape(inputs, outputs).to(torch.int64)
    scales = scale.squeeze(1).half()
    zeros = torch.full((inputs // _GROUP, outputs), 8)
    if kind == "awq":
        packed = {"qweight": _packed(levels, _AWQ_ORDER), "qzeros": _packed(zeros, _AWQ_ORDER)}
    else:  # the format counts zeros from 1
        packed = {"qweight": _packed(levels.T).T, "qzeros": _packed(zeros - 1)}
        packed["g_idx"] = torch.arange(inputs, dtype=torch.int32) // _GROUP
    return {**packed, "scales": scales}, (near * scale).reshape(inputs, outputs).T


def _packed(levels: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Eight values of 4 bits in each int32, along the last dimension."""
    eight = levels.reshape(*levels.shape[:-1], -1, 8)[..., list(order)]
    whole = (eight << (4 * torch.arange(8))).sum(-1)
    return whole.where(whole < 1 << 31, whole - (1 << 32)).to(torch.int32)


def add_tokenizer(folder: Path, *, adds_bos: bool) -> None:
    """Give a checkpoint of 4096 tokens the bundled tokenizer, or one that puts nothing before a text."""
    bundled = Path(str(files("chunkweave") / "assets" / "tokenizer"))
    for path in bundled.iterdir():
        shutil.copy(path, folder)
    if not adds_bos:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
