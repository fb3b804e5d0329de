"""A request's keys and values, layer by layer, and host memory for KV.

KV has its own memory mappings, with huge pages where available, reused by later requests.
"""

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, pairwise
from math import prod
from weakref import finalize

import numpy as np
import torch

from chunkweave.kv.segment import SegmentSource
from chunkweave.types import Geometry, Span

_OWN_PAGES = 256 << 10
"""From this size on, KV gets its own pages."""

_HUGE_PAGES = 4 << 20
"""From this size on, the pages may be huge."""

_KEPT = 256 << 20
"""Most bytes of free pages that are kept for reuse."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Numbers of two options of the GNU C library's `mallopt`."""

_SAYS_WHAT_IS_KEPT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def segment_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized host tensor for KV that is stored.

    It has its own pages, which return to the system with the last tensor in them. On the heap, segments that come and
    go fragment memory: a server would hold several times its store's budget. Huge pages are requested, because the
    first write to each small page costs more than the copy into it.
    """
    nbytes = prod(shape) * dtype.itemsize
    pages = _own_pages(nbytes) if nbytes >= _OWN_PAGES else None
    if pages is None:  # too small for its own pages, or no mappings left: use the heap
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


class ReusedMemory:
    """Host memory for KV that lives as long as its request. Thread-safe.

    The system fills each new page with zeros at the first write. With huge pages this is half of the time of a copy
    into new memory; with small pages and fragmented memory, thirty times as much. So pages are kept for the next
    request, but only once the last tensor in them is gone: no request writes another one's tensor.
    """

    def __init__(self, most_bytes: int = _KEPT) -> None:
        """Make a pool that keeps at most `most_bytes` of free pages; allocates nothing."""
        self._most_bytes = most_bytes
        self._waiting: defaultdict[int, list[mmap.mmap]] = defaultdict(list)  # by size; changed by single list calls

    @property
    def waiting_bytes(self) -> int:
        """Bytes of free pages that are kept."""
        return sum(size * len(pages) for size, pages in self._waiting.copy().items())

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized host tensor."""
        nbytes = prod(shape) * dtype.itemsize
        size = 1 << max(0, nbytes - 1).bit_length()  # few sizes, so that the next request finds its own
        pages = None
        if nbytes >= _OWN_PAGES:
            try:
                pages = self._waiting[size].pop()
            except IndexError:
                pages = _own_pages(size)
        if pages is None:
            return torch.empty(tuple(shape), dtype=dtype)
        memory = np.frombuffer(pages, dtype=np.uint8)  # lives as long as any tensor over it
        finalize(memory, self._give_back, size, pages).atexit = False
        return torch.from_numpy(memory)[:nbytes].view(dtype).view(tuple(shape))

    def _give_back(self, size: int, pages: mmap.mmap) -> None:
        """Return pages to the pool. Runs in a finalizer, in any thread at any time, so it takes no lock."""
        if self.waiting_bytes + size <= self._most_bytes:
            self._waiting[size].append(pages)


def keep_freed_memory() -> None:
    """Let the C library keep some freed memory instead of returning it to the system at once.

    Layers compute in short-lived tensors of a few MB. By default, the GNU C library may return each of them, and the
    system zeroes the next one page by page: a tenth of a prefill's time. No effect if the environment has settings of
    its own, or with another C library. Only for processes that we own.
    """
    if any(os.environ.get(name) for name in _SAYS_WHAT_IS_KEPT):
        return
    with suppress(AttributeError, OSError, TypeError):  # another system's library
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_TRIM_THRESHOLD, 128 << 20)
        set_option(_M_MMAP_THRESHOLD, 32 << 20)


def _own_pages(nbytes: int) -> mmap.mmap | None:
    """Anonymous pages from the system; None if it has no mappings left or no such mappings."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    if nbytes >= _HUGE_PAGES:
        with suppress(AttributeError, OSError):  # a hint: not every system has huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


_versions = count()

_TOGETHER = 16 << 20
"""Bytes of a cache that are allocated at a time: enough for huge pages. Held twice while a cache grows."""

_memory = ReusedMemory()
"""The pool for all caches on the host."""

Rotate = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, keys `[tokens, kv_heads, head_dim]` before RoPE, positions `[tokens]`) -> the same shape after RoPE."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A segment and its positions in the prompt; on the layers `unseen` no query looks at it."""

    span: Span
    segment: SegmentSource
    unseen: frozenset[int] = frozenset()


