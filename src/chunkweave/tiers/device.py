"""Segments in the memory of an accelerator."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import torch

from chunkweave.kv.segment import SegmentSource
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.device_blocks import BlockSegment, DeviceBlocks
from chunkweave.types import SegmentId

_BLOCK_TOKENS = 32
"""Of a chunk of 512 tokens nothing is wasted, of a short one at most 31 tokens."""


class DeviceTier:
    """Keeps segments in blocks of one piece of a device's memory; implements `chunkweave.store.tier.Tier`.

    The memory is taken with the first segment, which shows what a token takes. A payload is copied in by `put`, on the
    caller's current stream; running out of memory is an `OSError`, as a full disk is. What is evicted here is copied
    out by whoever takes it (`chunkweave.tiers.host_memory.moved_into`), once: later evictions of the same segment find
    it below (RAGCache §5.1, swap-out-only-once). Safe to use from several threads.
    """

    def __init__(self, device: torch.device | str, *, budget_bytes: int, block_tokens: int = _BLOCK_TOKENS) -> None:
        """A tier on `device` that takes at most `budget_bytes`, which its store keeps to as well."""
        self._device = torch.device(device)
        self._budget_bytes = budget_bytes
        self._block_tokens = block_tokens
        self._blocks: DeviceBlocks | None = None
        self._held: dict[SegmentId, tuple[SegmentRecord, BlockSegment]] = {}
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._device

    def put(self, record: SegmentRecord, payload: SegmentSource) -> None:
        """Copy `payload` into blocks, replacing one of the same id.

        Raises:
            OSError: the device is out of memory, or the blocks of what was forgotten are still being read.
        """
        kv = payload.whole() if isinstance(payload, BlockSegment) else getattr(payload, "kv", None)
        if kv is None:
            raise TypeError("only a segment that is whole in memory can go to a device")
        self.delete(record.id)
        segment = self._memory(kv).put(kv)
        if segment is None:
            raise OSError(f"no free blocks on {self._device} for {payload.tokens} tokens")
        self._held[record.id] = (replace(record, nbytes=segment.held_bytes), segment)

    def get(self, segment: SegmentId) -> SegmentSource | None:
        """The segment on the device, or None if it is not here."""
        held = self._held.get(segment)
        return None if held is None else held[1]

    def delete(self, segment: SegmentId) -> None:
        """Forget it; unknown ids are ignored."""
        self._held.pop(segment, None)

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes of the blocks held for this id, 0 if it is not here."""
        held = self._held.get(segment)
        return 0 if held is None else held[0].nbytes

    def size_of(self, record: SegmentRecord, payload: SegmentSource) -> int:  # noqa: ARG002  (the protocol has it)
        """Bytes of the blocks that it would take."""
        return payload.nbytes // payload.tokens * self._rounded(payload.tokens)

    def records(self) -> Iterator[SegmentRecord]:
        """Everything held, in no order; a snapshot, so the tier may change meanwhile."""
        return iter([record for record, _ in tuple(self._held.values())])

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens) * self._block_tokens

    def _memory(self, kv: torch.Tensor) -> DeviceBlocks:
        with self._lock:
            if self._blocks is None:
                block_bytes = kv.nbytes // kv.shape[2] * self._block_tokens
                try:
                    self._blocks = DeviceBlocks(
                        kv.shape,
                        kv.dtype,
                        self._device,
                        blocks=self._budget_bytes // block_bytes,
                        block_tokens=self._block_tokens,
                    )
                except torch.OutOfMemoryError as error:
                    raise OSError(f"out of memory on {self._device}: {error}") from error
            return self._blocks
