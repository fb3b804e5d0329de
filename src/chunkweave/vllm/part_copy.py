"""What vLLM has computed of one part, copied out of its blocks for the store."""

from collections.abc import Iterator

import torch

from chunkweave.kv.segment import SegmentKV
from chunkweave.store.records import SegmentRecord, all_read
from chunkweave.tiers.device import HostMemory
from chunkweave.types import ChunkId, Span
from chunkweave.vllm.paged_kv import RequestBlocks
from chunkweave.vllm.request import StoredPart
from chunkweave.vllm.stock_layers import StockLayers


class PartCopy:
    """One part's KV, read from the blocks piece by piece in prompt order. Owned by the worker."""

    def __init__(self, part: StoredPart, layers: StockLayers, memory: HostMemory, *, as_they_are: bool) -> None:
        """Into `memory`. Keys `as_they_are` come back to the bit, to the same position; else they are read before RoPE.

        The latter is for codecs that quantize by channel: before RoPE outliers keep to theirs.
        """
        self._part, self._layers, self._as_they_are = part, layers, as_they_are
        self._until = part.span.start
        shape = (layers.num_layers, 2, len(part.span), *layers.paged.shape)
        self._kv = memory.empty(shape, layers.paged.dtype)

    def follows(self, blocks: RequestBlocks, piece: Span) -> bool:
        """Whether a piece can be read: what lies before it was, and it has not left the window of some layer."""
        return piece.start == self._until and piece.start >= blocks.begins

    def read(self, blocks: RequestBlocks, piece: Span) -> Iterator[None]:
        """Read a piece that follows, a layer at each `next`."""
        paged = self._layers.paged
        self._until = piece.stop
        positions = torch.arange(piece.start, piece.stop, device=self._layers.device)
        rows = slice(piece.start - self._part.span.start, piece.stop - self._part.span.start)
        for layer in range(self._layers.num_layers):
            keys, values = paged.read(layer, blocks.of(layer).slots(positions))
            if not self._as_they_are:
                keys = self._layers.rotations.inverse(layer, keys, positions)
            self._kv[layer, 0, rows] = keys
            self._kv[layer, 1, rows] = values
            yield

    def write(self, blocks: RequestBlocks) -> None:
        """Put a part whose keys are as they are into other blocks, at the same positions."""
        paged, span = self._layers.paged, self._part.span
        positions = torch.arange(span.start, span.stop, device=self._layers.device)
        for layer, kv in enumerate(self._kv.to(paged.device)):
            paged.write(layer, blocks.of(layer).slots(positions), *kv)

    def segment(self, exact_to: int, read: frozenset[ChunkId]) -> tuple[SegmentRecord, SegmentKV]:
        """The part, for the store; it is exact if it ends at `exact_to` or before, else it has `read` this."""
        part = self._part
        kv = SegmentKV(self._kv, part.span.start if self._as_they_are else None)
        exact = part.span.stop <= exact_to
        read = frozenset() if exact else all_read(read.difference(part.context))
        return SegmentRecord.of(part.id, part.context, part.token_ids, exact=exact, nbytes=kv.nbytes, read=read), kv
