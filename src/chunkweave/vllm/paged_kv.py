"""Reading and writing vLLM's paged KV cache without knowing how a backend lays it out.

Writing goes through the backend's own `do_kv_cache_update`. Reading needs the inverse, which no backend offers; so it
is learnt: a block is written with the number of each of its elements, and what then lies where is looked up.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

import torch

from chunkweave.errors import UnsupportedModelError
from chunkweave.kv.request_cache import Placement, Rotate
from chunkweave.kv.segment import SegmentSource
from chunkweave.types import Span
from chunkweave.vllm.rotation import BEFORE_ROPE

if TYPE_CHECKING:
    from chunkweave.vllm.stock_layers import StockLayers


_DIGIT = 128
"""Numbers are written digit by digit, each exact in bfloat16 (8 bits of significand)."""


@dataclass(frozen=True, slots=True)
class _Strided:
    """Where keys (or values) lie in a block, if that is an affine function of token, head and dim."""

    origin: int
    strides: tuple[int, ...]

    @classmethod
    def found(cls, offsets: torch.Tensor) -> "_Strided | None":
        """From offsets in memory from a block's first element, `[tokens, kv_heads, head_dim]`."""
        origin = offsets[0, 0, 0]
        steps = [offsets.select(dim, min(1, size - 1))[0, 0] - origin for dim, size in enumerate(offsets.shape)]
        axes = [torch.arange(size, device=offsets.device) for size in offsets.shape]
        tokens, heads, dims = (axis * step for axis, step in zip(axes, steps, strict=True))
        if not torch.equal(origin + tokens[:, None, None] + heads[:, None] + dims, offsets):
            return None
        return cls(int(origin), tuple(map(int, steps)))

    def view(self, cache: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """They in a whole cache, `[blocks, *shape]` where `shape` is of the offsets."""
        strides = (cache.stride(0), *self.strides)
        return cache.as_strided((len(cache), *shape), strides, cache.storage_offset() + self.origin)


class PagedKV:
    """The KV cache of all attention layers of one worker; slots are `block * block_size + offset`, as in vLLM.

    Owns no memory: the tensors are vLLM's. `block_size` is the scheduler's; a backend may cut its blocks smaller, to
    `kernel_block` tokens, which changes no slot. `groups` says by layer which of a request's tables is its own:
    layers of one group have the same blocks.
    """

    def __init__(self, layers: Sequence[Any], block_size: int, groups: Sequence[int] | None = None) -> None:
        """Learn the layout of `layers`, vLLM's `Attention` modules in layer order; `groups` None: all are in one.

        Raises:
            UnsupportedModelError: the cache is not one of plain keys and values per head, or the layout found does
                not reproduce what was written.
        """
        self._layers = layers
        self.block_size = block_size
        self.groups = tuple(groups or [0] * len(layers))
        first = layers[0]
        cache = first.kv_cache
        self.kernel_block = int(cache.shape[2])
        self.shape = (int(first.num_kv_heads), int(first.head_size))
        expected = (self.shape[0], self.kernel_block, 2 * self.shape[1])
        if cache.dim() != 4 or tuple(cache.shape[1:]) != expected or not cache.is_floating_point():
            raise UnsupportedModelError(
                f"a KV cache of shape {tuple(cache.shape)} and type {cache.dtype} cannot be read; chunkweave needs "
                f"unquantized keys and values per head (--kv-cache-dtype auto)"
            )
        if other := next((one for one in layers if one.kv_cache.shape != cache.shape), None):
            shapes = f"{tuple(cache.shape)} and {tuple(other.kv_cache.shape)}"
            raise UnsupportedModelError(f"its layers have KV caches of different shapes, {shapes}")
        self.dtype: torch.dtype = cache.dtype
        self.device: torch.device = cache.device
        self.num_slots = int(cache.shape[0]) * self.kernel_block
        self._places = self._learn()
        self._strides = cache.stride()
        at = torch.unravel_index(self._places, cache.shape[1:])
        offsets = sum(index * stride for index, stride in zip(at, self._strides[1:], strict=True))
        self._strided = [_Strided.found(offsets[:, one]) for one in (0, 1)]
        self._verify()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rotated `keys` and `values` `[tokens, kv_heads, head_dim]` into `slots` `[tokens]` of one layer."""
        attention = self._layers[layer]
        attention.impl.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), attention.kv_cache, slots)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Rotated keys and values of `slots` `[tokens]` of one layer, `[2, tokens, kv_heads, head_dim]`, a copy."""
        cache, rows = self._layers[layer].kv_cache, slots % self.kernel_block
        keys, values = self._strided
        if keys is not None and values is not None and cache.stride() == self._strides:
            blocks, shape = slots // self.kernel_block, (self.kernel_block, *self.shape)
            return torch.stack([one.view(cache, shape)[blocks, rows] for one in (keys, values)])
        blocks, where = torch.unique(slots // self.kernel_block, return_inverse=True)
        raw = cache[blocks].reshape(len(blocks), -1)
        tokens = raw[:, self._places.view(-1)].view(len(blocks), *self._places.shape)
        found: torch.Tensor = tokens[where, rows].transpose(0, 1)
        return found

    @contextmanager
    def preserved(self, slots: torch.Tensor) -> Iterator[None]:
        """On leaving, the blocks of `slots` hold what they held on entering, in every layer."""
        blocks = torch.unique(slots // self.kernel_block)
        kept = [layer.kv_cache[blocks].clone() for layer in self._layers]
        try:
            yield
        finally:
            for layer, content in zip(self._layers, kept, strict=True):
                layer.kv_cache[blocks] = content

    def _learn(self) -> torch.Tensor:
        """Place of each element in a flattened block, `[tokens, 2, kv_heads, head_dim]`."""
        tokens, (heads, dim) = self.kernel_block, self.shape
        block = self.num_slots // self.kernel_block - 1
        slots = torch.arange(block * tokens, (block + 1) * tokens, device=self.device)
        numbers = torch.arange(tokens * 2 * heads * dim, device=self.device).view(tokens, 2, heads, dim)
        found = torch.zeros(numbers.numel(), dtype=torch.long, device=self.device)
        with self.preserved(slots):
            unit = 1
            while unit < numbers.numel():
                digit = (numbers // unit % _DIGIT).to(self.dtype)
                self.write(0, slots, digit[:, 0], digit[:, 1])
                found += self._layers[0].kv_cache[block].reshape(-1).long() * unit
                unit *= _DIGIT
        if not torch.equal(found.sort().values, numbers.view(-1)):
            raise UnsupportedModelError("the KV cache's layout could not be learnt: elements are missing or converted")
        return torch.argsort(found).view(tokens, 2, heads, dim)

    def _verify(self) -> None:
        """Write random KV to scattered slots of two blocks, and read it back, in the first and the last layer."""
        generator = torch.Generator().manual_seed(0)
        block = self.num_slots // self.kernel_block - 2
        slots = torch.randperm(2 * self.kernel_block, generator=generator)[: self.kernel_block + 3]
        slots = slots.to(self.device) + max(block, 0) * self.kernel_block
        slots = slots[slots < self.num_slots]
        kv = torch.randn((2, len(slots), *self.shape), generator=generator).to(self.device, self.dtype)
        with self.preserved(slots):
            for layer in {0, len(self._layers) - 1}:
                self.write(layer, slots, kv[0], kv[1])
                if not torch.equal(self.read(layer, slots), kv):
                    raise UnsupportedModelError(f"layer {layer} of the KV cache does not read back as it was written")


_NULL_BLOCK = 0
"""In place of blocks that have left the window of a group's layers."""


class BlockTable:
    """One request's blocks of one group of layers, in both of the sizes that they are counted in.

    Positions before `begins` have none (any more): they have left the layers' window.
    """

    def __init__(self, block_ids: Sequence[int], paged: PagedKV) -> None:
        ratio = paged.block_size // paged.kernel_block
        self.begins = paged.block_size * sum(1 for _ in takewhile(_NULL_BLOCK.__eq__, block_ids))
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=paged.device)
        self._kernel_blocks = (blocks[:, None] * ratio + torch.arange(ratio, device=paged.device)).flatten()
        self.kernel_block = paged.kernel_block

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Slots of `positions` `[tokens]`, int64."""
        blocks = self._kernel_blocks[positions // self.kernel_block]
        return blocks * self.kernel_block + positions % self.kernel_block

    def rows(self, count: int) -> torch.Tensor:
        """The table as `count` requests that share it, `[count, blocks]`, int32."""
        return self._kernel_blocks.to(torch.int32).expand(count, -1).contiguous()


class RequestBlocks:
    """One request's block tables, one for each group of layers. From `begins` on all have blocks; `whole`: from 0."""

    def __init__(self, block_ids: Sequence[Sequence[int]], paged: PagedKV) -> None:
        self.tables = tuple(BlockTable(ids, paged) for ids in block_ids)
        self.begins = max(table.begins for table in self.tables)
        self.whole = not self.begins
        self._groups = paged.groups

    def of(self, layer: int) -> BlockTable:
        """The table of a layer's group."""
        return self.tables[self._groups[layer]]


_MOST_PASSIVE = 0.75
"""Where a larger share of a segment's tokens is passive, all of them are brought."""


@dataclass(frozen=True, slots=True, eq=False)
class _Fill:
    """What the segments bring to one group of layers, where `passive` tokens need it: worked out once for all of them.

    `rows` are those with blocks, `slots` theirs; their keys are stored as `at` positions and go `to` others. They are
    places in a row where the others are few, whose KV is overwritten behind it: to pick rows out costs a copy.
    """

    passive: torch.Tensor
    rows: torch.Tensor | slice
    at: torch.Tensor
    to: torch.Tensor
    slots: torch.Tensor


class PagedCache:
    """A `PassCache` whose positions from `first` to `stop` are to be brought into the request's blocks.

    What lies before `first` is in the blocks already. What lies from `stop` on has no blocks yet: a question whose
    attention is read beforehand; its KV is held for one layer at a time. For attention that is not vLLM's, keys and
    values of the current layer are laid out in a row, `[2, capacity, kv_heads, head_dim]`; other passes fill the blocks
    alone. Owned by one weave.

    Where a layer's blocks begin later than the prompt, `first` is 0, and passes need the row: what lies before is laid
    out from the segments for each of them, and what all but the last computed there is held on the host.
    """

    kept_from: int | None = None
    last_pass = False
    """Nothing is to be held for another one."""

    def __init__(
        self,
        layers: "StockLayers",
        blocks: RequestBlocks,
        placements: Sequence[Placement],
        *,
        first: int,
        stop: int,
        capacity: int,
    ) -> None:
        """`placements` are segments with the spans that they go to, ascending; `capacity` is the prompt's tokens."""
        self.capacity, self.geometry = capacity, layers.geometry
        assert blocks.whole or not first, "what has left a window cannot be read back"
        self._paged, self._blocks = layers.paged, blocks
        self._rotations = layers.rotations
        placed = [one for one in placements if one.span.stop > first]
        self._sources = [(one.segment, slice(max(0, first - one.span.start), len(one.span))) for one in placed]
        inside = [Span(max(first, one.span.start), one.span.stop) for one in placed]
        assert all(one.stop <= other.start for one, other in pairwise(inside))
        positions = [position for span in inside for position in span.positions()]
        self.cached = torch.tensor(positions, dtype=torch.long, device=layers.device)
        """Positions of what the segments bring, ascending."""
        keys_at = [position for segment, rows in self._sources for position in _keys_at(segment, rows)]
        self._keys_at = torch.tensor(keys_at, dtype=torch.long, device=layers.device)
        self._turned, self._rotated = keys_at != positions, set(keys_at) != {BEFORE_ROPE}
        self._where = positions
        self._turns: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._fills: dict[int, _Fill] = {}
        self._below = torch.arange(stop, device=layers.device)
        self._first = first
        self._held: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._loaded = [False] * layers.num_layers
        self._row: torch.Tensor | None = None
        self._at = -1
        self._raw: tuple[int, torch.Tensor] | None = None
        self._written: dict[int, tuple[torch.Tensor, slice, torch.Tensor]] = {}

    def fill(self, layer: int, passive: torch.Tensor) -> None:
        """Bring the segments' KV of a layer into the blocks, once; `passive` are the places in `cached` that need it.

        The KV of the others is about to be computed.
        """
        if self._loaded[layer]:
            return
        self._loaded[layer] = True
        group = self._paged.groups[layer]
        if group not in self._fills or self._fills[group].passive is not passive:
            inside = self._inside(layer, self.cached)
            picked = passive[(passive >= inside.start) & (passive < inside.stop)]
            most = len(picked) > _MOST_PASSIVE * (inside.stop - inside.start)
            rows = inside if most else picked
            to = self.cached[rows]
            self._fills[group] = _Fill(passive, rows, self._keys_at[rows], to, self._blocks.of(layer).slots(to))
        fill = self._fills[group]
        if len(fill.slots):
            keys, values = self._gather(layer)[:, fill.rows]
            self._paged.write(layer, fill.slots, self._moved(layer, keys, fill.at, fill.to), values)

    def load_layer(self, layer: int, rotate: Rotate) -> None:  # noqa: ARG002  (the protocol has it)
        """Lay the KV of a layer out in a row: what is in the blocks, and what segments bring, which goes there too."""
        self._at, loaded = layer, self._loaded[layer]
        self._loaded[layer] = True
        row, table, inside = self._row_of(layer), self._blocks.of(layer), self._inside(layer, self.cached)
        known = self._below[table.begins :] if loaded else self._below[: self._first]
        if len(known):
            row[:, table.begins : table.begins + len(known)] = self._paged.read(layer, table.slots(known))
        self._place(layer, slice(0, inside.start if loaded else inside.stop))
        self._place(layer, slice(inside.stop, len(self.cached)))
        for positions, held in self._held.get(layer, ()):
            row[:, positions] = held.to(row.device, non_blocking=True)
        if not loaded and inside.stop > inside.start:
            keys, values = row[:, self._rows(inside)]
            self._paged.write(layer, table.slots(self.cached[inside]), keys, values)

    def cached_before_rope(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Segments' KV at `positions` (all of them `cached`), `[2, tokens, kv_heads, head_dim]`, before RoPE."""
        places = torch.searchsorted(self.cached, positions)
        found = self._gather(layer)[:, places]
        if not self._rotated:
            return found
        nowhere = torch.full_like(places, BEFORE_ROPE)
        return torch.stack((self._rotations.turn(layer, found[0], self._keys_at[places], nowhere), found[1]))

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows at `positions` `[tokens]`, ascending, with rotated `keys` and `values`, in row and blocks."""
        row = self._row_of(layer)
        row[0].index_copy_(0, positions, keys)
        row[1].index_copy_(0, positions, values)
        inside, slots = self._slots_of(layer, positions)
        if len(slots):
            self._paged.write(layer, slots, keys[inside], values[inside])
        if inside.start and not self.last_pass:
            held = torch.stack((keys[: inside.start], values[: inside.start])).cpu()
            self._held.setdefault(layer, []).append((positions[: inside.start], held))

    def keep(self, layer: int, positions: torch.Tensor, keys: torch.Tensor) -> None:
        """Never called: the question's KV is vLLM's to compute and to keep."""
        raise AssertionError(f"{len(keys)} keys of layer {layer} at {positions} have no place")

    def clear(self, layer: int, hidden: torch.Tensor) -> None:
        """Make the rows at the positions `hidden` finite; a later pass writes them into the blocks."""
        self._row_of(layer).index_fill_(1, hidden, 0)

    def view(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values of positions below `stop` in the current layer, `[stop, kv_heads, head_dim]`."""
        row = self._row_of(layer)
        return row[0, :stop], row[1, :stop]

    def _row_of(self, layer: int) -> torch.Tensor:
        assert layer == self._at, "a layer is loaded before it is used"
        if self._row is None:
            shape = (2, self.capacity, *self._paged.shape)
            self._row = torch.zeros(shape, dtype=self._paged.dtype, device=self._paged.device)
        return self._row

    def _place(self, layer: int, places: slice) -> None:
        """Lay out what the segments bring to those places in `cached`."""
        if places.stop <= places.start:
            return
        row, where = self._row_of(layer), self._rows(places)
        run = (places.start, places.stop)
        if run not in self._turns:
            self._turns[run] = self._keys_at[places], self.cached[places]
        keys, values = self._gather(layer)[:, places]
        row[0, where] = self._moved(layer, keys, *self._turns[run])
        row[1, where] = values

    def _rows(self, places: slice) -> slice | torch.Tensor:
        """The positions of those places in `cached`: as a slice, which costs a copy less, where they are one run."""
        first, stop = self._where[places.start], self._where[places.stop - 1] + 1
        return slice(first, stop) if stop - first == places.stop - places.start else self.cached[places]

    def _moved(self, layer: int, keys: torch.Tensor, at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Keys that are as `at` positions, as they are `to` others: untouched if all segments were computed there."""
        return self._rotations.turn(layer, keys, at, to) if self._turned else keys

    def _inside(self, layer: int, positions: torch.Tensor) -> slice:
        """Those of the `positions`, ascending, that have blocks in a layer."""
        begins = self._blocks.of(layer).begins
        return slice(int((positions < begins).sum()) if begins else 0, int((positions < len(self._below)).sum()))

    def _slots_of(self, layer: int, positions: torch.Tensor) -> tuple[slice, torch.Tensor]:
        """Those of the positions that have blocks, and their slots; worked out once for the rows of many layers."""
        group = self._paged.groups[layer]
        if group not in self._written or self._written[group][0] is not positions:
            inside = self._inside(layer, positions)
            self._written[group] = positions, inside, self._blocks.of(layer).slots(positions[inside])
        return self._written[group][1:]

    def _gather(self, layer: int) -> torch.Tensor:
        """Keys as they are stored and values of all `cached` positions, `[2, tokens, kv_heads, head_dim]`."""
        if self._raw is None or self._raw[0] != layer:
            parts = [source.layer(layer)[:, rows] for source, rows in self._sources]
            device, dtype = self._paged.device, self._paged.dtype
            self._raw = (layer, torch.cat([part.to(device, dtype, non_blocking=True) for part in parts], dim=1))
        return self._raw[1]


def _keys_at(segment: SegmentSource, rows: slice) -> Sequence[int]:
    """The positions that the keys of some rows of a segment are stored for."""
    count = rows.stop - rows.start
    if segment.keys_at is None:
        return [BEFORE_ROPE] * count
    return range(segment.keys_at + rows.start, segment.keys_at + rows.stop)
