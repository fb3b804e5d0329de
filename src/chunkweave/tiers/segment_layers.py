"""Layers of a segment, encoded and decoded: the same runs of bytes on disk and on the wire (docs/disk-format.md)."""

import zlib
from collections.abc import Iterator

import torch

from chunkweave.errors import UsageError
from chunkweave.kv.codecs import Codec, EncodingError
from chunkweave.kv.segment import SegmentLost, SegmentSource
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.segment_header import SegmentHeader, SegmentLayout, header_bytes


class EncodedSegment:
    """A segment that is known by its header, while its layers lie encoded somewhere. A base of `SegmentSource`s."""

    __slots__ = ("header",)

    def __init__(self, header: SegmentHeader) -> None:
        self.header = header

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self.header.layout.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors once they are decoded."""
        return self.header.layout.nbytes


def layout_of(payload: SegmentSource, codec: Codec) -> SegmentLayout:
    """How `payload` would be laid out by `codec`; reads its first layer."""
    first = payload.layer(0)
    return SegmentLayout((payload.nbytes // max(1, first.nbytes), *first.shape), first.dtype, codec)


def file_bytes(record: SegmentRecord, payload: SegmentSource, codec: Codec, fingerprint: str) -> int:
    """Bytes of `payload` once it is encoded, header and all.

    Raises:
        UsageError: record and payload do not fit each other.
        SegmentLost: the payload cannot be read.
    """
    layout = layout_of(payload, codec)
    head = header_bytes(record, fingerprint, layout, 0.0, (0,) * layout.num_layers)
    return len(head) + layout.num_layers * layout.layer_bytes


def encoded_layers(record: SegmentRecord, payload: SegmentSource, layout: SegmentLayout) -> Iterator[bytearray]:
    """The run of each layer of `payload` in order, `layer_bytes` long.

    Raises:
        OSError: the codec cannot represent this KV.
        UsageError: a layer is not of the layout's shape and dtype.
        SegmentLost: the payload could not be read.
    """
    for index in range(layout.num_layers):
        kv = payload.layer(index)
        if (kv.shape, kv.dtype) != (layout.shape[1:], layout.dtype):
            raise UsageError(
                f"layer {index} is {tuple(kv.shape)} {kv.dtype} in a segment of {layout.shape} {layout.dtype}"
            )
        run = bytearray()
        try:
            for tensor in layout.codec.encode_layer(kv):
                run += tensor.view(-1).view(torch.uint8).numpy().data
        except EncodingError as error:
            raise OSError(f"segment {record.id} was not encoded: {error}") from error
        yield run


def decode_layer(header: SegmentHeader, index: int, data: torch.Tensor) -> torch.Tensor:
    """One layer from its encoded run `data` (uint8, `layer_bytes` long), once its checksum matches.

    The result may be a view of `data`.

    Raises:
        SegmentLost: the checksum does not match.
    """
    if zlib.crc32(data.numpy().data) != header.layer_checksums[index]:
        raise SegmentLost(header.record.id, f"the checksum of layer {index} does not match")
    tensors, start = [], 0
    for tensor in header.layout.tensors:
        tensors.append(data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes
    return header.layout.codec.decode_layer(tensors, header.layout.dtype)
