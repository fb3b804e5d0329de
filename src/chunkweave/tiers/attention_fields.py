"""An attention profile as fields of a segment's header: text, as all of it."""

import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence

from chunkweave.store.attention_profile import AttentionProfile
from chunkweave.types import ChunkId

_FLOAT_BYTES = 4
"""Per-token masses are for rankings, so that float32 will do; they are two thirds of a header."""


def attention_fields(profile: AttentionProfile | None) -> dict[str, str]:
    """The fields that say what `attention_of` reads; none without a profile.

    Masses on chunks keep all their digits, those of single tokens are rounded to float32.
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
        "attention_received": _packed(profile.received),
    }


def attention_of(fields: Mapping[str, str]) -> AttentionProfile | None:
    """The profile that a header's `fields` have, or None if they have none.

    Raises:
        ValueError: a field is no such value, or they contradict each other.
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
        received=_unpacked(fields["attention_received"]),
    )


def _packed(masses: Sequence[float]) -> str:
    return b64encode(struct.pack(f"<{len(masses)}f", *masses)).decode()


def _unpacked(text: str) -> tuple[float, ...]:
    data = b64decode(text, validate=True)
    if len(data) % _FLOAT_BYTES:
        raise ValueError(f"{len(data)} bytes are no list of float32")
    return struct.unpack(f"<{len(data) // _FLOAT_BYTES}f", data)
