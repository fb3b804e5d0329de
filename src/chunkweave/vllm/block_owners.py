"""Records the cache salt of blocks in vLLM's own prefix cache, so that those of one salt can be forgotten."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, make_block_hash_with_group_id

_HASHES_PER_BLOCK = 4
"""Most hashes recorded per vLLM block: a hash may cover less than a block, or outlive its block."""


class BlockOwners:
    """Forgets blocks by the `cache_salt` of the requests that computed them. Called from the scheduler's thread only.

    A block with an unknown salt is forgotten with every salt. Later requests do not find forgotten blocks; running
    requests keep them, and vLLM frees them as usual.
    """

    def __init__(self, manager: Any) -> None:
        """`manager` is vLLM's `KVCacheManager`."""
        self._manager = manager
        self._salts: OrderedDict[bytes, str] = OrderedDict()
        """By block hash, most recently used last."""
        self._live: dict[str, tuple[Any, str]] = {}
        self._swept: set[str] = set()
        """Live requests that may use removed KV: their blocks are forgotten again when they end."""

    def begin(self, request: Any) -> None:
        """Add a new request, with or without chunks; its `cache_salt` is still the client's."""
        self._live[request.request_id] = request, request.cache_salt or ""

    def finish(self, request: Any) -> None:
        """Remove an ended request, whose hashes still exist."""
        _, salt = self._live.pop(request.request_id, (None, ""))
        if request.request_id in self._swept:
            self._swept.discard(request.request_id)
            self._forget_hashes(request.block_hashes)
        else:
            self._note(request.block_hashes, salt)

    def forget(self, salts: Collection[str] | None) -> None:
        """Forget all blocks of `salts` (None: all), and blocks of their live requests when these end."""
        for request, salt in self._live.values():
            self._note(request.block_hashes, salt)
        self._swept.update(name for name, (_, salt) in self._live.items() if salts is None or salt in salts)
        for pool in self._pools():
            pool.evict_blocks({block.block_id for block in pool.blocks if self._is_of(salts, pool, block)})

    def _is_of(self, salts: Collection[str] | None, pool: Any, block: Any) -> bool:
        """Whether a block is cached, and not only under other salts."""
        if block.block_hash is None:
            return False
        keys = (block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ()))
        owners = [self._salts.get(get_block_hash(key)) for key in keys]
        return salts is None or any(owner is None or owner in salts for owner in owners)

    def _forget_hashes(self, hashes: Iterable[bytes]) -> None:
        managers = self._manager.coordinator.single_type_managers
        for block_hash in hashes:
            self._salts.pop(block_hash, None)
            for group, manager in enumerate(managers):
                key = make_block_hash_with_group_id(block_hash, group)
                pool = manager.block_pool
                while (block := pool.cached_block_hash_to_block.get_one_block(key)) is not None:
                    pool.evict_blocks({block.block_id})

    def _note(self, hashes: Iterable[bytes], salt: str) -> None:
        for block_hash in hashes:
            self._salts[block_hash] = salt
            self._salts.move_to_end(block_hash)
        most = _HASHES_PER_BLOCK * sum(pool.num_gpu_blocks for pool in self._pools())
        while len(self._salts) > most:
            self._salts.popitem(last=False)

    def _pools(self) -> Iterator[Any]:
        managers = self._manager.coordinator.single_type_managers
        yield from dict.fromkeys(manager.block_pool for manager in managers)
