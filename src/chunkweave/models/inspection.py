"""Which Hugging Face models can be driven layer by layer: found by looking at the modules, refused by name."""

from typing import Any

from torch import nn

from chunkweave.errors import UnsupportedModelError
from chunkweave.types import Geometry

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ATTENTION_OPTIONAL = {"q_norm", "k_norm"}
_POSITION_ONLY_ROPE = {"default", "linear", "llama3", "yarn"}
_MULTIPLIERS = ("residual_multiplier", "embedding_multiplier", "logits_scaling", "final_logit_softcapping")


def check_config(config: Any) -> None:
    """Refuse what the configuration alone shows to be unsupported, before weights are read.

    Raises:
        UnsupportedModelError: naming the feature.
    """
    kind = getattr(config, "model_type", "?")
    if getattr(config, "kv_lora_rank", None):
        raise _refusal(kind, "multi-head latent attention (MLA)", "its cached KV has no per-head keys before RoPE")
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(kind, "an encoder-decoder architecture", "only decoder-only models have chunk caches")
    if any(hasattr(config, name) for name in ("ssm_cfg", "state_size", "mamba_d_state", "conv_kernel")):
        raise _refusal(kind, "state-space (Mamba) layers", "their state depends on every earlier token")
    for name in _MULTIPLIERS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise _refusal(kind, f"{name}={getattr(config, name)}", "its layers are not plain pre-norm residual layers")
    _check_rope(kind, getattr(config, "rope_parameters", None))


def _check_rope(kind: str, rope: Any) -> None:
    if not isinstance(rope, dict) or not rope:
        raise _refusal(kind, "no rotary position embedding", "keys cannot be shifted to new positions")
    if any(isinstance(value, dict) for value in rope.values()):
        raise _refusal(kind, "per-layer RoPE", "one rotation must hold for all layers")
    if rope.get("mrope_section"):
        raise _refusal(kind, "M-RoPE (multi-axis positions)", "positions must be one number a token")
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _POSITION_ONLY_ROPE:
        raise _refusal(
            kind, f"RoPE type {rope_type!r}", "its angles depend on the prompt's length, not on the position alone"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refusal(kind, "partial rotary embedding", "only whole heads are rotated here")


def check_modules(model: nn.Module) -> None:
    """Refuse a model whose modules are not those of a Llama-like layer.

    Raises:
        UnsupportedModelError: naming the modules that are missing or unknown.
    """
    kind = type(model).__name__
    body = getattr(model, "model", None)
    wanted = ("embed_tokens", "layers", "norm", "rotary_emb")
    if body is None or not hasattr(model, "lm_head") or not all(hasattr(body, name) for name in wanted):
        raise _refusal(kind, "an unknown outer structure", f"expected lm_head and model.{{{', '.join(wanted)}}}")
    for index, layer in enumerate(body.layers):
        _check_children(f"{kind} layer {index}", layer, _LAYER_PARTS, set())
        attention = layer.self_attn
        _check_children(f"{kind} layer {index} attention", attention, _ATTENTION_PARTS, _ATTENTION_OPTIONAL)
        norm = getattr(attention, "q_norm", None)
        if norm is not None and tuple(norm.weight.shape) != (attention.head_dim,):
            raise _refusal(kind, "a query norm over all heads", "only norms over one head's dims are driven")


def _check_children(where: str, module: nn.Module, wanted: set[str], optional: set[str]) -> None:
    found = {name for name, _ in module.named_children()}
    missing, unknown = wanted - found, found - wanted - optional
    if missing or unknown:
        raise _refusal(where, f"modules {sorted(found)}", f"missing {sorted(missing)}, unknown {sorted(unknown)}")


def geometry_of(config: Any) -> Geometry:
    """Sizes from a Hugging Face configuration; `max_positions` honours a sliding window."""
    heads = config.num_attention_heads
    window = sliding_window(config)
    return Geometry(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=min(config.max_position_embeddings, window or config.max_position_embeddings),
    )


def sliding_window(config: Any) -> int | None:
    """The attention window in tokens if any layer has one; a prompt within it is attended in full."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _refusal(kind: str, feature: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{kind} is not supported: it has {feature} ({why}). Use a Llama-like model.")
