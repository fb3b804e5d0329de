"""A request's keys and values, layer by layer, and the host's memory that KV lies in.

KV has pages of its own, huge where there are any, and used again by the next request.
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

from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.types import Geometry, Span

_OWN_PAGES = 256 << 10
"""From so many bytes on KV has pages of its own."""

_HUGE_PAGES = 4 << 20
"""From so many bytes on they may be huge."""

_KEPT = 256 << 20
"""Most bytes that wait to be used again."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""The numbers of two settings of the GNU C library's `mallopt`."""

_SAYS_WHAT_IS_KEPT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def segment_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A fresh tensor of the host for KV that stays; its contents are whatever was there.

    It has pages of its own, which the system gets back with the last tensor in them. On the heap, segments that come
    and go leave holes between what stays: a server then holds several times the budget of its store. The system is
    asked for huge pages: the first write to each small one costs more than the copy that it is for.
    """
    nbytes = prod(shape) * dtype.itemsize
    pages = _own_pages(nbytes) if nbytes >= _OWN_PAGES else None
    if pages is None:  # too little for pages of its own, or no more mappings: the heap has to do
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


class ReusedMemory:
    """Memory for KV that ends with its request. Thread-safe.

    The system hands out pages filled with zeros, at the first write to each. With huge pages that is half of the time
    that KV takes to be copied there; where memory is in pieces and the pages are small, thirty times as much. So pages
    are kept for the next request once the last tensor in them is gone, not sooner: no tensor is ever written by another
    request.
    """

    def __init__(self, most_bytes: int = _KEPT) -> None:
        """Nothing is allocated yet; at most `most_bytes` are kept while nobody uses them."""
        self._most_bytes = most_bytes
        self._waiting: defaultdict[int, list[mmap.mmap]] = defaultdict(list)  # by size; changed by single list calls

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are kept and that nobody uses."""
        return sum(size * len(pages) for size, pages in self._waiting.copy().items())

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the host; its contents are whatever was there."""
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
        """May run in the middle of anything, in any thread: it takes no lock."""
        if self.waiting_bytes + size <= self._most_bytes:
            self._waiting[size].append(pages)


def keep_freed_memory() -> None:
    """Have the C library keep some freed memory instead of giving it back to the system at once.

    A layer computes in tensors of a few MB that come and go. By default the GNU C library may give each of them back,
    and the system fills the next with zeros, page by page: a tenth of a prefill. Left as it is where the environment
    has settings of its own, or with another library. For a process that is ours.
    """
    if any(os.environ.get(name) for name in _SAYS_WHAT_IS_KEPT):
        return
    with suppress(AttributeError, OSError, TypeError):  # another system's library
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_TRIM_THRESHOLD, 128 << 20)
        set_option(_M_MMAP_THRESHOLD, 32 << 20)


def _own_pages(nbytes: int) -> mmap.mmap | None:
    """So many bytes from the system; None if it has no more mappings, or none of this kind."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    if nbytes >= _HUGE_PAGES:
        with suppress(AttributeError, OSError):  # a wish: not every system has them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


_versions = count()

_TOGETHER = 16 << 20
"""So many bytes of a cache are allocated at a time: enough for huge pages, and there twice while a cache grows."""

_memory = ReusedMemory()
"""What caches on the host lie in, whoever's they are."""

Rotate = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, keys `[tokens, kv_heads, head_dim]` before RoPE, positions `[tokens]`) -> the same shape after RoPE."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A segment and the positions that it takes in the prompt; on the layers `unseen` nothing will look at it."""

    span: Span
    segment: SegmentSource
    unseen: frozenset[int] = frozenset()


