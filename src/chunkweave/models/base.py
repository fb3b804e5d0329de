"""The contract between our layer loop and a model's layers."""

from typing import Protocol

import torch

from chunkweave.types import Geometry


class DecoderLayers(Protocol):
    """The layers of a decoder-only transformer, driven one at a time over a flat batch of tokens.

    The first dimension of all tensors is the tokens of all requests; nothing here knows which request owns a token.
    Attention is not part of this contract: the loop calls `chunkweave.models.attention` between `qkv` and `finish`.
    """

    @property
    def geometry(self) -> Geometry:
        """Sizes of the model."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[tokens]` -> hidden states before layer 0, `[tokens, hidden]`."""

    def qkv(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[tokens, heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`, all before RoPE.

        Queries are scaled so that attention is softmax(q k^T / sqrt(head_dim)).
        """

    def rotate_queries(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply the model's own RoPE: `[tokens, heads, head_dim]` at `positions` `[tokens]`."""

    def rotate_keys(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same for keys: what the cache holds of keys at `positions`."""

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer: output projection of `attended` `[tokens, heads * head_dim]`, residuals, MLP."""


class LayerwiseModel(DecoderLayers, Protocol):
    """Decoder layers and the output head."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head: `[tokens, hidden]` -> `[tokens, vocab]` in float32."""
