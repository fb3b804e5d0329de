"""Forwards requests without documents, and other endpoints of vLLM, to a vLLM server."""

import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from chunkweave.planning.method_choice import FIELD
from chunkweave.types import CacheUse
from chunkweave.vllm.inventory import STORED
from chunkweave.vllm.removal import FORGET
from chunkweave.vllm.request import FIND, REQUEST_FIELDS
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
from chunkweave_server.requests import ReuseField
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
"""Completion requests with one of these fields are answered here; all others are forwarded."""

_FINDING = REQUEST_FIELDS & ReuseField.model_fields.keys()
"""Our fields of a request that the plug-in reads too."""

_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Endpoints that can use an adapter."""

SALTED = (
    *_GENERATING,
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/rerank",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
)
"""Endpoints whose bodies have a `cache_salt`, which separates entries of vLLM's own prefix cache."""

_TRIES = 2

_DATA = b"data: "
_ERROR = b'data: {"error"'
_MOST_ERROR_BYTES = 1 << 16
"""Most bytes that are read of an error response of vLLM."""

_MOST_VALUES = 300_000
"""Most values in a forwarded body; a prompt may be a list of token ids."""

_FOR_ALL: Mapping[str, Sequence[str]] = {
    "GET": ("/v1/models", "/v1/models/{model:path}"),
    "POST": (*SALTED, "/detokenize", "/tokenize"),
}
"""By method, paths of vLLM that keep no data of a request for other requests to find."""

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
"""By method, paths of vLLM that show or change state shared by tenants, or whose requests have no salt."""


_RESETS = ("/pause", "/reset_prefix_cache", "/sleep")
"""Paths by which vLLM may reset the plug-in's cache. If it does not, the next answers say what is still stored."""


class Passthrough:
    """Forwards requests to the least loaded server."""

    def __init__(self, fleet: Callable[[], Fleet], *, model: str | None = None, finds: bool = False) -> None:
        """`fleet` is called for each request; it raises `HttpError` before the fleet has started.

        `model` is set in completion requests that name no model; None: vLLM's default. `finds`: the plug-in finds
        chunks in requests that do not say otherwise.
        """
        self._model = model
        self._finds = finds
        self.router = APIRouter()
        self.router.add_api_route("/ping", self._ping, include_in_schema=False)
        for paths, handler in ((_FOR_ALL, self._for_all), (_FOR_ADMINS, self._for_admins)):
            for method, those in paths.items():
                for path in those:
                    self.router.add_api_route(path, handler, methods=[method], include_in_schema=False)
        self._fleet = fleet

    async def plain(self, request: Request) -> Response | None:
        """Forward a completion request without documents; None if the request has documents.

        Raises:
            HttpError: 400, the body is not JSON or has too many values.
        """
        body = await beside(
            request, await request.body(), partial(self._plain, request.scope["path"], request.state.tenant)
        )
        if body is None:
            return None
        sent, finds = body
        if not finds:
            say_that_nothing_was_named()
        also = None if finds else NOTHING_NAMED
        return PassedThrough(self._fleet(), request, sent, place_of_tenant, also=also)

    def _plain(self, path: str, tenant: Tenant, raw: bytes) -> tuple[bytes, bool] | None:
        """The body for vLLM of a completion request, and whether chunks are found in it; None: it is answered here."""
        body = _parsed(raw)
        finds = self._finds
        if body is not None and (finding := self._finding(body)) is not None:
            body, finds = finding
            raw = json.dumps(body).encode()
        if body is not None and any(body.get(name) for name in _OURS):
            return None
        return self._completed(path, raw, body, tenant), finds

    def _finding(self, body: dict[str, Any]) -> tuple[dict[str, Any], bool] | None:
        """The body with our field for the plug-in, and whether chunks are found in it; None if it does not say so.

        A body that is refused is not changed, nor one that names documents.
        """
        field = body.get(FIELD)
        salt = body.get("cache_salt") or ""
        if not isinstance(field, dict) or body.get("documents") or body.get("kv_transfer_params"):
            return None
        try:
            reuse = ReuseField.model_validate(field)
        except ValueError:
            return None
        ours = {name: value for name, value in field.items() if value is not None and name != "order"}
        finds = reuse.find_chunks
        cache = CacheUse(reuse.cache)
        if finds is None or not (finds or self._finds) or not ours.keys() <= _FINDING or not isinstance(salt, str):
            return None
        other_fields = {name: value for name, value in body.items() if name != FIELD}
        if cache is CacheUse.OFF or not (finds or cache is CacheUse.USE):
            # A new salt, so that vLLM's own prefix cache is not used.
            finds, ours, other_fields["cache_salt"] = False, {FIND: False}, f"{salt}|{uuid.uuid4().hex}"
        return {**other_fields, "kv_transfer_params": {FIELD: ours}}, finds

    async def _ping(self, request: Request) -> Response:
        """Health of vLLM; needs no key."""
        return PassedThrough(self._fleet(), request, b"", lambda _: nullcontext())

    async def _for_all(self, request: Request, tenant: OfTenant) -> Response:
        """Forward a request that keeps tenants apart."""
        path: str = request.scope["path"]
        _refuse_other_paths(path)
        with place_if_large(request):
            body = await request.body()
            if path in SALTED and body:
                body = await beside(request, body, lambda raw: self._completed(path, raw, _parsed(raw), tenant))
        return PassedThrough(self._fleet(), request, body, place_of_tenant)

    async def _for_admins(self, request: Request, tenant: OfTenant) -> Response:
        """Forward other requests, for admins only."""
        path: str = request.scope["path"]
        if not tenant.admin:
            raise HttpError(403, f"only an admin may use {path} here", code="not_admin")
        _refuse_other_paths(path)
        return PassedThrough(self._fleet(), request, await request.body(), place_of_tenant)

    def _completed(self, path: str, raw: bytes, body: dict[str, Any] | None, tenant: Tenant) -> bytes:
        """The body with the tenant's salt instead of the given one, and with a model; others are unchanged."""
        if body is None or path not in SALTED:
            return raw
        if not tenant.admin and _commands(body):
            message = "only an admin may send commands to the plug-in"
            raise HttpError(403, message, param="kv_transfer_params", code="not_admin")
        client_salt = body.get("cache_salt") or ""
        added: dict[str, Any] = {}
        if not tenant.anonymous and isinstance(client_salt, str):
            added["cache_salt"] = tenant.salt(client_salt)
        if self._model is not None and path in _GENERATING and not body.get("model"):
            added["model"] = self._model
        return json.dumps({**body, **added}).encode() if added else raw


