"""The layers of each model family: norms and their order, projections of queries and keys, and rotation.

A family is one declaration, with module names as in its transformers file. A model of an undeclared type is assumed to
have Llama's layers, and refused if its modules differ.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType, SimpleNamespace
from typing import Any


class NormOver(StrEnum):
    """The shape of states that a norm of queries or keys takes."""

    HEAD = "head"
    """`[tokens, heads, head_dim]`."""
    ALL_HEADS = "all heads"
    """`[tokens, heads * head_dim]`."""
    HEADS_FIRST = "heads first"
    """`[1, heads, tokens, head_dim]`."""


def _everywhere(_: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Modules of a layer, in the order that a token passes them; defaults are Llama's.

    An empty name is a step that the family does not have.
    """

    before_attention: str = "input_layernorm"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Three modules of the attention, or one that returns queries, keys and values concatenated."""
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Norms of queries and of keys, in models of the family that have them."""
    norm_over: NormOver = NormOver.HEAD
    norms_behind_rope: bool = False
    rotates: Callable[[Any], bool] = _everywhere
    """Whether a layer's attention rotates keys; if not, they are independent of positions."""
    rope_by_layer_type: bool = False
    """Whether windowed and full layers have different angles."""
    half_angles: bool = False
    """Whether the model's RoPE takes each angle once instead of repeated for both halves."""
    capped: bool = False
    """Whether the configuration may cap attention scores and logits: c becomes cap * tanh(c / cap)."""
    sinks: str = ""
    """Parameter of the attention: logits per query head that join the softmax and belong to no key."""
    output: str = "o_proj"
    behind_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    mlp: str = "mlp"
    behind_mlp: str = ""
    multiplied: bool = False
    """Whether the configuration may scale embeddings, what a layer adds to the stream, and logits."""
    parallel: bool = False
    """Whether the MLP reads the attention's input instead of its output."""
    final_norm: str = "norm"
    logit_scale: str = ""
    """Attribute of the model that scales logits."""

    @property
    def differs(self) -> str:
        """Differences from Llama's layers, in words."""
        applies_by_difference = {
            "no norms before attention and MLP": not self.before_attention,
            "norms behind attention and MLP": bool(self.behind_attention),
            "the MLP beside the attention": self.parallel,
            "one projection for queries, keys and values": len(self.projections) == 1,
            f"queries and keys normed over {self.norm_over}": self.norm_over is NormOver.ALL_HEADS,
            "queries and keys normed behind RoPE": self.norms_behind_rope,
            "layers without RoPE": self.rotates is not _everywhere,
            "angles of their own for windowed layers": self.rope_by_layer_type,
            "soft-capped attention scores and logits": self.capped,
            "attention sinks": bool(self.sinks),
            "scaled logits": bool(self.logit_scale),
            "scaled embeddings, residuals and logits": self.multiplied,
        }
        return ", ".join(words for words, applies in applies_by_difference.items() if applies)

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of a layer."""
        norms = (self.before_attention, self.behind_attention, self.before_mlp, self.behind_mlp)
        return tuple(name for name in norms if name)


LLAMA = Anatomy()
_SANDWICH = Anatomy(
    behind_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind_mlp="post_feedforward_layernorm",
)
_POST_NORM = Anatomy(
    before_attention="",
    behind_attention="post_attention_layernorm",
    before_mlp="",
    behind_mlp="post_feedforward_layernorm",
)
_PARALLEL = Anatomy(before_mlp="", parallel=True)
_PER_HEAD_NORMS = ("q_layernorm", "k_layernorm")


def _stablelm(config: Any) -> Anatomy:
    parallel = bool(getattr(config, "use_parallel_residual", False))
    layer = _PARALLEL if parallel else LLAMA
    return replace(layer, head_norms=_PER_HEAD_NORMS, norm_over=NormOver.HEADS_FIRST)


FAMILIES: Mapping[str, Anatomy | Callable[[Any], Anatomy]] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": LLAMA,
        "mixtral": LLAMA,
        "qwen2": LLAMA,
        "qwen2_moe": LLAMA,
        "qwen3": LLAMA,
        "qwen3_moe": LLAMA,
        "gemma": LLAMA,
        "gemma2": replace(_SANDWICH, capped=True),
        "gemma3_text": replace(_SANDWICH, rope_by_layer_type=True),
        "phi": replace(_PARALLEL, head_norms=_PER_HEAD_NORMS, output="dense", final_norm="final_layernorm"),
        "phi3": replace(LLAMA, projections=("qkv_proj",)),
        "stablelm": _stablelm,
        "nemotron": LLAMA,
        "glm": LLAMA,
        "glm4": replace(LLAMA, behind_attention="post_self_attn_layernorm", behind_mlp="post_mlp_layernorm"),
        "olmo2": replace(_POST_NORM, norm_over=NormOver.ALL_HEADS),
        "olmoe": replace(LLAMA, norm_over=NormOver.ALL_HEADS),
        "olmo3": replace(_POST_NORM, norm_over=NormOver.ALL_HEADS, rope_by_layer_type=True),
        "exaone4": replace(
            _POST_NORM, rotates=lambda attention: attention.sliding_window is None or attention.is_sliding
        ),
        "cohere": replace(_PARALLEL, logit_scale="logit_scale"),
        "cohere2": replace(
            _PARALLEL, logit_scale="logit_scale", rotates=lambda attention: attention.sliding_window is not None
        ),
        "hunyuan_v1_dense": replace(LLAMA, head_norms=("query_layernorm", "key_layernorm"), norms_behind_rope=True),
        "apertus": replace(LLAMA, before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
        "arcee": LLAMA,
        "cwm": LLAMA,
        "dots1": LLAMA,
        "ernie4_5": LLAMA,
        "ernie4_5_moe": LLAMA,
        "glm4_moe": LLAMA,
        "granite": replace(LLAMA, multiplied=True),
        "granitemoe": replace(LLAMA, mlp="block_sparse_moe", multiplied=True),
        "helium": LLAMA,
        "jais2": LLAMA,
        "minimax_m2": replace(LLAMA, norm_over=NormOver.ALL_HEADS),
        "seed_oss": LLAMA,
        "starcoder2": LLAMA,
        "smollm3": replace(LLAMA, rotates=lambda attention: bool(attention.use_rope)),
        "gpt_oss": replace(LLAMA, half_angles=True, sinks="sinks"),
    }
)
"""By `model_type` of the configuration; a function of the configuration where it depends on more."""

_MLA = ("multi-head latent attention (MLA)", "its cached KV has no per-head keys before RoPE")
_STATE = ("state-space (Mamba) layers", "their state depends on every earlier token")
_LEARNED = ("no rotary position embedding", "positions are learned and part of the first layer's input")
_ALIBI = ("no rotary position embedding", "positions are a bias of the scores (ALiBi), which is not driven")
REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "deepseek_v2": _MLA,
        "deepseek_v3": _MLA,
        "mamba": _STATE,
        "mamba2": _STATE,
        "falcon_mamba": _STATE,
        "jamba": _STATE,
        "gpt2": _LEARNED,
        "opt": _LEARNED,
        "bloom": _ALIBI,
        "mpt": _ALIBI,
        "t5": ("an encoder-decoder architecture", "only decoder-only models have chunk caches"),
    }
)
"""Unsupported architectures by `model_type`: the feature, and why. Others are refused by their modules."""


def anatomy_of(config: Any) -> Anatomy:
    """The anatomy of a model with this configuration; Llama's if its family is not declared."""
    declared = FAMILIES.get(getattr(config, "model_type", ""), LLAMA)
    return declared if isinstance(declared, Anatomy) else declared(config)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, and whether it can be woven.

    `why` lists its differences from Llama's layers, or the reason why it is refused.
    """

    model_type: str
    woven: bool
    why: str


def families() -> list[Family]:
    """Declared families, then those refused by name, each in alphabetical order."""
    woven = [Family(name, True, anatomy_of(SimpleNamespace(model_type=name)).differs) for name in sorted(FAMILIES)]
    return woven + [Family(name, False, f"{REFUSED[name][0]}: {REFUSED[name][1]}") for name in sorted(REFUSED)]
