"""The modules of one of vLLM's decoder layers, driven in the steps of its family's anatomy, or called as a whole."""

from typing import Any

import torch

from chunkweave.models.anatomy import Anatomy, NormOver
from chunkweave.vllm.architectures import Architecture, Call

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines as transformers' layers want them."""


class LayerModules:
    """One layer. `run` and `finish` need a forward context of vLLM's around them.

    `attention` is vLLM's `Attention`, `rotary` the module that it rotates with, None if it does not rotate, or if the
    rotary module is the model's. `rotates` says whether it does.
    """

    def __init__(self, block: Any, architecture: Architecture, anatomy: Anatomy) -> None:
        own = getattr(block, architecture.attention)
        self._block, self._own, self._anatomy, self._call = block, own, anatomy, architecture.call
        self._output, self._mlp = getattr(own, architecture.output), getattr(block, architecture.mlp)
        self.attention = own.attn
        self.rotates = architecture.rotates(own)
        self.rotary = getattr(own, "rotary_emb", None) if self.rotates else None
        self._head_dim = int(self.attention.head_size)
        self._sizes = [self._head_dim * int(heads) for heads in (self.attention.num_heads, self.attention.num_kv_heads)]
        self._query_scale = float(own.scaling) * self._head_dim**0.5

    def run(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, angles: Angles | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The whole layer, with vLLM's kernels; the residual that comes back is still to be added, if there is one."""
        block = self._block
        match self._call:
            case Call.ADDED_LATER:
                added, to_add = block(positions, hidden, residual)
                return added, to_add
            case Call.HIDDEN_FIRST:
                added, to_add = block(hidden, positions, residual)
                return added, to_add
            case Call.ADDED:
                return block(positions, hidden, None)[0], None
            case Call.STREAM:
                return block(positions, hidden)[0], None
            case Call.TRANSFORMERS:
                stream = block(hidden[None], position_ids=positions[None], position_embeddings=angles)
                return _first(stream)[0], None

    def qkv(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the stream before the layer, `[tokens, heads, head_dim]`, before RoPE.

        Queries come scaled as `DecoderLayers` says.
        """
        queries, keys = self._sizes
        found = _first(self._own.qkv_proj(self._normed(self._anatomy.before_attention, hidden)))
        q, k, v = torch.split(found, [queries, keys, keys], dim=-1)
        q, k = self._head_normed(q, k)
        return q if self._query_scale == 1.0 else q * self._query_scale, k, self._by_head(v)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What comes behind attention: output projection, residuals, norms and MLP."""
        anatomy = self._anatomy
        added = hidden + self._normed(anatomy.behind_attention, _first(self._output(attended)))
        before = (anatomy.before_attention, hidden) if anatomy.parallel else (anatomy.before_mlp, added)
        return added + self._normed(anatomy.behind_mlp, _first(self._mlp(self._normed(*before))))

    def _head_normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By head, through the norms that there are."""
        query_norm, key_norm = (getattr(self._own, name, None) for name in self._anatomy.head_norms)
        if query_norm is None or key_norm is None:
            return self._by_head(q), self._by_head(k)
        if hasattr(self._own, "_apply_qk_norm"):  # vLLM's own, over the heads of all ranks
            q, k = self._own._apply_qk_norm(q, k)
            return self._by_head(q), self._by_head(k)
        if self._anatomy.norm_over is NormOver.ALL_HEADS:
            return self._by_head(query_norm(q.contiguous())), self._by_head(key_norm(k.contiguous()))
        return query_norm(self._by_head(q).contiguous()), key_norm(self._by_head(k).contiguous())

    def _normed(self, norm_name: str, states: torch.Tensor) -> torch.Tensor:
        """What the norm of that name makes of `states`; without a name, the states."""
        return _first(getattr(self._block, norm_name)(states)) if norm_name else states

    def _by_head(self, states: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads * head_dim]` -> `[tokens, heads, head_dim]`."""
        return states.reshape(len(states), states.shape[-1] // self._head_dim, self._head_dim)


def _first(found: Any) -> torch.Tensor:
    """What a module gives, where some give a tuple that begins with it."""
    first: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return first
