"""The endpoints of the server."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, File, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

import chunkweave
from chunkweave.errors import DocumentError, NotRemovedError
from chunkweave.prompt.documents import SplitConfig
from chunkweave.retrieval.conversion import FileRead
from chunkweave.retrieval.corpus import CorpusChange
from chunkweave.retrieval.documents import MOST_DOCUMENTS, CorpusDocument, check_text_bytes
from chunkweave.retrieval.indexes import IndexKind, usual_top_k
from chunkweave.retrieval.reading import documents_of, rows_of, without_repeated
from chunkweave.retrieval.retrievers import RetrievedChunk
from chunkweave.types import Chunk
from chunkweave_server.answering import RunningAnswer
from chunkweave_server.backend import Forgotten
from chunkweave_server.bodies import NOTHING_NAMED, BodyRoute, say_that_nothing_was_named
from chunkweave_server.corpora import joined
from chunkweave_server.errors import NOT_READY_AGAIN_S, STREAMED, HttpError, error_responses, invalid_request
from chunkweave_server.fields import CAPPED_HEADER, UNKNOWN_HEADER, as_header
from chunkweave_server.gate import NEEDS_KEY, OfTenant
from chunkweave_server.metrics import CONTENT_TYPE
from chunkweave_server.observability import RequestMeta
from chunkweave_server.replies import EventStream, ReplyForm
from chunkweave_server.requests import (
    Body,
    ChatBody,
    ChunksBody,
    ClearBody,
    CompletionBody,
    CorpusBody,
    IngestBody,
    IngestedDocument,
    PromptBody,
    SearchBody,
    check_documents,
    chunks_of,
)
from chunkweave_server.service import AnyService, Parts, ReadyParts, Service
from chunkweave_server.tenants import Tenant
from chunkweave_server.threads import TenantThreads, in_thread, to_its_end, unless_gone

WITHOUT_KEY = (("GET", "/health"), ("GET", "/ready"), ("GET", "/version"))
"""Methods and paths that need no key: probes use them."""


class AnswerRoute(BodyRoute):
    """A route that forwards requests without documents to vLLM unchanged, if the backend is vLLM."""

    async def read(self, request: Request, kind: type[Body]) -> Request | Response:
        """The request with a validated body, or vLLM's response."""
        service: Service = request.app.state.service
        passed = None if service.backend.passthrough is None else await service.backend.passthrough.plain(request)
        if passed is not None:
            return passed
        try:
            return await super().read(request, kind)
        except (HttpError, RequestValidationError) as error:
            refused = error if isinstance(error, HttpError) else invalid_request(error.errors(), error.body)
            if service.parts is not None:
                service.parts.observer.failed(_meta(request), refused)
            raise refused from error


completions = APIRouter(prefix="/v1", tags=["answers"], dependencies=NEEDS_KEY, route_class=AnswerRoute)


@completions.post("/chat/completions", responses={**STREAMED, **error_responses(400, 404, 409, 429, 501, 503, 504)})
async def chat(body: ChatBody, request: Request, service: AnyService, parts: ReadyParts, tenant: OfTenant) -> Response:
    """Answer the user's message with `documents`, with chunks of a corpus, or without documents."""
    return await _answered(body, request, service, parts, tenant)


@completions.post("/completions", responses={**STREAMED, **error_responses(400, 404, 409, 429, 501, 503, 504)})
async def complete(
    body: PromptBody, request: Request, service: AnyService, parts: ReadyParts, tenant: OfTenant
) -> Response:
    """Answer one prompt: the same as a chat with this question and no system message."""
    return await _answered(body, request, service, parts, tenant)


async def _answered(body: CompletionBody, request: Request, service: Service, parts: Parts, tenant: Tenant) -> Response:
    model = body.model or parts.backend.name
    form = ReplyForm(isinstance(body, ChatBody), model, body.with_usage, body.return_token_ids, body.alternatives)
    meta = _meta(request)
    running = await unless_gone(request.receive, parts.answering.start(tenant, body, meta))
    response: Response
    if body.stream:
        try:
            # Until the first piece has arrived, an error can still set the status.
            first = await unless_gone(request.receive, anext(running))
        except BaseException:
            await running.aclose()
            raise
        events = form.events(running, first, body.n)
        response = EventStream(running, events, stalled_s=service.settings.listen.stalled_s)
    else:
        try:
            whole = await unless_gone(request.receive, _whole(form, running, service.threads))
        finally:
            await running.aclose()
        response = Response(whole, media_type="application/json")
    reuse = body.chunkweave
    finds = body.finds_chunks(service.settings.finding.find_chunks)
    if not (finds or body.documents or reuse.corpus or body.question.history):
        say_that_nothing_was_named()
        response.headers.append(*NOTHING_NAMED)
    if unknown := body.unknown:
        response.headers[UNKNOWN_HEADER] = as_header(unknown)
    most = service.settings.limits.max_answer_tokens
    if (body.answer_tokens or 0) > most:
        response.headers[CAPPED_HEADER] = str(most)
    return response


