"""LoRA adapters in PEFT's format, with random weights, for any model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from chunkweave.models.adapters import CONFIG_FILE, WEIGHTS_FILE

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(
    folder: Path,
    model: Any,
    *,
    seed: int = 0,
    size: float = 0.05,
    ranks: Mapping[str, int] | None = None,
    targets: list[str] | None = None,
    **config: Any,
) -> Path:
    """An adapter for all linear layers whose names end as `targets` do; `ranks` has those that are not 4, by module."""
    generator = torch.Generator().manual_seed(seed)
    targets = LINEAR if targets is None else targets
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            outputs, inputs = module.weight.shape
            rank = (ranks or {}).get(name, 4)
            key = f"base_model.model.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * size
            weights[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets, **config}
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    return folder
