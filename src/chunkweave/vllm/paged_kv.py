"""Read and write vLLM's paged KV cache without knowing a backend's layout.

Writes use the backend's own `do_kv_cache_update`. No backend offers the inverse, so the layout is learnt: each element
of a block is written with its own number, and the numbers found in memory give the places.

A quantized cache (`--kv-cache-dtype fp8`) keeps each number in one byte, divided by a scale of its layer. A backend may
truncate what it writes there; so what was stored is written back by `place`, which keeps the bytes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from chunkweave.errors import UnsupportedModelError

_DIGIT = 128
"""Numbers are written digit by digit; each digit is exact in bfloat16 (8 bits of significand)."""

_SMALL_DIGIT = {torch.float8_e4m3fn: 16, torch.float8_e5m2: 8}
"""The same for one byte, with 4 and 3 bits of significand."""

_ABOVE = 1 + 2**-6
"""Factor that keeps a digit above its number when it was multiplied by a scale: it may be truncated."""

_MOST_ROUNDED = {torch.float8_e4m3fn: 0.08, torch.float8_e5m2: 0.16}
"""Largest relative error, by norm, of what was written to a quantized cache; backends round or truncate."""

KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Quantized caches that are woven, by vLLM's `--kv-cache-dtype`."""


@dataclass(frozen=True, slots=True)
class _Strided:
    """The layout of keys (or values) in a block, as an affine function of token, head and dim."""

    origin: int
    strides: tuple[int, ...]

    @classmethod
    def found(cls, offsets: torch.Tensor) -> "_Strided | None":
        """From offsets in memory relative to a block's first element, `[tokens, kv_heads, head_dim]`; None if not
        affine.
        """
        origin = offsets[0, 0, 0]
        steps = [offsets.select(dim, min(1, size - 1))[0, 0] - origin for dim, size in enumerate(offsets.shape)]
        axes = [torch.arange(size, device=offsets.device) for size in offsets.shape]
        tokens, heads, dims = (axis * step for axis, step in zip(axes, steps, strict=True))
        if not torch.equal(origin + tokens[:, None, None] + heads[:, None] + dims, offsets):
            return None
        return cls(int(origin), tuple(map(int, steps)))

    def view(self, cache: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of them in a whole cache, `[blocks, *shape]`; `shape` is that of the offsets."""
        strides = (cache.stride(0), *self.strides)
        return cache.as_strided((len(cache), *shape), strides, cache.storage_offset() + self.origin)


class PagedKV:
    """The KV cache of all attention layers of one worker; slots are `block * block_size + offset`, as in vLLM.

    Owns no memory: the tensors are vLLM's. `block_size` is the scheduler's; a backend may use smaller blocks of
    `kernel_block` tokens, which changes no slot. `groups` maps each layer to one of a request's block tables: layers of
    one group have the same blocks.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        block_size: int,
        groups: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Learn the layout of `layers`, vLLM's `Attention` modules in layer order; `groups` None: one group.

        `dtype` is the model's, in which KV of a quantized cache is read and written.

        Raises:
            UnsupportedModelError: the cache has no plain keys and values per head, or the learnt layout does not
                reproduce what was written.
        """
        self._layers = layers
        self.block_size = block_size
        self.groups = tuple(groups or [0] * len(layers))
        first = layers[0]
        cache = first.kv_cache
        self.kernel_block = int(cache.shape[2])
        self.shape = (int(first.num_kv_heads), int(first.head_size))
        expected = (self.shape[0], self.kernel_block, 2 * self.shape[1])
        named = KV_DTYPES.get(getattr(first, "kv_cache_dtype", ""), cache.dtype)
        self.stored_dtype: torch.dtype = cache.dtype if cache.is_floating_point() else named
        if cache.dim() != 4 or tuple(cache.shape[1:]) != expected or not self.stored_dtype.is_floating_point:
            raise UnsupportedModelError(
                f"a KV cache of shape {tuple(cache.shape)} and type {cache.dtype} cannot be read; chunkweave needs "
                f"keys and values per head (--kv-cache-dtype auto, {', '.join(KV_DTYPES)})"
            )
        kinds = {
            f"{tuple(layer.kv_cache.shape)} {getattr(layer, 'kv_cache_dtype', layer.kv_cache.dtype)}"
            for layer in layers
        }
        if len(kinds) > 1:
            raise UnsupportedModelError(f"its layers have KV caches of different shapes or types, {sorted(kinds)}")
        self.quantized = self.stored_dtype.itemsize == 1
        self.dtype: torch.dtype = dtype if self.quantized else cache.dtype
        self._scales = [_scales_of(layer) if self.quantized else (1.0, 1.0) for layer in layers]
        self.device: torch.device = cache.device
        self.num_slots = int(cache.shape[0]) * self.kernel_block
        self._places = self._learn()
        self._strides = cache.stride()
        at = torch.unravel_index(self._places, cache.shape[1:])
        offsets = sum(index * stride for index, stride in zip(at, self._strides[1:], strict=True))
        self._strided = [_Strided.found(offsets[:, kv_index]) for kv_index in (0, 1)]
        self._verify()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rotated `keys` and `values` `[tokens, kv_heads, head_dim]` to `slots` `[tokens]` of one layer."""
        attention = self._layers[layer]
        attention.impl.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), attention.kv_cache, slots)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Rotated keys and values at `slots` `[tokens]` of one layer, `[2, tokens, kv_heads, head_dim]`, a copy."""
        return self.opened(layer, self.read_stored(layer, slots))

    def opened(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """A layer's keys and values `[2, tokens, kv_heads, head_dim]`, as stored or not, in `dtype` on the device."""
        if not self.quantized or kv.dtype != self.stored_dtype:
            return kv.to(self.device, self.dtype, non_blocking=True)
        return (kv.to(self.device, non_blocking=True).float() * self._scales_on_device(layer)).to(self.dtype)

    def place(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As `write`, for what was stored, opened and perhaps rotated: rounded to the nearest, so the same bytes if it
        was not rotated.
        """
        if not self.quantized:
            self.write(layer, slots, keys, values)
            return
        cache = self._layers[layer].kv_cache
        kv = self._closed(layer, torch.stack((keys.float(), values.float())))
        at = torch.unravel_index(self._places[slots % self.kernel_block], cache.shape[1:])
        blocks = (slots // self.kernel_block).view(-1, 1, 1, 1)
        cache[blocks, at[0], at[1], at[2]] = kv.transpose(0, 1).contiguous().view(cache.dtype)

    def rounded(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Rotated keys of a layer as they are read after `place`, in `dtype`."""
        if not self.quantized:
            return keys
        return self.opened(layer, self._closed(layer, torch.stack((keys, keys)).float()))[0]

    def _closed(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """float32 keys and values in a quantized cache's `stored_dtype`."""
        most = torch.finfo(self.stored_dtype).max
        return (kv / self._scales_on_device(layer)).clamp_(-most, most).to(self.stored_dtype)

    def _scales_on_device(self, layer: int) -> torch.Tensor:
        return torch.tensor(self._scales[layer], device=self.device).view(2, 1, 1, 1)

    @property
    def scales_name(self) -> str:
        """A name of all layers' scales, part of the stores' names; empty if all are 1."""
        if all(both == (1.0, 1.0) for both in self._scales):
            return ""
        return "-kv" + hashlib.blake2b(repr(self._scales).encode(), digest_size=8).hexdigest()

    def read_stored(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """As `read`, in the cache's own `stored_dtype`."""
        cache = self._layers[layer].kv_cache
        rows = slots % self.kernel_block
        keys, values = self._strided
        if keys is not None and values is not None and cache.stride() == self._strides:
            blocks = slots // self.kernel_block
            shape = (self.kernel_block, *self.shape)
            return self._typed(torch.stack([strided.view(cache, shape)[blocks, rows] for strided in (keys, values)]))
        blocks, where = torch.unique(slots // self.kernel_block, return_inverse=True)
        raw = cache[blocks].reshape(len(blocks), -1)
        tokens = raw[:, self._places.view(-1)].view(len(blocks), *self._places.shape)
        return self._typed(tokens[where, rows].transpose(0, 1))

    def _typed(self, raw: torch.Tensor) -> torch.Tensor:
        """What a backend may keep as bare bytes, as `stored_dtype`."""
        return raw if raw.dtype == self.stored_dtype else raw.view(self.stored_dtype)

    def reserve(self, nbytes: int) -> None:
        """Let PyTorch take device memory now and keep it for the tensors that follow.

        Raises:
            torch.OutOfMemoryError: it is not there.
        """
        if self.device.type != "cpu":
            torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @contextmanager
    def preserved(self, slots: torch.Tensor) -> Iterator[None]:
        """Restore the blocks of `slots` in every layer on exit."""
        blocks = torch.unique(slots // self.kernel_block)
        saved = [layer.kv_cache[blocks].clone() for layer in self._layers]
        try:
            yield
        finally:
            for layer, content in zip(self._layers, saved, strict=True):
                layer.kv_cache[blocks] = content

    def _learn(self) -> torch.Tensor:
        """Place of each element in a flattened block, `[tokens, 2, kv_heads, head_dim]`."""
        tokens, (heads, dim) = self.kernel_block, self.shape
        block = self.num_slots // self.kernel_block - 1
        slots = torch.arange(block * tokens, (block + 1) * tokens, device=self.device)
        numbers = torch.arange(tokens * 2 * heads * dim, device=self.device).view(tokens, 2, heads, dim)
        found = torch.zeros(numbers.numel(), dtype=torch.long, device=self.device)
        base = _SMALL_DIGIT.get(self.stored_dtype, _DIGIT)
        above = _ABOVE if self.quantized else 1.0
        for_keys, for_values = (scale * above for scale in self._scales[0])
        with self.preserved(slots):
            unit = 1
            while unit < numbers.numel():
                digit = (numbers // unit % base).to(self.dtype)
                self.write(0, slots, digit[:, 0] * for_keys, digit[:, 1] * for_values)
                found += self._typed(self._layers[0].kv_cache[block].reshape(-1)).float().long() * unit
                unit *= base
        if not torch.equal(found.sort().values, numbers.view(-1)):
            raise UnsupportedModelError("the KV cache's layout could not be learnt: elements are missing or converted")
        return torch.argsort(found).view(tokens, 2, heads, dim)

    def _verify(self) -> None:
        """Write random KV to scattered slots of two blocks and read it back, in the first and the last layer.

        A quantized cache must be near it, and keep the bytes that are placed.
        """
        generator = torch.Generator().manual_seed(0)
        block = self.num_slots // self.kernel_block - 2
        slots = torch.randperm(2 * self.kernel_block, generator=generator)[: self.kernel_block + 3]
        slots = slots.to(self.device) + max(block, 0) * self.kernel_block
        slots = slots[slots < self.num_slots]
        kv = torch.randn((2, len(slots), *self.shape), generator=generator).to(self.device, self.dtype)
        with self.preserved(slots):
            for layer in {0, len(self._layers) - 1}:
                self.write(layer, slots, kv[0], kv[1])
                found = self.read(layer, slots)
                stored = self.read_stored(layer, slots)
                near = (found - kv).norm() <= _MOST_ROUNDED[self.stored_dtype] * kv.norm() if self.quantized else True
                self.place(layer, slots, *(found if self.quantized else kv))
                same = torch.equal(self.read_stored(layer, slots).view(torch.uint8), stored.view(torch.uint8))
                if not (near and same and (self.quantized or torch.equal(found, kv))):
                    raise UnsupportedModelError(f"layer {layer} of the KV cache does not read back as it was written")


def _scales_of(layer: Any) -> tuple[float, float]:
    """What a layer's keys and values are divided by in a quantized cache.

    Raises:
        UnsupportedModelError: there is more than one scale for all heads.
    """
    if any(getattr(layer, name).numel() != 1 for name in ("_k_scale", "_v_scale")):
        raise UnsupportedModelError("its quantized KV cache has a scale for every head")
    return float(layer._k_scale_float), float(layer._v_scale_float)


_NULL_BLOCK = 0
"""Replaces blocks that have left the window of a group's layers."""


class BlockTable:
    """One request's blocks of one group of layers, counted in both block sizes.

    Positions before `begins` have no blocks: they have left the layers' window.
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
        """The table repeated for `count` requests that share it, `[count, blocks]`, int32."""
        return self._kernel_blocks.to(torch.int32).expand(count, -1).contiguous()


class RequestBlocks:
    """One request's block tables, one per group of layers. From `begins` on all have blocks; `whole`: from 0 on."""

    def __init__(self, block_ids: Sequence[Sequence[int]], paged: PagedKV) -> None:
        self.tables = tuple(BlockTable(ids, paged) for ids in block_ids)
        self.begins = max(table.begins for table in self.tables)
        self.whole = not self.begins
        self._groups = paged.groups

    def of(self, layer: int) -> BlockTable:
        """The table of a layer's group."""
        return self.tables[self._groups[layer]]