class BeforeRope:
    """A segment whose keys are stored as they are at positions, with the keys before RoPE; a `SegmentSource`."""

    keys_at = None

    def __init__(self, source: SegmentSource, unrotate: Rotate, device: torch.device) -> None:
        """`unrotate` takes keys as they are at positions, and gives them before RoPE; it computes on `device`."""
        self._source, self._unrotate, self._device = source, unrotate, device
        self.tokens, self.nbytes = source.tokens, source.nbytes

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Keys before RoPE and values of one layer, `[2, tokens, kv_heads, head_dim]`. Raises what the source does."""
        keys, values = self._source.layer(index, scratch).to(self._device, non_blocking=True)
        start = self._source.keys_at or 0
        positions = torch.arange(start, start + self.tokens, device=self._device)
        return torch.stack((self._unrotate(index, keys, positions), values))


def before_rope(placements: Sequence[Placement], unrotate: Rotate, device: torch.device) -> list[Placement]:
    """The same placements, the keys of all of them before RoPE; for the rest see `BeforeRope`."""
    return [
        one if one.segment.keys_at is None else replace(one, segment=BeforeRope(one.segment, unrotate, device))
        for one in placements
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Placements `[first, last)` that stand side by side, and the positions that they take."""

    first: int
    last: int
    span: Span
    positions: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """What is brought on some layers, and the row of each position among all that is."""

    placements: tuple[Placement, ...]
    runs: tuple[_Run, ...]
    row_of: torch.Tensor


