"""The stored KV of one chunk: immutable, position-free."""

from dataclasses import dataclass
from typing import Protocol

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

    @property
    def device(self) -> torch.device:
        return self.kv.device

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]` (a view)."""
        return self.kv[index]


class SegmentLost(Exception):  # noqa: N818  (a signal between layers of the library, never seen by its users)
    """A segment's layer cannot be had: missing, corrupt, or too late. The caller drops it and computes instead."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"segment {segment}: {reason}")
        self.segment = segment


class SegmentLate(SegmentLost):
    """A layer did not come in time; the segment itself may be sound."""


class SegmentSource(Protocol):
    """A segment that is read layer by layer: `SegmentKV` itself, or one whose layers still lie on disk."""

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors once they are in memory."""

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Keys before RoPE and values of one layer, `[2, tokens, kv_heads, head_dim]`; may read and block.

        `scratch` (uint8, one dimension) may be read into, and the result may be a view of it: reused or already
        mapped memory saves the page faults of fresh memory, which cost as much as reading from a fast disk.

        Raises:
            SegmentLost: this layer cannot be had.
        """
