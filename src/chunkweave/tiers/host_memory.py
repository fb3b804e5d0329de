"""Memory of the host that segments lie in: plain, or page-locked, which a GPU reads while it computes."""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import torch

from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.tiers.device_blocks import BlockSegment

logger = logging.getLogger(__name__)


class HostMemory(Protocol):
    """Gives out memory of the host."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape whose contents are whatever was there."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host lies in this memory as well as it can."""


class PlainMemory:
    """What the process has."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor."""
        return torch.empty(tuple(shape), dtype=dtype)

    def holds(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """All that the process has is as good."""
        return True


class PinnedMemory:
    """Page-locked memory up to a bound, plain memory beyond it. Safe to use from several threads.

    A buffer counts until the last tensor that lies in it is gone. PyTorch's own pool keeps what was given back for the
    next one of its size, and not before the copies from it are over; it rounds sizes up to powers of two, and so does
    the count. Rejected: a free list of our own, which would have to follow those copies a second time.
    """

    def __init__(
        self, max_bytes: int, allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None
    ) -> None:
        """A pool that page-locks at most `max_bytes` at a time, by `allocate` (None: PyTorch's)."""
        self.max_bytes = max_bytes
        self._allocate = allocate or _pinned
        self._used = 0
        self._mine: set[int] = set()
        """Where its buffers begin."""
        self._given_back: deque[int] = deque()
        """Filled by whoever drops the last tensor, in the middle of anything: so without the lock."""
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes that are page-locked and in use."""
        with self._lock:
            return self._settled()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A page-locked tensor if there is room for it, and if the system allows."""
        nbytes = prod(shape) * dtype.itemsize
        rounded = 1 << max(nbytes - 1, 0).bit_length()
        with self._lock:
            if self._settled() + rounded > self.max_bytes:
                return torch.empty(tuple(shape), dtype=dtype)
            self._used += rounded
        try:
            tensor = self._allocate(tuple(shape), dtype)
        except RuntimeError as error:
            self._given_back.append(rounded)
            self.max_bytes = self.used_bytes
            logger.warning("no more host memory can be page-locked; copies to the device will be slower: %s", error)
            return torch.empty(tuple(shape), dtype=dtype)
        storage = tensor.untyped_storage()
        self._mine.add(storage.data_ptr())
        weakref.finalize(storage, self._dropped, storage.data_ptr(), rounded).atexit = False
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in a page-locked buffer of this pool: one of another pool counts there."""
        return tensor.untyped_storage().data_ptr() in self._mine

    def _dropped(self, begin: int, rounded: int) -> None:
        self._mine.discard(begin)
        self._given_back.append(rounded)

    def _settled(self) -> int:
        while self._given_back:
            self._used -= self._given_back.popleft()
        return self._used


def host_memory_for(device: torch.device, max_pinned_bytes: int) -> HostMemory:
    """Page-locked where a GPU computes."""
    return PinnedMemory(max_pinned_bytes) if device.type == "cuda" else PlainMemory()


def moved_into(memory: HostMemory, segment: SegmentSource) -> SegmentSource:
    """`segment` in that memory, for the host tier: itself if it lies there. What another pool page-locked is copied, so
    that what stays here does not use up what that pool is for.
    """
    if isinstance(segment, BlockSegment):
        segment = SegmentKV(segment.whole())
    if not isinstance(segment, SegmentKV):
        return segment
    kv = segment.kv
    if kv.device.type == "cpu" and memory.holds(kv):
        return segment
    return SegmentKV(memory.empty(kv.shape, kv.dtype).copy_(kv))


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)
