"""Which of vLLM's model classes are woven, and what their layers have otherwise than their family's anatomy says.

vLLM names a layer's norms as transformers does, so that `models.anatomy` holds for its modules too. What differs is how
a layer is called, and what vLLM alone knows of it: which layers rotate, and within which window a layer attends.
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
    """How a layer is called, and what it gives; a stream is `[tokens, hidden]`."""

    ADDED_LATER = "added later"
    """`layer(positions, hidden, residual)` gives two states whose sum is the stream."""
    HIDDEN_FIRST = "hidden first"
    """`layer(hidden, positions, residual)` gives two states whose sum is the stream."""
    ADDED = "added"
    """`layer(positions, hidden, residual)` gives the stream first; the residual is not read."""
    STREAM = "stream"
    """`layer(positions, hidden)` gives the stream first."""
    TRANSFORMERS = "transformers"
    """As transformers calls it: a batch of one, with the cosines and sines of its positions; gives the stream."""


def _always(_: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of vLLM's model classes; Llama's, unless it is said otherwise."""

    call: Call = Call.ADDED_LATER
    attention: str = "self_attn"
    output: str = "o_proj"
    mlp: str = "mlp"
    interleaved: bool = False
    """Whether transformers rotates dim 2i with dim 2i + 1; vLLM's rotary modules say so themselves."""
    rotates: Callable[[Any], bool] = _always
    """Whether a layer's attention module rotates."""
    reduces_itself: bool = False
    """Whether the layer sums over tensor-parallel ranks, instead of its projections: with several, it is not woven."""


_LLAMA = Architecture()
_TRANSFORMERS = Architecture(call=Call.TRANSFORMERS)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _LLAMA,
        "MixtralForCausalLM": Architecture(mlp="block_sparse_moe"),
        "Qwen2ForCausalLM": _LLAMA,
        "Qwen2MoeForCausalLM": _LLAMA,
        "Qwen3ForCausalLM": _LLAMA,
        "Qwen3MoeForCausalLM": _LLAMA,
        "GemmaForCausalLM": _LLAMA,
        "Gemma2ForCausalLM": _LLAMA,
        "Gemma3ForCausalLM": _LLAMA,
        "GptOssForCausalLM": Architecture(call=Call.HIDDEN_FIRST, attention="attn"),
        "Phi3ForCausalLM": _LLAMA,
        "Glm4ForCausalLM": _LLAMA,
        "NemotronForCausalLM": _LLAMA,
        "OlmoeForCausalLM": _LLAMA,
        "StablelmForCausalLM": Architecture(call=Call.STREAM),
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
"""By the name of the class."""

RUN_BY_TRANSFORMERS: Mapping[str, Architecture] = MappingProxyType(
    {
        "glm": Architecture(call=Call.TRANSFORMERS, interleaved=True),
        "olmo2": _TRANSFORMERS,
        "olmo3": _TRANSFORMERS,
        "phi": Architecture(call=Call.TRANSFORMERS, output="dense"),
        "smollm3": Architecture(call=Call.TRANSFORMERS, rotates=lambda attention: bool(attention.use_rope)),
    }
)
"""By `model_type`: families without a class in vLLM, which puts modules of its own into transformers' layers."""


def architecture_of(model: Any, config: Any) -> Architecture | None:
    """That of a model of vLLM's with this configuration of the checkpoint; None if it is not woven."""
    name = type(model).__name__
    if name.startswith("Transformers"):
        return RUN_BY_TRANSFORMERS.get(getattr(config, "model_type", ""))
    return ARCHITECTURES.get(name)


def missing_modules(layer: Any, architecture: Architecture, anatomy: Anatomy) -> list[str]:
    """The modules that a layer should have and has not."""
    wanted = [name for name in (*anatomy.norms, architecture.attention, architecture.mlp) if not hasattr(layer, name)]
    attention = getattr(layer, architecture.attention, None)
    return wanted + [name for name in ("qkv_proj", architecture.output, "attn") if not hasattr(attention, name)]


def windows_of(attentions: Sequence[Any]) -> tuple[int | None, ...]:
    """How many keys up to its own a token sees, by vLLM's `Attention` module; empty if all see all.

    Raises:
        UnsupportedModelError: a module's backend says it in a way that is not known.
    """
    windows = tuple(_window(getattr(attention.impl, "sliding_window", None)) for attention in attentions)
    return windows if any(windows) else ()


def sinks_of(attentions: Sequence[Any]) -> tuple[tuple[float, ...], ...]:
    """The sinks of this rank's query heads by vLLM's `Attention` module; empty without."""
    sinks = [getattr(attention.impl, "sinks", None) for attention in attentions]
    return tuple(tuple(one.float().tolist()) for one in sinks if one is not None)


@contextmanager
def narrowed(attentions: Sequence[Any], window: int) -> Iterator[None]:
    """Narrow the windows that there are to `window` keys, for a check with few tokens."""
    before = [(attention.impl, attention.impl.sliding_window) for attention in attentions if windows_of([attention])]
    for impl, was in before:
        impl.sliding_window = window if isinstance(was, int) else (window - 1, 0)
    try:
        yield
    finally:
        for impl, was in before:
            impl.sliding_window = was


def _window(said: Any) -> int | None:
    """Backends keep a number of keys, or how far to the left and to the right a token sees."""
    match said:
        case None | -1 | (-1, -1):
            return None
        case int() if said > 0:
            return said
        case (int(left), 0) if left >= 0:
            return left + 1
    raise UnsupportedModelError(f"its attention is limited in a way that is not known ({said!r})")
