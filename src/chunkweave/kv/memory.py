"""Memory of the host: for KV pages of its own, huge where there are any, and used again by the next request."""

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from weakref import finalize

import numpy as np
import torch

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
