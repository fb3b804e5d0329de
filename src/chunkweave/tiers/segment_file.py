"""Segment files: written atomically, read one layer at a time.

They are safetensors files, but not written by that library: it sorts tensors by alignment, then name, so all scales
would precede all layers, and one layer would not be one contiguous read.
"""

import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from chunkweave.errors import UsageError
from chunkweave.kv.segment import Codec, EncodingError, SegmentLost, SegmentSource
from chunkweave.store.records import SegmentRecord
from chunkweave.store.shared_folder import sync_folder
from chunkweave.tiers.segment_header import (
    FileProblem,
    SegmentHeader,
    SegmentLayout,
    SegmentRefused,
    header_bytes,
    header_size,
    parse_header,
)


class EncodedSegment:
    """A segment with a decoded header and encoded layers. A base class of `SegmentSource`s."""

    __slots__ = ("header", "keys_at", "nbytes", "tokens")

    def __init__(self, header: SegmentHeader) -> None:
        self.header = header
        self.keys_at = header.layout.keys_at
        self.tokens, self.nbytes = header.layout.shape[2], header.layout.nbytes


def layout_of(payload: SegmentSource, codec: Codec) -> SegmentLayout:
    """The layout of `payload` under `codec`; reads its first layer."""
    first = payload.layer(0)
    shape = (payload.nbytes // max(1, first.nbytes), *first.shape)
    return SegmentLayout(shape, first.dtype, codec, payload.keys_at)


def file_bytes(record: SegmentRecord, payload: SegmentSource, codec: Codec, fingerprint: str) -> int:
    """Bytes of the encoded `payload` with its header. Raises the errors of `encoded_layers` except `OSError`."""
    layout = layout_of(payload, codec)
    head = header_bytes(record, fingerprint, layout, 0.0, (0,) * layout.num_layers)
    return len(head) + layout.num_layers * layout.layer_bytes


def encoded_layers(record: SegmentRecord, payload: SegmentSource, layout: SegmentLayout) -> Iterator[bytearray]:
    """The encoded layers of `payload` in order, each `layer_bytes` long.

    Raises:
        OSError: the codec cannot represent this KV.
        UsageError: a layer's shape or dtype differs from the layout's.
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
    """Decode one layer from `data` (uint8, `layer_bytes` long) after checking its checksum.

    The result may be a view of `data`.

    Raises:
        SegmentLost: the checksum does not match.
    """
    if zlib.crc32(data.numpy().data) != header.layer_checksums[index]:
        raise SegmentLost(header.record.id, f"the checksum of layer {index} does not match")
    tensors = []
    start = 0
    for tensor in header.layout.tensors:
        tensors.append(data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes
    return header.layout.codec.decode_layer(tensors, header.layout.dtype)


class MemorySegment(EncodedSegment):
    """A segment received over the network; implements `SegmentSource`.

    All bytes are in memory; a layer is checked and decoded when it is read. Immutable and thread-safe. `report_lost` is
    called for a layer that fails its checksum.
    """

    __slots__ = ("_data", "_report_lost")

    def __init__(self, data: bytes, report_lost: Callable[[SegmentLost], None] | None = None) -> None:
        """The segment in `data`; only its header is checked now. Raises the errors of `parse_header`."""
        super().__init__(parse_header(data, len(data)))
        self._data = data
        self._report_lost = report_lost

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]`: copied, checked, decoded.

        Raises:
            SegmentLost: the layer fails its checksum.
            IndexError: there is no such layer.
        """
        start = self.header.layer_offset(index)
        size = self.header.layout.layer_bytes
        # Copied, because a tensor over `bytes` would be writable, and a layer within a message may be unaligned.
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
    """The bytes that `write_segment` would write. Raises the errors of `encoded_layers`."""
    layout = layout_of(payload, codec)
    runs = list(encoded_layers(record, payload, layout))
    checksums = tuple(zlib.crc32(run) for run in runs)
    return b"".join([header_bytes(record, fingerprint, layout, created_s, checksums), *runs])


TEMPORARY_SUFFIX = ".tmp"
_FIRST_READ_BYTES = 16 << 10
# O_NONBLOCK: otherwise opening a FIFO with a segment's name would block until it has a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskSegment(EncodedSegment):
    """A segment whose layers are in a file; implements `SegmentSource`.

    Each read opens the file again: a request with many segments holds no descriptors, and threads share none. Layers
    must match the checksums in the header read at creation, so a file that was deleted, replaced or damaged since then
    is reported as lost. Immutable and thread-safe.
    """

    __slots__ = ("path",)

    def __init__(self, path: Path, header: SegmentHeader) -> None:
        super().__init__(header)
        self.path = path

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values of one layer, `[2, tokens, kv_heads, head_dim]`: one read, checked, decoded.

        `scratch` (uint8), if long enough, is used as the buffer; the result may then be a view of it.

        Raises:
            SegmentLost: the file is gone, was replaced, cannot be read, or fails its checksum.
            IndexError: there is no such layer.
        """
        header = self.header
        offset = self.header.layer_offset(index)
        length = header.layout.layer_bytes
        fits = scratch is not None and len(scratch) >= length
        data = scratch[:length] if scratch is not None and fits else torch.empty(length, dtype=torch.uint8)
        try:
            with _open_regular(self.path) as (file, size):
                if size != header.record.nbytes:
                    raise SegmentRefused(FileProblem.CORRUPT, f"{size} bytes instead of {header.record.nbytes}")
                read = _read_into(file, data.numpy().data, offset)
        except (OSError, SegmentRefused) as error:
            raise SegmentLost(header.record.id, str(error)) from error
        if read != length:
            raise SegmentLost(header.record.id, f"the file ends within layer {index}")
        return decode_layer(header, index, data)


def write_segment(
    path: Path, record: SegmentRecord, payload: SegmentSource, *, codec: Codec, fingerprint: str, created_s: float
) -> SegmentHeader:
    """Write a segment to `path` atomically and durably, replacing an existing file.

    The data goes to a temporary file in the same folder, which is synced and renamed; then the folder is synced. A
    writer that dies in between leaves at most a temporary file.

    Raises the errors of `encoded_layers`, and `OSError` if it cannot be written; then no file remains.
    """
    layout = layout_of(payload, codec)
    head = header_bytes(record, fingerprint, layout, created_s, (0,) * layout.num_layers)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    checksums: list[int] = []
    renamed = False
    try:
        file = os.open(temporary, _WRITE_FLAGS, 0o600)
        try:
            # The header is written last, into reserved space: its checksums are known only then.
            offset = len(head)
            for run in encoded_layers(record, payload, layout):
                checksums.append(zlib.crc32(run))
                offset = _write_all(file, run, offset)
            head = header_bytes(record, fingerprint, layout, created_s, tuple(checksums))
            _write_all(file, head, 0)
            os.fsync(file)
        finally:
            os.close(file)
        temporary.replace(path)
        renamed = True
        sync_folder(path.parent)
    except BaseException:  # Ctrl-C too must leave nothing behind
        with suppress(OSError):
            (path if renamed else temporary).unlink()
        raise
    return parse_header(head, offset)


def read_header(path: Path) -> SegmentHeader:
    """The validated header of a segment file. Its id must be the file's name.

    Raises:
        FileNotFoundError: there is no such file.
        SegmentRefused: it is not a whole segment that this version reads, or it is not readable.
    """
    try:
        with _open_regular(path) as (file, size):
            whole = os.pread(file, _FIRST_READ_BYTES, 0)
            needed = header_size(whole, size)
            if needed > len(whole):
                rest = bytearray(needed - len(whole))
                read = _read_into(file, memoryview(rest), len(whole))
                whole += rest[:read]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SegmentRefused(FileProblem.UNREADABLE, str(error)) from error
    header = parse_header(whole, size)
    if header.record.id != path.stem:
        raise SegmentRefused(FileProblem.CORRUPT, f"it contains segment {header.record.id}, which is not its name")
    return header


@contextmanager
def _open_regular(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file; a link, folder or device is refused as foreign."""
    try:
        file = os.open(path, _READ_FLAGS)
    except OSError as error:
        if path.is_symlink():
            raise SegmentRefused(FileProblem.FOREIGN, "a link, which is never followed") from error
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise SegmentRefused(FileProblem.FOREIGN, "not a regular file")
        yield file, status.st_size
    finally:
        os.close(file)


def _write_all(file: int, data: bytes | bytearray, offset: int) -> int:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view = view[written:]
        offset = offset + written
    return offset


def _read_into(file: int, view: memoryview, offset: int) -> int:
    """Fill `view` from file position `offset`; returns fewer bytes only at the end of the file."""
    read = 0
    while read < len(view):
        count = os.preadv(file, [view[read:]], offset + read)
        if count == 0:
            break
        read += count
    return read
