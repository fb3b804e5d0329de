"""`/v1/cache`: what is stored, and computing, pinning and removing it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from chunkweave.server.access import NEEDS_KEY, OfTenant, ReadyParts
from chunkweave.server.answering import chunks_of
from chunkweave.server.keys import Tenant
from chunkweave.server.refusals import RefusalError
from chunkweave.server.request_checks import check_documents
from chunkweave.server.requests import ChunksBody, ClearBody
from chunkweave.server.schema import refusals
from chunkweave.server.service import Parts
from chunkweave.server.streams import unless_gone
from chunkweave.server.threads import in_thread
from chunkweave.types import Chunk

router = APIRouter(prefix="/v1/cache", tags=["cache"], dependencies=NEEDS_KEY)


@router.get("", responses=refusals(503))
async def stats(parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """What your answers reused so far; for admins also what all tiers hold and what the engine does."""
    told: dict[str, Any] = {"tenant": parts.answering.counts[tenant.name].as_dict()}
    if tenant.admin:
        told["store"] = asdict(await in_thread(lambda: parts.engine.store.stats))
        told["engine"] = asdict(parts.batching.stats)
    return told


@router.post("/warm", responses=refusals(400, 404, 503))
async def warm(body: ChunksBody, request: Request, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Compute what is not stored of documents, or of a whole corpus, before somebody asks."""
    chunks = await _chunks(body, parts, tenant)
    computed = await unless_gone(request, parts.answering.warm(tenant, chunks, body.cache_salt))
    return {"chunks": len(chunks), "computed": computed}


@router.post("/pin", responses=refusals(400, 403, 404, 503))
async def pin(body: ChunksBody, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Keep what is stored of documents or of a corpus from eviction, until it is unpinned or the server ends."""
    chunks = await _chunks(body, parts, tenant)
    return {"chunks": len(chunks), "segments_pinned": await parts.pins.pin(tenant, chunks, body.cache_salt)}


@router.post("/unpin", responses=refusals(400, 404, 503))
async def unpin(body: ChunksBody, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Take pins back."""
    chunks = await _chunks(body, parts, tenant)
    return {"chunks": len(chunks), "chunks_unpinned": await parts.pins.unpin(tenant, chunks, body.cache_salt)}


@router.post("/clear", responses=refusals(400, 403, 404, 503))
async def clear(body: ClearBody, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Remove what is stored of documents or of a corpus from every tier; `everything` of all tenants is for admins."""
    if body.everything:
        if not tenant.admin:
            raise RefusalError(403, "only an admin may clear everything: name documents or a corpus", code="not_admin")
        before = len(parts.engine.store)
        await in_thread(parts.engine.store.clear)
        return {"segments_removed": before}
    chunks = await _chunks(body, parts, tenant)
    return {"segments_removed": await parts.answering.forget(tenant, (chunk.text for chunk in chunks), body.cache_salt)}


async def _chunks(body: ChunksBody, parts: Parts, tenant: Tenant) -> Sequence[Chunk]:
    """The chunks that a command is about.

    Raises:
        RefusalError: none are named, or a corpus that is not there.
    """
    if body.corpus is not None:
        async with parts.corpora.locked(parts.corpora.get(tenant, body.corpus)) as served:
            return served.corpus.chunks()
    if not body.documents:
        raise RefusalError(400, "name documents or a corpus", param="documents")
    check_documents(len(body.documents), parts.answering.settings)
    return chunks_of(body.documents)
