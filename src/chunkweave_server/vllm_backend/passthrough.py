"""Requests without documents, and the endpoints of vLLM that are not ours: handed to a vLLM server as they are."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from chunkweave.planning.method_choice import FIELD
from chunkweave.vllm.inventory import STORED
from chunkweave.vllm.removal import FORGET
from chunkweave_server.bodies import (
    NOTHING_NAMED,
    beside,
    parsed_json,
    place_if_large,
    place_of_tenant,
    refuse_costly,
    say_that_nothing_was_named,
)
from chunkweave_server.errors import HttpError
from chunkweave_server.gate import OfTenant
from chunkweave_server.markers import marks_documents
from chunkweave_server.tenants import Tenant
from chunkweave_server.threads import ClientGoneError, unless_gone
from chunkweave_server.vllm_backend.fleet import Fleet, Replica
from chunkweave_server.vllm_backend.upstream import (
    UpstreamFailedError,
    UpstreamLostError,
    failed_reply,
    handed_back,
    refusal,
)

_OURS = ("documents", FIELD)
"""A completion request with one of these is the server's; all others are handed through."""

_TEXTS = ("messages", "prompt")
"""Where a completion request has texts."""

_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Endpoints that an adapter answers at."""

SALTED = (
    *_GENERATING,
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
)
"""Endpoints whose bodies take a `cache_salt`: vLLM's own prefix cache is separated by it."""

_TRIES = 2

_DATA = b"data: "
_ERROR = b'data: {"error"'
_MOST_ERROR_BYTES = 1 << 16
"""Of an error that vLLM answers with: what is longer is not read to its end."""

_MOST_VALUES = 300_000
"""In a body that is handed on: a prompt may be a list of token ids."""

_FOR_ALL: Mapping[str, Sequence[str]] = {
    "GET": ("/v1/models", "/v1/models/{model:path}"),
    "POST": (*SALTED, "/detokenize", "/tokenize"),
}
"""By method, paths of vLLM that keep nothing of a request where another request could find it."""

_FOR_ADMINS: Mapping[str, Sequence[str]] = {
    "GET": (
        "/is_paused",
        "/is_sleeping",
        "/load",
        "/openapi.json",
        "/server_info",
        "/tokenizer_info",
        "/v1/responses/{response_id}",
    ),
    "POST": (
        "/cohere/v2/chat",
        "/collective_rpc",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/pause",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/sleep",
        "/start_profile",
        "/stop_profile",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/v1/load_lora_adapter",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses/{response_id}/cancel",
        "/v1/unload_lora_adapter",
        "/wake_up",
    ),
}
"""By method, paths of vLLM that show or change what tenants share, or whose requests take no salt."""


