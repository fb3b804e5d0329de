"""Read a GGUF file, and convert it to a checkpoint folder in Hugging Face format: config, tokenizer and weights.

Why not transformers' reader: it holds all weights in float32 at once, ignores the BOS token and long-context RoPE
factors, and splits text like GPT-2 where it does not know the file's rule.
"""

import errno
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from chunkweave.errors import ModelNotFoundError, UnsupportedModelError, one_line

_SHARD_BYTES = 4 << 30
_FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
}
"""By `general.architecture`; Mistral's files say `llama`."""

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_GEMMA3_LAYER = {
    **_IN_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """gguf's reader, but a tokenizer's lists are read at once, not with two arrays for each of their elements."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        array = gguf.GGUFValueType.ARRAY
        offset = orig_offs + 12
        kind = self._get(orig_offs, np.uint32)[0] if raw_type == array else None
        if kind is None or kind == array:
            return super()._get_field_parts(orig_offs, raw_type)
        (count,), types = self._get(orig_offs + 4, np.uint64).tolist(), [array, gguf.GGUFValueType(kind)]
        if types[1] != gguf.GGUFValueType.STRING:
            values = self._get(offset, self.gguf_scalar_to_np[types[1]], count)
            if len(values) < count:
                raise ValueError("a list ends behind the end of the file")
            return 12 + values.nbytes, [values], [0], types
        order: Literal["little", "big"] = "little" if self.endianess == gguf.GGUFEndian.LITTLE else "big"
        data = self.data.data
        strings = list[Any]()
        for _ in range(count):
            begin = offset + 8
            offset = begin + int.from_bytes(data[offset:begin], order)
            if offset > len(data):
                raise ValueError("a text ends behind the end of the file")
            strings.append(data[begin:offset])
        return offset - orig_offs, strings, list(range(count)), types


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's metadata, its tensors by their names there, its configuration, and each tensor's parameter."""

    fields: "_Fields"
    tensors: Mapping[str, Any]
    config: PreTrainedConfig
    names: Mapping[str, str]

    def ordered(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows of a tensor in the order of Hugging Face's models; they may still be quantized."""
        heads = {"attn_q": self.config.num_attention_heads, "attn_k": self.config.num_key_value_heads}
        permuted = heads.get(name.split(".")[-2]) if self.config.model_type == "llama" else None
        return rows if permuted is None else _halves(rows, permuted)

    def dequantized(self, name: str) -> torch.Tensor:
        """A tensor in bfloat16.

        Raises:
            UnsupportedModelError: its type is unknown.
        """
        tensor = self.tensors[name]
        try:
            values = self.ordered(name, gguf.dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError as error:
            raise UnsupportedModelError(f"{name} of the GGUF file is of an unsupported type: {error}") from error
        if self.config.model_type == "gemma3_text" and name.endswith("_norm.weight"):
            values = values - 1.0  # Hugging Face's norms multiply by 1 + weight; files store the factor itself
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)


def read_gguf(file: Path) -> GgufFile:
    """Read metadata and positions of tensors; their values stay in the file.

    Raises:
        ModelNotFoundError: the file is truncated or damaged.
        UnsupportedModelError: an unknown architecture.
    """
    try:
        reader = _Reader(file)
        fields = _Fields({name: field.contents() for name, field in reader.fields.items()})
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ModelNotFoundError(f"{file} is truncated or damaged; download it again ({error})") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tensors)
    return GgufFile(fields, tensors, config, _names(config, tensors))


def write_checkpoint(file: Path, folder: Path, progress: Callable[[int, int], None], *, weights: bool = True) -> None:
    """Write config, tokenizer and, if wanted, bfloat16 weights of `file` into `folder`, which exists and is empty.

    Holds one tensor in float32 at a time, and at most one shard in bfloat16.

    Raises:
        ModelNotFoundError: the file is truncated or damaged.
        UnsupportedModelError: an unknown architecture, tokenizer or tensor type.
        OSError: a file cannot be written.
    """
    checkpoint = read_gguf(file)
    tokenizer = _tokenizer(checkpoint.fields)
    sizes = (int(checkpoint.tensors[name].n_elements) for name in checkpoint.names)
    _make_sure_of_room(folder, torch.bfloat16.itemsize * sum(sizes) if weights else 0)
    checkpoint.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if weights:
        tensors = ((parameter, checkpoint.dequantized(name)) for name, parameter in checkpoint.names.items())
        _write_weights(folder, tensors, len(checkpoint.names), progress)


def _make_sure_of_room(folder: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, f"{needed_bytes / 2**30:.2g} GiB of free space are needed")


class _Fields(dict[str, Any]):
    """A file's metadata; `own` reads keys of its architecture by their short name."""

    @property
    def architecture(self) -> str:
        """The model family, in llama.cpp's names."""
        return str(self["general.architecture"])

    def own(self, name: str, default: Any = None) -> Any:
        """The value of `<architecture>.<name>`; without a default the key is required."""
        key = f"{self.architecture}.{name}"
        return self[key] if default is None else self.get(key, default)

    def __missing__(self, key: str) -> Any:
        raise ModelNotFoundError(f"the GGUF file has no {key}: it is not a complete language model")


def _config(fields: _Fields, tensors: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a supported model.

    Raises:
        UnsupportedModelError: another architecture, or an unknown feature.
    """
    architecture = fields.architecture
    if architecture not in _FAMILIES:
        raise UnsupportedModelError(
            f"GGUF files of architecture {architecture!r} are not supported, only of Llama, Mistral, Qwen2, Qwen3 and "
            f"Gemma 3 ({', '.join(_FAMILIES)})"
        )
    if fields.get("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"the GGUF file is one of {fields['split.count']} parts: merge them with `llama-gguf-split --merge`"
        )
    if fields.own("expert_count", 0):
        raise UnsupportedModelError("GGUF files with experts (MoE) are not supported")
    heads = fields.own("attention.head_count")
    kv_heads = fields.own("attention.head_count_kv", -1)
    hidden = fields.own("embedding_length")
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise UnsupportedModelError("GGUF files with another number of heads in each layer are not supported")
    head_dim = fields.own("attention.key_length", hidden // heads)
    if fields.own("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("GGUF files with values of another width than keys are not supported")
    if fields.own("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("GGUF files with partial rotary embedding are not supported")
    kind: Callable[..., PreTrainedConfig] = _FAMILIES[architecture]
    rope = _rope(fields, tensors, head_dim)
    family_fields = _gemma3_fields(fields, rope) if architecture == "gemma3" else {"rope_parameters": rope}
    config = kind(
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_FAMILIES[architecture].model_type]],
        hidden_size=hidden,
        intermediate_size=fields.own("feed_forward_length"),
        num_hidden_layers=fields.own("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads < 0 else kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_written(fields.own("attention.layer_norm_rms_epsilon")),
        vocab_size=_rows(tensors, "token_embd.weight"),
        max_position_embeddings=fields.own("context_length"),
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=_end_ids(fields),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
        **family_fields,
    )
    config.dtype = torch.bfloat16
    return config


_GEMMA3_PERIOD = 6
_GEMMA3_27B_LAYERS = 62
"""Every sixth layer has full attention. Files record neither this nor the largest model's query scale."""


def _gemma3_fields(fields: _Fields, rope: dict[str, Any]) -> dict[str, Any]:
    """Windows, their RoPE and the query scale, which llama.cpp hard-codes for Gemma 3.

    Raises:
        UnsupportedModelError: the file has other values.
    """
    if fields.own("attention.sliding_window_pattern", _GEMMA3_PERIOD) != _GEMMA3_PERIOD:
        raise UnsupportedModelError("GGUF files of Gemma 3 with another pattern of windows are not supported")
    layers = fields.own("block_count")
    heads = fields.own("attention.head_count")
    head_dim = fields.own("attention.key_length", fields.own("embedding_length") // heads)
    windowed = {"rope_type": "default", "rope_theta": _written(fields.own("rope.freq_base_swa", 10000.0))}
    return {
        "rope_parameters": {"sliding_attention": windowed, "full_attention": rope},
        "layer_types": [
            "full_attention" if layer % _GEMMA3_PERIOD == 0 else "sliding_attention" for layer in range(1, layers + 1)
        ],
        "sliding_window": fields.own("attention.sliding_window"),
        "query_pre_attn_scalar": fields.own("embedding_length") // heads if layers == _GEMMA3_27B_LAYERS else head_dim,
    }


def _rows(tensors: Mapping[str, Any], name: str) -> int:
    if name not in tensors:
        raise ModelNotFoundError(f"the GGUF file has no {name}: it is not a complete language model")
    return int(tensors[name].shape[-1])


def _written(value: float) -> float:
    """A float32 in its shortest decimal form: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _end_ids(fields: _Fields) -> int | list[int] | None:
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    stop_ids = list(dict.fromkeys(end for end in ends if end is not None))
    return stop_ids if len(stop_ids) > 1 else stop_ids[0] if stop_ids else None


def _rope(fields: _Fields, tensors: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """RoPE's base and scaling, as in Hugging Face's configurations."""
    base = _written(fields.own("rope.freq_base", 10000.0))
    scaling = fields.own("rope.scaling.type", "none")
    if _ROPE_FACTORS in tensors:
        return {"rope_theta": base, **_llama3_scaling(tensors[_ROPE_FACTORS].data, base, head_dim)}
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": base}
    if scaling not in ("linear", "yarn"):
        raise UnsupportedModelError(f"GGUF files with RoPE scaling {scaling!r} are not supported")
    values = {"rope_type": scaling, "rope_theta": base, "factor": _written(fields.own("rope.scaling.factor"))}
    if scaling == "yarn":
        values["original_max_position_embeddings"] = fields.own("rope.scaling.original_context_length")
    return values


def _llama3_scaling(factors: np.ndarray, base: float, head_dim: int) -> dict[str, Any]:
    """The Llama 3 RoPE settings that give these factors, which a file stores instead.

    Raises:
        UnsupportedModelError: other settings gave them.
    """
    scaling = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    context = 8192
    wavelengths = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context / wavelengths - 1.0) / 3.0, 0.0, 1.0)
    if factors.shape != smooth.shape or not np.allclose(
        1 / ((1 - smooth) / scaling["factor"] + smooth), factors, rtol=1e-3
    ):
        raise UnsupportedModelError("GGUF files with RoPE factors other than Llama 3's are not supported")
    return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": context}


def _names(config: PreTrainedConfig, tensors: Mapping[str, Any]) -> dict[str, str]:
    """The parameter of each tensor, by its name in the file.

    Raises:
        UnsupportedModelError: tensors and parameters do not match.
    """
    build: Callable[..., Any] = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in build(config).state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    in_layer = _IN_GEMMA3_LAYER if config.model_type == "gemma3_text" else _IN_LAYER
    parameters = {name: _parameter(name, in_layer) for name in tensors if name != _ROPE_FACTORS}
    unknown = [name for name, parameter in parameters.items() if parameter not in wanted]
    missing = wanted.keys() - parameters.values()
    if unknown or missing:
        raise UnsupportedModelError(
            f"the GGUF file is not of a {config.model_type} model: unknown tensors {sorted(unknown)[:4]}, "
            f"missing {sorted(missing)[:4]}"
        )
    for name, parameter in parameters.items():
        shape = tuple(int(size) for size in reversed(tensors[name].shape))
        if shape != wanted[parameter]:
            raise UnsupportedModelError(f"{name} of the GGUF file is {shape}, not {wanted[parameter]}")
    return parameters


def _parameter(name: str, in_layer: Mapping[str, str] = _IN_LAYER) -> str:
    """A tensor's name in Hugging Face's models; "" if unknown.

    >>> _parameter("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in in_layer:
        return ""
    return f"model.layers.{match[1]}.{in_layer[match[2]]}.{kind}"


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder each head's rows from rotated pairs to halves, as in Hugging Face's Llama."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_weights(
    folder: Path, weights: Iterator[tuple[str, torch.Tensor]], count: int, progress: Callable[[int, int], None]
) -> None:
    """Write safetensors files of about `_SHARD_BYTES` each, with an index if there are several."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    shard_bytes = 0
    progress(0, count)
    for done, (name, tensor) in enumerate(weights, start=1):
        shard[name] = tensor
        shard_bytes += tensor.nbytes
        if shard_bytes >= _SHARD_BYTES or done == count:
            _save(shard, folder / f"model-{len(shards)}")
            shards.append(list(shard))
            shard = {}
            shard_bytes = 0
        progress(done, count)
    places = [f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)]
    for number, place in enumerate(places if len(shards) > 1 else ["model.safetensors"]):
        (folder / f"model-{number}").replace(folder / place)
    if len(shards) > 1:
        index = {name: place for place, names in zip(places, shards, strict=True) for name in names}
        text = json.dumps({"metadata": {}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the same permissions as the folder's other files."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        full = shutil.disk_usage(path.parent).free < sum(tensor.nbytes for tensor in tensors.values())
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    path.chmod((path.parent / "config.json").stat().st_mode)


_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": _GPT2_SPLIT,
    "smollm": _GPT2_SPLIT,  # applied after digits are split
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
"""Rule that splits text before BPE, by `tokenizer.ggml.pre`."""
_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""For these, llama.cpp puts BOS first if the file does not say."""
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""For these, a word that is a token stays whole, whatever the merges give."""

_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
"""Values of `tokenizer.ggml.token_type`."""


def _tokenizer(fields: _Fields) -> PreTrainedTokenizerFast:
    """The tokenizer of a file, with its chat template.

    Raises:
        UnsupportedModelError: neither byte-level BPE nor SentencePiece's BPE, or an unknown split rule.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"GGUF files with a tokenizer of kind {kind!r} are not supported")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    tokenizer = _byte_level(fields, tokens) if kind == "gpt2" else _sentencepiece(fields, tokens, kinds)
    for token, token_kind in zip(tokens, kinds, strict=True):
        if token_kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False)])
        elif token_kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    named = {
        f"{ours}_token": tokens[number]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (number := fields.get(f"tokenizer.ggml.{theirs}_token_id")) is not None
    }
    usual = kind == "llama" or fields.get("tokenizer.ggml.pre") in _WITH_BOS
    if fields.get("tokenizer.ggml.add_bos_token", usual) and "bos_token" in named:
        bos = named["bos_token"]
        number = fields["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, number)]
        )
    build: Callable[..., Any] = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = build(
        tokenizer_object=tokenizer,
        model_max_length=fields.own("context_length"),
        clean_up_tokenization_spaces=False,
        **named,
    )
    made.chat_template = fields.get("tokenizer.chat_template")
    return made


def _byte_level(fields: _Fields, tokens: Sequence[str]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer splits text by the unknown rule {pre!r}; known are {', '.join(_SPLITS)}"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    try:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    except Exception as error:  # the library raises nothing narrower
        raise ModelNotFoundError(f"the GGUF file's tokenizer is damaged ({one_line(error)})") from error
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []),
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: _Fields, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    model = BPE(
        vocab=vocabulary,
        merges=_merges(tokens, fields["tokenizer.ggml.scores"], kinds),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    first = fields.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if first else [replace])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if first else []),
        ]
    )
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece's merges: pairs of tokens that form a token, highest score first."""
    normal = {token: number for number, token in enumerate(tokens) if kinds[number] == _NORMAL}
    merges = []
    for token, number in normal.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in normal and pair[1] in normal]
        pairs.sort(key=lambda pair: (normal[pair[0]], normal[pair[1]]))
        merges += [(-scores[number], pair) for pair in pairs]
    return [pair for _, pair in sorted(merges, key=lambda scored: scored[0])]
