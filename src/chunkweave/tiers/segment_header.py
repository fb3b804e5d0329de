"""The header of a segment file: its fields, encoding and validation.

docs/disk-format.md describes the format. Bytes on disk and on the wire are the same.
"""

import enum
import hashlib
import json
import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from math import prod
from typing import Any

import torch

from chunkweave.errors import UsageError
from chunkweave.kv.segment import Codec, Shape, TensorLayout, make_codec
from chunkweave.store.records import AttentionProfile, SegmentRecord, segment_id
from chunkweave.types import ChunkId, Context, SegmentId

FORMAT_VERSION = 1
"""The version that is written, and the only one that is read."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 4 << 20
"""Far more than a chunk of 128k tokens and 1000 layers needs, yet cheap to allocate."""

_ALIGNMENT = 64
_NO_CHECKSUM = b"0" * 32
# Version and checksum are at the same place in every version, so a flipped bit is not mistaken for another format.
_HEAD = re.compile(rb'\{"__metadata__":\{"chunkweave_segment":"(\d{4})","checksum":"([0-9a-f]{32})",')
_ID = re.compile(r"[0-9a-f]{32}")

_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_KV_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPE_NAMES if dtype.is_floating_point}


class FileProblem(enum.Enum):
    """Why a file is refused."""

    CORRUPT = "corrupt"
    OTHER_VERSION = "other-version"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"
    UNDELETABLE = "undeletable"


class SegmentRefused(Exception):  # noqa: N818  (internal: users of the library never see it)
    """A file or message that is not one of our segments, or not a whole one. None of its data was used."""

    def __init__(self, problem: FileProblem, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The layout of a segment's tensors. `shape` is `[layers, 2, tokens, kv_heads, head_dim]`.

    `keys_at` is the position of the first token for which the keys are rotated (None: before RoPE). It does not affect
    the tensors' offsets.
    """

    shape: Shape
    dtype: torch.dtype
    codec: Codec
    keys_at: int | None = field(default=None, compare=False)

    @property
    def num_layers(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded tensors."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def tensors(self) -> tuple[TensorLayout, ...]:
        """The encoded tensors of one layer, in file order."""
        return self.codec.layout(self.shape[1:], self.dtype)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one encoded layer, which is contiguous."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """All fields of a segment file beside its tensors.

    `record.nbytes` is the size of the whole file; the tensors start at its byte `data_start`. `layer_checksums` are the
    CRC-32 of each encoded layer.
    """

    record: SegmentRecord
    fingerprint: str
    layout: SegmentLayout
    created_s: float
    layer_checksums: tuple[int, ...]
    data_start: int

    def layer_offset(self, index: int) -> int:
        """Offset of an encoded layer in the file, in bytes; raises `IndexError` if there is no such layer."""
        if not 0 <= index < self.layout.num_layers:
            raise IndexError(f"layer {index} of a segment with {self.layout.num_layers} layers")
        return self.data_start + index * self.layout.layer_bytes


def header_bytes(
    record: SegmentRecord, fingerprint: str, layout: SegmentLayout, created_s: float, layer_checksums: tuple[int, ...]
) -> bytes:
    """Length word and header, padded so that the tensors start at a multiple of 64 bytes.

    The number of bytes does not depend on checksums or time, so a file's size is known before it is encoded.
    `record.nbytes` is not written; it is the file's size.

    Raises:
        UsageError: record and layout are inconsistent or exceed the format's limits.
    """
    _require_fitting(record, layout)
    metadata = {
        "chunkweave_segment": f"{FORMAT_VERSION:04}",
        "checksum": _NO_CHECKSUM.decode(),
        "id": record.id,
        "chunk": record.chunk_id,
        "context": " ".join(record.context),
        "token_ids": " ".join(map(str, record.token_ids)),
        "source": record.source.encode("utf-8", "replace").decode(),
        "exact": "true" if record.exact else "false",
        "shape": " ".join(map(str, layout.shape)),
        "dtype": str(layout.dtype).removeprefix("torch."),
        "codec": layout.codec.name,
        "fingerprint": fingerprint,
        "created": datetime.fromtimestamp(created_s, UTC).isoformat(timespec="microseconds"),
        "layer_checksums": " ".join(f"{checksum:08x}" for checksum in layer_checksums),
        **({} if layout.keys_at is None else {"keys_at": str(layout.keys_at)}),
        **({"owner": record.owner} if record.owner else {}),
        **({"generation": str(record.generation)} if record.generation else {}),
        **({"contexts": "|".join(map(" ".join, record.contexts))} if record.contexts else {}),
        **({"read": " ".join(record.read)} if record.read else {}),
        **attention_fields(record.attention),
    }
    text = json.dumps({"__metadata__": metadata, **_tensor_table(layout)}, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(f"the header has {len(text)} bytes; the limit is {MAX_HEADER_BYTES}")
    whole = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return whole.replace(_NO_CHECKSUM, _checksum(whole), 1)


def header_size(head: bytes, file_bytes: int) -> int:
    """Bytes of length word and header of a file of `file_bytes` that begins with `head` (at least 8 bytes).

    Raises:
        SegmentRefused: the size is invalid.
    """
    if len(head) < LENGTH_BYTES:
        raise SegmentRefused(FileProblem.CORRUPT, f"a file of {len(head)} bytes is not a segment")
    size = int.from_bytes(head[:LENGTH_BYTES], "little")
    if size > MAX_HEADER_BYTES or LENGTH_BYTES + size > file_bytes:
        raise SegmentRefused(FileProblem.CORRUPT, f"it claims a header of {size} bytes in a file of {file_bytes}")
    return LENGTH_BYTES + size


def parse_header(data: bytes, file_bytes: int) -> SegmentHeader:
    """The header of a file of `file_bytes` that begins with `data`: at least length word and header.

    The checksum is compared before anything is parsed; every field is still validated afterwards.

    Raises:
        SegmentRefused: the header is foreign, damaged, of another version, or contradicts itself or the file.
    """
    size = header_size(data, file_bytes)
    whole = data[:size]
    if len(whole) < size:
        raise SegmentRefused(FileProblem.CORRUPT, f"the header needs {size} bytes, the data has {len(whole)}")
    head = _HEAD.match(whole, LENGTH_BYTES)
    if head is None:
        foreign = whole[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"
        problem = FileProblem.FOREIGN if foreign else FileProblem.CORRUPT
        raise SegmentRefused(problem, "it does not start with the header of a chunkweave segment")
    blank = whole[: head.start(2)] + _NO_CHECKSUM + whole[head.end(2) :]
    if _checksum(blank) != head[2]:
        raise SegmentRefused(FileProblem.CORRUPT, "the header's checksum does not match")
    version = int(head[1])
    if version != FORMAT_VERSION:
        reason = f"format version {version}; this chunkweave reads {FORMAT_VERSION}"
        raise SegmentRefused(FileProblem.OTHER_VERSION, reason)
    try:
        return _header_of(json.loads(whole[LENGTH_BYTES:]), len(whole), file_bytes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SegmentRefused(FileProblem.CORRUPT, f"the header contradicts itself ({error})") from error


def is_segment_id(text: str) -> bool:
    """Whether `text` is 32 lower-case hex digits, so that it cannot lead out of a folder."""
    return _ID.fullmatch(text) is not None


def _header_of(fields: dict[str, Any], data_start: int, file_bytes: int) -> SegmentHeader:
    metadata: dict[str, str] = fields.pop("__metadata__")
    chunk = _chunk_id(metadata["chunk"])
    context = tuple(map(_chunk_id, metadata["context"].split()))
    layout = SegmentLayout(
        tuple(map(int, metadata["shape"].split())),
        _KV_DTYPES[metadata["dtype"]],
        make_codec(metadata["codec"]),
        int(metadata["keys_at"]) if "keys_at" in metadata else None,
    )
    record = SegmentRecord(
        SegmentId(_an_id(metadata["id"])),
        chunk,
        context,
        tuple(map(int, metadata["token_ids"].split())),
        {"true": True, "false": False}[metadata["exact"]],
        file_bytes,
        metadata["source"],
        attention_of(metadata),
        metadata.get("owner", ""),
        int(metadata.get("generation", "0")),
        _contexts(metadata["contexts"]) if "contexts" in metadata else (),
        tuple(map(_chunk_id, metadata.get("read", "").split())),
    )
    _require_fitting(record, layout)
    checksums = tuple(int(checksum, 16) for checksum in metadata["layer_checksums"].split())
    if len(checksums) != layout.num_layers or fields != _tensor_table(layout):
        raise ValueError("its tensors do not match its shape and codec")
    if data_start + layout.num_layers * layout.layer_bytes != file_bytes:
        raise ValueError(f"its tensors do not fill a file of {file_bytes} bytes: cut short or extended")
    created_s = datetime.fromisoformat(metadata["created"]).timestamp()
    return SegmentHeader(record, metadata["fingerprint"], layout, created_s, checksums, data_start)


def _require_fitting(record: SegmentRecord, layout: SegmentLayout) -> None:
    shape = layout.shape
    if len(shape) != 5 or shape[1] != 2 or min(shape) < 1:
        raise UsageError(f"the shape must be [layers, 2, tokens, kv_heads, head_dim], but is {shape}")
    if layout.keys_at is not None and layout.keys_at < 0:
        raise UsageError(f"keys_at must not be negative, but is {layout.keys_at}")
    if layout.dtype not in _KV_DTYPES.values():
        raise UsageError(f"the format does not support KV of {layout.dtype}")
    if len(record.token_ids) != shape[2]:
        raise UsageError(f"{len(record.token_ids)} token ids, but KV of {shape[2]} tokens")
    if record.id != segment_id(record.chunk_id, record.context):
        raise UsageError(f"id {record.id} is not the id of its chunk and context")


@lru_cache(maxsize=1024)
def _tensor_table(layout: SegmentLayout) -> dict[str, Any]:
    """The tensor part of a safetensors header; callers must not change it."""
    table: dict[str, Any] = {}
    offset = 0
    for layer in range(layout.num_layers):
        for tensor in layout.tensors:
            table[f"layer.{layer:03}{tensor.suffix}"] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.nbytes],
            }
            offset += tensor.nbytes
    return table


def _chunk_id(text: str) -> ChunkId:
    return ChunkId(_an_id(text))


def _contexts(text: str) -> tuple[Context, ...]:
    return tuple(tuple(map(_chunk_id, context.split())) for context in text.split("|"))


def _an_id(text: str) -> str:
    if not is_segment_id(text):
        raise ValueError(f"{text[:40]!r} is not an id")
    return text


def _checksum(whole: bytes) -> bytes:
    return hashlib.blake2b(whole, digest_size=16).hexdigest().encode()


_FLOAT_BYTES = 4
"""Per-token masses are used for ranking only, so float32 is enough; they are two thirds of a header."""


def attention_fields(profile: AttentionProfile | None) -> dict[str, str]:
    """The header fields of a profile, which `attention_of` reads; empty without a profile.

    Masses on chunks keep full precision; those of single tokens are rounded to float32.
    """
    if profile is None:
        return {}
    return {
        "attention_chunks": " ".join(profile.chunks),
        "attention_lengths": " ".join(map(str, profile.lengths)),
        "attention_inter": " ".join(map(repr, profile.inter)),
        "attention_intra": repr(profile.intra),
        "attention_sink": repr(profile.sink),
        "attention_outward": _packed(profile.outward),
    }


def attention_of(fields: Mapping[str, str]) -> AttentionProfile | None:
    """The profile in a header's `fields`, or None if there is none.

    Raises:
        ValueError: a field is invalid, or fields contradict each other.
        KeyError: some fields are there, others missing.
    """
    if not any(name.startswith("attention_") for name in fields):
        return None
    return AttentionProfile(
        chunks=tuple(map(ChunkId, fields["attention_chunks"].split())),
        lengths=tuple(map(int, fields["attention_lengths"].split())),
        inter=tuple(map(float, fields["attention_inter"].split())),
        intra=float(fields["attention_intra"]),
        sink=float(fields["attention_sink"]),
        outward=_unpacked(fields["attention_outward"]),
    )


def _packed(masses: Sequence[float]) -> str:
    return b64encode(struct.pack(f"<{len(masses)}f", *masses)).decode()


def _unpacked(text: str) -> tuple[float, ...]:
    data = b64decode(text, validate=True)
    if len(data) % _FLOAT_BYTES:
        raise ValueError(f"{len(data)} bytes are not a list of float32")
    return struct.unpack(f"<{len(data) // _FLOAT_BYTES}f", data)
