"""A whole segment as bytes in memory: exactly what its file would hold (docs/disk-format.md)."""

import zlib
from collections.abc import Callable

import numpy as np
import torch

from chunkweave.kv.codecs import Codec
from chunkweave.kv.segment import SegmentLost, SegmentSource
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.segment_header import (
    LENGTH_BYTES,
    FileProblem,
    SegmentHeader,
    SegmentRefused,
    header_bytes,
    header_size,
    parse_header,
)
from chunkweave.tiers.segment_layers import EncodedSegment, decode_layer, encoded_layers, layout_of


class MemorySegment(EncodedSegment):
    """A segment that came over the wire; implements `SegmentSource`.

    The bytes are all here, but a layer is checked and decoded only when it is asked for. Immutable; any thread may
    read. `report_lost` is told of a layer that fails its checksum.
    """

    __slots__ = ("_data", "_report_lost")

    def __init__(
        self, header: SegmentHeader, data: bytes, report_lost: Callable[[SegmentLost], None] | None = None
    ) -> None:
        super().__init__(header)
        self._data = data
        self._report_lost = report_lost

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Keys before RoPE and values of one layer, `[2, tokens, kv_heads, head_dim]`: copied, checked, decoded.

        Raises:
            SegmentLost: the layer fails its checksum.
            IndexError: there is no such layer.
        """
        start, size = self.header.layer_offset(index), self.header.layout.layer_bytes
        # Copied, because tensors over `bytes` could be written to, and a run within a message need not be aligned.
        run = torch.empty(size, dtype=torch.uint8)
        run.numpy()[:] = np.frombuffer(self._data, np.uint8, count=size, offset=start)
        try:
            return decode_layer(self.header, index, run)
        except SegmentLost as lost:
            if self._report_lost is not None:
                self._report_lost(lost)
            raise


def encode_segment(
    record: SegmentRecord, payload: SegmentSource, *, codec: Codec, fingerprint: str, created_s: float
) -> bytes:
    """The bytes that `write_segment` would write.

    Raises:
        OSError: the codec cannot represent this KV.
        UsageError: record and payload do not fit each other.
        SegmentLost: the payload could not be read.
    """
    layout = layout_of(payload, codec)
    runs = list(encoded_layers(record, payload, layout))
    checksums = tuple(zlib.crc32(run) for run in runs)
    return b"".join([header_bytes(record, fingerprint, layout, created_s, checksums), *runs])


def decode_segment(data: bytes, report_lost: Callable[[SegmentLost], None] | None = None) -> MemorySegment:
    """The segment in `data`; only its header is checked now.

    Raises:
        SegmentRefused: it is not a whole segment that this version reads.
    """
    return MemorySegment(decode_header(data, len(data)), data, report_lost)


def decode_header(head: bytes, total_bytes: int) -> SegmentHeader:
    """The checked header of a segment of `total_bytes`, of which `head` is the beginning.

    Raises:
        SegmentRefused: it is not a whole segment that this version reads, or `head` is shorter than its header.
    """
    needed = header_size(head[:LENGTH_BYTES], total_bytes)
    if len(head) < needed:
        raise SegmentRefused(FileProblem.CORRUPT, f"the header takes {needed} bytes, {len(head)} are here")
    return parse_header(head[:needed], total_bytes)