async def _whole(form: ReplyForm, running: RunningAnswer, threads: TenantThreads) -> bytes:
    """The body of an answer. Log-probabilities of many tokens take seconds to render, so a thread does it."""
    choices = await running.whole()
    assert running.end is not None, "the answer has ended"
    render = partial(form.whole, choices, running.end)
    return render() if form.alternatives is None else await threads.run(running.tenant, render)


def _meta(request: Request) -> RequestMeta:
    return RequestMeta(request.state.request_id, request.state.tenant.name, request.headers.get("traceparent"))


models = APIRouter(prefix="/v1", tags=["answers"], dependencies=NEEDS_KEY)


@models.get("/models", responses=error_responses(503))
async def list_models(service: AnyService) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model(service)]}


@models.get("/models/{name}", responses=error_responses(404, 503))
async def get_model(name: str, service: AnyService) -> dict[str, Any]:
    """The model of this name."""
    if name != service.backend.name:
        message = f"no model {name!r}: this server serves {service.backend.name!r}"
        raise HttpError(404, message, param="model", code="model_not_found")
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.backend.name, "object": "model", "created": service.created, "owned_by": "chunkweave"}


corpora = APIRouter(prefix="/v1/corpora", tags=["corpora"], dependencies=NEEDS_KEY, route_class=BodyRoute)

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]


