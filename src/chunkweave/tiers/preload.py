"""Reads segments ahead of the layers that need them, in the order of need (Cache-Craft Algorithm 2)."""

import threading
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import product

import numpy as np
import torch

from chunkweave.kv.segment import SegmentKV, SegmentLate, SegmentLost, SegmentSource


class LoadOrder(StrEnum):
    """In which order layers of several segments are read. Only `LAYERS` is for use; the others are to compare with."""

    LAYERS = "layer-wise"
    """Layer by layer over all segments: layer 0 computes while layer 1 is read."""
    SEGMENTS = "async"
    """Segment by segment: the first layer computes when the last segment is in."""
    SYNC = "sync"
    """Everything is read before anything computes."""


class Gone:
    """Stands in for a segment that left its store between the plan and the reading of it."""

    tokens = 0
    nbytes = 0

    def __init__(self, name: str) -> None:
        self.failure = SegmentLost(name, "it was gone before it was read")

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Never there.

        Raises:
            SegmentLost: always.
        """
        raise self.failure


class LoadingSegment:
    """One segment on its way into memory: a `SegmentSource` whose `layer` waits for the loader."""

    def __init__(self, name: str, source: SegmentSource, num_layers: int, wait_s: float | None) -> None:
        self.name = name
        self._source = source
        self._wait_s = wait_s
        self._kv: torch.Tensor | None = None
        self._ready = [threading.Event() for _ in range(num_layers)]
        self._failure: SegmentLost | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self._source.tokens

    @property
    def failure(self) -> SegmentLost | None:
        """Why it will not come in; None as long as it may, or has."""
        return self._failure

    @property
    def nbytes(self) -> int:
        """Bytes once it is in memory."""
        return self._source.nbytes

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """One layer, `[2, tokens, kv_heads, head_dim]`, as soon as it is read.

        Raises:
            SegmentLost: reading failed or was cancelled.
            SegmentLate: it took longer than the loader was told to wait.
        """
        if not self._ready[index].wait(self._wait_s):
            raise SegmentLate(self.name, f"layer {index} did not come within {self._wait_s:.3g} s")
        if self._failure is not None:
            raise self._failure
        assert self._kv is not None, "a layer is ready only once there is memory for it"
        return self._kv[index]

    def read(self, index: int) -> None:
        """Read one layer into memory, once; called by the loader only."""
        if self._failure is not None or self._ready[index].is_set():
            return
        place = None if self._kv is None else self._kv[index]
        try:
            layer = self._source.layer(index, None if place is None else place.view(-1).view(torch.uint8))
        except SegmentLost as lost:
            self.fail(lost)
            return
        if self._kv is None:
            self._kv = torch.empty((len(self._ready), *layer.shape), dtype=layer.dtype)
            place = self._kv[index]
        if place is not None and layer.data_ptr() != place.data_ptr():
            _bytes_of(place)[:] = _bytes_of(layer.contiguous())
        self._ready[index].set()

    def fail(self, lost: SegmentLost) -> None:
        """Nobody needs to wait any longer."""
        self._failure = lost
        for ready in self._ready:
            ready.set()

    def wait_for(self, layers: int) -> None:
        """Wait until the first `layers` layers are in, or it has failed or is late."""
        for ready in self._ready[:layers]:
            if not ready.wait(self._wait_s):
                return

    def whole(self) -> SegmentKV | None:
        """The segment, if every layer came in."""
        done = self._failure is None and all(ready.is_set() for ready in self._ready)
        return SegmentKV(self._kv) if done and self._kv is not None else None


def _bytes_of(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """A tensor's memory. PyTorch's own copy would start threads that fight with those of the layers for the cores."""
    return tensor.view(-1).view(torch.uint8).numpy()


class LayerLoader:
    """Reads the layers of one request's segments on a thread of its own. Owned by that request; close it.

    `depth` bounds how many layers are read while nobody computes (prefetching a request that still waits);
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
    ) -> None:
        """Start reading `(name, source)` pairs; a layer that takes longer than `wait_s` counts as lost."""
        self.segments = [LoadingSegment(name, source, num_layers, wait_s) for name, source in sources]
        self._num_layers = num_layers
        self._order = order
        self._limit = num_layers if depth is None else depth
        self._moved = threading.Condition()
        self._cancelled = False
        self._thread = threading.Thread(target=self._read_all, name="chunkweave-loader", daemon=True)
        self._thread.start()

    def release(self, first_layers: int = 0) -> None:
        """Read on without bound, and wait until the first `first_layers` layers are in (all of them when sync)."""
        with self._moved:
            self._limit = self._num_layers
            self._moved.notify_all()
        wanted = self._num_layers if self._order is LoadOrder.SYNC else first_layers
        for segment in self.segments:
            segment.wait_for(wanted)

    def close(self) -> None:
        """Stop reading and wait for the thread; whoever still waits for a layer gets SegmentLost."""
        with self._moved:
            self._cancelled = True
            self._moved.notify_all()
        self._thread.join()

    def _read_all(self) -> None:
        for segment, layer in self._in_order():
            with self._moved:
                while layer >= self._limit and not self._cancelled:
                    self._moved.wait()
                if self._cancelled:
                    break
            segment.read(layer)
        if self._cancelled:
            for segment in self.segments:
                if segment.whole() is None:
                    segment.fail(SegmentLost(segment.name, "loading was cancelled"))

    def _in_order(self) -> Iterator[tuple[LoadingSegment, int]]:
        if self._order is LoadOrder.LAYERS:
            return ((segment, layer) for layer, segment in product(range(self._num_layers), self.segments))
        return product(self.segments, range(self._num_layers))
