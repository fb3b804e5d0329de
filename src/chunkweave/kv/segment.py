"""The stored KV of one chunk: immutable, position-free."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class SegmentKV:
    """Keys before RoPE and values of one chunk.

    `kv` is `[layers, 2, tokens, kv_heads, head_dim]`, index 0 of the second axis the keys, 1 the values; layer-major,
    so that one layer of one chunk is one contiguous read. Nobody writes to it after construction: a position shift
    returns new tensors.
    """

    kv: torch.Tensor

    def __post_init__(self) -> None:
        if self.kv.dim() != 5 or self.kv.shape[1] != 2:
            raise ValueError(f"not [layers, 2, tokens, kv_heads, head_dim]: {tuple(self.kv.shape)}")

    @property
    def tokens(self) -> int:
        return self.kv.shape[2]

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def layer(self, index: int) -> torch.Tensor:
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]` (a view)."""
        return self.kv[index]
