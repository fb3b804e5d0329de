"""Memory of an accelerator in blocks of tokens, so that segments of any length come and go without holes."""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch


class BlockSegment:
    """A segment whose tokens lie in blocks of a `DeviceBlocks`; a `SegmentSource`. Never changes.

    Its blocks are free again when it is gone, not when its tier forgets it: a request may still read them.
    """

    def __init__(self, arena: torch.Tensor, blocks: Sequence[int], tokens: int) -> None:
        self._arena = arena
        self._blocks = tuple(blocks)
        self._rows: torch.Tensor | None = None
        self.tokens = tokens
        layers, two, _, _, kv_heads, head_dim = arena.shape
        self.nbytes = layers * two * tokens * kv_heads * head_dim * arena.dtype.itemsize
        self.held_bytes = self.nbytes // tokens * arena.shape[3] * len(self._blocks)
        """Bytes of its blocks, the unused rest of the last one included."""

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self._arena.device

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]`: a view if the blocks are one run."""
        layer = self._arena[index]
        first = self._blocks[0]
        if all(after == before + 1 for before, after in pairwise(self._blocks)):
            return layer[:, first : first + len(self._blocks)].flatten(1, 2)[:, : self.tokens]
        if self._rows is None:
            self._rows = torch.tensor(self._blocks, device=self._arena.device)
        return layer[:, self._rows].flatten(1, 2)[:, : self.tokens]

    def whole(self) -> torch.Tensor:
        """All layers, `[layers, 2, tokens, kv_heads, head_dim]`, copied out of the blocks."""
        return torch.stack([self.layer(index) for index in range(len(self._arena))])


class DeviceBlocks:
    """One piece of device memory, taken once and given out in blocks. Safe to use from several threads."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, blocks: int, block_tokens: int
    ) -> None:
        """Memory for segments of `shape` `[layers, 2, any, kv_heads, head_dim]`."""
        layers, two, _, kv_heads, head_dim = shape
        self._arena = torch.empty((layers, two, blocks, block_tokens, kv_heads, head_dim), dtype=dtype, device=device)
        self._block_tokens = block_tokens
        self._free = deque(range(blocks))
        self._lock = threading.Lock()

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    def put(self, kv: torch.Tensor) -> BlockSegment | None:
        """Copy a segment `[layers, 2, tokens, kv_heads, head_dim]` in; None if there are too few free blocks.

        The copy is issued to the caller's current stream, and so is every reading of blocks: what read a block's
        former contents comes before it there.
        """
        model = (*self._arena.shape[:2], *self._arena.shape[4:])
        if kv.dtype != self._arena.dtype or (*kv.shape[:2], *kv.shape[3:]) != model:
            raise ValueError(f"not a segment of this model: {tuple(kv.shape)}, {kv.dtype}")
        tokens = kv.shape[2]
        wanted = -(-tokens // self._block_tokens)
        with self._lock:
            if wanted > len(self._free):
                return None
            blocks = sorted(self._free.popleft() for _ in range(wanted))
        kv = kv.to(self._arena.device, non_blocking=True)  # in one piece: a block's rows are strided on the host
        for place, block in enumerate(blocks):
            rows = kv[:, :, place * self._block_tokens : (place + 1) * self._block_tokens]
            self._arena[:, :, block, : rows.shape[2]].copy_(rows, non_blocking=True)
        segment = BlockSegment(self._arena, blocks, tokens)
        # Without the lock: it may run in the middle of anything, also in a thread that holds it.
        weakref.finalize(segment, self._free.extend, blocks).atexit = False
        return segment