@corpora.get("", responses=error_responses(503))
async def list_corpora(parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """The corpora that you may search."""
    return {"object": "list", "data": [served.as_dict() for served in parts.corpora.all(tenant)]}


@corpora.post("", status_code=201, responses=error_responses(400, 403, 409, 503, 507))
async def create_corpus(body: CorpusBody, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Create an empty corpus."""
    split = SplitConfig(body.chunk_tokens, body.overlap_tokens)
    kind = None if body.index is None else IndexKind(body.index)
    return (await to_its_end(parts.corpora.create(tenant, body.name, split, kind))).as_dict()


@corpora.get("/{name}", responses=error_responses(404, 503))
async def get_corpus(name: str, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """One corpus."""
    return parts.corpora.get(tenant, name).as_dict()


@corpora.delete("/{name}", responses=error_responses(403, 404, 503, 507))
async def delete_corpus(name: str, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Delete a corpus, and remove the KV of its chunks from every tier."""

    async def work() -> Forgotten:
        return await parts.answering.forget(tenant, await parts.corpora.delete(tenant, name))

    with parts.limits.occupy(tenant.name):
        removed = await to_its_end(work())
    return {"name": name, "object": "corpus", "deleted": True, **removed.as_dict()}


@corpora.get("/{name}/documents", responses=error_responses(404, 503))
async def list_documents(
    name: str, parts: ReadyParts, tenant: OfTenant, limit: Limit = 100, offset: Offset = 0
) -> dict[str, Any]:
    """The documents of a corpus, in the order in which they were added."""
    async with parts.corpora.locked(parts.corpora.get(tenant, name)) as served:
        documents = served.corpus.documents
    data = [
        {
            "id": document.id,
            "title": document.title,
            "chunks": len(document.chunks),
            "metadata": dict(document.metadata),
        }
        for document in documents[offset : offset + limit]
    ]
    return {"object": "list", "data": data, "total": len(documents), "has_more": offset + limit < len(documents)}


@corpora.post("/{name}/documents", responses=error_responses(400, 403, 404, 409, 503, 507))
async def add_documents(
    name: str, body: IngestBody, request: Request, parts: ReadyParts, tenant: OfTenant
) -> dict[str, Any]:
    """Add texts; with `update`, replace changed documents. The default id is a hash of the text."""

    async def work() -> dict[str, Any]:
        documents = await parts.corpora.changing.run(
            tenant.name, lambda: [_document(document) for document in body.documents]
        )
        return await _ingested(name, documents, body.update, parts, tenant)

    with parts.limits.occupy(tenant.name):
        return await unless_gone(request.receive, work())


@corpora.post("/{name}/documents/files", responses=error_responses(400, 403, 404, 409, 415, 503, 507))
async def add_files(
    name: str,
    files: Annotated[list[UploadFile], File()],
    request: Request,
    parts: ReadyParts,
    tenant: OfTenant,
    update: bool = False,
    strict: bool = False,
) -> dict[str, Any]:
    """Add files to a corpus.

    A text, Markdown, CSV, HTML, PDF or DOCX file becomes one document with the file's name; a JSON lines file, one
    document for each line. Unreadable files are left out, and `files` has the reason; with `strict` nothing is added
    then.
    """

    async def work() -> dict[str, Any]:
        parts.corpora.get(tenant, name, to_change=True)
        reads: list[FileRead] = []
        for file in files:
            called = PurePosixPath((file.filename or "").replace("\\", "/")).name
            if not called:
                raise HttpError(400, "an uploaded file has no name", param="files")
            reads.append(await parts.corpora.read(tenant, called, file.file))
            if sum(len(read.documents) for read in reads) > MOST_DOCUMENTS:
                raise HttpError(400, f"an upload may have at most {MOST_DOCUMENTS} documents", param="files")
        reads = without_repeated(reads)
        done = await _ingested(name, _readable(reads, strict), update, parts, tenant)
        changes = {what: done[what] for what in ("added", "replaced", "unchanged")}
        return {**done, "files": rows_of(reads, changes)}

    return await unless_gone(request.receive, work())


def _readable(reads: Sequence[FileRead], strict: bool) -> list[CorpusDocument]:
    """The documents of uploaded files.

    Raises:
        HttpError: no file could be read, or with `strict` not all: 415 if a file's kind is unsupported, else 400.
    """
    try:
        return documents_of(reads, strict=strict)
    except DocumentError as error:
        unreadable = any(read.unreadable for read in reads)
        status, code = (415, "unreadable_file") if unreadable else (400, "bad_file")
        more = {"files": rows_of(reads, {})}
        raise HttpError(status, str(error), param="files", code=code, more=more) from error


@corpora.delete("/{name}/documents/{document:path}", responses=error_responses(403, 404, 503, 507))
async def delete_document(name: str, document: str, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Delete a document, and remove the KV of chunks that no other document has from every tier."""
    served = parts.corpora.get(tenant, name, to_change=True)

    async def work() -> Forgotten:
        change = await parts.corpora.remove(served, document)
        return await _forget_gone(change, parts, tenant)

    with parts.limits.occupy(tenant.name):
        removed = await to_its_end(work())
    return {"id": document, "object": "document", "deleted": True, **removed.as_dict()}


@corpora.post("/{name}/search", responses=error_responses(400, 404, 503))
async def search(name: str, body: SearchBody, request: Request, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """The chunks nearest to a question, best first. Default of `top_k`: 6, or all if there are fewer."""

    async def work() -> Sequence[RetrievedChunk]:
        await parts.answering.check_length(tenant, body.query)
        async with parts.corpora.locked(parts.corpora.get(tenant, name)) as served:
            k = usual_top_k(len(served.corpus)) if body.top_k is None else body.top_k
            if not k:
                return ()
            return await parts.corpora.searching.run(tenant.name, lambda: served.corpus.search(body.query, k))

    with parts.limits.occupy(tenant.name):
        chunks = await unless_gone(request.receive, work())
    return {"object": "list", "data": [chunk.as_dict() for chunk in chunks]}


def _document(entry: str | IngestedDocument) -> CorpusDocument:
    document = IngestedDocument(text=entry) if isinstance(entry, str) else entry
    check_text_bytes(document.id or document.text[:20], len(document.text))
    made = CorpusDocument(document.id or "", document.text, document.title, document.metadata)
    return made if made.id else CorpusDocument(f"text-{made.digest[:16]}", made.text, made.title, made.metadata)


async def _ingested(
    name: str, documents: Sequence[CorpusDocument], update: bool, parts: Parts, tenant: Tenant
) -> dict[str, Any]:
    """Add documents to a corpus. Removes the KV of replaced documents, also after an error or a cancellation."""
    served = parts.corpora.get(tenant, name, to_change=True)
    changes: list[CorpusChange] = []
    try:
        await parts.corpora.ingest(tenant, served, documents, changes, update=update)
    except BaseException:
        with suppress(NotRemovedError):  # logged; the store retries it
            await to_its_end(_forget_gone(joined(changes), parts, tenant))
        raise
    change = joined(changes)
    left = 0
    try:
        removed = await to_its_end(_forget_gone(change, parts, tenant))
    except NotRemovedError as error:  # the documents were added nevertheless
        removed, left = Forgotten(error.removed), error.left
    changed = {"added": change.added, "replaced": change.replaced, "unchanged": change.unchanged}
    return {
        **{what: list(ids) for what, ids in changed.items()},
        **removed.as_dict(),
        "segments_left": left,
        "corpus": served.as_dict(),
    }


async def _forget_gone(change: CorpusChange, parts: Parts, tenant: Tenant) -> Forgotten:
    return await parts.answering.forget(tenant, (chunk.text for chunk in change.gone))


cache = APIRouter(prefix="/v1/cache", tags=["cache"], dependencies=NEEDS_KEY, route_class=BodyRoute)


@cache.get("", responses=error_responses(503))
async def stats(parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Totals of your answers; for admins also those of all tenants, and statistics of the backend."""
    body: dict[str, Any] = {"tenant": parts.answering.counts[tenant.name].as_dict()}
    if not tenant.admin:
        return body
    all_tenants = {"all_tenants": parts.answering.counted(tenant).as_dict()}
    return {**body, **all_tenants, **await in_thread(parts.backend.cache.stats)}


@cache.post("/warm", responses=error_responses(400, 404, 502, 503))
async def warm(body: ChunksBody, request: Request, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Compute missing chunks of documents or of a corpus ahead of requests."""
    begin = parts.backend.cache.warm
    with parts.limits.occupy(tenant.name):
        chunks = await _chunks(body, parts, tenant)
        computed = await unless_gone(request.receive, begin(tenant.name, chunks, tenant.salt(body.cache_salt)))
    return {"chunks": len(chunks), "computed": computed}


@cache.post("/clear", responses=error_responses(400, 403, 404, 503))
async def clear(body: ClearBody, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Remove the KV of documents or of a corpus from every tier; for admins, `everything` of all tenants."""
    if body.everything and not tenant.admin:
        raise HttpError(403, "only an admin may clear everything: name documents or a corpus", code="not_admin")
    commands = parts.backend.cache
    with parts.limits.occupy(tenant.name):
        if body.everything:
            return {"segments_removed": await commands.clear()}
        texts = [chunk.text for chunk in await _chunks(body, parts, tenant)]
        return dict((await parts.answering.forget(tenant, texts, body.cache_salt)).as_dict())


async def _chunks(body: ChunksBody, parts: Parts, tenant: Tenant) -> Sequence[Chunk]:
    """The chunks of a command.

    Raises:
        HttpError: no documents or too many, or an unknown corpus.
        PromptTooLongError: a document is longer than any prompt.
    """
    if body.corpus is not None:
        async with parts.corpora.locked(parts.corpora.get(tenant, body.corpus)) as served:
            return await parts.corpora.searching.run(tenant.name, served.corpus.chunks)
    if not body.documents:
        raise HttpError(400, "name documents or a corpus", param="documents")
    check_documents(len(body.documents), parts.limits.settings)
    chunks = chunks_of(body.documents)
    for place, chunk in enumerate(chunks):
        await parts.answering.check_length(tenant, chunk.text, f"documents[{place}]")
    return chunks


operation = APIRouter(tags=["operation"], dependencies=NEEDS_KEY)


@operation.get("/metrics", response_class=Response, responses=error_responses(401, 403, 503))
async def metrics(parts: ReadyParts, tenant: OfTenant) -> Response:
    """Metrics in Prometheus's text format. If the server has API keys, an admin's key is needed."""
    _require_admin(tenant)
    return Response(await parts.metrics(), media_type=CONTENT_TYPE)


def _require_admin(tenant: Tenant) -> None:
    if not tenant.admin:
        raise HttpError(403, "only an admin may see data of all tenants", code="not_admin")


open_to_all = APIRouter(tags=["operation"])


@open_to_all.get("/health")
async def health() -> dict[str, str]:
    """200 while the process responds."""
    return {"status": "ok"}


@open_to_all.get("/ready", responses={503: {"description": "not ready, or stopping; see `stage`"}})
async def ready(service: AnyService) -> JSONResponse:
    """200 if requests are answered, else 503."""
    is_ready = service.ready
    again = {} if is_ready else {"retry-after": str(ceil(NOT_READY_AGAIN_S))}
    return JSONResponse({"ready": is_ready, "stage": service.state}, 200 if is_ready else 503, again)


@open_to_all.get("/version")
async def version() -> dict[str, Any]:
    """The version of chunkweave."""
    return {"version": chunkweave.__version__}
