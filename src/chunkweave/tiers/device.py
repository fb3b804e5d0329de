"""Device memory, page-locked host memory, and copies between the two.

The thread that has read the data sends the copy on a separate stream; the computing thread receives it. Later kernels
then wait for the copy on the device; the host does not wait.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf, prod

import torch

from chunkweave.kv.request_cache import segment_memory
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.host import HostTier

logger = logging.getLogger(__name__)

_BLOCK_TOKENS = 32
"""A chunk of 512 tokens wastes nothing, a short one at most 31 tokens."""

Event = torch.cuda.Event | None
"""Marks the work issued to a stream so far; None on a device without streams."""


class Streams:
    """The computing and the copying stream of a device. This base class is for the CPU, which has no streams."""

    device = torch.device("cpu")
    """The target of copies."""

    def copying(self) -> AbstractContextManager[object]:
        """Context: this thread issues work to the copying stream."""
        return nullcontext()

    def computing(self) -> AbstractContextManager[object]:
        """Context: this thread issues work to the computing stream."""
        return nullcontext()

    def computes_here(self) -> None:
        """Make this thread's current stream the computing stream."""

    def mark(self) -> Event:
        """An event after all work that this thread has issued to its current stream."""
        return None

    def wait_for(self, event: Event) -> None:
        """Let later work on this thread's current stream run after `event`; the host does not wait."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Protect a tensor of the other stream: its memory is not reused before the current stream is done with it."""

    def send(self, tensors: Sequence[torch.Tensor]) -> "list[Sent]":
        """Start copies to the device, which are used together; none of tensors that are there. Thread-safe.

        From page-locked memory this returns at once, and PyTorch does not reuse that memory before the copy has ended;
        from other memory it may take as long as the copy.
        """
        with self.copying():
            copies = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
            mark = self.mark()
        return [Sent(copy, mark, self) for copy in copies]


class CudaStreams(Streams):
    """The current (computing) stream of a CUDA device, and a second stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index  # looking up a stream by a device takes longer
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computing: torch.cuda.Stream | None = None

    def computing(self) -> AbstractContextManager[object]:
        """The stream set by `computes_here`; before the first call this thread's own."""
        if self._computing is None:
            return nullcontext()
        context: AbstractContextManager[object] = torch.cuda.stream(self._computing)
        return context

    def computes_here(self) -> None:
        """Called in each step, because vLLM switches to its own stream late."""
        self._computing = torch.cuda.current_stream(self._index)

    def copying(self) -> AbstractContextManager[object]:
        """The second stream."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._side)
        return context

    def mark(self) -> Event:
        """An event recorded on the current stream."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits does not spin
        event.record(torch.cuda.current_stream(self._index))
        return event

    def wait_for(self, event: Event) -> None:
        """Issue the wait to the device."""
        if event is not None:
            torch.cuda.current_stream(self._index).wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """Record the second stream's use with the caching allocator."""
        tensor.record_stream(torch.cuda.current_stream(self._index))


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A tensor that is being copied to a device. Call `receive` once, where it is used."""

    _tensor: torch.Tensor
    _event: Event
    _streams: Streams

    def receive(self) -> torch.Tensor:
        """The tensor on the device; work that this thread issues from now on runs after the copy."""
        self._streams.wait_for(self._event)
        self._streams.keep(self._tensor)
        return self._tensor


def streams_of(device: torch.device) -> Streams:
    """The streams of a CUDA device, or of the CPU, which needs no copies."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


Send = Callable[[Sequence[torch.Tensor]], list[Sent]]
"""`Streams.send`."""


