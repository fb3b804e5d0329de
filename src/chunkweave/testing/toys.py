"""Tiny random models of every supported family, for tests without downloads."""

from typing import Any

import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from chunkweave.models.fingerprint import fingerprint_shape
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.loading import LoadedModel, bundled_tokenizer, random_model

TOY_FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def toy_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A 4-layer configuration with grouped-query attention of `family`, with `changes` applied."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if family == "mistral":
        values["sliding_window"] = None
    return TOY_FAMILIES[family](**{**values, **changes})


def toy_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> LoadedModel:
    """A loaded toy with the bundled tokenizer. Weights are large, so that tokens differ and attention is not flat."""
    config = toy_config(family, **changes)
    model = HuggingFaceModel(random_model(config, dtype=dtype, device="cpu", seed=seed))
    name = f"toy-{family}"
    fingerprint = fingerprint_shape(config, str(dtype).removeprefix("torch."), seed)
    return LoadedModel(model, bundled_tokenizer(), fingerprint, name)
