"""The contracts of the layer loop: with a model's layers, and with the other ranks that hold a part of them."""

from typing import Protocol

import torch

from chunkweave.types import Geometry


class DecoderLayers(Protocol):
    """The layers of a decoder-only transformer, driven one at a time over a flat batch of tokens.

    All tensors have the tokens of all requests in their first dimension; nothing here knows who owns a token.
    Attention itself is not the model's: the loop calls `chunkweave.models.attention` between `qkv` and `finish`.
    """

    @property
    def geometry(self) -> Geometry:
        """Sizes of the model."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[tokens]` -> hidden states before layer 0, `[tokens, hidden]`."""

    def qkv(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[tokens, heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`, all before RoPE.

        Queries come scaled so that attention is softmax(q k^T / sqrt(head_dim)).
        """

    def rotate(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE with the model's own code: queries or keys `[tokens, heads, head_dim]` at `positions` `[tokens]`."""

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer: output projection of `attended` `[tokens, heads * head_dim]`, residuals, MLP."""


class LayerwiseModel(DecoderLayers, Protocol):
    """Decoder layers, and the head that makes logits of what comes out of them."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head: `[tokens, hidden]` -> `[tokens, vocab]` in float32."""


class Ranks:
    """Tensor-parallel ranks: each computes its share of a layer's heads, and what all heads decide is combined.

    Every rank calls the same methods in the same order and gets the same. This is the one rank of an undivided model.
    """

    def own_heads(self, num_heads: int) -> range:
        """The query heads that this rank computes, of all `num_heads`."""
        return range(num_heads)

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks of a tensor of one shape."""
        return states

    def maximum(self, states: torch.Tensor) -> torch.Tensor:
        """Greatest of the ranks' tensors, element by element."""
        return states

    def norm(self, norms: torch.Tensor) -> torch.Tensor:
        """The L2 norm over all heads from the norms over each rank's own."""
        return norms


ALONE = Ranks()
"""What a model computes that runs in one piece."""