def _commands(body: dict[str, Any]) -> bool:
    """Whether a body's `kv_transfer_params` are a command to the plug-in instead of a request."""
    params = body.get("kv_transfer_params")
    ours = params.get(FIELD) if isinstance(params, dict) else None
    return isinstance(ours, dict) and not ours.keys().isdisjoint((FORGET, STORED))


def _refuse_other_paths(path: str) -> None:
    """Refuse a decoded path that could reach another endpoint.

    The HTTP client resolves `..`, and a proxy may decode a second time: an accepted `/v1/models/..` could become any
    endpoint of vLLM.

    Raises:
        HttpError: 404.
    """
    steps = path.replace("\\", "/").split("/")
    if "%" in path or not path.isprintable() or "." in steps or ".." in steps:
        raise HttpError(404, "Not Found")


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """The body if it is an object, else None: vLLM refuses it.

    Raises:
        HttpError: 400, the body is not JSON, has too many values, or has a value that cannot be forwarded.
    """
    refuse_costly(raw, _MOST_VALUES)
    body = parsed_json(raw)
    return body if isinstance(body, dict) else None


class PassedThrough(Response):
    """Streams vLLM's response to a request. Closes the connection to vLLM when the client disconnects.

    Errors are sent in this server's form, as responses and in streams.
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
        """`place` takes a slot of the tenant for the request's duration; `also` is an additional response header."""
        super().__init__()
        self._place = place
        self._also = [] if also is None else [(also[0].encode(), also[1].encode())]
        self._fleet = fleet
        self._request = request
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request; retry once on another server if the first one cannot be reached."""
        failed: Replica | None = None
        try:
            with self._place(self._request):
                for _ in range(_TRIES):
                    replica = self._fleet.least_loaded(avoid=failed)
                    if await self._pass(replica, receive, send):
                        return
                    failed = replica
            raise HttpError(502, "the vLLM server is gone; see its log", code="replica_lost")
        except HttpError as error:
            await error.response(scope, receive, send)

    async def _pass(self, replica: Replica, receive: Receive, send: Send) -> bool:
        """Forward to one replica. Returns False if it could not be reached and the client was sent nothing."""
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
                if path.startswith(_RESETS):
                    self._fleet.forget(replica, None)
                headers = [*handed_back(reply.headers), *self._also]
                await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
                begun, streams = True, reply.headers.get("content-type", "").startswith("text/event-stream")
                async for data in _with_our_errors(reply.aiter_raw()) if streams else reply.aiter_raw():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except UpstreamLostError:
            if begun and not streams:
                raise  # close the connection early, so that the client does not take half a body for a whole one
            if begun:
                await send({"type": "http.response.body", "body": _lost_event(), "more_body": False})
            return begun
        return True


async def _error_of(reply: httpx.Response) -> HttpError:
    """An error response of vLLM in this server's form, with the same status."""
    body = b""
    async for data in reply.aiter_bytes():
        body += data
        if len(body) > _MOST_ERROR_BYTES:
            break
    refused = refusal(reply.status_code, body)
    error = failed_reply(reply.status_code) if isinstance(refused, UpstreamFailedError) else refused
    error.status_code = reply.status_code
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in handed_back(reply.headers)}
    error.headers = {name: value for name, value in headers.items() if not name.startswith("content-")}
    return error


async def _with_our_errors(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Convert error events of a stream to this server's form. Other events are neither delayed nor changed."""
    held, inside = b"", False  # `inside`: the beginning of the current line was already sent
    async for data in chunks:
        held += data
        ready = []
        while held:
            line, ends, rest = held.partition(b"\n")
            is_error = not inside and line.startswith(_ERROR)
            whole = bool(ends) or len(held) > _MOST_ERROR_BYTES
            if not inside and not whole and (is_error or _ERROR.startswith(line)):
                break  # wait for the rest of the line
            ready.append((_our_error(line) if is_error and ends else line) + ends)
            held = rest
            inside = not ends
        if ready:
            yield b"".join(ready)
    if held:
        yield held


def _our_error(line: bytes) -> bytes:
    refused = refusal(500, line.removeprefix(_DATA))
    return _DATA + json.dumps((failed_reply() if isinstance(refused, UpstreamFailedError) else refused).body).encode()


def _lost_event() -> bytes:
    """The last event of a broken stream."""
    error = HttpError(502, "the vLLM server is gone", code="replica_lost")
    return b"data: " + json.dumps(error.body).encode() + b"\n\ndata: [DONE]\n\n"
