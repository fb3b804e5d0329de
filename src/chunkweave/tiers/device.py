"""Segments in the memory of an accelerator."""

from collections.abc import Iterator

import torch

from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.host import HostTier
from chunkweave.types import SegmentId


class DeviceTier:
    """Keeps segments as tensors on one torch device; implements `chunkweave.store.tier.Tier`.

    A payload that is elsewhere is copied in by `put`, on the caller's current stream; running out of device
    memory is an `OSError`, as a full disk is. What is evicted here is copied out by whoever takes it
    (`on_host`), once: later evictions of the same segment find it below (RAGCache §5.1, swap-out-only-once).
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._tier: HostTier[SegmentSource] = HostTier(self._move_here)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._device

    def put(self, record: SegmentRecord, payload: SegmentSource) -> None:
        """Keep `payload` on the device, replacing one of the same id.

        Raises:
            OSError: the device is out of memory.
        """
        self._tier.put(record, payload)

    def get(self, segment: SegmentId) -> SegmentSource | None:
        """The segment on the device, or None if it is not here."""
        return self._tier.get(segment)

    def delete(self, segment: SegmentId) -> None:
        """Forget it; unknown ids are ignored."""
        self._tier.delete(segment)

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes of device memory held for this id, 0 if it is not here."""
        return self._tier.nbytes(segment)

    def size_of(self, record: SegmentRecord, payload: SegmentSource) -> int:  # noqa: ARG002  (the protocol has it)
        """Bytes of the tensors: the type does not change with the device."""
        return payload.nbytes

    def records(self) -> Iterator[SegmentRecord]:
        """Everything held, in no order."""
        return self._tier.records()

    def _move_here(self, segment: SegmentSource) -> SegmentSource:
        if not isinstance(segment, SegmentKV):
            raise TypeError("only a segment that is whole in memory can go to a device")
        try:
            kv = segment.kv.to(self._device)
        except torch.OutOfMemoryError as error:
            raise OSError(f"out of memory on {self._device}: {error}") from error
        return segment if kv is segment.kv else SegmentKV(kv)


def on_host(segment: SegmentSource) -> SegmentSource:
    """`segment` in host memory: itself unless it is on another device, else a copy."""
    if not isinstance(segment, SegmentKV) or segment.kv.device.type == "cpu":
        return segment
    return SegmentKV(segment.kv.cpu())
