"""Keeps the KV of newly computed chunks, so that it can be stored when the request ends."""

import torch

from chunkweave.kv.segment import SegmentKV
from chunkweave.planning.plan import PartPlan
from chunkweave.types import Geometry


class PartCapture:
    """Collects keys before RoPE and values of one computed part, layer by layer, in host memory.

    The part's tokens are active at every layer of one pass; its rows are then one run of the active positions.
    """

    def __init__(self, part: PartPlan, geometry: Geometry, dtype: torch.dtype) -> None:
        self.part = part
        shape = (geometry.num_layers, 2, len(part.span), geometry.num_kv_heads, geometry.head_dim)
        self._kv = torch.empty(shape, dtype=dtype)
        self._layers_seen = 0

    def take(self, layer: int, first_row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy this part's rows, from `first_row` on, of `keys` and `values` `[rows, kv_heads, head_dim]`."""
        rows = slice(first_row, first_row + len(self.part.span))
        self._kv[layer, 0].copy_(keys[rows], non_blocking=True)
        self._kv[layer, 1].copy_(values[rows], non_blocking=True)
        self._layers_seen += 1

    @property
    def complete(self) -> bool:
        return self._layers_seen == self._kv.shape[0]

    def segment(self) -> SegmentKV:
        """The finished segment; call it once, after the last layer."""
        assert self.complete, "a part was taken for fewer layers than the model has"
        return SegmentKV(self._kv)
