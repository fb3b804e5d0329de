"""Memory of the device that computes, page-locked memory of the host, and the copies between the two.

A copy is sent on a stream of its own, by whichever thread has read the data, and received where it is needed: what is
computed from then on waits for it on the device, and the host waits for nothing.
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
from math import prod

import torch

from chunkweave.kv.request_cache import segment_memory
from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.host import HostTier

logger = logging.getLogger(__name__)

_BLOCK_TOKENS = 32
"""Of a chunk of 512 tokens nothing is wasted, of a short one at most 31 tokens."""

Event = torch.cuda.Event | None
"""The end of what was issued to a stream so far; None on a device without streams."""


class Streams:
    """The streams of a device, one that computes and one that copies to it. Here of the CPU, which has none: what is
    issued is done.
    """

    device = torch.device("cpu")
    """Where copies go."""

    def copying(self) -> AbstractContextManager[object]:
        """What this thread issues within goes to the copying stream."""
        return nullcontext()

    def computing(self) -> AbstractContextManager[object]:
        """What this thread issues within goes to the computing stream."""
        return nullcontext()

    def computes_here(self) -> None:
        """This thread's current stream is the computing one."""

    def mark(self) -> Event:
        """The end of what this thread has issued to its current stream so far."""
        return None

    def wait_for(self, event: Event) -> None:
        """What this thread issues to its current stream from now on runs after `event`; the host does not wait."""

    def keep(self, tensor: torch.Tensor) -> None:
        """The current stream uses a tensor of the other one: its memory is not reused before that is over."""

    def send(self, tensor: torch.Tensor) -> "Sent":
        """Begin to copy to the device; nothing if it is there already. Safe to use from several threads.

        From page-locked memory this returns at once, and PyTorch does not reuse that memory before the copy is over;
        from other memory it may take as long as the copy.
        """
        with self.copying():
            return Sent(tensor.to(self.device, non_blocking=True), self.mark(), self)


class CudaStreams(Streams):
    """The current stream of a CUDA device, which computes, and one of our own beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computing: torch.cuda.Stream | None = None

    def computing(self) -> AbstractContextManager[object]:
        """The stream that was last said to compute; before that this thread's own."""
        here = nullcontext() if self._computing is None else torch.cuda.stream(self._computing)
        context: AbstractContextManager[object] = here
        return context

    def computes_here(self) -> None:
        """Called in each step: vLLM takes a stream of its own late."""
        self._computing = torch.cuda.current_stream(self.device)

    def copying(self) -> AbstractContextManager[object]:
        """Our own stream."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._side)
        return context

    def mark(self) -> Event:
        """An event recorded on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_for(self, event: Event) -> None:
        """The wait is issued to the device."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """The caching allocator learns of the second stream."""
        tensor.record_stream(torch.cuda.current_stream(self.device))


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A tensor on its way to a device. `receive` it where it is used, once."""

    _tensor: torch.Tensor
    _event: Event
    _streams: Streams

    def receive(self) -> torch.Tensor:
        """The tensor on the device; what this thread issues from now on finds it complete."""
        self._streams.wait_for(self._event)
        self._streams.keep(self._tensor)
        return self._tensor


