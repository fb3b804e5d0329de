"""vLLM's modules behind the contract of our own layer loop, for passes that look at attention.

vLLM's kernels return no attention weights, and cannot hide keys. Where either is needed, our loop attends instead, and
all else of a layer (norms, projections, MLP) is vLLM's own.
"""

from dataclasses import replace
from typing import Any

import torch

from chunkweave.config import AttentionKernel
from chunkweave.models.flat_attention import make_attention
from chunkweave.types import Geometry
from chunkweave.vllm.ranks import ranks_here
from chunkweave.vllm.stock_layers import StockLayers


class LayerModules:
    """`DecoderLayers` over the layers of a model that vLLM has loaded, this rank's share of their heads.

    `layers` are the same layers with vLLM's own kernels. `geometry` is the whole model's, `own_geometry` has this
    rank's heads; `attention` is what attends, `ranks` what combines what they see.
    """

    def __init__(self, layers: StockLayers) -> None:
        self.layers = layers
        self._blocks = layers.blocks
        attention: Any = self._blocks[0].self_attn
        self._heads, self._dim = int(attention.num_heads), int(attention.head_dim)
        self._scale = float(attention.scaling) * self._dim**0.5
        kv_heads = layers.paged.shape[0]
        self.geometry: Geometry = layers.geometry
        self.own_geometry = replace(layers.geometry, num_heads=self._heads, num_kv_heads=kv_heads)
        self.ranks = ranks_here()
        self.attention = make_attention(
            AttentionKernel.AUTO, self.own_geometry, dtype=layers.paged.dtype, device=layers.device
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.layers.paged.dtype

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[tokens]` -> `[tokens, hidden]`."""
        return self.layers.embed(token_ids)

    def qkv(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before RoPE of this rank's heads; queries scaled as the contract has it."""
        q, k, v = self.layers.qkv(layer, self._blocks[layer].input_layernorm(hidden))
        return q if self._scale == 1.0 else q * self._scale, k, v

    def rotate(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE by the model's own angles."""
        return self.layers.rotation.forward(states, positions)

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer, by as many tokens at a time as vLLM was sized for. `hidden` is used up."""
        block = self._blocks[layer]
        done = []
        for rows in self.layers.pieces(len(hidden)):
            with self.layers.context({}, {}, rows.stop - rows.start):
                out, _ = block.self_attn.o_proj(attended[rows])
                normed, residual = block.post_attention_layernorm(out, hidden[rows])
                done.append(block.mlp(normed) + residual)
        return done[0] if len(done) == 1 else torch.cat(done)
