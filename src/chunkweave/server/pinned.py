"""Chunks that tenants keep from eviction, as long as the server runs."""

import asyncio
from collections.abc import Sequence

from chunkweave.engine.async_engine import AsyncEngine
from chunkweave.engine.engine import Engine
from chunkweave.server.auth import Tenant
from chunkweave.server.errors import HttpError
from chunkweave.server.settings import LimitSettings
from chunkweave.store.lease import TieredLease
from chunkweave.types import Chunk, ChunkId


class PinnedChunks:
    """One lease for each pinned chunk of each tenant, on its segments at the time of pinning.

    Belongs to the event loop's thread.
    """

    def __init__(self, engine: Engine, batching: AsyncEngine, settings: LimitSettings) -> None:
        self._engine = engine
        self._batching = batching
        self._budget_bytes = settings.pin_budget_bytes
        self._leases: dict[str, dict[ChunkId, TieredLease]] = {}

    async def pin(self, tenant: Tenant, chunks: Sequence[Chunk], cache_salt: str) -> int:
        """Pin what is stored of chunks; returns how many segments are.

        Raises:
            HttpError: 403, that and what the tenant has pinned is more than it may.
        """
        return await asyncio.wrap_future(
            self._batching.between_steps(lambda: self._pin(tenant.name, self._ids(tenant, chunks, cache_salt)))
        )

    async def unpin(self, tenant: Tenant, chunks: Sequence[Chunk], cache_salt: str) -> int:
        """Take pins back; returns how many chunks were pinned."""
        return await asyncio.wrap_future(
            self._batching.between_steps(lambda: self._unpin(tenant.name, self._ids(tenant, chunks, cache_salt)))
        )

    def release_all(self) -> None:
        """Take all pins back."""
        for leases in self._leases.values():
            for lease in leases.values():
                lease.release()
        self._leases.clear()

    def _ids(self, tenant: Tenant, chunks: Sequence[Chunk], cache_salt: str) -> list[ChunkId]:
        salt = tenant.salt(cache_salt)
        parts = [self._engine.builder.chunk_part(chunk, cache_salt=salt) for chunk in chunks]
        return list(dict.fromkeys(part.id for part in parts if part.id is not None))

    def _pin(self, tenant: str, ids: Sequence[ChunkId]) -> int:
        own = self._leases.setdefault(tenant, {})
        wanted = {*ids, *own}
        records = [record for record in self._engine.store.records() if record.chunk_id in wanted]
        if sum(record.nbytes for record in records) > self._budget_bytes:
            raise HttpError(403, f"more than {self._budget_bytes} bytes would be pinned", code="pin_budget_exceeded")
        pinned = 0
        for chunk in ids:
            lease = self._engine.store.lease(record.id for record in records if record.chunk_id == chunk)
            if lease.ids:
                own[chunk] = lease
                pinned += len(lease.ids)
        return pinned

    def _unpin(self, tenant: str, ids: Sequence[ChunkId]) -> int:
        own = self._leases.get(tenant, {})
        found = [lease for chunk in ids if (lease := own.pop(chunk, None)) is not None]
        for lease in found:
            lease.release()
        return len(found)
