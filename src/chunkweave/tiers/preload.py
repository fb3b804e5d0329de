"""Reads segments ahead of the layers that need them, in that order (Cache-Craft Algorithm 2)."""

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import product
from types import MappingProxyType

import numpy as np
import torch

from chunkweave.kv.segment import SegmentHeldUp, SegmentKV, SegmentLate, SegmentLost, SegmentSource
from chunkweave.tiers.device import HostMemory, PinnedMemory, Send, Sent, Staging, Streams

logger = logging.getLogger(__name__)

_TOGETHER_BYTES = 32 << 20
"""Layers of a segment up to this size are sent in one copy: a copy costs the host as much time as a launch."""

_READ = threading.Event()
_READ.set()


class LoadOrder(StrEnum):
    """The order in which the layers of several segments are read. `SYNC` is for comparison only."""

    LAYERS = "layer-wise"
    """Layer by layer over all segments: layer 0 computes while layer 1 is read."""
    SEGMENTS = "async"
    """Segment by segment: the first layer computes once the last segment is read.

    For reading ahead in the queue from a tier slower than computing: segments read by the end of the wait are whole.
    """
    SYNC = "sync"
    """All layers are read before the first one computes."""


class Gone:
    """Placeholder for a segment that left its store between planning and reading."""

    tokens = 0
    nbytes = 0
    keys_at = None
    late = held_up = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure = SegmentLost(name, "it was removed before it was read")

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Raises `SegmentLost`."""
        raise self.failure


class LoadingSegment:
    """A segment that is being read: a `SegmentSource` whose `layer` waits for the loader.

    Each layer is read into host memory, unless the whole segment is there; the loader sends layers to the device ahead.
    `unseen` layers are not read.
    """

    def __init__(
        self,
        name: str,
        source: SegmentSource,
        num_layers: int,
        loader: "LayerLoader",
        *,
        memory: HostMemory,
        unseen: frozenset[int] = frozenset(),
        read: bool = False,
    ) -> None:
        """With `read`, the source is in host memory, and no layer needs to be read."""
        self.name = name
        self.unseen = unseen
        self._slots = {layer: slot for slot, layer in enumerate(sorted(set(range(num_layers)) - unseen))}
        self.tokens, self.nbytes = source.tokens, source.nbytes * len(self._slots) // num_layers
        self.keys_at = source.keys_at
        self.failure: SegmentLost | None = None
        """Why it cannot be read; None while it is being read or was read."""
        self._source = source
        self._loader = loader
        self._wait_s = loader.wait_s
        self._memory = memory
        self._kv: torch.Tensor | None = source.kv if isinstance(source, SegmentKV) else None
        self._reading: tuple[int, float] | None = None
        self._ready = [_READ if read or layer in unseen else threading.Event() for layer in range(num_layers)]
        self._read = set(self._slots) if read else set()
        self._layers_in = 0  # for one caller; never decreases

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Wait for one layer that is not `unseen`; returns `[2, tokens, kv_heads, head_dim]`.

        The first call returns the copy on the device if it was sent ahead; others return the one on the host. Layers
        read before another layer failed are returned.

        Raises:
            SegmentLost: reading failed or was cancelled.
            SegmentLate: reading took longer than the loader's `wait_s`.
        """
        if not self._ready[index].wait(self._wait_s):
            raise SegmentLate(self.name, f"layer {index} was not read within {self._wait_s:.3g} s")
        if self.failure is not None and index not in self._read:
            raise self.failure
        sent = self._loader.receive(self, index)
        return self.on_host(index) if sent is None else sent

    def on_host(self, index: int) -> torch.Tensor:
        """One layer that was read, in host memory."""
        assert self._kv is not None, "a layer is ready only after its memory was allocated"
        return self._kv[self._slot(index)]

    def read(self, index: int) -> None:
        """Read one layer into memory, and let it be sent ahead. Only the loader calls this."""
        if self._ready[index].is_set():  # also if it has failed
            return
        self._reading = (index, time.monotonic())
        try:
            self._read_into_memory(index)
            self._loader.offer(self, index)
        except SegmentLost as lost:
            self.fail(lost)
            return
        except Exception as error:  # noqa: BLE001  (the loader's thread must not end: a request waits for this layer)
            self.give_up(index, error)
            return
        finally:
            self._reading = None
        if self.failure is not None:  # also if it could not be sent
            return
        self._read.add(index)
        self._ready[index].set()

    def has(self, index: int) -> bool:
        """Whether a layer was read."""
        return index in self._read

    def layers_from(self, index: int, count: int) -> torch.Tensor:
        """`count` layers in host memory from one on that was read, or fewer, `[layers, 2, tokens, kv_heads, head_dim]`.

        Layers that are not to be read, or were not read yet, end it.
        """
        assert self._kv is not None, "a layer is ready only after its memory was allocated"
        whole = isinstance(self._source, SegmentKV)
        stop = index + 1
        while stop < min(index + count, len(self._ready)) and stop not in self.unseen and (whole or self.has(stop)):
            stop += 1
        return self._kv[self._slot(index) : self._slot(index) + stop - index]

    def _read_into_memory(self, index: int) -> None:
        if isinstance(self._source, SegmentKV):
            return
        place = None if self._kv is None else self._kv[self._slot(index)]
        layer = self._source.layer(index, None if place is None else place.view(-1).view(torch.uint8))
        if place is None:
            self._kv = self._memory.empty((len(self._slots), *layer.shape), layer.dtype)
            place = self._kv[self._slot(index)]
        if layer.data_ptr() != place.data_ptr():
            _bytes_of(place)[:] = _bytes_of(layer.contiguous())

    def _slot(self, index: int) -> int:
        """A layer's index in host memory; for a segment that is wholly in memory, the layer's own index."""
        return index if isinstance(self._source, SegmentKV) else self._slots[index]

    def give_up(self, index: int, error: Exception) -> None:
        """Fail because of an error that says nothing about what is stored."""
        if not isinstance(error, torch.OutOfMemoryError):
            logger.error("layer %d of segment %s could not be read", index, self.name, exc_info=error)
        self.fail(SegmentLate(self.name, f"layer {index} could not be read: {error!r}"))

    def not_sent(self, index: int, error: Exception) -> None:
        """Fail from a layer on that could not be sent: copying it when it is used would fail, too."""
        self._read -= set(range(index, len(self._ready)))
        self.give_up(index, error)

    def fail(self, lost: SegmentLost) -> None:
        """End every wait for a layer with `lost`, and drop the copies on the device."""
        self.failure = lost
        self.drop_sent()
        for ready in self._ready:
            ready.set()

    def drop_sent(self) -> None:
        """Free its copies on the device; layers are then read from the host."""
        self._loader.drop_sent(self)

    @property
    def late(self) -> SegmentLate | None:
        """An error if the read of a layer already takes longer than `wait_s`, else None."""
        reading = self._reading
        if reading is None or self._wait_s is None or time.monotonic() - reading[1] <= self._wait_s:
            return None
        return SegmentLate(self.name, f"layer {reading[0]} was not read within {self._wait_s:.3g} s")

    @property
    def held_up(self) -> SegmentHeldUp | None:
        """An error if its own layers are not late but its loader is stuck at another segment's layer, else None."""
        if self.complete or self.failure is not None or not self._loader.late:
            return None
        return SegmentHeldUp(self.name, "a segment that is read before it is late")

    def wait_for(self, layers: int) -> None:
        """Wait until the first `layers` layers are read, or the segment has failed or is late."""
        for ready in self._ready[:layers]:
            if not ready.wait(self._wait_s):
                return

    @property
    def left(self) -> float:
        """The share of its layers that are not read yet, from 0 to 1."""
        return 1.0 - len(self._read) / len(self._slots) if self._slots else 0.0

    @property
    def layers_in(self) -> int:
        """Number of leading layers that were read."""
        if self.failure is not None:
            return 0
        while self._layers_in < len(self._ready) and self._ready[self._layers_in].is_set():
            self._layers_in += 1
        return self._layers_in

    @property
    def complete(self) -> bool:
        """Whether every layer that is not `unseen` was read."""
        return all(ready.is_set() for ready in self._ready) and self.failure is None  # in this order: see `fail`

    def whole(self) -> SegmentKV | None:
        """The segment in host memory if every layer was read, else None."""
        if isinstance(self._source, SegmentKV):
            return self._source
        if self._kv is None or self.unseen or not self.complete:
            return None
        return SegmentKV(self._kv, self.keys_at)


