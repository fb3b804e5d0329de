"""Random-weight models of known geometry: time can be measured where weights cannot be had."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from chunkweave.planning.known_shapes import known_shape

_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
}


def shape_config(name: str) -> PreTrainedConfig:
    """The Hugging Face configuration of a known shape.

    Raises:
        UnknownMethodError: no shape of that name; the message lists them.
    """
    shape = known_shape(name)
    sizes = shape.geometry
    config_class, values = _FAMILIES[shape.family]
    if sizes.head_dim * sizes.num_heads != sizes.hidden_size:
        values = {**values, "head_dim": sizes.head_dim}
    build: Callable[..., PreTrainedConfig] = config_class
    return build(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied_embeddings,
        **values,
    )


def random_model(config: PreTrainedConfig, *, dtype: torch.dtype, device: str, seed: int) -> Any:
    """A model of that configuration with normal(0, 0.02) weights from `seed`, in evaluation mode.

    They are drawn on `device` itself: drawing eight billion on a CPU takes minutes.
    """
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        build: Callable[..., Any] = AutoModelForCausalLM.from_config
        with torch.device(device):
            model = build(config, dtype=dtype, attn_implementation="sdpa")
    finally:
        torch.random.set_rng_state(state)
    return model.to(device).eval()
