"""Sizes of published models, by name: for models with random weights, and for planning without any."""

from dataclasses import dataclass

from chunkweave.errors import UnknownMethodError
from chunkweave.types import Geometry


@dataclass(frozen=True, slots=True)
class KnownShape:
    """The family whose layers a model has, its sizes, and the base of its rotary embedding."""

    family: str
    geometry: Geometry
    rope_theta: float
    tied_embeddings: bool = False


def _llama_like(
    family: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    theta: float,
    *,
    head_dim: int | None = None,
    tied: bool = False,
) -> KnownShape:
    geometry = Geometry(layers, hidden, heads, kv_heads, head_dim or hidden // heads, inner, vocab, positions)
    return KnownShape(family, geometry, theta, tied)


KNOWN_SHAPES: dict[str, KnownShape] = {
    "demo": _llama_like("llama", 256, 704, 8, 8, 4, 4096, 8192, 1e4, tied=True),
    "smollm2-135m": _llama_like("llama", 576, 1536, 30, 9, 3, 49152, 8192, 1e5, tied=True),
    "qwen2.5-0.5b": _llama_like("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, 1e6, tied=True),
    "qwen3-0.6b": _llama_like("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, 1e6, head_dim=128, tied=True),
    "llama-3.2-1b": _llama_like("llama", 2048, 8192, 16, 32, 8, 128256, 131072, 5e5, tied=True),
    "qwen2.5-1.5b": _llama_like("qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, 1e6, tied=True),
    "llama-3-8b": _llama_like("llama", 4096, 14336, 32, 32, 8, 128256, 8192, 5e5),
    "mistral-7b": _llama_like("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, 1e6),
}


def known_shape(name: str) -> KnownShape:
    """The shape of that name.

    Raises:
        UnknownMethodError: there is none; the message lists them.
    """
    if name not in KNOWN_SHAPES:
        raise UnknownMethodError(f"unknown shape {name!r}; there are: {', '.join(KNOWN_SHAPES)}")
    return KNOWN_SHAPES[name]