def _bytes_of(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """A tensor's memory as an array. PyTorch's copy would start threads that compete with computing for the cores."""
    return tensor.view(-1).view(torch.uint8).numpy()


class _Copied:
    """Consecutive layers of a segment, sent to the device in one copy."""

    def __init__(self, first: int, count: int, nbytes: int, sent: Sent) -> None:
        self.layers = range(first, first + count)
        self.nbytes = nbytes
        self._left = count
        self._sent = sent
        self._here: torch.Tensor | None = None

    def receive(self, layer: int) -> torch.Tensor:
        """One layer; work that this thread issues from now on runs after the copy."""
        if self._here is None:
            self._here = self._sent.receive()
        return self._here[layer - self.layers.start]

    def leave(self) -> int:
        """One layer less is wanted; returns the bytes of the whole copy once none is."""
        self._left -= 1
        return 0 if self._left else self.nbytes


def _is_sent_at_once(source: SegmentSource, memory: HostMemory) -> bool:
    """Whether a copy to the device returns at once, or is none: then no other thread is needed."""
    return isinstance(source, SegmentKV) and (not isinstance(memory, PinnedMemory) or source.kv.is_pinned())


class LayerLoader:
    """Reads the layers of one request's segments in a separate thread. The request owns it and must close it.

    Layers are sent to the device in the order of their use, as far as the budget allows: after each read, and each time
    that a layer is used. What was not sent is copied by the request when it uses it.

    `depth` limits how many layers are read before the request computes (prefetching while it waits); `release` lifts
    the limit. Reading releases the interpreter's lock, so one thread keeps a disk busy.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, SegmentSource]],
        num_layers: int,
        *,
        order: LoadOrder = LoadOrder.LAYERS,
        depth: int | None = None,
        wait_s: float | None = None,
        send: Send | None = None,
        staging: Staging | None = None,
        held_back: Collection[str] = (),
        memory: HostMemory | None = None,
        unseen: Mapping[str, frozenset[int]] = MappingProxyType({}),
    ) -> None:
        """Start reading `(name, source)` pairs; a layer that takes longer than `wait_s` counts as lost.

        `unseen` lists by name the layers that are not read, since no token attends to them. Layers are read into
        `memory` (None: ordinary memory) and sent ahead with `send` (None: the CPU computes) within the budget `staging`
        (None: no limit), except those of segments that are `held_back`.
        """
        self._send = Streams().send if send is None else send
        self._staging = Staging() if staging is None else staging
        self._held_back = frozenset(held_back)
        self._to_send: deque[tuple[LoadingSegment, int]] = deque()
        self._sent: dict[tuple[LoadingSegment, int], _Copied] = {}
        self._used: set[tuple[LoadingSegment, int]] = set()
        self._sending = threading.RLock()
        self.wait_s = wait_s
        memory = HostMemory() if memory is None else memory
        in_memory = depth is None and all(_is_sent_at_once(source, memory) for _, source in sources)
        self.segments = [
            LoadingSegment(
                name, source, num_layers, self, memory=memory, unseen=unseen.get(name, frozenset()), read=in_memory
            )
            for name, source in sources
        ]
        self._num_layers = num_layers
        self._order = order
        self._limit = num_layers if depth is None else depth
        self._moved = threading.Condition()
        self._cancelled = False
        self._thread = threading.Thread(target=self._read_all, name="chunkweave-loader", daemon=True)
        if in_memory:  # a thread that only sends would compete with the one that computes
            self.hold_back(self._held_back)
        elif self.segments:
            self._thread.start()

    def release(self, first_layers: int = 0) -> None:
        """Lift the limit, and wait until the first `first_layers` layers are read (with `SYNC`: all layers)."""
        with self._moved:
            self._limit = self._num_layers
            self._moved.notify_all()
        wanted = self._num_layers if self._order is LoadOrder.SYNC else first_layers
        for segment in self.segments:
            segment.wait_for(wanted)

    def offer(self, segment: LoadingSegment, layer: int) -> None:
        """Let a layer in host memory be sent ahead."""
        if segment.name not in self._held_back:
            self._to_send.append((segment, layer))
            self._send_ahead()

    def hold_back(self, names: Collection[str]) -> None:
        """Send these segments no more, and the others from now on."""
        with self._sending:
            self._held_back = frozenset(names)
            free = [segment for segment in self.segments if segment.name not in self._held_back]
            by_use = ((segment, layer) for layer, segment in product(range(self._num_layers), free))
            self._to_send = deque(key for key in by_use if key[0].has(key[1]))
        self._send_ahead()

    def receive(self, segment: LoadingSegment, layer: int) -> torch.Tensor | None:
        """A layer that was sent ahead, once; None if it was not. Send others in its place."""
        with self._sending:
            self._used.add((segment, layer))
            copied = self._sent.pop((segment, layer), None)
            kv = None if copied is None else copied.receive(layer)
            if copied is not None:
                self._staging.give_back(copied.leave())
                del copied  # before its bytes are taken again
        self._send_ahead()
        return kv

    def drop_sent(self, segment: LoadingSegment) -> None:
        """Free the copies of a segment on the device, and send no more of it."""
        with self._sending:
            keys_of_segment = [(segment, layer) for layer in range(self._num_layers)]
            self._used.update(keys_of_segment)
            for key in keys_of_segment:
                copied = self._sent.pop(key, None)
                if copied is not None:
                    self._staging.give_back(copied.leave())

    def _send_ahead(self) -> None:
        if not self._to_send:
            return
        with self._sending:
            fits = True
            while self._to_send and fits:
                layer = self._to_send[0][1]
                batch: list[tuple[LoadingSegment, torch.Tensor]] = []
                while fits and self._to_send and self._to_send[0][1] == layer:
                    segment, _ = self._to_send[0]
                    if (segment, layer) not in self._used and (segment, layer) not in self._sent:
                        kv = self._next_copy(segment, layer)
                        if kv is None:
                            fits = False
                            break
                        batch.append((segment, kv))
                    self._to_send.popleft()
                self._send_batch(layer, batch)

    def _send_batch(self, layer: int, batch: Sequence[tuple[LoadingSegment, torch.Tensor]]) -> None:
        """Send what several segments have from one layer on; their bytes are taken."""
        if not batch:
            return
        try:
            copies = self._send([kv for _, kv in batch])
        except Exception as error:  # noqa: BLE001  (the request may be using another layer)
            for segment, kv in batch:
                self._staging.give_back(kv.nbytes)
                segment.not_sent(layer, error)
            return
        for (segment, kv), sent in zip(batch, copies, strict=True):
            copied = _Copied(layer, len(kv), kv.nbytes, sent)
            self._sent.update(((segment, copied_layer), copied) for copied_layer in copied.layers)

    def _next_copy(self, segment: LoadingSegment, layer: int) -> torch.Tensor | None:
        """The layers to send in one copy, from one that was read; their bytes are taken. None if none fits.

        At most as many as there are before: computing waits for the first, and later ones are sent meanwhile.
        """
        kv = segment.layers_from(layer, max(1, layer))
        kv = kv[: max(1, _TOGETHER_BYTES // kv[0].nbytes)]
        taken = {(segment, layer + place) for place in range(len(kv))} & (self._used | self._sent.keys())
        kv = kv[: min((taken_layer - layer for _, taken_layer in taken), default=len(kv))]
        while not self._staging.take(kv.nbytes):
            if len(kv) == 1:
                return None
            kv = kv[: len(kv) // 2]
        return kv

    @property
    def late(self) -> bool:
        """Whether the loader is stuck at a late layer."""
        return any(segment.late for segment in self.segments)

    def close(self) -> None:
        """Stop reading; pending waits for a layer end with `SegmentLost`.

        Joins the thread, unless it is stuck at a late layer; that read's result is discarded.
        """
        with self._moved:
            self._cancelled = True
            self._moved.notify_all()
        while self._thread.is_alive() and not self.late:
            self._thread.join(self.wait_s)
        self._cancel()
        for segment in self.segments:
            self.drop_sent(segment)

    def _read_all(self) -> None:
        for segment, layer in self._in_order():
            with self._moved:
                while layer >= self._limit and not self._cancelled:
                    self._moved.wait()
                if self._cancelled:
                    break
            segment.read(layer)
        if self._cancelled:
            self._cancel()

    def _cancel(self) -> None:
        for segment in self.segments:
            if segment.failure is None and not segment.complete:
                segment.fail(SegmentLost(segment.name, "loading was cancelled"))

    def _in_order(self) -> Iterator[tuple[LoadingSegment, int]]:
        if self._order is LoadOrder.LAYERS:
            return ((segment, layer) for layer, segment in product(range(self._num_layers), self.segments))
        return product(self.segments, range(self._num_layers))