class Passthrough:
    """Hands requests to the least loaded server."""

    def __init__(self, fleet: Callable[[], Fleet], document_tag: str = "", *, model: str | None = None) -> None:
        """`fleet` is called for each request: it raises `HttpError` while there is none.

        Requests with a `document_tag` in a text are the server's too. Completion requests that name no model get
        `model`, or vLLM's own choice.
        """
        self._model = model
        self._document_tag = document_tag
        self.router = APIRouter()
        self.router.add_api_route("/ping", self._ping, include_in_schema=False)
        for paths, handler in ((_FOR_ALL, self._for_all), (_FOR_ADMINS, self._for_admins)):
            for method, those in paths.items():
                for path in those:
                    self.router.add_api_route(path, handler, methods=[method], include_in_schema=False)
        self._fleet = fleet

    async def plain(self, request: Request) -> Response | None:
        """The answer to a completion request that says nothing of documents; None if it does.

        Raises:
            HttpError: 400, the body has more values than vLLM is handed.
        """
        body = await beside(
            request, await request.body(), partial(self._plain, request.scope["path"], request.state.tenant)
        )
        if body is None:
            return None
        say_that_nothing_was_named()
        return PassedThrough(self._fleet(), request, body, place_of_tenant, also=NOTHING_NAMED)

    def _plain(self, path: str, tenant: Tenant, raw: bytes) -> bytes | None:
        """What vLLM is sent for a completion request; None if the request is the server's."""
        body = _parsed(raw)
        if body is not None and (any(body.get(name) for name in _OURS) or self._marked(body)):
            return None
        return self._completed(path, raw, body, tenant)

    def _marked(self, body: dict[str, Any]) -> bool:
        said = [body.get(name) for name in _TEXTS]
        return bool(self._document_tag) and marks_documents(_texts(said), self._document_tag)

    async def _ping(self, request: Request) -> Response:
        """Whether vLLM is well; needs no key."""
        return PassedThrough(self._fleet(), request, b"", lambda _: nullcontext())

    async def _for_all(self, request: Request, tenant: OfTenant) -> Response:
        """What keeps tenants apart, as vLLM serves it."""
        path: str = request.scope["path"]
        _refuse_other_paths(path)
        with place_if_large(request):
            body = await request.body()
            if path in SALTED and body:
                body = await beside(request, body, lambda raw: self._completed(path, raw, _parsed(raw), tenant))
        return PassedThrough(self._fleet(), request, body, place_of_tenant)

    async def _for_admins(self, request: Request, tenant: OfTenant) -> Response:
        """The rest, where there are tenants."""
        path: str = request.scope["path"]
        if not tenant.admin:
            raise HttpError(403, f"only an admin may use {path} here", code="not_admin")
        _refuse_other_paths(path)
        return PassedThrough(self._fleet(), request, await request.body(), place_of_tenant)

    def _completed(self, path: str, raw: bytes, body: dict[str, Any] | None, tenant: Tenant) -> bytes:
        """A completion request with the tenant's own salt in the place of its own, and a model; else as it came."""
        if body is None or path not in SALTED:
            return raw
        if not tenant.admin and _commands(body):
            message = "only an admin may send commands to the plug-in"
            raise HttpError(403, message, param="kv_transfer_params", code="not_admin")
        given = body.get("cache_salt") or ""
        added: dict[str, Any] = {}
        if not tenant.anonymous and isinstance(given, str):
            added["cache_salt"] = tenant.salt(given)
        if self._model is not None and path in _GENERATING and not body.get("model"):
            added["model"] = self._model
        return json.dumps({**body, **added}).encode() if added else raw


def _commands(body: dict[str, Any]) -> bool:
    """Whether a body's `kv_transfer_params` are a command to the plug-in, and no request."""
    params = body.get("kv_transfer_params")
    ours = params.get(FIELD) if isinstance(params, dict) else None
    return isinstance(ours, dict) and not ours.keys().isdisjoint((FORGET, STORED))


def _refuse_other_paths(path: str) -> None:
    """Refuse a decoded path that somebody on the way to the endpoint could read as another one.

    The HTTP client resolves `..`, and a proxy may decode a second time: what was let through as `/v1/models/..` would
    be any endpoint of vLLM.

    Raises:
        HttpError: 404.
    """
    steps = path.replace("\\", "/").split("/")
    if "%" in path or not path.isprintable() or "." in steps or ".." in steps:
        raise HttpError(404, "Not Found")


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """A body that is an object; what is none is vLLM's to refuse.

    Raises:
        HttpError: 400, it is no JSON, has too many values to be read here, or holds a value that cannot be sent on.
    """
    refuse_costly(raw, _MOST_VALUES)
    body = parsed_json(raw)
    return body if isinstance(body, dict) else None


