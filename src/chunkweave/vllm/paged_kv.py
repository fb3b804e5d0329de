"""Reading and writing vLLM's paged KV cache without knowing how a backend lays it out.

Writing goes through the backend's own `do_kv_cache_update`. Reading needs the inverse, which no backend offers; so it
is learnt: a block is written with the number of each of its elements, and what then lies where is looked up.
"""

from collections.abc import Sequence
from typing import Any

import torch

from chunkweave.errors import UnsupportedModelError

_DIGIT = 128
"""Numbers are written digit by digit, each exact in bfloat16 (8 bits of significand)."""


class PagedKV:
    """The KV cache of all attention layers of one worker; slots are `block * block_size + offset`, as in vLLM.

    Owns no memory: the tensors are vLLM's. `block_size` is the scheduler's; a backend may cut its blocks smaller, which
    changes no slot.
    """

    def __init__(self, layers: Sequence[Any], block_size: int) -> None:
        """Learn the layout.

        Args:
            layers: vLLM's `Attention` modules, in layer order.
            block_size: tokens of a block as the scheduler counts them.

        Raises:
            UnsupportedModelError: the cache is not one of plain keys and values per head, or the layout found does
                not reproduce what was written.
        """
        self._layers = layers
        self.block_size = block_size
        first = layers[0]
        cache = first.kv_cache
        self._kernel_block = int(cache.shape[2])
        self.shape = (int(first.num_kv_heads), int(first.head_size))
        expected = (self.shape[0], self._kernel_block, 2 * self.shape[1])
        if cache.dim() != 4 or tuple(cache.shape[1:]) != expected or not cache.is_floating_point():
            raise UnsupportedModelError(
                f"a KV cache of shape {tuple(cache.shape)} and type {cache.dtype} cannot be read; chunkweave needs "
                f"unquantized keys and values per head (--kv-cache-dtype auto)"
            )
        self.dtype: torch.dtype = cache.dtype
        self.device: torch.device = cache.device
        self.num_slots = int(cache.shape[0]) * self._kernel_block
        self._places = self._learn()
        self._verify()

    @property
    def kernel_block(self) -> int:
        """Tokens of a block as the backend's kernels count them."""
        return self._kernel_block

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rotated `keys` and `values` `[tokens, kv_heads, head_dim]` into `slots` `[tokens]` of one layer."""
        attention = self._layers[layer]
        attention.impl.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), attention.kv_cache, slots)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Rotated keys and values of `slots` `[tokens]` of one layer, `[2, tokens, kv_heads, head_dim]`, a copy."""
        cache = self._layers[layer].kv_cache
        blocks, rows = torch.unique(slots // self._kernel_block, return_inverse=True)
        raw = cache[blocks].reshape(len(blocks), -1)
        tokens = raw[:, self._places.view(-1)].view(len(blocks), *self._places.shape)
        found: torch.Tensor = tokens[rows, slots % self._kernel_block].transpose(0, 1)
        return found

    def preserved(self, slots: torch.Tensor) -> "PreservedBlocks":
        """A guard that puts the blocks of `slots` back as they were, in every layer."""
        return PreservedBlocks([layer.kv_cache for layer in self._layers], torch.unique(slots // self._kernel_block))

    def _learn(self) -> torch.Tensor:
        """Place of each element in a flattened block, `[tokens, 2, kv_heads, head_dim]`."""
        tokens, (heads, dim) = self._kernel_block, self.shape
        block = self.num_slots // self._kernel_block - 1
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
        block = self.num_slots // self._kernel_block - 2
        slots = torch.randperm(2 * self._kernel_block, generator=generator)[: self._kernel_block + 3]
        slots = slots.to(self.device) + max(block, 0) * self._kernel_block
        slots = slots[slots < self.num_slots]
        kv = torch.randn((2, len(slots), *self.shape), generator=generator).to(self.device, self.dtype)
        with self.preserved(slots):
            for layer in {0, len(self._layers) - 1}:
                self.write(layer, slots, kv[0], kv[1])
                if not torch.equal(self.read(layer, slots), kv):
                    raise UnsupportedModelError(f"layer {layer} of the KV cache does not read back as it was written")


class PreservedBlocks:
    """Context manager: on leaving, blocks of the given caches hold what they held on entering."""

    def __init__(self, caches: Sequence[torch.Tensor], blocks: torch.Tensor) -> None:
        self._caches = caches
        self._blocks = blocks
        self._kept: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._kept = [cache[self._blocks].clone() for cache in self._caches]

    def __exit__(self, *_: object) -> None:
        for cache, kept in zip(self._caches, self._kept, strict=True):
            cache[self._blocks] = kept
        self._kept = []


class BlockTable:
    """One request's blocks, in both of the sizes that they are counted in."""

    def __init__(self, block_ids: Sequence[int], paged: PagedKV) -> None:
        ratio = paged.block_size // paged.kernel_block
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=paged.device)
        self._kernel_blocks = (blocks[:, None] * ratio + torch.arange(ratio, device=paged.device)).flatten()
        self._kernel_block = paged.kernel_block

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Slots of `positions` `[tokens]`, int64."""
        blocks = self._kernel_blocks[positions // self._kernel_block]
        return blocks * self._kernel_block + positions % self._kernel_block

    def rows(self, count: int) -> torch.Tensor:
        """The table as `count` requests that share it, `[count, blocks]`, int32."""
        return self._kernel_blocks.to(torch.int32).expand(count, -1).contiguous()
