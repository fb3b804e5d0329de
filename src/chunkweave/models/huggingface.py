"""Drives the layers of a Hugging Face model without copying any model file."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from chunkweave.errors import UnsupportedModelError
from chunkweave.models.anatomy import REFUSED, Anatomy, NormOver, anatomy_of
from chunkweave.models.attention import ScatteredQueries
from chunkweave.models.kernels.compiles import KERNEL_COMPILES
from chunkweave.types import Geometry

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest difference of log-probabilities in the start-up check; bfloat16 rounds at every layer."""


class HuggingFaceModel:
    """A `LayerwiseModel` over a `PreTrainedModel` whose family is declared (`models/anatomy.py`).

    The model itself stays usable: only on CUDA, weights of queries, keys and values move into one tensor. The
    attention's `scaling` is folded into the queries if it is not 1/sqrt(head_dim).
    """

    def __init__(self, model: Any) -> None:
        """Wrap a model; raises `UnsupportedModelError` as `check_config` and `check_modules` do."""
        check_config(model.config)
        check_modules(model)
        self.model = model
        self.anatomy = anatomy_of(model.config)
        self._body = model.model
        self.geometry = replace(geometry_of(model.config), sinks=_sinks(model, self.anatomy))
        self._layers = [_Layer(block, self.anatomy, self.geometry) for block in model.model.layers]
        self.dtype: torch.dtype = model.dtype
        """The dtype of hidden states and KV."""
        self.device: torch.device = model.device
        """The device of the weights."""
        self._final_norm = _in_one_launch(getattr(self._body, self.anatomy.final_norm))
        self._logit_scale = getattr(model, self.anatomy.logit_scale) if self.anatomy.logit_scale else 1.0
        self._logit_scale /= getattr(model.config, "logits_scaling", 1.0)
        self._embedding_scale: float = getattr(model.config, "embedding_multiplier", 1.0)
        self._logit_cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._apply_rope = _rope_function(self._layers[0].attention)
        self._turns_halves = not self.anatomy.half_angles and _turns_halves(self._apply_rope)
        by_type = self.anatomy.rope_by_layer_type
        self._layer_types = tuple(model.config.layer_types) if by_type else ("",) * len(self._layers)
        self._cos_sin: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._wide = _WideAngles()
        self._turn_halves = self._one_launch() if self._turns_halves and self.device.type == "cuda" else None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[tokens]` -> `[tokens, hidden]`."""
        hidden: torch.Tensor = self._body.embed_tokens(token_ids)
        return hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale

    def qkv(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before RoPE, `[tokens, heads or kv_heads, head_dim]`."""
        return self._layers[layer].qkv(hidden)

    def rotate_queries(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply the model's own RoPE at `positions`, and the family's query norm after RoPE, if any."""
        return self._layers[layer].query_norm_behind(self._rotated(layer, queries, positions))

    def rotate_keys(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same for keys."""
        return self._layers[layer].key_norm_behind(self._rotated(layer, keys, positions))

    def unrotate_keys(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Invert `rotate_keys`: keys before RoPE, computed in float32 and rounded once.

        Not possible where a norm follows RoPE: such keys must be stored before it.
        """
        if not self._layers[layer].rotates:
            return keys
        cos, sin = (angles[positions].float() for angles in self._angles(self._layer_types[layer]))
        scale = cos.square() + sin.square()
        return self._turned(keys.float(), cos / scale, -sin / scale).to(keys.dtype)

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, residuals, norms and MLP of one layer."""
        return self._layers[layer].finish(hidden, attended)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` -> `[tokens, vocab]`, float32."""
        logits: torch.Tensor = self.model.lm_head(self._final_norm(hidden)).float()
        scaled = logits if self._logit_scale == 1.0 else logits * self._logit_scale
        return scaled if self._logit_cap is None else torch.tanh(scaled / self._logit_cap) * self._logit_cap

    def verify(self) -> None:
        """Drive a few tokens through every layer and compare with the model's own forward.

        Sliding windows are narrowed meanwhile, so that the tokens exceed a window.

        Raises:
            UnsupportedModelError: they differ, so some step of the model is not as its anatomy says.
        """
        ids = torch.arange(_PROBE_TOKENS, device=self.device) * 7919 % self.geometry.vocab_size
        with torch.inference_mode(), _narrowed(self.model.config) as window:
            ours = torch.log_softmax(self._driven(ids, window), -1)
            theirs = torch.log_softmax(self.model(ids[None], use_cache=False).logits[0].float(), -1)
        error = (ours - theirs).abs().max().item()
        if not error <= _TOLERANCE[self.dtype]:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} is not supported: driven layer by layer its log-probabilities differ "
                f"from its own forward by {error:.3g}; some step of its layers is not known to chunkweave"
            )

    def _driven(self, ids: torch.Tensor, window: int) -> torch.Tensor:
        """Logits of a short prompt, `[tokens, vocab]`, with this window on windowed layers."""
        positions = torch.arange(len(ids), device=self.device)
        hidden = self.embed(ids)
        for layer in range(self.geometry.num_layers):
            own_window = None if self.geometry.window(layer) is None else window
            q, k, v = self.qkv(layer, hidden)
            rotated = self.rotate_queries(layer, q, positions), self.rotate_keys(layer, k, positions)
            queries = ScatteredQueries(positions, self.dtype, window=own_window)
            attended = queries.attend(*rotated, v, self.geometry.scores(layer))
            hidden = self.finish(layer, hidden, attended)
        return self.logits(hidden)

    def _rotated(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate by angles from a table of the model's rotary module; dimensions beyond it are not rotated."""
        if not self._layers[layer].rotates:
            return states
        kind = self._layer_types[layer]
        cos, sin = self._angles(kind)
        whole = cos.shape[-1] == states.shape[-1]
        if self._turns_halves and whole and self.device.type == "cpu":
            wide = self._wide.get(kind, positions, states.shape[1], cos, sin)
            if wide is not None:
                return _halves_turned(states, *wide)
        if self._turn_halves is not None and whole and not torch.is_grad_enabled():  # our kernel has no gradient
            return self._turn_halves(states, positions, cos, sin)
        return self._turned(states, cos[positions], sin[positions])

    def _turned(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate `states` by angles `[tokens, rotated dims]`, as the model's file does."""
        dims = cos.shape[-1] * (2 if self.anatomy.half_angles else 1)
        rotated: torch.Tensor
        if self._turns_halves:
            rotated = _halves_turned(states[..., :dims], cos[:, None], sin[:, None])
        else:
            rotated, _ = self._apply_rope(states[..., :dims], states[:, :0, :dims], cos, sin, unsqueeze_dim=1)
        return rotated if dims == states.shape[-1] else torch.cat((rotated, states[..., dims:]), -1)

    def _one_launch(self) -> Callable[..., torch.Tensor] | None:
        """RoPE as one launch of our kernel, after a trial; None where it does not run, or gives another result."""
        try:
            from chunkweave.models.triton_attention import turn_halves
        except ImportError:
            return None
        dim = self.geometry.head_dim
        draw = torch.Generator().manual_seed(0)
        states, *angles = (
            torch.randn(shape, generator=draw).to(self.device, self.dtype)
            for shape in ((3, 9, dim), (8, dim), (8, dim))
        )
        positions = torch.tensor([1, 2, 7], device=self.device)
        cos, sin = (table[positions, None] for table in angles)
        try:
            with KERNEL_COMPILES.at_start(1):
                error = float((turn_halves(states, positions, *angles) - _halves_turned(states, cos, sin)).abs().max())
        except Exception as failure:  # noqa: BLE001 - any compiler or driver error means that it does not run here
            problem = f"{type(failure).__name__}: {failure}"
        else:
            if error <= _ROPE_TOLERANCE.get(self.dtype, 0.0):
                return turn_halves
            problem = f"our kernel's result is off by {error:.3g}"
        logger.warning("RoPE falls back to PyTorch's operations: %s", problem)
        return None

    def _angles(self, layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all positions, `[positions, rotated dims]`, from the model's rotary module.

        Sines are signed for `_halves_turned` if the family's RoPE works that way.
        """
        if layer_type not in self._cos_sin:
            positions = torch.arange(self.geometry.max_positions, device=self.device)[None]
            probe = torch.empty(0, dtype=self.dtype, device=self.device)
            cos, sin = self._body.rotary_emb(probe, positions, *((layer_type,) if layer_type else ()))
            self._cos_sin[layer_type] = cos[0], _signed(sin[0]) if self._turns_halves else sin[0]
        return self._cos_sin[layer_type]


_ROPE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.07, torch.float16: 0.01}
"""Largest difference in the trial of our kernel: one rounding of its numbers."""


@contextmanager
def _narrowed(config: Any) -> Iterator[int]:
    """Narrow a model's sliding windows to half the probe; its mask is made from the configuration each time.

    Independent of the geometry, so that a window missing there is detected.
    """
    configured = getattr(config, "sliding_window", None)
    window = _PROBE_TOKENS // 2
    if configured:
        config.sliding_window = window
    try:
        yield window
    finally:
        if configured:
            config.sliding_window = configured


class _Layer:
    """One decoder layer, driven step by step as its anatomy says."""

    def __init__(self, block: Any, anatomy: Anatomy, geometry: Geometry) -> None:
        self.attention = block.self_attn
        self.rotates = anatomy.rotates(self.attention)
        self._anatomy, self._geometry = anatomy, geometry
        self._mlp = getattr(block, anatomy.mlp)
        self._residual_scale: float = getattr(block, "residual_multiplier", 1.0)
        self._before_attention = _step(block, anatomy.before_attention)
        self._behind_attention = _step(block, anatomy.behind_attention)
        self._before_mlp = _step(block, anatomy.before_mlp)
        self._behind_mlp = _step(block, anatomy.behind_mlp)
        self._output = getattr(self.attention, anatomy.output)
        self._projections = _in_one_product([getattr(self.attention, name) for name in anatomy.projections])
        norms = [getattr(self.attention, name, None) for name in anatomy.head_norms]
        query_norm, key_norm = [
            _as_it_is if norm is None else _HEAD_NORMS[anatomy.norm_over](_in_one_launch(norm)) for norm in norms
        ]
        norms_before = (query_norm, key_norm)
        norms_behind = (_as_it_is, _as_it_is)
        if anatomy.norms_behind_rope:
            norms_before, norms_behind = norms_behind, norms_before
        self._query_norm, self._key_norm = norms_before
        self.query_norm_behind, self.key_norm_behind = norms_behind
        self._query_scale = self.attention.scaling * geometry.head_dim**0.5

    def qkv(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normed = self._before_attention(hidden)
        dim = self._geometry.head_dim
        states = [projection(normed).view(len(hidden), -1, dim) for projection in self._projections]
        if len(states) == 1:
            heads = self._geometry.num_heads
            kv_heads = self._geometry.num_kv_heads
            states = list(states[0].split([heads, kv_heads, kv_heads], dim=1))
        q, k, v = states
        q = self._query_norm(q)
        k = self._key_norm(k)
        return (q if self._query_scale == 1.0 else q * self._query_scale), k, v

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        added = hidden + self._scaled(self._behind_attention(self._output(attended)))
        if self._anatomy.parallel:
            return added + self._scaled(self._behind_mlp(self._through_mlp(self._before_attention(hidden))))
        return added + self._scaled(self._behind_mlp(self._through_mlp(self._before_mlp(added))))

    def _scaled(self, states: torch.Tensor) -> torch.Tensor:
        """What is added to the stream, by the family's multiplier."""
        return states if self._residual_scale == 1.0 else states * self._residual_scale

    def _through_mlp(self, states: torch.Tensor) -> torch.Tensor:
        """Run the MLP on a batch of one: expert blocks need three dimensions, and may also return router scores."""
        result = self._mlp(states[None])
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output.view(states.shape)


_Step = Callable[[torch.Tensor], torch.Tensor]


def _as_it_is(states: torch.Tensor) -> torch.Tensor:
    return states


def _step(block: Any, name: str) -> _Step:
    return _in_one_launch(getattr(block, name)) if name else _as_it_is


def _in_one_product(projections: list[Any]) -> list[Any]:
    """On CUDA, linear layers as one, whose weights theirs become parts of; else themselves."""
    if len(projections) == 1 or any(type(projection) is not nn.Linear for projection in projections):
        return projections
    weights = [projection.weight for projection in projections]
    biases = [projection.bias for projection in projections]
    if weights[0].device.type != "cuda" or len({bias is None for bias in biases}) > 1:
        return projections
    with torch.no_grad():
        together = nn.Linear(1, 1, bias=biases[0] is not None, device="meta")
        together.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        if biases[0] is not None:
            together.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        for weight, part in zip(
            weights, torch.split(together.weight, [len(weight) for weight in weights]), strict=True
        ):
            weight.data = part
    return [together]


def _in_one_launch(norm: Any) -> _Step:
    """On CUDA, a norm that PyTorch's `rms_norm` equals but for one rounding: one launch for eight. Else itself."""
    module: _Step = norm
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or eps is None or weight.dim() != 1 or weight.device.type != "cuda":
        return module

    def fused(states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(states, norm.weight.shape, norm.weight, eps)

    draw = torch.Generator().manual_seed(0)
    states = torch.randn(4, len(weight), generator=draw).to(weight.device, weight.dtype)
    with torch.inference_mode():
        error = (fused(states) - norm(states)).float().abs().max()
        size = norm(states).float().abs().max()
    return fused if bool(error <= size * 2 * torch.finfo(weight.dtype).eps) else module


_HEAD_NORMS: Mapping[NormOver, Callable[[Any], _Step]] = MappingProxyType(
    {
        NormOver.HEAD: lambda norm: norm,
        NormOver.ALL_HEADS: lambda norm: lambda states: norm(states.flatten(1)).view(states.shape),
        NormOver.HEADS_FIRST: lambda norm: lambda states: norm(states.transpose(0, 1)[None])[0].transpose(0, 1),
    }
)


def _rope_function(attention: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The RoPE function in the attention module's own file."""
    function = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if function is None:
        raise UnsupportedModelError(f"{type(attention).__name__} is not supported: its file has no known RoPE function")
    rope: Callable[..., tuple[torch.Tensor, torch.Tensor]] = function
    return rope


def _halves_turned(states: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """RoPE that rotates the first half of a head's dimensions with the second, as in most families.

    Rounds where their functions round, so results are bitwise equal. Angles are `[tokens, 1, dims]`, or as wide as the
    states: whole rows take half the time.
    """
    return (states * cos).add_(states.roll(states.shape[-1] // 2, -1) * signed_sin)


def _signed(sin: torch.Tensor) -> torch.Tensor:
    """Sines for `_halves_turned`: negated for the first half of the dimensions."""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)


class _WideAngles:
    """Cosines and sines of positions for every head, `[tokens, heads, dims]`.

    Computed once per tensor of positions, which every layer reuses; the last few are kept. In inference mode only,
    because tensors kept there cannot be part of a graph.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def get(
        self, kind: str, positions: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Angles at `positions` for states of `heads` heads, from tables of all positions; None if it does not pay."""
        tokens = positions.shape[0]
        dims = cos.shape[-1]
        if not _FEWEST_WIDE <= tokens * heads * dims <= _MOST_WIDE or not torch.is_inference_mode_enabled():
            return None
        key = (kind, id(positions), heads)
        rotation = self._kept.get(key)
        if rotation is None:
            rotations = self._kept.copy()  # another thread may add to it while we sum
            if sum(wide.numel() for _, wide, _ in rotations.values()) + tokens * heads * dims > _MOST_WIDE:
                self._kept.clear()
            wide_cos, wide_sin = (table[positions].unsqueeze(1).repeat(1, heads, 1) for table in (cos, sin))
            rotation = self._kept[key] = (
                positions,
                wide_cos,
                wide_sin,
            )  # keeps positions alive, so their id stays valid
        return rotation[1], rotation[2]


def _turns_halves(rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether a family's RoPE equals `_halves_turned`."""
    draw = torch.Generator().manual_seed(0)
    states, cos, sin = (torch.randn(shape, generator=draw).bfloat16() for shape in ((3, 2, 8), (3, 8), (3, 8)))
    rotated, _ = rope(states, states[:, :0], cos, sin, unsqueeze_dim=1)
    return torch.equal(rotated, _halves_turned(states, cos[:, None], _signed(sin)[:, None]))


_FEWEST_WIDE = 1 << 14
_MOST_WIDE = 1 << 23
"""Fewest elements of states that get wide angles, and most elements that are kept."""

_POSITION_ONLY_ROPE = {"default", "linear", "llama3", "yarn", "longrope"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_NOT_DRIVEN = ("clip_qkv",)
_MULTIPLIERS = ("residual_multiplier", "embedding_multiplier", "logits_scaling")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def check_config(config: Any) -> None:
    """Refuse unsupported configurations before weights are read.

    Raises:
        UnsupportedModelError: the message names the feature.
    """
    kind = getattr(config, "model_type", "?")
    if kind in REFUSED:
        raise _refusal(kind, *REFUSED[kind])
    if getattr(config, "kv_lora_rank", None):
        raise _refusal(kind, *REFUSED["deepseek_v3"])
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(kind, *REFUSED["t5"])
    if any(hasattr(config, name) for name in ("ssm_cfg", "state_size", "mamba_d_state", "conv_kernel")):
        raise _refusal(kind, *REFUSED["mamba"])
    anatomy = anatomy_of(config)
    multipliers = () if anatomy.multiplied else _MULTIPLIERS
    caps = () if anatomy.capped else _CAPS
    for name in (*_NOT_DRIVEN, *multipliers, *caps):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise _refusal(kind, f"{name}={getattr(config, name)}", "chunkweave does not implement that step")
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or not rope:
        raise _refusal(kind, "no rotary position embedding", "keys cannot be shifted to new positions")
    if anatomy.rope_by_layer_type and rope.keys() <= _LAYER_TYPES:
        for parameters in rope.values():
            _check_rope(kind, parameters)
    else:
        _check_rope(kind, rope)


def _check_rope(kind: str, rope: Mapping[str, Any]) -> None:
    if any(isinstance(value, dict) for value in rope.values()):
        raise _refusal(kind, "per-layer RoPE", "its family is not known to rotate layers by different angles")
    if rope.get("mrope_section"):
        raise _refusal(kind, "M-RoPE (multi-axis positions)", "positions must be one number a token")
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _POSITION_ONLY_ROPE:
        raise _refusal(
            kind, f"RoPE type {rope_type!r}", "its angles depend on the prompt's length, not on the position alone"
        )


def check_modules(model: nn.Module) -> None:
    """Refuse a model whose modules are not those of its family's anatomy.

    Raises:
        UnsupportedModelError: the message names missing or unknown modules.
    """
    kind = type(model).__name__
    anatomy = anatomy_of(getattr(model, "config", None))
    body = getattr(model, "model", None)
    wanted = ("embed_tokens", "layers", anatomy.final_norm, "rotary_emb")
    if body is None or not hasattr(model, "lm_head") or not all(hasattr(body, name) for name in wanted):
        raise _refusal(kind, "an unknown outer structure", f"expected lm_head and model.{{{', '.join(wanted)}}}")
    for index, layer in enumerate(body.layers):
        _check_children(f"{kind} layer {index}", layer, {"self_attn", anatomy.mlp, *anatomy.norms}, set())
        attention = layer.self_attn
        parts = {*anatomy.projections, anatomy.output}
        _check_children(f"{kind} layer {index} attention", attention, parts, set(anatomy.head_norms))
        norm = getattr(attention, anatomy.head_norms[0], None)
        if anatomy.norm_over is NormOver.HEAD and norm is not None and norm.weight.shape[-1] != attention.head_dim:
            raise _refusal(kind, "a query norm over all heads", "its family is not known to have one")
        if hasattr(attention, "sinks") and not anatomy.sinks:
            raise _refusal(kind, "attention sinks", "its family is not known to have them")


def _check_children(where: str, module: nn.Module, wanted: set[str], optional: set[str]) -> None:
    child_names = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    missing = wanted - child_names
    unknown = child_names - wanted - optional
    if missing or unknown:
        raise _refusal(where, f"modules {sorted(child_names)}", f"missing {sorted(missing)}, unknown {sorted(unknown)}")


def geometry_of(config: Any) -> Geometry:
    """Sizes from a Hugging Face configuration; `max_positions` accounts for LongRoPE."""
    heads = config.num_attention_heads
    return Geometry(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=_active_intermediate_size(config),
        vocab_size=config.vocab_size,
        max_positions=_positions_before_long_rope(config) or config.max_position_embeddings,
        windows=sliding_windows(config),
        score_cap=getattr(config, "attn_logit_softcapping", None),
    )


def own_attention(config: Any) -> str:
    """The attention implementation for a model's own forward: transformers' SDPA supports no caps and no sinks."""
    plain = getattr(config, "attn_logit_softcapping", None) is None and not anatomy_of(config).sinks
    return "sdpa" if plain else "eager"


def _sinks(model: Any, anatomy: Anatomy) -> tuple[tuple[float, ...], ...]:
    if not anatomy.sinks:
        return ()
    return tuple(tuple(getattr(layer.self_attn, anatomy.sinks).float().tolist()) for layer in model.model.layers)


def _active_intermediate_size(config: Any) -> int:
    """Width of the MLP that a token passes; in a mixture of experts, the sum over the experts that it uses."""
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return int(config.intermediate_size)
    each = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return int(experts * each + (getattr(config, "shared_expert_intermediate_size", None) or 0))


def _positions_before_long_rope(config: Any) -> int | None:
    """LongRoPE's limit, up to which its angles are the short ones for every prompt length; None otherwise."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    within = rope.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
    return int(within) if within else None


def sliding_windows(config: Any) -> tuple[int | None, ...]:
    """Per layer, the number of keys that a token sees; empty if every layer sees all."""
    window: int | None = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return ()
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()


def _refusal(kind: str, feature: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{kind} is not supported: it has {feature} ({why}). See `chunkweave models`.")