class Staging:
    """Budget of device memory for copies that are sent before their use, shared by all requests. Thread-safe."""

    def __init__(self, max_bytes: float = inf) -> None:
        self._max_bytes, self._used_bytes = max_bytes, 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken now."""
        return self._used_bytes

    def take(self, nbytes: int) -> bool:
        """Take bytes if they fit; returns whether they do."""
        with self._lock:
            fits = self._used_bytes + nbytes <= self._max_bytes
            self._used_bytes += nbytes * fits
            return fits

    def give_back(self, nbytes: int) -> None:
        """Return bytes that were taken."""
        with self._lock:
            self._used_bytes -= nbytes


class HostMemory:
    """Ordinary (pageable) host memory."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor."""
        return segment_memory(shape, dtype)

    def holds(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """Whether a host tensor is in this kind of memory: always true."""
        return True


class PinnedMemory(HostMemory):
    """Page-locked memory up to a bound, so that a GPU copies while it computes; plain memory beyond it. Thread-safe.

    A buffer counts until its last tensor is gone. PyTorch's pool reuses freed buffers of the same size once the copies
    from them have ended; it rounds sizes up to powers of two, and so does the count. Rejected: a free list of our own,
    which would have to track those copies again.
    """

    def __init__(
        self, max_bytes: int, allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None
    ) -> None:
        """A pool that page-locks at most `max_bytes` at a time, by `allocate` (None: PyTorch's)."""
        self.max_bytes = max_bytes
        self._allocate = allocate or _pinned
        self._used = 0
        self._mine: set[int] = set()
        """Start addresses of its buffers."""
        self._freed: deque[int] = deque()
        """Filled without the lock, since the last tensor may be dropped by any thread, even one that holds the lock."""
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes that are page-locked and in use."""
        with self._lock:
            return self._settled()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A page-locked tensor if the bound and the system allow it, else a plain one."""
        nbytes = prod(shape) * dtype.itemsize
        rounded = 1 << max(nbytes - 1, 0).bit_length()
        with self._lock:
            if self._settled() + rounded > self.max_bytes:
                return super().empty(shape, dtype)
            self._used += rounded
        try:
            tensor = self._allocate(tuple(shape), dtype)
        except RuntimeError as error:
            self._freed.append(rounded)
            self.max_bytes = self.used_bytes
            logger.warning("no more host memory can be page-locked; copies to the device will be slower: %s", error)
            return super().empty(shape, dtype)
        storage = tensor.untyped_storage()
        self._mine.add(storage.data_ptr())
        weakref.finalize(storage, self._dropped, storage.data_ptr(), rounded).atexit = False
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is in a page-locked buffer of this pool; other pools' buffers do not count."""
        return tensor.untyped_storage().data_ptr() in self._mine

    def _dropped(self, begin: int, rounded: int) -> None:
        self._mine.discard(begin)
        self._freed.append(rounded)

    def _settled(self) -> int:
        while self._freed:
            self._used -= self._freed.popleft()
        return self._used


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def host_memory_for(device: torch.device, max_pinned_bytes: int) -> HostMemory:
    """Page-locked memory for a GPU, ordinary memory for the CPU."""
    return PinnedMemory(max_pinned_bytes) if device.type == "cuda" else HostMemory()


def moved_into(memory: HostMemory, segment: SegmentSource) -> SegmentSource:
    """`segment` in `memory`, for the host tier: unchanged if it is there already.

    Data in another pool's page-locked memory is copied, so that stored segments do not use up that pool.
    """
    if isinstance(segment, BlockSegment):
        segment = SegmentKV(segment.whole(), segment.keys_at)
    if not isinstance(segment, SegmentKV):
        return segment
    kv = segment.kv
    if kv.device.type == "cpu" and memory.holds(kv):
        return segment
    return SegmentKV(memory.empty(kv.shape, kv.dtype).copy_(kv), segment.keys_at)


class BlockSegment:
    """A segment whose tokens are in blocks of a `DeviceTier`; a `SegmentSource`. Immutable.

    Its blocks are freed when the object is garbage-collected, not when its tier deletes it: a request may still read
    them. A thread other than the computing one must have finished its reads before it drops the segment.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        blocks: Sequence[int],
        tokens: int,
        keys_at: int | None = None,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """`written` makes the calling thread's current stream wait until the blocks are written."""
        self._arena = arena
        self._written = written
        self._blocks = tuple(blocks)
        self._rows: torch.Tensor | None = None
        self.tokens = tokens
        self.keys_at = keys_at
        self.device = arena.device
        layers, two, _, _, kv_heads, head_dim = arena.shape
        self.nbytes = layers * two * tokens * kv_heads * head_dim * arena.dtype.itemsize
        self.held_bytes = self.nbytes // tokens * arena.shape[3] * len(self._blocks)
        """Bytes of its blocks, including the unused rest of the last one."""

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]`: a view if the blocks are contiguous."""
        self._written()
        layer = self._arena[index]
        first = self._blocks[0]
        if all(after == before + 1 for before, after in pairwise(self._blocks)):
            return layer[:, first : first + len(self._blocks)].flatten(1, 2)[:, : self.tokens]
        if self._rows is None:
            self._rows = torch.tensor(self._blocks, device=self.device)
        return layer[:, self._rows].flatten(1, 2)[:, : self.tokens]

    def whole(self) -> torch.Tensor:
        """A copy of all layers, `[layers, 2, tokens, kv_heads, head_dim]`."""
        return torch.stack([self.layer(index) for index in range(len(self._arena))])


class DeviceTier(HostTier[SegmentSource]):
    """Stores segments in blocks of one allocation of device memory; implements `chunkweave.store.tier.Tier`.

    Blocks avoid fragmentation by segments of different lengths. The memory is allocated with the first segment, which
    determines the bytes per token. `put` copies a payload in, on the computing stream; running out of memory is an
    `OSError`, like a full disk. The tier below copies an evicted segment out (`moved_into`), once: later evictions of
    the same segment find it there (RAGCache §5.1, swap-out-only-once). Thread-safe.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        budget_bytes: int,
        block_tokens: int = _BLOCK_TOKENS,
        streams: Streams | None = None,
    ) -> None:
        """A tier on `device` that allocates at most `budget_bytes`; its store enforces the same budget.

        `streams` are needed if threads other than the computing one put or read on their own streams.
        """
        super().__init__()
        self._streams = Streams() if streams is None else streams
        self.device = torch.device(device)
        self._budget_bytes = budget_bytes
        self._block_tokens = block_tokens
        self._arena: torch.Tensor | None = None
        """`[layers, 2, blocks, block_tokens, kv_heads, head_dim]`"""
        self._free: deque[int] = deque()
        self._lock = threading.Lock()

    @torch.inference_mode()
    def put(self, record: SegmentRecord, payload: SegmentSource) -> None:
        """Copy `payload` into blocks, replacing one with the same id.

        Raises:
            OSError: the device is out of memory, or the blocks of deleted segments are still in use.
        """
        kv = payload.whole() if isinstance(payload, BlockSegment) else getattr(payload, "kv", None)
        if kv is None:
            raise TypeError("only a segment that is wholly in memory can be stored on a device")
        self.delete(record.id)
        segment = self._in_blocks(kv, payload.keys_at)
        self._held[record.id] = (replace(record, nbytes=segment.held_bytes), segment)

    def size_of(self, record: SegmentRecord, payload: SegmentSource) -> int:  # noqa: ARG002  (the protocol has it)
        """Bytes of the blocks that a payload would take."""
        return payload.nbytes // payload.tokens * self._blocks_for(payload.tokens) * self._block_tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _in_blocks(self, kv: torch.Tensor, keys_at: int | None) -> BlockSegment:
        """Copy a segment `[layers, 2, tokens, kv_heads, head_dim]` into free blocks.

        The copy is issued to the computing stream, so it runs after earlier reads of the blocks' former contents.
        """
        layers, two, tokens, kv_heads, head_dim = kv.shape
        with self._lock:
            if self._arena is None:
                self._arena = self._take_memory(kv)
            arena = self._arena
            wanted = self._blocks_for(tokens)
            if (kv.dtype, layers, two, kv_heads, head_dim) != (arena.dtype, *arena.shape[:2], *arena.shape[4:]):
                raise ValueError(f"not a segment of this model: {tuple(kv.shape)}, {kv.dtype}")
            if wanted > len(self._free):
                raise OSError(f"no free blocks on {self.device} for {tokens} tokens")
            blocks = sorted(self._free.popleft() for _ in range(wanted))
        mark = self._streams.mark()
        with self._streams.computing():
            self._streams.wait_for(mark)
            if kv.device.type == self.device.type:
                self._streams.keep(kv)
            kv = kv.to(self.device, non_blocking=True)  # one copy: a block's rows are strided on the host
            for place, block in enumerate(blocks):
                rows = kv[:, :, place * self._block_tokens : (place + 1) * self._block_tokens]
                arena[:, :, block, : rows.shape[2]].copy_(rows, non_blocking=True)
            written = partial(self._streams.wait_for, self._streams.mark())
        segment = BlockSegment(arena, blocks, tokens, keys_at, written)
        # Without the lock: it may run at any time, even in a thread that holds the lock.
        weakref.finalize(segment, self._free.extend, blocks).atexit = False
        return segment

    def _take_memory(self, kv: torch.Tensor) -> torch.Tensor:
        layers, two, tokens, kv_heads, head_dim = kv.shape
        blocks = self._budget_bytes // (kv.nbytes // tokens * self._block_tokens)
        shape = (layers, two, blocks, self._block_tokens, kv_heads, head_dim)
        try:
            arena = torch.empty(shape, dtype=kv.dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise OSError(f"out of memory on {self.device}: {error}") from error
        self._free.extend(range(blocks))
        return arena
