"""Segments as a blob store has them: their bytes, or only their headers, checked."""

from collections.abc import Callable

from chunkweave.kv.segment import SegmentLost
from chunkweave.tiers.blobs import BlobKey, BlobStore
from chunkweave.tiers.segment_bytes import MemorySegment, decode_header, decode_segment
from chunkweave.tiers.segment_header import LENGTH_BYTES, FileProblem, SegmentHeader, SegmentRefused, header_size

_HEAD_BYTES = 64 << 10
"""Read first of a header: all of it for chunks of some thousand tokens, for less than a round trip costs."""


def fetch_segment(
    blobs: BlobStore, key: BlobKey, *, max_bytes: int, report_lost: Callable[[SegmentLost], None] | None = None
) -> MemorySegment | None:
    """The segment under `key` with all its bytes, its header checked; None if there is none.

    Raises:
        SegmentRefused: what lies there is larger than `max_bytes`, or no whole segment that this version reads.
        OSError: the store has no answer.
    """
    data = blobs.get(key, max_bytes + 1)
    if data is None:
        return None
    if len(data) > max_bytes:
        raise SegmentRefused(FileProblem.CORRUPT, f"more than {max_bytes} bytes")
    return decode_segment(data, report_lost)


def fetch_header(blobs: BlobStore, key: BlobKey) -> SegmentHeader | None:
    """The checked header of the segment under `key`, in two calls unless it is very long; None if there is none.

    Raises:
        SegmentRefused: what lies there is no whole segment that this version reads.
        OSError: the store has no answer.
    """
    total_bytes, head = blobs.size(key), blobs.get(key, _HEAD_BYTES)
    if total_bytes is None or head is None:
        return None
    needed = header_size(head[:LENGTH_BYTES], total_bytes)
    return decode_header(head if needed <= len(head) else blobs.get(key, needed) or b"", total_bytes)
