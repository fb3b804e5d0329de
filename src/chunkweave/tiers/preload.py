"""Reads segments ahead of the layers that need them, in the order of need (Cache-Craft Algorithm 2)."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import product
from types import MappingProxyType

import numpy as np
import torch

from chunkweave.kv.segment import SegmentHeldUp, SegmentKV, SegmentLate, SegmentLost, SegmentSource
from chunkweave.tiers.device import HostMemory, Send, Sent, Streams

logger = logging.getLogger(__name__)


class LoadOrder(StrEnum):
    """In which order layers of several segments are read. `SYNC` is for comparison only."""

    LAYERS = "layer-wise"
    """Layer by layer over all segments: layer 0 computes while layer 1 is read."""
    SEGMENTS = "async"
    """Segment by segment: the first layer computes when the last segment is in.

    For a queue that reads ahead from a tier slower than computing: what came in by its end, came in whole.
    """
    SYNC = "sync"
    """Everything is read before anything computes."""


class Gone:
    """Stands in for a segment that left its store between the plan and the reading of it."""

    tokens = 0
    nbytes = 0
    keys_at = None
    late = held_up = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure = SegmentLost(name, "it was gone before it was read")

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Never there: raises `SegmentLost`."""
        raise self.failure


class LoadingSegment:
    """One segment on its way to the device that computes: a `SegmentSource` whose `layer` waits for the loader.

    Each layer is read into memory of the host, unless the whole segment lies there, and sent to the device from there.
    Layers that are `unseen` are not read.
    """

    def __init__(
        self,
        name: str,
        source: SegmentSource,
        num_layers: int,
        wait_s: float | None,
        *,
        send: Send,
        memory: HostMemory,
        unseen: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.unseen = unseen
        self._slots = {layer: slot for slot, layer in enumerate(sorted(set(range(num_layers)) - unseen))}
        self.tokens, self.nbytes = source.tokens, source.nbytes * len(self._slots) // num_layers
        self.keys_at = source.keys_at
        self.failure: SegmentLost | None = None
        """Why it will not come in; None as long as it may, or has."""
        self._source = source
        self._wait_s = wait_s
        self._send = send
        self._memory = memory
        self._kv: torch.Tensor | None = source.kv if isinstance(source, SegmentKV) else None
        self._sent: dict[int, Sent] = {}
        self._reading: tuple[int, float] | None = None
        self.loader: LayerLoader | None = None
        self._ready = [threading.Event() for _ in range(num_layers)]
        for layer in unseen:
            self._ready[layer].set()
        self._read: set[int] = set()
        self._layers_in = 0  # for one caller: none of these can leave again

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """One layer that is not `unseen`, `[2, tokens, kv_heads, head_dim]`, as soon as it is read.

        The first time it is what was sent to the device; after that it is what lies on the host.

        What was read before a later layer failed is there.

        Raises:
            SegmentLost: reading failed or was cancelled.
            SegmentLate: it took longer than the loader's `wait_s`.
        """
        if not self._ready[index].wait(self._wait_s):
            raise SegmentLate(self.name, f"layer {index} did not come within {self._wait_s:.3g} s")
        if self.failure is not None and index not in self._read:
            raise self.failure
        assert self._kv is not None, "a layer is ready only once there is memory for it"
        sent = self._sent.pop(index, None)
        return self._kv[self._slot(index)] if sent is None else sent.receive()

    def read(self, index: int) -> None:
        """Read one layer into memory and send it on, once; called by the loader only."""
        if self.failure is not None or self._ready[index].is_set():
            return
        self._reading = (index, time.monotonic())
        try:
            self._sent[index] = self._send(self._read_into_memory(index))
        except SegmentLost as lost:
            self.fail(lost)
            return
        except Exception as error:  # the boundary of the loader's thread: a request waits for this layer
            if not isinstance(error, torch.OutOfMemoryError):
                logger.exception("layer %d of segment %s could not be brought", index, self.name)
            self.fail(SegmentLate(self.name, f"layer {index} could not be brought: {error!r}"))
            return
        finally:
            self._reading = None
        self._read.add(index)
        self._ready[index].set()

    def _read_into_memory(self, index: int) -> torch.Tensor:
        if isinstance(self._source, SegmentKV):
            return self._source.kv[index]
        place = None if self._kv is None else self._kv[self._slot(index)]
        layer = self._source.layer(index, None if place is None else place.view(-1).view(torch.uint8))
        if place is None:
            self._kv = self._memory.empty((len(self._slots), *layer.shape), layer.dtype)
            place = self._kv[self._slot(index)]
        if layer.data_ptr() != place.data_ptr():
            _bytes_of(place)[:] = _bytes_of(layer.contiguous())
        return place

    def _slot(self, index: int) -> int:
        """Where a layer is kept: in a segment that is in memory as a whole, at its own place."""
        return index if isinstance(self._source, SegmentKV) else self._slots[index]

    def fail(self, lost: SegmentLost) -> None:
        """Every wait for a layer ends with `lost`; what was sent to the device is let go."""
        self.failure = lost
        self._sent.clear()
        for ready in self._ready:
            ready.set()

    @property
    def late(self) -> SegmentLate | None:
        """Why it is not worth waiting for: the reading of one layer already takes longer than `wait_s`."""
        reading = self._reading
        if reading is None or self._wait_s is None or time.monotonic() - reading[1] <= self._wait_s:
            return None
        return SegmentLate(self.name, f"layer {reading[0]} did not come within {self._wait_s:.3g} s")

    @property
    def held_up(self) -> SegmentHeldUp | None:
        """Why it is not worth waiting for although none of its own layers is late: its loader is stuck at another's."""
        if self.complete or self.failure is not None or self.loader is None or not self.loader.late:
            return None
        return SegmentHeldUp(self.name, "what is read before it does not come")

    def wait_for(self, layers: int) -> None:
        """Wait until the first `layers` layers are in, or it has failed or is late."""
        for ready in self._ready[:layers]:
            if not ready.wait(self._wait_s):
                return

    @property
    def left(self) -> float:
        """The share of its layers that are still to be read."""
        return 1.0 - len(self._read) / len(self._slots) if self._slots else 0.0

    @property
    def layers_in(self) -> int:
        """How many of its first layers were read and sent."""
        if self.failure is not None:
            return 0
        while self._layers_in < len(self._ready) and self._ready[self._layers_in].is_set():
            self._layers_in += 1
        return self._layers_in

    @property
    def complete(self) -> bool:
        """Whether every layer was read and sent that is not `unseen`."""
        return all(ready.is_set() for ready in self._ready) and self.failure is None  # in this order: see `fail`

    def whole(self) -> SegmentKV | None:
        """The segment in memory of the host, if every layer came in."""
        if isinstance(self._source, SegmentKV):
            return self._source
        if self._kv is None or self.unseen or not self.complete:
            return None
        return SegmentKV(self._kv, self.keys_at)


def _bytes_of(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """A tensor's memory. PyTorch's own copy would start threads that fight with those of the layers for the cores."""
    return tensor.view(-1).view(torch.uint8).numpy()


class LayerLoader:
    """Reads the layers of one request's segments on a thread of its own. Owned by that request; close it.

    `depth` bounds how many layers are read before the request computes (prefetching while it waits);
    `release` lifts it. Reading leaves the interpreter's lock, so one thread keeps a disk busy.
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
        memory: HostMemory | None = None,
        unseen: Mapping[str, frozenset[int]] = MappingProxyType({}),
    ) -> None:
        """Start reading `(name, source)` pairs; a layer that takes longer than `wait_s` counts as lost.

        `unseen` has by name the layers that are not to be read, since nothing will look at them.
        What is read goes into `memory` (None: plain) and by `send` to the device that computes (None: it is this one).
        """
        send = Streams().send if send is None else send
        memory = HostMemory() if memory is None else memory
        self.segments = [
            LoadingSegment(
                name, source, num_layers, wait_s, send=send, memory=memory, unseen=unseen.get(name, frozenset())
            )
            for name, source in sources
        ]
        for segment in self.segments:
            segment.loader = self
        self._num_layers = num_layers
        self._order = order
        self._wait_s = wait_s
        self._limit = num_layers if depth is None else depth
        self._moved = threading.Condition()
        self._cancelled = False
        self._thread = threading.Thread(target=self._read_all, name="chunkweave-loader", daemon=True)
        if self.segments:
            self._thread.start()

    def release(self, first_layers: int = 0) -> None:
        """Read on without bound, and wait until the first `first_layers` layers are in (all of them when sync)."""
        with self._moved:
            self._limit = self._num_layers
            self._moved.notify_all()
        wanted = self._num_layers if self._order is LoadOrder.SYNC else first_layers
        for segment in self.segments:
            segment.wait_for(wanted)

    @property
    def late(self) -> bool:
        """Whether it is stuck at a layer that is late."""
        return any(segment.late for segment in self.segments)

    def close(self) -> None:
        """Stop reading; those that still wait for a layer get SegmentLost.

        Waits for the thread, but not for a layer that is late: what it still reads is for nobody.
        """
        with self._moved:
            self._cancelled = True
            self._moved.notify_all()
        while self._thread.is_alive() and not self.late:
            self._thread.join(self._wait_s)
        self._cancel()

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
