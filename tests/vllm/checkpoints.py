"""Tiny checkpoints with random weights, so large that tokens differ and attention is not flat."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

FAMILIES: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
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
    config = FAMILIES[family](**{**values, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("_proj.bias", "norm.weight")):  # else all zero and all one, which would hide mistakes
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
