"""Separates a request's blocks in vLLM's prefix cache, from one position on."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def keep_apart(request: Any, salt: str, *, start: int = 0, block_tokens: int = 1) -> None:
    """Salt the hashes of a request's blocks with `salt`, from the block that contains position `start` on.

    Earlier blocks are shared with all requests of the same `cache_salt`. vLLM's hashes are a chain, each derived from
    the one before; one covers `block_tokens` tokens.
    """
    shared = start // block_tokens
    hasher = request._block_hasher
    if shared and hasher is not None:
        request._block_hasher = SaltedHasher(hasher, shared, salt.encode())
    else:
        request.cache_salt = f"{request.cache_salt or ''}|{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()


@dataclass(frozen=True, slots=True)
class SaltedHasher:
    """Hashes a request's blocks as `plain` does, but adds the salt to the hash after the first `shared` ones.

    All later hashes derive from that one, whenever they are made, including those of generated tokens.
    """

    plain: Callable[[Any], list[bytes]]
    shared: int
    salt: bytes

    def __call__(self, request: Any) -> list[bytes]:
        """The hashes of full blocks that have none yet."""
        stored_hashes = request.block_hashes
        plain_hashes = self.plain(request)
        missing = self.shared - len(stored_hashes)
        if missing < 0 or len(plain_hashes) <= missing:
            return plain_hashes
        hashes = [*stored_hashes, *plain_hashes[:missing]]
        request.block_hashes = [*hashes[:-1], hashlib.blake2b(hashes[-1] + self.salt, digest_size=32).digest()]
        try:
            return [*plain_hashes[:missing], *self.plain(request)]
        finally:
            request.block_hashes = stored_hashes
