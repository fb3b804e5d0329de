"""Copies one part's KV out of vLLM's blocks for the store."""

from collections.abc import Iterator

import torch

from chunkweave.conversation.weave_request import StoredPart
from chunkweave.kv.segment import SegmentKV
from chunkweave.store.records import SegmentRecord, all_read
from chunkweave.tiers.device import HostMemory
from chunkweave.types import ChunkId, Span
from chunkweave.vllm.paged_kv import RequestBlocks
from chunkweave.vllm.stock_layers import StockLayers


class PartCopy:
    """One part's KV, read from the blocks piece by piece in prompt order. Owned by the worker."""

    def __init__(self, part: StoredPart, layers: StockLayers, memory: HostMemory, *, as_they_are: bool) -> None:
        """Copy into `memory`. Keys `as_they_are` are restored bitwise at the same position; else they are read before
        RoPE.

        The latter is for codecs that quantize by channel: before RoPE, outliers stay in fixed channels.
        """
        self._part, self._layers, self._as_they_are = part, layers, as_they_are
        self._until = part.span.start
        shape = (layers.num_layers, 2, len(part.span), *layers.paged.shape)
        self._kv = memory.empty(shape, layers.paged.stored_dtype)

    def follows(self, blocks: RequestBlocks, piece: Span) -> bool:
        """Whether a piece can be read: it continues what was read, and all layers still have its blocks."""
        return piece.start == self._until and piece.start >= blocks.begins

    def read(self, blocks: RequestBlocks, piece: Span, *, wait: bool = True) -> Iterator[None]:
        """Read a piece that follows, one layer per `next`. Without `wait`, copies to page-locked memory are only
        issued, to the current stream.
        """
        paged = self._layers.paged
        self._until = piece.stop
        positions = torch.arange(piece.start, piece.stop, device=self._layers.device)
        rows = slice(piece.start - self._part.span.start, piece.stop - self._part.span.start)
        for layer in range(self._layers.num_layers):
            slots = blocks.of(layer).slots(positions)
            keys, values = paged.read_stored(layer, slots)
            if not self._as_they_are:  # never of a quantized cache: see `check_store`
                keys = self._layers.rotations.inverse(layer, keys, positions)
            for place, copied in enumerate((keys, values)):
                self._kv[layer, place, rows].copy_(copied, non_blocking=not wait)
            yield

    def write(self, blocks: RequestBlocks) -> None:
        """Write a part with keys as they are into other blocks, at the same positions."""
        paged = self._layers.paged
        span = self._part.span
        positions = torch.arange(span.start, span.stop, device=self._layers.device)
        for layer, kv in enumerate(self._kv.to(paged.device)):
            paged.place(layer, blocks.of(layer).slots(positions), *paged.opened(layer, kv))

    def segment(self, exact_to: int, read: frozenset[ChunkId]) -> tuple[SegmentRecord, SegmentKV]:
        """The part as a segment; exact if it ends at or before `exact_to`, else its record has `read`."""
        part = self._part
        kv = SegmentKV(self._kv, part.span.start if self._as_they_are else None)
        exact = part.span.stop <= exact_to
        read = frozenset() if exact else all_read(read.difference(part.context))
        record = SegmentRecord.of(
            part.id,
            part.context,
            part.token_ids,
            exact=exact,
            nbytes=kv.nbytes,
            source=part.source,
            read=read,
            novel=part.novel,
        )
        return record, kv