def streams_of(device: torch.device) -> Streams:
    """Of a CUDA device, or of the CPU, where there is nothing to copy."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


Send = Callable[[torch.Tensor], Sent]
"""`Streams.send`."""


class HostMemory:
    """Memory of the host as the process has it."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor of that shape whose contents are whatever was there."""
        return segment_memory(shape, dtype)

    def holds(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """Whether a tensor of the host lies in this kind of memory: all do."""
        return True


class PinnedMemory(HostMemory):
    """Page-locked memory, which a GPU reads while it computes, up to a bound; plain memory beyond it. Thread-safe.

    A buffer counts until the last tensor that lies in it is gone. PyTorch's own pool keeps freed buffers for the next
    one of their size, and not before the copies from them are over; it rounds sizes up to powers of two, and so does
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
        self._freed: deque[int] = deque()
        """Filled by the thread that drops the last tensor, in the middle of anything: so without the lock."""
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
        """Whether it lies in a page-locked buffer of this pool: one of another pool counts there."""
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
    """Page-locked where a GPU computes."""
    return PinnedMemory(max_pinned_bytes) if device.type == "cuda" else HostMemory()


def moved_into(memory: HostMemory, segment: SegmentSource) -> SegmentSource:
    """`segment` in that memory, for the host tier: itself if it lies there. What another pool page-locked is copied, so
    that what stays here does not use up what that pool is for.
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
    """A segment whose tokens lie in blocks of a `DeviceTier`; a `SegmentSource`. Never changes.

    Its blocks are free again when it is gone, not when its tier forgets it: a request may still read them. A thread
    that does not compute has read what it asked for before it drops the segment.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        blocks: Sequence[int],
        tokens: int,
        keys_at: int | None = None,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """`written` lets the calling thread's current stream wait until the blocks are."""
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
        """Bytes of its blocks, the unused rest of the last one included."""

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]`: a view if the blocks are one run."""
        self._written()
        layer = self._arena[index]
        first = self._blocks[0]
        if all(after == before + 1 for before, after in pairwise(self._blocks)):
            return layer[:, first : first + len(self._blocks)].flatten(1, 2)[:, : self.tokens]
        if self._rows is None:
            self._rows = torch.tensor(self._blocks, device=self.device)
        return layer[:, self._rows].flatten(1, 2)[:, : self.tokens]

    def whole(self) -> torch.Tensor:
        """All layers, `[layers, 2, tokens, kv_heads, head_dim]`, copied out of the blocks."""
        return torch.stack([self.layer(index) for index in range(len(self._arena))])


class DeviceTier(HostTier[SegmentSource]):
    """Keeps segments in blocks of one piece of a device's memory; implements `chunkweave.store.tier.Tier`.

    Blocks of tokens let segments of any length come and go without holes. The memory is taken with the first segment,
    which shows what a token takes. A payload is copied in by `put`, on the stream that computes; running out of memory
    is an `OSError`, as a full disk is. What is evicted is copied out by the tier below (`moved_into`), once:
    later evictions of the same segment find it there (RAGCache §5.1, swap-out-only-once). Safe to use from several
    threads.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        budget_bytes: int,
        block_tokens: int = _BLOCK_TOKENS,
        streams: Streams | None = None,
    ) -> None:
        """A tier on `device` that takes at most `budget_bytes`, which its store keeps to as well.

        `streams` are needed where other threads than the computing one put or read on streams of their own.
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
        """Copy `payload` into blocks, replacing one of the same id.

        Raises:
            OSError: the device is out of memory, or the blocks of what was forgotten are still being read.
        """
        kv = payload.whole() if isinstance(payload, BlockSegment) else getattr(payload, "kv", None)
        if kv is None:
            raise TypeError("only a segment that is whole in memory can go to a device")
        self.delete(record.id)
        segment = self._in_blocks(kv, payload.keys_at)
        self._held[record.id] = (replace(record, nbytes=segment.held_bytes), segment)

    def size_of(self, record: SegmentRecord, payload: SegmentSource) -> int:  # noqa: ARG002  (the protocol has it)
        """Bytes of the blocks that it would take."""
        return payload.nbytes // payload.tokens * self._blocks_for(payload.tokens) * self._block_tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _in_blocks(self, kv: torch.Tensor, keys_at: int | None) -> BlockSegment:
        """Copy a segment `[layers, 2, tokens, kv_heads, head_dim]` into free blocks.

        The copy is issued to the stream that computes: what read a block's former contents comes before it there.
        """
        layers, two, tokens, kv_heads, head_dim = kv.shape
        with self._lock:
            if self._arena is None:
                self._arena = self._take_memory(kv)
            arena, wanted = self._arena, self._blocks_for(tokens)
            if (kv.dtype, layers, two, kv_heads, head_dim) != (arena.dtype, *arena.shape[:2], *arena.shape[4:]):
                raise ValueError(f"not a segment of this model: {tuple(kv.shape)}, {kv.dtype}")
            if wanted > len(self._free):
                raise OSError(f"no free blocks on {self.device} for {tokens} tokens")
            blocks = sorted(self._free.popleft() for _ in range(wanted))
        given = self._streams.mark()
        with self._streams.computing():
            self._streams.wait_for(given)
            if kv.device.type == self.device.type:
                self._streams.keep(kv)
            kv = kv.to(self.device, non_blocking=True)  # in one piece: a block's rows are strided on the host
            for place, block in enumerate(blocks):
                rows = kv[:, :, place * self._block_tokens : (place + 1) * self._block_tokens]
                arena[:, :, block, : rows.shape[2]].copy_(rows, non_blocking=True)
            written = partial(self._streams.wait_for, self._streams.mark())
        segment = BlockSegment(arena, blocks, tokens, keys_at, written)
        # Without the lock: it may run in the middle of anything, also in a thread that holds it.
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
