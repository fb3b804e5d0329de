"""Writes small GGUF files, as llama.cpp's converter does."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

from tests.toys import toy_model

SMALL = 272
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

_GEMMA3_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    model: Any = None,
    *,
    quantized: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    extra: dict[str, Any] | None = None,
    without: str = "",
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """`model` with the fields of `tokenizer`, its matrices as `quantized`.

    Left out, they are a toy Llama and the first `SMALL` tokens of the bundled tokenizer. `extra` are more fields, or
    others; `without` names one that is left out, `tensors` are more of them.
    """
    described = byte_level_fields(size=SMALL) if tokenizer is None else tokenizer
    model = toy_model(vocab_size=len(described["tokenizer.ggml.tokens"])).model.model if model is None else model
    config = model.config
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer = gguf.GGUFWriter(path, arch)
    fields = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": rope["rope_theta"],
        **({f"{arch}.attention.sliding_window": config.sliding_window} if arch == "gemma3" else {}),
        **({f"{arch}.attention.key_length": config.head_dim} if arch == "gemma3" else {}),
        **described,
        **(extra or {}),
    }
    fields.pop(without, None)
    for name, value in fields.items():
        _add(writer, name, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.to(torch.float32).numpy()
        if arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            values = _paired(values, config.head_dim)
        own = _name(name, arch)
        if arch == "gemma3" and own.endswith("_norm.weight"):
            values = values + 1
        if values.ndim == 1:
            writer.add_tensor(own, values)
        else:
            writer.add_tensor(own, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_fields(pre: str = "gpt-2", size: int = 4096) -> dict[str, Any]:
    """The bundled tokenizer's first tokens and merges as a GGUF file has them, split by the rule `pre`."""
    saved = json.loads((files("chunkweave") / "assets" / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    numbers = saved["model"]["vocab"]
    control = {token["content"] for token in saved["added_tokens"]}
    tokens = sorted(numbers, key=numbers.__getitem__)[:size]
    merges = [merge for merge in saved["model"]["merges"] if numbers["".join(merge)] < size]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": numbers["<s>"],
        "tokenizer.ggml.eos_token_id": numbers["</s>"],
        "tokenizer.chat_template": TEMPLATE,
    }


def sentencepiece_fields(text: str, size: int = 4096) -> dict[str, Any]:
    """A SentencePiece vocabulary trained on `text`, filled to `size`, as a GGUF file has it: scores, no merges."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([text], trainers.BpeTrainer(vocab_size=size - 259, show_progress=False))
    saved = json.loads(trained.to_str())["model"]
    merged = ["".join(merge) for merge in saved["merges"]]
    letters = sorted(set(saved["vocab"]) - set(merged))
    pieces = [piece for piece in dict.fromkeys([*merged, *letters]) if piece not in ("<s>", "</s>", "<unk>")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokens += [f"<unused{number}>" for number in range(size - len(tokens))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(size - 259)],
        "tokenizer.ggml.token_type": kinds + [5] * (size - len(kinds)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _name(parameter: str, arch: str) -> str:
    parts = parameter.removeprefix("model.").split(".")
    if parts[0] != "layers":
        stem = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[0]]
        return f"{stem}.{parts[-1]}"
    own = _GEMMA3_NORMS if arch == "gemma3" else {}
    return f"blk.{parts[1]}.{({**_IN_LAYER, **own})['.'.join(parts[2:-1])]}.{parts[-1]}"


def _paired(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head so that the two that are rotated together are neighbours: first halves to even places."""
    rows = [
        head + half * head_dim // 2 + place
        for head in range(0, len(values), head_dim)
        for place in range(head_dim // 2)
        for half in (0, 1)
    ]
    return values[rows]
