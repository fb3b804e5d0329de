"""From which position on a request's blocks are apart from others' in vLLM's prefix cache."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def keep_apart(request: Any, salt: str, *, start: int = 0, block_tokens: int = 1) -> None:
    """Have a request's blocks found under `salt` from the block on in which position `start` lies.

    Those before are found by everyone with the request's own `cache_salt`. vLLM's hashes are a chain, each made of the
    one before; it is `block_tokens` that one covers.
    """
    shared, hasher = start // block_tokens, request._block_hasher
    if shared and hasher is not None:
        request._block_hasher = _SaltedHasher(hasher, shared, salt.encode())
    else:
        request.cache_salt = f"{request.cache_salt or ''}|{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()


@dataclass(frozen=True, slots=True)
class _SaltedHasher:
    """Hashes a request's blocks as `plain` does, but that the one behind the first `shared` is made of the salt too.

    So are all after it, whenever they are hashed: also those of tokens that are generated.
    """

    plain: Callable[[Any], list[bytes]]
    shared: int
    salt: bytes

    def __call__(self, request: Any) -> list[bytes]:
        """The hashes of the blocks that are full, and have none yet."""
        there = request.block_hashes
        found = self.plain(request)
        missing = self.shared - len(there)
        if missing < 0 or len(found) <= missing:
            return found
        before = [*there, *found[:missing]]
        request.block_hashes = [*before[:-1], hashlib.blake2b(before[-1] + self.salt, digest_size=32).digest()]
        try:
            return [*found[:missing], *self.plain(request)]
        finally:
            request.block_hashes = there
