"""Chunk identity: what makes two chunks the same for the cache (DESIGN.md §3.2)."""

import hashlib
import struct
from collections.abc import Sequence

from chunkweave.types import ChunkId


def chunk_id(fingerprint: str, cache_salt: str, token_ids: Sequence[int]) -> ChunkId:
    """BLAKE2b-128 over model fingerprint, cache salt and token ids, as 32 hex digits.

    Every field is preceded by its length, so that no two different inputs are the same bytes. Equal ids are
    no proof of equal tokens: the store compares the tokens on a hit.
    """
    digest = hashlib.blake2b(digest_size=16)
    for text in (fingerprint, cache_salt):
        encoded = text.encode("utf-8")
        digest.update(struct.pack("<Q", len(encoded)))
        digest.update(encoded)
    digest.update(struct.pack(f"<Q{len(token_ids)}I", len(token_ids), *token_ids))
    return ChunkId(digest.hexdigest())
