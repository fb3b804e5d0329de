"""The front's own endpoints, and the one that hands everything else to vLLM."""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from math import isfinite
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

import chunkweave
from chunkweave.scheduling.shadow import ShadowMonitor, ShadowStats
from chunkweave.server.auth import Tenant, bearer
from chunkweave.server.errors import HttpError
from chunkweave.server.metrics import CONTENT_TYPE
from chunkweave.server.observability import RequestMeta
from chunkweave.server.replies import EventStream, unless_gone
from chunkweave.server.routes import NEEDS_KEY, OfTenant
from chunkweave.server.vllm_backend.answering import FrontAnswer
from chunkweave.server.vllm_backend.bodies import OURS, FrontBody, read_body
from chunkweave.server.vllm_backend.passthrough import PassedThrough, refuse_unless_allowed, salted
from chunkweave.server.vllm_backend.replies import ReplyShape
from chunkweave.server.vllm_backend.service import FrontParts, FrontService
from chunkweave.server.vllm_backend.upstream import Event

router = APIRouter()
rest = APIRouter()
"""Comes last: it takes every path."""

CHAT = "/v1/chat/completions"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def _service(request: Request) -> FrontService:
    service: FrontService = request.app.state.service
    return service


AnyFront = Annotated[FrontService, Depends(_service)]


@router.post(CHAT, dependencies=NEEDS_KEY)
@router.post("/v1/completions", dependencies=NEEDS_KEY)
async def answer(request: Request, service: AnyFront, tenant: OfTenant) -> Response:
    """With `documents` or `chunkweave` the front answers; without, vLLM does, and nothing is changed."""
    parts, raw, path = service.require_ready(), await request.body(), request.url.path
    body = _parsed(raw)
    if body is None or not any(body.get(name) for name in OURS):
        if body is not None and (changed := salted(path, body, tenant)) is not body:
            raw = json.dumps(changed).encode()
        return PassedThrough(parts.fleet, request, raw)
    return await _answered(read_body(body, chat=path == CHAT), request, service, parts, tenant)


@router.get("/health")
async def health() -> dict[str, str]:
    """200 as long as the front answers at all."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(service: AnyFront) -> JSONResponse:
    """200 if a vLLM server is up, else 503."""
    return JSONResponse({"ready": service.ready, "stage": str(service.stage)}, 200 if service.ready else 503)


@router.get("/version")
async def version() -> dict[str, Any]:
    """The version of chunkweave."""
    return {"version": chunkweave.__version__}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, service: AnyFront) -> Response:
    """The front's metrics, and vLLM's with the label `replica`. If there are API keys, an admin's is needed."""
    _require_admin(service.tenant_of(bearer(request.headers)))
    return Response(await service.metrics(), media_type=CONTENT_TYPE)


@router.get("/v1/cache", dependencies=NEEDS_KEY)
async def cache(service: AnyFront, tenant: OfTenant) -> dict[str, Any]:
    """What your answers reused so far; for admins also the replicas as the front sees them."""
    parts = service.require_ready()
    told: dict[str, Any] = {"tenant": parts.answering.counts[tenant.name].as_dict()}
    if tenant.admin:
        told["replicas"] = [
            {
                "name": one.name,
                "up": one.up,
                "running": one.running,
                "waiting": len(one.queue),
                "outstanding_tokens": one.outstanding_tokens,
                "mirror_tokens": one.contents.tokens,
                "answered": one.served,
            }
            for one in parts.fleet.replicas
        ]
    return told


@router.get("/v1/shadow", dependencies=NEEDS_KEY)
async def shadow(service: AnyFront, tenant: OfTenant) -> dict[str, Any]:
    """What holding woven answers against full prefill has shown. For admins."""
    return _shown(_monitor(service, tenant).stats)


@router.post("/v1/shadow/switch-on", dependencies=NEEDS_KEY)
async def switch_on(service: AnyFront, tenant: OfTenant) -> dict[str, Any]:
    """Weave again after the shadow check has switched weaving off. For admins."""
    monitor = _monitor(service, tenant)
    monitor.switch_on()
    return _shown(monitor.stats)


@rest.api_route("/{path:path}", methods=_METHODS)
async def hand_through(request: Request, service: AnyFront, tenant: OfTenant) -> Response:
    """Whatever vLLM serves, as it serves it."""
    path = request.url.path
    refuse_unless_allowed(path, tenant)
    raw = await request.body()
    body = _parsed(raw) if path.startswith("/v1/") and raw else None
    if body is not None and (changed := salted(path, body, tenant)) is not body:
        raw = json.dumps(changed).encode()
    return PassedThrough(service.require_ready().fleet, request, raw)


async def _answered(
    body: FrontBody, request: Request, service: FrontService, parts: FrontParts, tenant: Tenant
) -> Response:
    model = body.model or service.flags.name
    asked = RequestMeta(request.state.request_id, tenant.name, request.headers.get("traceparent"))
    shape = ReplyShape(request.url.path == CHAT, model, body.with_usage, body.return_token_ids, body.logprobs_of_tokens)
    running = await unless_gone(request, parts.answering.start(tenant, body, asked, model=model))
    try:
        # Before the first piece there is still a status that can say what went wrong.
        first = await unless_gone(request, anext(running))
        if not body.stream:
            await unless_gone(request, _to_the_end(running))
    except StopAsyncIteration:
        await running.aclose()
        raise HttpError(502, "vLLM answered nothing", code="replica_lost") from None
    except BaseException:
        await running.aclose()
        raise
    if body.stream:
        return EventStream(running, _events(running, first, shape, body.n), stalled_s=service.settings.listen.stalled_s)
    await running.aclose()
    assert running.ending is not None, "it came to its end"
    return JSONResponse(shape.whole(running.whole.choices, running.ending))


async def _to_the_end(running: FrontAnswer) -> None:
    async for _ in running:
        pass


async def _events(running: FrontAnswer, first: Event, shape: ReplyShape, choices: int) -> AsyncIterator[dict[str, Any]]:
    """A stream's events. What ends a choice waits for the next one, since the last carries the report."""
    for one in shape.opening(choices):
        yield one
    held = shape.piece(first)
    if not _ends(held):
        yield held
    async for event in running:
        piece = shape.piece(event)
        if _ends(held):
            yield held
        held = piece
        if not _ends(piece):
            yield piece
    assert running.ending is not None, "it came to its end"
    for one in shape.closing(held, running.ending):
        yield one


def _ends(piece: dict[str, Any]) -> bool:
    return any(choice["finish_reason"] is not None for choice in piece["choices"])


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """A body that is an object; what is none is vLLM's to refuse."""
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _shown(stats: ShadowStats) -> dict[str, Any]:
    """JSON-able: an infinite divergence is null."""
    fields = asdict(stats).items()
    return {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in fields}


def _monitor(service: FrontService, tenant: Tenant) -> ShadowMonitor:
    _require_admin(tenant)
    found = service.require_ready().shadow
    if found is None:
        raise HttpError(404, "no answers are checked here: the front was started without shadow_every")
    return found


def _require_admin(tenant: Tenant) -> None:
    if not tenant.admin:
        raise HttpError(403, "only an admin may see what all tenants do together", code="not_admin")
