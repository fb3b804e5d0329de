"""The contract between the layer loop, which is ours, and a model's layers, which are not."""

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

    def rotate_queries(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE with the model's own code: `[tokens, heads, head_dim]` at `positions` `[tokens]`."""

    def rotate_keys(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same of keys: what the cache holds of keys before RoPE that stand at `positions`."""

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer: output projection of `attended` `[tokens, heads * head_dim]`, residuals, MLP."""


class LayerwiseModel(DecoderLayers, Protocol):
    """Decoder layers, and the head that makes logits of what comes out of them."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head: `[tokens, hidden]` -> `[tokens, vocab]` in float32."""
