"""vLLM's model classes that can be woven, and how their layers differ from their family's anatomy.

vLLM names a layer's norms as transformers does, so `models.anatomy` applies to its modules too. What differs is how a
layer is called, and properties that only vLLM records: which layers rotate, and a layer's attention window.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from chunkweave.errors import UnsupportedModelError
from chunkweave.models.anatomy import Anatomy


class Call(StrEnum):
    """How a layer is called, and what it returns; a stream is `[tokens, hidden]`."""

    ADDED_LATER = "added later"
    """`layer(positions, hidden, residual)` returns two states whose sum is the stream."""
    HIDDEN_FIRST = "hidden first"
    """`layer(hidden, positions, residual)` returns two states whose sum is the stream."""
    ADDED = "added"
    """`layer(positions, hidden, residual)` returns the stream first; the residual is not read."""
    STREAM = "stream"
    """`layer(positions, hidden)` returns the stream, alone or first."""
    TRANSFORMERS = "transformers"
    """As transformers calls it: a batch of one, with cosines and sines of its positions; returns the stream."""


def _always(_: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of vLLM's model classes; the defaults are Llama's."""

    call: Call = Call.ADDED_LATER
    attention: str = "self_attn"
    output: str = "o_proj"
    mlp: str = "mlp"
    interleaved: bool = False
    """Whether transformers rotates dim 2i with dim 2i + 1; vLLM's rotary modules record this themselves."""
    rotates: Callable[[Any], bool] = _always
    """Whether a layer's attention module rotates."""
    reduces_itself: bool = False
    """Whether the layer, not its projections, sums over tensor-parallel ranks; it is then not woven with several ranks.
    """


_LLAMA = Architecture()
_STREAM = Architecture(call=Call.STREAM)
_TRANSFORMERS = Architecture(call=Call.TRANSFORMERS)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _LLAMA,
        "MixtralForCausalLM": Architecture(mlp="block_sparse_moe"),
        "Qwen2ForCausalLM": _LLAMA,
        "Qwen2MoeForCausalLM": _LLAMA,
        "Qwen3ForCausalLM": _LLAMA,
        "Qwen3LLMForCausalLM": _LLAMA,
        "Qwen3MoeForCausalLM": _LLAMA,
        "GemmaForCausalLM": _LLAMA,
        "Gemma2ForCausalLM": _LLAMA,
        "Gemma3ForCausalLM": _LLAMA,
        "GptOssForCausalLM": Architecture(call=Call.HIDDEN_FIRST, attention="attn"),
        "Phi3ForCausalLM": _LLAMA,
        "Glm4ForCausalLM": _LLAMA,
        "Glm4MoeForCausalLM": _LLAMA,
        "NemotronForCausalLM": _LLAMA,
        "OlmoeForCausalLM": _LLAMA,
        "StablelmForCausalLM": _STREAM,
        "Ernie4_5ForCausalLM": _LLAMA,
        "GraniteForCausalLM": _STREAM,
        "GraniteMoeForCausalLM": Architecture(call=Call.STREAM, mlp="block_sparse_moe"),
        "Exaone4ForCausalLM": Architecture(
            call=Call.ADDED,
            rotates=lambda attention: bool(attention.sliding_window or attention.apply_rope_all_layers),
        ),
        "CohereForCausalLM": Architecture(
            call=Call.ADDED,
            rotates=lambda attention: bool(attention.v1 or attention.sliding_window),
            reduces_itself=True,
        ),
    }
)
"""By class name."""

MULTIMODAL = (
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Classes whose prompts may have images; their `language_model` is of a class above, and computes text as it does."""

RUN_BY_TRANSFORMERS: Mapping[str, Architecture] = MappingProxyType(
    {
        "arcee": _TRANSFORMERS,
        "cwm": _TRANSFORMERS,
        "glm": Architecture(call=Call.TRANSFORMERS, interleaved=True),
        "helium": Architecture(call=Call.TRANSFORMERS, interleaved=True),
        "jais2": _TRANSFORMERS,
        "olmo2": _TRANSFORMERS,
        "olmo3": _TRANSFORMERS,
        "phi": Architecture(call=Call.TRANSFORMERS, output="dense"),
        "seed_oss": _TRANSFORMERS,
        "smollm3": Architecture(call=Call.TRANSFORMERS, rotates=lambda attention: bool(attention.use_rope)),
        "starcoder2": _TRANSFORMERS,
    }
)
"""By `model_type`: families without a class in vLLM, which puts its own modules into transformers' layers."""


def language_model_of(model: Any) -> Any:
    """What computes text in a vLLM model: the model itself, but for multimodal ones."""
    return model.language_model if type(model).__name__ in MULTIMODAL else model


def architecture_of(name: str, config: Any) -> Architecture | None:
    """The architecture of vLLM's class `name`, which computes text, by its configuration; None: it cannot be woven."""
    if name.startswith("Transformers"):
        return RUN_BY_TRANSFORMERS.get(getattr(config, "model_type", ""))
    return ARCHITECTURES.get(name)


def missing_modules(layer: Any, architecture: Architecture, anatomy: Anatomy) -> list[str]:
    """Expected modules that a layer does not have."""
    wanted = [name for name in (*anatomy.norms, architecture.attention, architecture.mlp) if not hasattr(layer, name)]
    attention = getattr(layer, architecture.attention, None)
    return wanted + [name for name in ("qkv_proj", architecture.output, "attn") if not hasattr(attention, name)]


def windows_of(attentions: Sequence[Any]) -> tuple[int | None, ...]:
    """Keys up to its own that a token sees, per vLLM `Attention` module; empty if all see all.

    Raises:
        UnsupportedModelError: a module's backend records its window in an unknown form.
    """
    windows = tuple(_window(getattr(attention.impl, "sliding_window", None)) for attention in attentions)
    return windows if any(windows) else ()


def sinks_of(attentions: Sequence[Any]) -> tuple[tuple[float, ...], ...]:
    """The sinks of this rank's query heads, per vLLM `Attention` module; empty without."""
    sinks = [getattr(attention.impl, "sinks", None) for attention in attentions]
    return tuple(tuple(sink.float().tolist()) for sink in sinks if sink is not None)


@contextmanager
def narrowed(attentions: Sequence[Any], window: int) -> Iterator[None]:
    """Narrow existing windows to `window` keys, for a check with few tokens."""
    impls = [attention.impl for attention in attentions if windows_of([attention])]
    saved_windows = [(impl, impl.sliding_window, getattr(impl, "window_left", None)) for impl in impls]
    for impl, was, window_left in saved_windows:
        impl.sliding_window = window if isinstance(was, int) else (window - 1, 0)
        if window_left is not None:  # FlashInfer's layers refuse a plan for another window than this
            impl.window_left = window - 1
    try:
        yield
    finally:
        for impl, was, window_left in saved_windows:
            impl.sliding_window = was
            if window_left is not None:
                impl.window_left = window_left


def _window(window: Any) -> int | None:
    """Parse a backend's window: a number of keys, or how far to the left and right a token sees."""
    match window:
        case None | -1 | (-1, -1):
            return None
        case int() if window > 0:
            return window
        case (int(left), 0) if left >= 0:
            return left + 1
    raise UnsupportedModelError(f"its attention has a limit of an unknown form ({window!r})")
