"""Random-weight models of known geometry: time can be measured where weights cannot be had."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from chunkweave.errors import UnknownMethodError


@dataclass(frozen=True, slots=True)
class Shape:
    """The configuration class and the numbers of a published model."""

    config_class: type[PreTrainedConfig]
    values: dict[str, Any]


def _values(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    theta: float,
    **more: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **more,
    }


SHAPES: dict[str, Shape] = {
    "demo": Shape(LlamaConfig, _values(256, 704, 8, 8, 4, 4096, 8192, 1e4, tie_word_embeddings=True)),
    "smollm2-135m": Shape(LlamaConfig, _values(576, 1536, 30, 9, 3, 49152, 8192, 1e5, tie_word_embeddings=True)),
    "qwen2.5-0.5b": Shape(Qwen2Config, _values(896, 4864, 24, 14, 2, 151936, 32768, 1e6, tie_word_embeddings=True)),
    "qwen3-0.6b": Shape(
        Qwen3Config, _values(1024, 3072, 28, 16, 8, 151936, 40960, 1e6, tie_word_embeddings=True, head_dim=128)
    ),
    "llama-3.2-1b": Shape(LlamaConfig, _values(2048, 8192, 16, 32, 8, 128256, 131072, 5e5, tie_word_embeddings=True)),
    "qwen2.5-1.5b": Shape(Qwen2Config, _values(1536, 8960, 28, 12, 2, 151936, 32768, 1e6, tie_word_embeddings=True)),
    "llama-3-8b": Shape(LlamaConfig, _values(4096, 14336, 32, 32, 8, 128256, 8192, 5e5)),
    "mistral-7b": Shape(MistralConfig, _values(4096, 14336, 32, 32, 8, 32768, 32768, 1e6, sliding_window=None)),
}


def shape_config(name: str) -> PreTrainedConfig:
    """The Hugging Face configuration of a known shape.

    Raises:
        UnknownMethodError: no shape of that name; the message lists them.
    """
    if name not in SHAPES:
        raise UnknownMethodError(f"unknown shape {name!r}; there are: {', '.join(SHAPES)}")
    shape = SHAPES[name]
    return shape.config_class(**shape.values)


def random_model(config: PreTrainedConfig, *, dtype: torch.dtype, device: str, seed: int) -> Any:
    """A model of that configuration with normal(0, 0.02) weights from `seed`, in evaluation mode."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        build: Callable[..., Any] = AutoModelForCausalLM.from_config
        model = build(config, dtype=dtype, attn_implementation="sdpa")
    finally:
        torch.random.set_rng_state(state)
    return model.to(device).eval()
