"""Drives the layers of a Hugging Face model, without a copy of any model file."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from chunkweave.errors import UnsupportedModelError
from chunkweave.models.attention import ScatteredQueries
from chunkweave.types import Geometry

_PROBE_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest difference of log-probabilities in the start-up check; bfloat16 rounds at every layer."""


class HuggingFaceModel:
    """A `LayerwiseModel` over a Llama-like `PreTrainedModel` (Llama, Mistral, Qwen2, Qwen3 and their kin).

    Only reads the modules; the model itself stays usable. `scaling` of the attention modules is folded into the
    queries where it is not 1/sqrt(head_dim).
    """

    def __init__(self, model: Any) -> None:
        """Look the model over; raises `UnsupportedModelError` as `check_config` and `check_modules` do."""
        check_config(model.config)
        check_modules(model)
        self.model = model
        self._body = model.model
        self._layers = list(model.model.layers)
        self.geometry = geometry_of(model.config)
        self.dtype: torch.dtype = model.dtype
        """The type that hidden states and KV are computed in."""
        self.device: torch.device = model.device
        """Where the weights are."""
        self._apply_rope = _rope_function(self._layers[0].self_attn)
        self._query_scale = self._layers[0].self_attn.scaling * self.geometry.head_dim**0.5
        self._cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[tokens]` -> `[tokens, hidden]`."""
        hidden: torch.Tensor = self._body.embed_tokens(token_ids)
        return hidden

    def qkv(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before RoPE, `[tokens, heads or kv_heads, head_dim]`."""
        block = self._layers[layer]
        attention = block.self_attn
        normed = block.input_layernorm(hidden)
        shape = (hidden.shape[0], -1, self.geometry.head_dim)
        q = attention.q_proj(normed).view(shape)
        k = attention.k_proj(normed).view(shape)
        v = attention.v_proj(normed).view(shape)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        if self._query_scale != 1.0:
            q = q * self._query_scale
        return q, k, v

    def rotate(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's own RoPE at `positions`; angles come from a table made by its rotary module."""
        cos, sin = self._angles()
        rotated: torch.Tensor
        rotated, _ = self._apply_rope(states, states[:, :0], cos[positions], sin[positions], unsqueeze_dim=1)
        return rotated

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, residuals and MLP of one layer."""
        block = self._layers[layer]
        hidden = hidden + block.self_attn.o_proj(attended)
        mlp = block.mlp(block.post_attention_layernorm(hidden))
        output: torch.Tensor = hidden + (mlp[0] if isinstance(mlp, tuple) else mlp)
        return output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` -> `[tokens, vocab]`, float32."""
        logits: torch.Tensor = self.model.lm_head(self._body.norm(hidden))
        return logits.float()

    def verify(self) -> None:
        """Drive a few tokens through every layer and compare with the model's own forward.

        Raises:
            UnsupportedModelError: they differ, so something in the model is not as its anatomy suggests.
        """
        ids = torch.arange(_PROBE_TOKENS, device=self.device) * 7919 % self.geometry.vocab_size
        positions = torch.arange(_PROBE_TOKENS, device=self.device)
        with torch.inference_mode():
            hidden = self.embed(ids)
            queries = ScatteredQueries(positions, self.dtype)
            for layer in range(self.geometry.num_layers):
                q, k, v = self.qkv(layer, hidden)
                attended = queries.attend(self.rotate(q, positions), self.rotate(k, positions), v)
                hidden = self.finish(layer, hidden, attended)
            ours = torch.log_softmax(self.logits(hidden), -1)
            theirs = torch.log_softmax(self.model(ids[None], use_cache=False).logits[0].float(), -1)
        error = (ours - theirs).abs().max().item()
        if not error <= _TOLERANCE[self.dtype]:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} is not supported: driven layer by layer its log-probabilities differ "
                f"from its own forward by {error:.3g}; some step of its layers is not known to chunkweave"
            )

    def _angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all positions, `[positions, head_dim]`, by the model's rotary module."""
        if self._cos_sin is None:
            positions = torch.arange(self.geometry.max_positions, device=self.device)[None]
            probe = torch.empty(0, dtype=self.dtype, device=self.device)
            cos, sin = self._body.rotary_emb(probe, positions)
            self._cos_sin = cos[0], sin[0]
        return self._cos_sin


def _rope_function(attention: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The function that the attention module's own file rotates with."""
    function = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if function is None:
        raise UnsupportedModelError(f"{type(attention).__name__} is not supported: its file has no known RoPE function")
    rope: Callable[..., tuple[torch.Tensor, torch.Tensor]] = function
    return rope


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
