"""`/v1/corpora`: make, fill, search and remove corpora."""

from collections.abc import Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, File, Query, UploadFile

from chunkweave.chunking.documents import SplitConfig
from chunkweave.retrieval.corpus import CorpusChange
from chunkweave.retrieval.documents import CorpusDocument, parse_corpus_documents
from chunkweave.retrieval.indexes import usual_top_k
from chunkweave.server.access import NEEDS_KEY, CorpusParts, OfTenant, WithCorpora
from chunkweave.server.keys import Tenant
from chunkweave.server.refusals import RefusalError
from chunkweave.server.requests import CorpusBody, IngestBody, IngestedDocument, SearchBody
from chunkweave.server.schema import refusals
from chunkweave.server.threads import in_thread, to_its_end

router = APIRouter(prefix="/v1/corpora", tags=["corpora"], dependencies=NEEDS_KEY)

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]


@router.get("", responses=refusals(503))
async def list_corpora(parts: CorpusParts, tenant: OfTenant) -> dict[str, Any]:
    """The corpora that you may search."""
    return {"object": "list", "data": [served.as_dict() for served in parts.corpora.all(tenant)]}


@router.post("", status_code=201, responses=refusals(400, 403, 409, 503))
async def create_corpus(body: CorpusBody, parts: CorpusParts, tenant: OfTenant) -> dict[str, Any]:
    """Make an empty corpus."""
    split = SplitConfig(body.chunk_tokens, body.overlap_tokens)
    return (await to_its_end(parts.corpora.create(tenant, body.name, split))).as_dict()


@router.get("/{name}", responses=refusals(404, 503))
async def get_corpus(name: str, parts: CorpusParts, tenant: OfTenant) -> dict[str, Any]:
    """One corpus."""
    return parts.corpora.get(tenant, name).as_dict()


@router.delete("/{name}", responses=refusals(403, 404, 503))
async def delete_corpus(name: str, parts: CorpusParts, tenant: OfTenant) -> dict[str, Any]:
    """Remove a corpus, and the KV of its chunks from every tier."""

    async def work() -> int:
        return await parts.answering.forget(tenant, await parts.corpora.delete(tenant, name))

    return {"name": name, "object": "corpus", "deleted": True, "segments_removed": await to_its_end(work())}


@router.get("/{name}/documents", responses=refusals(404, 503))
async def list_documents(
    name: str, parts: CorpusParts, tenant: OfTenant, limit: Limit = 100, offset: Offset = 0
) -> dict[str, Any]:
    """The documents of a corpus, in the order in which they were added."""
    async with parts.corpora.locked(parts.corpora.get(tenant, name)) as served:
        documents = served.corpus.documents
    data = [
        {"id": one.id, "title": one.title, "chunks": len(one.chunks), "metadata": dict(one.metadata)}
        for one in documents[offset : offset + limit]
    ]
    return {"object": "list", "data": data, "total": len(documents), "has_more": offset + limit < len(documents)}


@router.post("/{name}/documents", responses=refusals(400, 403, 404, 409, 503))
async def add_documents(name: str, body: IngestBody, parts: CorpusParts, tenant: OfTenant) -> dict[str, Any]:
    """Add texts; with `update` replace documents that have changed. An id that is not given is a hash of the text."""
    documents = [_document(one) for one in body.documents]
    return await _ingested(name, documents, body.update, parts, tenant)


@router.post("/{name}/documents/files", responses=refusals(400, 403, 404, 409, 503))
async def add_files(
    name: str, files: Annotated[list[UploadFile], File()], parts: CorpusParts, tenant: OfTenant, update: bool = False
) -> dict[str, Any]:
    """Add files: `.txt`, `.md` and the like, a document each, called as the file; `.jsonl`, a document a line."""
    documents: list[CorpusDocument] = []
    for file in files:
        data, called = await file.read(), PurePosixPath((file.filename or "").replace("\\", "/")).name
        if not called:
            raise RefusalError(400, "an uploaded file has no name", param="files")
        documents += await in_thread(partial(parse_corpus_documents, called, data))
    return await _ingested(name, documents, update, parts, tenant)


@router.delete("/{name}/documents/{document:path}", responses=refusals(403, 404, 503))
async def delete_document(name: str, document: str, parts: CorpusParts, tenant: OfTenant) -> dict[str, Any]:
    """Remove a document, and the KV of what no other document has from every tier."""
    served = parts.corpora.get(tenant, name, to_change=True)

    async def work() -> int:
        change = await parts.corpora.remove(served, document)
        return await _forget_gone(change, parts, tenant)

    return {"id": document, "object": "document", "deleted": True, "segments_removed": await to_its_end(work())}


@router.post("/{name}/search", responses=refusals(400, 404, 503))
async def search(name: str, body: SearchBody, parts: CorpusParts, tenant: OfTenant) -> dict[str, Any]:
    """The chunks that are nearest to a question, the best first; six, or all there are, where `top_k` is left out."""
    async with parts.corpora.locked(parts.corpora.get(tenant, name)) as served:
        k = usual_top_k(len(served.corpus)) if body.top_k is None else body.top_k
        found = await in_thread(lambda: served.corpus.search(body.query, k)) if k else ()
    return {"object": "list", "data": [one.as_dict() for one in found]}


def _document(one: str | IngestedDocument) -> CorpusDocument:
    document = IngestedDocument(text=one) if isinstance(one, str) else one
    made = CorpusDocument(document.id or "", document.text, document.title, document.metadata)
    return made if made.id else CorpusDocument(f"text-{made.digest[:16]}", made.text, made.title, made.metadata)


async def _ingested(
    name: str, documents: Sequence[CorpusDocument], update: bool, parts: WithCorpora, tenant: Tenant
) -> dict[str, Any]:
    served = parts.corpora.get(tenant, name, to_change=True)

    async def work() -> dict[str, Any]:
        change = await parts.corpora.ingest(served, documents, update=update)
        removed = await _forget_gone(change, parts, tenant)
        changed = {"added": change.added, "replaced": change.replaced, "unchanged": change.unchanged}
        return {
            **{what: list(ids) for what, ids in changed.items()},
            "segments_removed": removed,
            "corpus": served.as_dict(),
        }

    return await to_its_end(work())


async def _forget_gone(change: CorpusChange, parts: WithCorpora, tenant: Tenant) -> int:
    return await parts.answering.forget(tenant, (chunk.text for chunk in change.gone))