class BeforeRope:
    """Wraps a segment whose keys are stored after RoPE, and returns keys before RoPE; a `SegmentSource`."""

    keys_at = None

    def __init__(self, source: SegmentSource, unrotate: Rotate, device: torch.device) -> None:
        """`unrotate` maps keys after RoPE to keys before it; it computes on `device`."""
        self._source, self._unrotate, self._device = source, unrotate, device
        self.tokens, self.nbytes = source.tokens, source.nbytes

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Keys before RoPE and values of one layer, `[2, tokens, kv_heads, head_dim]`. Raises as the source."""
        keys, values = self._source.layer(index, scratch).to(self._device, non_blocking=True)
        start = self._source.keys_at or 0
        positions = torch.arange(start, start + self.tokens, device=self._device)
        return torch.stack((self._unrotate(index, keys, positions), values))


def before_rope(placements: Sequence[Placement], unrotate: Rotate, device: torch.device) -> list[Placement]:
    """The same placements with all keys before RoPE (see `BeforeRope`)."""
    return [
        placement
        if placement.segment.keys_at is None
        else replace(placement, segment=BeforeRope(placement.segment, unrotate, device))
        for placement in placements
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Adjacent placements `[first, last)` and the positions that they cover."""

    first: int
    last: int
    span: Span
    positions: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """The placements loaded on some layers, and for each position its row among the loaded tokens."""

    placements: tuple[Placement, ...]
    runs: tuple[_Run, ...]
    row_of: torch.Tensor