class RequestCache:
    """Keys after RoPE and values of one request, `[layers][2, capacity, kv_heads, head_dim]`.

    Owned and written by one request; segments are only read. Token-major, so that scattered rows are written with
    one index copy; attention reads it through a transposed view.

    The keys of positions from `kept_from` on are kept before RoPE too, `[layers][capacity - kept_from, kv_heads,
    head_dim]`, so that what is said there, question and answer, can be taken out as a segment. What segments bring has
    its keys before RoPE (`before_rope`).
    """

    def __init__(
        self,
        geometry: Geometry,
        capacity: int,
        placements: Sequence[Placement] = (),
        *,
        dtype: torch.dtype,
        device: torch.device,
        kept_from: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.geometry = geometry
        self.version = next(_versions)
        """Another number for every cache, and after it has grown: as long as it is the same, so are the addresses."""
        self._layers: list[torch.Tensor | None] = [None] * geometry.num_layers
        self.kept_from = kept_from
        """From which position on keys are kept before RoPE too; None if they are not."""
        self._kept: list[torch.Tensor | None] = [None] * geometry.num_layers
        self._shape: tuple[int, ...] = (2, capacity, geometry.num_kv_heads, geometry.head_dim)
        self._dtype, self._device = dtype, device
        self._placements = tuple(placements)
        self._placed: dict[tuple[Placement, ...], _Placed] = {}
        self._raw: tuple[int, list[torch.Tensor]] | None = None
        self._loaded = [not self._placements] * geometry.num_layers
        self._spare: list[torch.Tensor] = []
        """Layers that have memory and no contents yet."""

    def load_layer(self, layer: int, rotate: Rotate) -> None:
        """Bring all placed segments' KV of `layer` in: keys rotated to their positions, values as they are.

        Rows that nothing will look at are set to 0: attention multiplies their values by 0, so they have to be finite.
        Happens once a layer: a later pass must not lose what an earlier one recomputed.
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
        """Segments' KV at `positions` (all of them placed and seen), `[2, tokens, kv_heads, head_dim]`, before RoPE."""
        return torch.cat(self._rows(layer), dim=1)[:, self._placed_on(layer).row_of[positions]]

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows: rotated `keys` and `values` `[tokens, kv_heads, head_dim]` at `positions` `[tokens]`."""
        cache = self._layer(layer)
        cache[0].index_copy_(0, positions, keys)
        cache[1].index_copy_(0, positions, values)

    def keep(self, layer: int, positions: torch.Tensor, keys: torch.Tensor) -> None:
        """Keep `keys` before RoPE `[tokens, kv_heads, head_dim]` of `positions` `[tokens]`, none below `kept_from`."""
        assert self.kept_from is not None, "nothing is kept of this request"
        self._kept_layer(layer).index_copy_(0, positions - self.kept_from, keys)

    @torch.inference_mode()
    def segment(self, tokens: int) -> SegmentKV:
        """What the `tokens` positions from `kept_from` on hold, all of them written: a copy in host memory."""
        assert self.kept_from is not None, "nothing is kept of this request"
        start, layers = self.kept_from, len(self._layers)
        kv = segment_memory((layers, 2, tokens, *self._shape[2:]), self._dtype)
        for layer in range(layers):
            kv[layer, 0] = self._kept_layer(layer)[:tokens]
            kv[layer, 1] = self._layer(layer)[1, start : start + tokens]
        return SegmentKV(kv)

    def clear(self, layer: int, hidden: torch.Tensor) -> None:
        """Make the rows at the positions `hidden` finite: attention multiplies their values by 0."""
        self._layer(layer).index_fill_(1, hidden, 0)

    def view(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values of positions below `stop`, `[stop, kv_heads, head_dim]` each (views)."""
        cache = self._layer(layer)
        return cache[0, :stop], cache[1, :stop]

    def grow(self, capacity: int) -> None:
        """Make room for positions below `capacity`; copies what is there, a few layers after the others.

        So at no time more than those are there twice. Growing by fixed steps rather than doubling wastes no more than a
        step; the copy costs little, since decoding as many tokens reads the cache that often anyway.
        """
        if capacity <= self.capacity:
            return
        before, self.capacity = self.capacity, capacity
        self.version = next(_versions)
        self._shape = (2, capacity, *self._shape[2:])
        self._spare = []
        for layer, old in enumerate(self._layers):
            if old is not None:
                self._layers[layer] = None
                self._layer(layer)[:, :before] = old
        for layer, kept in enumerate(self._kept):
            if kept is not None:
                self._kept[layer] = None
                self._kept_layer(layer)[: len(kept)] = kept

    def free(self) -> None:
        """Give the memory back; the cache is of no use afterwards."""
        self.capacity = 0
        self._layers = [None] * len(self._layers)
        self._kept = [None] * len(self._kept)
        self._spare = []
        self.release_segments()

    def release_segments(self) -> None:
        """Forget the segments once every layer is loaded; the cache no longer needs them."""
        self._placements, self._placed, self._raw = (), {}, None

    def _layer(self, layer: int) -> torch.Tensor:
        cache = self._layers[layer]
        if cache is None:
            self._spare = self._spare or self._some_layers()
            cache = self._layers[layer] = self._spare.pop()
        return cache

    def _some_layers(self) -> list[torch.Tensor]:
        """Memory of one layer, or on the host of as many as are allocated together."""
        if self._device.type != "cpu":
            return [torch.empty(self._shape, dtype=self._dtype, device=self._device)]
        left, nbytes = sum(cache is None for cache in self._layers), prod(self._shape) * self._dtype.itemsize
        together = max(1, min(left, _TOGETHER // max(1, nbytes)))
        return list(_memory.tensor((together, *self._shape), self._dtype).unbind())

    def _kept_layer(self, layer: int) -> torch.Tensor:
        kept = self._kept[layer]
        if kept is None:
            shape = (self.capacity - (self.kept_from or 0), *self._shape[2:])
            kept = self._kept[layer] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return kept

    def _placed_on(self, layer: int) -> _Placed:
        """What is brought on a layer; worked out once for all layers with the same."""
        here = tuple(placement for placement in self._placements if layer not in placement.unseen)
        if here not in self._placed:
            runs = tuple(_runs_of(here, self._device))
            row_of = torch.full((self.capacity,), -1, dtype=torch.long, device=self._device)
            done = 0
            for run in runs:
                row_of[run.span.start : run.span.stop] = torch.arange(done, done + len(run.span), device=self._device)
                done += len(run.span)
            self._placed[here] = _Placed(here, runs, row_of)
        return self._placed[here]

    def _rows(self, layer: int) -> list[torch.Tensor]:
        """Each placed segment's rows of one layer; the last ones asked for are kept, since a check reads them again."""
        if self._raw is None or self._raw[0] != layer:
            here = self._placed_on(layer).placements
            self._raw = (layer, [p.segment.layer(layer).to(self._device, non_blocking=True) for p in here])
        return self._raw[1]


def _runs_of(placements: Sequence[Placement], device: torch.device) -> Iterator[_Run]:
    """Placements, in order of their positions, cut where two of them do not touch."""
    spans = [placement.span for placement in placements]
    edges = [place for place, (one, other) in enumerate(pairwise(spans), 1) if one.stop != other.start]
    for first, last in pairwise([0, *edges, len(spans)] if spans else []):
        span = Span(spans[first].start, spans[last - 1].stop)
        yield _Run(first, last, span, torch.arange(span.start, span.stop, device=device))
