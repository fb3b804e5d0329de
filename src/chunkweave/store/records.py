"""What the store knows of one segment. The tensors themselves live in a tier."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from chunkweave.store.attention_profile import AttentionProfile
from chunkweave.types import ChunkId, Context, SegmentId


def segment_id(chunk_id: ChunkId, context: Context) -> SegmentId:
    """Id of the segment of `chunk_id` computed in `context` (BLAKE2b-128, 32 hex digits)."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (*context, chunk_id):
        digest.update(part.encode("ascii"))
    digest.update(len(context).to_bytes(4, "little"))
    return SegmentId(digest.hexdigest())


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One stored segment: the KV of `token_ids`, computed after the parts named in `context`.

    `exact` means that every token before it was exact too when it was computed, so that its KV equals
    what full prefill gives (up to rounding). Only exact segments may be in the path index. `attention` is what
    its tokens looked at then, if somebody measured it.

    Raises:
        ValueError: the attention profile is of another number of tokens, or has chunks that are not in the context.
    """

    id: SegmentId
    chunk_id: ChunkId
    context: Context
    token_ids: tuple[int, ...]
    exact: bool
    nbytes: int
    source: str = ""
    attention: AttentionProfile | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.attention is None:
            return
        if self.attention.tokens != len(self.token_ids):
            raise ValueError(f"an attention profile of {self.attention.tokens} tokens for {len(self.token_ids)}")
        if not set(self.attention.chunks) <= set(self.context):
            raise ValueError("an attention profile has chunks that are not in the segment's context")

    @classmethod
    def of(
        cls,
        chunk_id: ChunkId,
        context: Context,
        token_ids: tuple[int, ...],
        *,
        exact: bool,
        nbytes: int,
        source: str = "",
        attention: AttentionProfile | None = None,
    ) -> Self:
        """A record whose id follows from chunk and context."""
        return cls(segment_id(chunk_id, context), chunk_id, context, token_ids, exact, nbytes, source, attention)

    @property
    def alone(self) -> bool:
        """Computed with nothing before it (but BOS)."""
        return not self.context

    @property
    def document(self) -> str:
        """The document of a chunk called `document#3`, or of one that is its whole document."""
        name, _, number = self.source.rpartition("#")
        return name if name and number.isdecimal() else self.source

    def __len__(self) -> int:
        return len(self.token_ids)


def union(*groups: Iterable[SegmentRecord]) -> tuple[SegmentRecord, ...]:
    """Each segment of `groups` once: the exact record before an inexact one, else the one that comes first."""
    best: dict[SegmentId, SegmentRecord] = {}
    for record in (record for group in groups for record in group):
        held = best.get(record.id)
        if held is None or (record.exact and not held.exact):
            best[record.id] = record
    return tuple(best.values())
