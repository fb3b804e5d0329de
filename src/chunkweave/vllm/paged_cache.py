"""One request's KV as passes read and write it: in vLLM's blocks, and for the layer at hand in a row."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from chunkweave.kv.request_cache import Rotate
from chunkweave.kv.segment import SegmentSource
from chunkweave.types import Span
from typing import TYPE_CHECKING
from chunkweave.vllm.paged_kv import BlockTable

if TYPE_CHECKING:
    from chunkweave.vllm.stock_layers import StockLayers



class PagedCache:
    """A `PassCache` whose positions from `first` to `stop` are to be brought into the request's blocks.

    What lies before `first` is in the blocks already. What lies from `stop` on has no blocks yet: a question that is
    asked beforehand, whose KV of one layer is held until the next. Keys and values of the layer at hand lie in a row,
    `[2, capacity, kv_heads, head_dim]`, for attention that is not vLLM's; passes that need none fill the blocks alone.
    Owned by one weave.
    """

    kept_from: int | None = None

    def __init__(
        self,
        layers: "StockLayers",
        table: BlockTable,
        sources: Sequence[tuple[Span, SegmentSource]],
        *,
        first: int,
        stop: int,
        capacity: int,
    ) -> None:
        """`sources` are segments with the spans that they go to, ascending; `capacity` is the prompt's tokens."""
        self.capacity = capacity
        self._paged, self._table = layers.paged, table
        self._rotation = layers.rotation
        placed = [(span, source) for span, source in sources if span.stop > first]
        inside = [Span(max(first, span.start), span.stop) for span, _ in placed]
        self._sources = [
            (source, slice(part.start - span.start, part.stop - span.start))
            for part, (span, source) in zip(inside, placed, strict=True)
        ]
        self.cached = _positions(inside).to(layers.device)
        """Positions of what the segments bring, ascending."""
        self._in_blocks = int((self.cached < stop).sum())
        self._below = torch.arange(stop, device=layers.device)
        self._first = first
        self._loaded = [False] * layers.num_layers
        self._row: torch.Tensor | None = None
        self._at = -1
        self._raw: tuple[int, torch.Tensor] | None = None
        self._written: tuple[torch.Tensor, torch.Tensor] | None = None

    def fill(self, layer: int, passive: torch.Tensor) -> None:
        """Bring the segments' KV of a layer into the blocks, once; `passive` are the places in `cached` that need it.

        The KV of the others is about to be computed.
        """
        if self._loaded[layer]:
            return
        self._loaded[layer] = True
        passive = passive[passive < self._in_blocks]
        if len(passive):
            keys, values = self._gather(layer)[:, passive]
            where = self.cached[passive]
            self._paged.write(layer, self._table.slots(where), self._rotation.forward(keys, where), values)

    def load_layer(self, layer: int, rotate: Rotate) -> None:
        """Lay the KV of a layer out in a row: what is in the blocks, and what segments bring, which goes there too."""
        self._at, loaded = layer, self._loaded[layer]
        self._loaded[layer] = True
        row = self._row_of(layer)
        known = self._below if loaded else self._below[: self._first]
        if len(known):
            row[:, : len(known)] = self._paged.read(layer, self._table.slots(known))
        missing = self.cached[self._in_blocks if loaded else 0 :]
        if not len(missing):
            return
        keys, values = self._gather(layer)[:, -len(missing) :]
        keys = rotate(keys, missing)
        row[0].index_copy_(0, missing, keys)
        row[1].index_copy_(0, missing, values)
        if not loaded and self._in_blocks:
            slots = self._table.slots(missing[: self._in_blocks])
            self._paged.write(layer, slots, keys[: self._in_blocks], values[: self._in_blocks])

    def cached_before_rope(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Segments' KV at `positions` (all of them `cached`), `[2, tokens, kv_heads, head_dim]`, before RoPE."""
        return self._gather(layer)[:, torch.searchsorted(self.cached, positions)]

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows at `positions` `[tokens]`, ascending, with rotated `keys` and `values`, in row and blocks."""
        row = self._row_of(layer)
        row[0].index_copy_(0, positions, keys)
        row[1].index_copy_(0, positions, values)
        slots = self._slots_of(positions)
        if len(slots):
            self._paged.write(layer, slots, keys[: len(slots)], values[: len(slots)])

    def keep(self, layer: int, positions: torch.Tensor, keys: torch.Tensor) -> None:
        """Never asked for: the question's KV is vLLM's to compute and to keep."""
        raise AssertionError(f"{len(keys)} keys of layer {layer} at {positions} have no place")

    def clear(self, layer: int, hidden: torch.Tensor) -> None:
        """Make the rows at the positions `hidden` finite; a later pass writes them into the blocks."""
        self._row_of(layer).index_fill_(1, hidden, 0)

    def view(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values of positions below `stop` in the layer at hand, `[stop, kv_heads, head_dim]`."""
        row = self._row_of(layer)
        return row[0, :stop], row[1, :stop]

    def _row_of(self, layer: int) -> torch.Tensor:
        assert layer == self._at, "one layer is at hand at a time"
        if self._row is None:
            shape = (2, self.capacity, *self._paged.shape)
            self._row = torch.zeros(shape, dtype=self._paged.dtype, device=self._paged.device)
        return self._row

    def _slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Slots of those positions that have blocks, the first ones; worked out once for the rows of many layers."""
        if self._written is None or self._written[0] is not positions:
            inside = int((positions < len(self._below)).sum())
            self._written = (positions, self._table.slots(positions[:inside]))
        return self._written[1]

    def _gather(self, layer: int) -> torch.Tensor:
        """Keys before RoPE and values of all `cached` positions, `[2, tokens, kv_heads, head_dim]`."""
        if self._raw is None or self._raw[0] != layer:
            parts = [source.layer(layer)[:, rows] for source, rows in self._sources]
            device, dtype = self._paged.device, self._paged.dtype
            self._raw = (layer, torch.cat([part.to(device, dtype, non_blocking=True) for part in parts], dim=1))
        return self._raw[1]


def _positions(spans: Sequence[Span]) -> torch.Tensor:
    """The positions of ascending spans in one row, `[tokens]`."""
    assert all(one.stop <= other.start for one, other in pairwise(spans))
    return torch.tensor([position for span in spans for position in span.positions()], dtype=torch.long)
