"""`POST /v1/embeddings`: vectors of the embedder that searches new corpora, in OpenAI's form."""

from base64 import b64encode
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.retrieval.embedders import Embedder, make_embedder
from chunkweave_server.bodies import BodyRoute
from chunkweave_server.errors import HttpError, error_responses
from chunkweave_server.fields import UNKNOWN_HEADER, as_header
from chunkweave_server.gate import NEEDS_KEY, OfTenant
from chunkweave_server.replies import rendered, with_items
from chunkweave_server.requests import EmbeddingsBody
from chunkweave_server.service import Parts, ReadyParts
from chunkweave_server.tenants import Tenant
from chunkweave_server.threads import unless_gone

_AT_A_TIME = 16
"""Texts that are embedded in one turn of a tenant."""

_MOST_CHARACTERS = 64 << 10
"""Most characters of a text; embedders read far fewer."""

_CLIENTS_DEFAULTS = ("text-embedding-ada-002", "text-embedding-3-small", "text-embedding-3-large")
"""Names that clients send by default; the answer's `model` is the embedder's own."""

embeddings = APIRouter(prefix="/v1", tags=["answers"], dependencies=NEEDS_KEY, route_class=BodyRoute)


@embeddings.post("/embeddings", responses=error_responses(400, 404, 503))
async def embed(body: EmbeddingsBody, request: Request, parts: ReadyParts, tenant: OfTenant) -> Response:
    """Vectors of texts, of length 1. Tokens are counted by the served model's tokenizer."""
    for place, text in enumerate(body.texts):
        if not text.strip() or len(text) > _MOST_CHARACTERS:
            message = f"a text must have 1 to {_MOST_CHARACTERS} characters, other than white space"
            raise HttpError(400, message, param="input" if isinstance(body.input, str) else f"input[{place}]")
    with parts.limits.occupy(tenant.name):
        content = await unless_gone(request.receive, _embedded(body, parts, tenant))
    response = Response(content, media_type="application/json")
    if unknown := body.unknown:
        response.headers[UNKNOWN_HEADER] = as_header(unknown)
    return response


async def _embedded(body: EmbeddingsBody, parts: Parts, tenant: Tenant) -> bytes:
    threads = parts.corpora.searching
    embedder = await threads.run(tenant.name, make_embedder)
    if body.model not in (None, embedder.name, *_CLIENTS_DEFAULTS):
        message = f"no embedding model {body.model!r}: this server embeds with {embedder.name!r}"
        raise HttpError(404, message, param="model", code="model_not_found")
    if body.dimensions not in (None, embedder.dimension):
        raise HttpError(400, f"dimensions must be {embedder.dimension}, or left out", param="dimensions")
    data: list[bytes] = []
    tokens = 0
    for start in range(0, len(body.texts), _AT_A_TIME):
        work = partial(_vectors, embedder, parts.started.tokenizer, body, start)
        vectors, more = await threads.run(tenant.name, work)
        data += vectors
        tokens += more
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return with_items({"object": "list", "model": embedder.name, "usage": usage}, "data", data)


def _vectors(embedder: Embedder, tokenizer: TextTokenizer, body: EmbeddingsBody, start: int) -> tuple[list[bytes], int]:
    """The vectors of the texts from `start` on as JSON, base64 of little-endian float32, and the number of tokens."""
    texts = body.texts[start : start + _AT_A_TIME]
    data = []
    for index, vector in enumerate(embedder.embed_documents(texts).astype("<f4"), start):
        coded = vector.tolist() if body.encoding_format == "float" else b64encode(vector.tobytes()).decode()
        data.append(rendered({"object": "embedding", "index": index, "embedding": coded}))
    return data, sum(len(tokenizer.encode(text)) for text in texts)