class RequestCache:
    """Keys after RoPE and values of one request, `[layers][2, capacity, kv_heads, head_dim]`.

    Owned and written by one request; segments are only read. The layout is token-major, so that scattered rows are
    written with one index copy; attention reads a transposed view.

    Placed segments must have keys before RoPE (`before_rope`).
    """

    def __init__(
        self,
        geometry: Geometry,
        capacity: int,
        placements: Sequence[Placement] = (),
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self.geometry = geometry
        self.version = next(_versions)
        """Unique per cache, and changed when it grows; while it is equal, memory addresses are unchanged."""
        self._layers: list[torch.Tensor | None] = [None] * geometry.num_layers
        self._shape: tuple[int, ...] = (2, capacity, geometry.num_kv_heads, geometry.head_dim)
        self._dtype, self._device = dtype, device
        self._placements = tuple(placements)
        self._placed: dict[tuple[Placement, ...], _Placed] = {}
        self._raw: tuple[int, list[torch.Tensor]] | None = None
        self._loaded = [not self._placements] * geometry.num_layers
        self._spare: list[torch.Tensor] = []
        """Allocated layers without contents."""

    def load_layer(self, layer: int, rotate: Rotate) -> None:
        """Load the KV of all placed segments for `layer`: keys rotated to their positions, values unchanged.

        Rows that no query sees are set to 0: attention multiplies their values by 0, so they must be finite. Each layer
        is loaded once, because loading again would overwrite what an earlier pass recomputed.
        """
        if self._loaded[layer]:
            return
        self._loaded[layer] = True
        cache = self._layer(layer)
        placed = self._placed_on(layer)
        for placement in self._placements:
            if layer in placement.unseen:
                cache[:, placement.span.start : placement.span.stop] = 0
        rows = self._rows(layer)
        for run in placed.runs:
            keys, values = cache[:, run.span.start : run.span.stop]
            torch.cat([kv[0] for kv in rows[run.first : run.last]], out=keys)
            torch.cat([kv[1] for kv in rows[run.first : run.last]], out=values)
            keys.copy_(rotate(layer, keys, run.positions))

    def cached_before_rope(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Segments' KV at `positions` (all placed and seen), `[2, tokens, kv_heads, head_dim]`, before RoPE."""
        return torch.cat(self._rows(layer), dim=1)[:, self._placed_on(layer).row_of[positions]]

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows: rotated `keys` and `values` `[tokens, kv_heads, head_dim]` at `positions` `[tokens]`."""
        cache = self._layer(layer)
        cache[0].index_copy_(0, positions, keys)
        cache[1].index_copy_(0, positions, values)

    def clear(self, layer: int, hidden: torch.Tensor) -> None:
        """Set the rows at positions `hidden` to 0: attention multiplies their values by 0, so they must be finite."""
        self._layer(layer).index_fill_(1, hidden, 0)

    def view(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values of positions below `stop`, `[stop, kv_heads, head_dim]` each (views)."""
        cache = self._layer(layer)
        return cache[0, :stop], cache[1, :stop]

    def grow(self, capacity: int) -> None:
        """Make room for positions below `capacity`; copies the contents a few layers at a time.

        So only those few layers are held twice. Fixed steps waste at most one step, unlike doubling. The copy is cheap:
        decoding that many tokens reads the whole cache that often anyway.
        """
        if capacity <= self.capacity:
            return
        old_capacity, self.capacity = self.capacity, capacity
        self.version = next(_versions)
        self._shape = (2, capacity, *self._shape[2:])
        self._spare = []
        for layer, old in enumerate(self._layers):
            if old is not None:
                self._layers[layer] = None
                self._layer(layer)[:, :old_capacity] = old

    def copy(self, tokens: int, capacity: int) -> "RequestCache":
        """A cache of its own with the KV of the first `tokens` positions, which all layers have, and this capacity."""
        copied = RequestCache(self.geometry, capacity, dtype=self._dtype, device=self._device)
        for layer in range(self.geometry.num_layers if tokens else 0):
            copied._layer(layer)[:, :tokens] = self._layer(layer)[:, :tokens]
        return copied

    def rows(self, span: Span) -> torch.Tensor:
        """A copy of rotated keys and values, `[layers, 2, tokens, kv_heads, head_dim]` in host memory."""
        shape = (self.geometry.num_layers, 2, len(span), *self._shape[2:])
        rows = segment_memory(shape, self._dtype)
        for layer, copied in enumerate(rows):
            copied.copy_(self._layer(layer)[:, span.start : span.stop])
        return rows

    def free(self) -> None:
        """Free the memory; the cache cannot be used afterwards."""
        self.capacity = 0
        self._layers = [None] * len(self._layers)
        self._spare = []
        self.release_segments()

    def release_segments(self) -> None:
        """Drop the segments, once every layer is loaded."""
        self._placements, self._placed, self._raw = (), {}, None

    def _layer(self, layer: int) -> torch.Tensor:
        cache = self._layers[layer]
        if cache is None:
            self._spare = self._spare or self._some_layers()
            cache = self._layers[layer] = self._spare.pop()
        return cache

    def _some_layers(self) -> list[torch.Tensor]:
        """Memory of one layer, or on the host of several layers that are allocated together."""
        if self._device.type != "cpu":
            return [torch.empty(self._shape, dtype=self._dtype, device=self._device)]
        unallocated = sum(cache is None for cache in self._layers)
        nbytes = prod(self._shape) * self._dtype.itemsize
        together = max(1, min(unallocated, _TOGETHER // max(1, nbytes)))
        return list(_memory.tensor((together, *self._shape), self._dtype).unbind())

    def _placed_on(self, layer: int) -> _Placed:
        """What is loaded on a layer; computed once for all layers with the same placements."""
        placements = tuple(placement for placement in self._placements if layer not in placement.unseen)
        if placements not in self._placed:
            runs = tuple(_runs_of(placements, self._device))
            row_of = torch.full((self.capacity,), -1, dtype=torch.long, device=self._device)
            done = 0
            for run in runs:
                row_of[run.span.start : run.span.stop] = torch.arange(done, done + len(run.span), device=self._device)
                done += len(run.span)
            self._placed[placements] = _Placed(placements, runs, row_of)
        return self._placed[placements]

    def _rows(self, layer: int) -> list[torch.Tensor]:
        """Each placed segment's rows of one layer; the last result is cached, because a check reads it again."""
        if self._raw is None or self._raw[0] != layer:
            placements = self._placed_on(layer).placements
            self._raw = (layer, [p.segment.layer(layer).to(self._device, non_blocking=True) for p in placements])
        return self._raw[1]


def _runs_of(placements: Sequence[Placement], device: torch.device) -> Iterator[_Run]:
    """Runs of adjacent placements; placements are in order of position."""
    spans = [placement.span for placement in placements]
    edges = [place for place, (span, next_span) in enumerate(pairwise(spans), 1) if span.stop != next_span.start]
    for first, last in pairwise([0, *edges, len(spans)] if spans else []):
        span = Span(spans[first].start, spans[last - 1].stop)
        yield _Run(first, last, span, torch.arange(span.start, span.stop, device=device))
