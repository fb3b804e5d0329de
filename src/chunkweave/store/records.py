"""What the store knows of one segment. The tensors themselves live in a tier."""

import hashlib
from dataclasses import dataclass
from typing import Self

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
    what full prefill gives (up to rounding). Only exact segments may be in the path index.
    """

    id: SegmentId
    chunk_id: ChunkId
    context: Context
    token_ids: tuple[int, ...]
    exact: bool
    nbytes: int
    source: str = ""

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
    ) -> Self:
        """A record whose id follows from chunk and context."""
        return cls(segment_id(chunk_id, context), chunk_id, context, token_ids, exact, nbytes, source)

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