def _texts(value: Any, levels: int = 5) -> Iterator[str]:
    """Texts in a body's part: no deeper than a message's content in pieces."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and levels:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one, levels - 1)


class PassedThrough(Response):
    """vLLM's answer to a request, as it comes; the connection is closed when the client goes.

    Errors are said in this server's form, as status and in streams.
    """

    def __init__(
        self,
        fleet: Fleet,
        request: Request,
        body: bytes,
        place: Callable[[Request], AbstractContextManager[Any]],
        *,
        also: tuple[str, str] | None = None,
    ) -> None:
        """`place` is what it holds meanwhile; `also` is one more header of the answer."""
        super().__init__()
        self._place = place
        self._also = [] if also is None else [(also[0].encode(), also[1].encode())]
        self._fleet = fleet
        self._request = request
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand it through; once more to another server if the first one cannot be reached."""
        failed: Replica | None = None
        try:
            with self._place(self._request):
                for _ in range(_TRIES):
                    replica = self._fleet.least_loaded(avoid=failed)
                    if await self._pass(replica, receive, send):
                        return
                    failed = replica
            raise HttpError(502, "the vLLM server went away; its log says why", code="replica_lost")
        except HttpError as error:
            await error.response(scope, receive, send)

    async def _pass(self, replica: Replica, receive: Receive, send: Send) -> bool:
        """Whether the request is over; false if the server could not be reached and its client was sent nothing."""
        request = self._request
        query: str = request.scope["query_string"].decode("latin-1")
        path = quote(request.scope["path"])
        path = f"{path}?{query}" if query else path
        replica.handed_through += 1
        try:
            return await unless_gone(receive, self._copy(replica, request.method, path, send))
        except ClientGoneError:
            return True
        finally:
            replica.handed_through -= 1

    async def _copy(self, replica: Replica, method: str, path: str, send: Send) -> bool:
        begun = streams = False
        try:
            async with replica.upstream.passed(method, path, self._request.headers.raw, self._body) as reply:
                if reply.status_code >= 400:
                    error = await _error_of(reply)
                    begun = True
                    await error.response(self._request.scope, self._request.receive, send)
                    return True
                headers = [*handed_back(reply.headers), *self._also]
                await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
                begun, streams = True, reply.headers.get("content-type", "").startswith("text/event-stream")
                async for data in _with_our_errors(reply.aiter_raw()) if streams else reply.aiter_raw():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except UpstreamLostError:
            if begun and not streams:
                raise  # half a body: the connection is closed before its end, so that it is not taken for a whole one
            if begun:
                await send({"type": "http.response.body", "body": _lost_event(), "more_body": False})
            return begun
        return True


async def _error_of(reply: httpx.Response) -> HttpError:
    """An answer of vLLM's with an error's status, in this server's form and with the same status."""
    body = b""
    async for data in reply.aiter_bytes():
        body += data
        if len(body) > _MOST_ERROR_BYTES:
            break
    found = refusal(reply.status_code, body)
    error = failed_reply(reply.status_code) if isinstance(found, UpstreamFailedError) else found
    error.status_code = reply.status_code
    kept = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in handed_back(reply.headers)}
    error.headers = {name: value for name, value in kept.items() if not name.startswith("content-")}
    return error


async def _with_our_errors(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream whose events that are errors are in this server's form. Others are not held back or changed."""
    held, inside = b"", False  # `inside` a line whose beginning was handed on; `held` has no such line before it
    async for data in chunks:
        held += data
        ready = []
        while held:
            line, ends, rest = held.partition(b"\n")
            is_error = not inside and line.startswith(_ERROR)
            whole = bool(ends) or len(held) > _MOST_ERROR_BYTES
            if not inside and not whole and (is_error or _ERROR.startswith(line)):
                break  # the rest of it is still to come
            ready.append((_our_error(line) if is_error and ends else line) + ends)
            held, inside = rest, not ends
        if ready:
            yield b"".join(ready)
    if held:
        yield held


def _our_error(line: bytes) -> bytes:
    found = refusal(500, line.removeprefix(_DATA))
    return _DATA + json.dumps((failed_reply() if isinstance(found, UpstreamFailedError) else found).body).encode()


def _lost_event() -> bytes:
    """What a stream that broke ends with."""
    error = HttpError(502, "the vLLM server went away", code="replica_lost")
    return b"data: " + json.dumps(error.body).encode() + b"\n\ndata: [DONE]\n\n"
