"""Endpoints for operators: available methods, last requests, and what reuse has saved. The page at `/` shows them.

A tenant sees its own requests, an admin all. Only a request's own tenant sees the names of its parts and its error
message.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

import chunkweave
from chunkweave.errors import UsageError
from chunkweave.metrics import FullEstimate, ReuseReport
from chunkweave.page import AnswerView
from chunkweave.planning.method import about_method, parameters_of
from chunkweave.plugins import METHODS
from chunkweave_server.errors import HttpError, Responses, error_responses
from chunkweave_server.gate import NEEDS_KEY, OfTenant
from chunkweave_server.observability import RecentRequest
from chunkweave_server.service import Parts, ReadyParts
from chunkweave_server.tenants import Tenant
from chunkweave_server.threads import in_thread

_EXACT = ("prefix", "full")
_UNCHANGED: Responses = {204: {"description": "nothing has changed since version `since`"}}

activity = APIRouter(prefix="/v1", tags=["operation"], dependencies=NEEDS_KEY)


@activity.get("/server", responses=error_responses(503))
async def server(parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """The model, the reuse methods with their parameters, and the permissions of this key."""
    return {
        "model": parts.backend.name,
        "version": chunkweave.__version__,
        "methods": [described for name in METHODS.names if (described := _method(name)) is not None],
        "admin": tenant.admin,
        "tenants": not tenant.anonymous,
        "pins": parts.backend.cache.pins,
    }


def _method(name: str) -> dict[str, Any] | None:
    try:
        takes, about = parameters_of(name), about_method(name)
    except UsageError:  # a plug-in method that cannot be made: a request that names it gets the reason
        return None
    return {"name": name, "about": about, "parameters": list(takes), "exact": name in _EXACT}


@activity.get("/requests", responses={**_UNCHANGED, **error_responses(503)})
async def list_requests(
    parts: ReadyParts, tenant: OfTenant, since: str = "", limit: Annotated[int, Query(ge=1, le=200)] = 60
) -> Response:
    """The last requests, answered and unanswered, and what reuse has saved since the server started.

    Returns 204 if nothing has changed since the response whose `version` is `since`.
    """
    recent, (running, waiting) = parts.observer.recent, parts.answering.active(tenant)
    answered, unanswered = (list(recent.seen_by(tenant, answered=one)) for one in (True, False))
    newest = "-".join(seen[0].key if seen else "" for seen in (answered, unanswered))
    version = f"{newest}-{running}-{waiting}"
    if version == since:
        return Response(status_code=204)
    totals = parts.answering.counted(tenant)
    shown: dict[str, Any] = {
        "object": "list",
        "version": version,
        "running": running,
        "waiting": waiting,
        "totals": totals.as_dict(),
        "data": [_summary(one, tenant, totals.full) for one in answered[:limit]],
        "unanswered": [_summary(one, tenant, totals.full) for one in unanswered[:limit]],
    }
    if tenant.admin:
        shown["stored"] = await in_thread(lambda: _stored(parts))
    return JSONResponse(shown)


@activity.get("/requests/{key}", responses=error_responses(404, 503))
async def get_request(key: str, parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """One of the last requests: its prompt part by part, and the duration of each phase; or why it has no answer."""
    found = parts.observer.recent.find(tenant, key)
    if found is None:
        raise HttpError(404, "this request is no longer kept", code="request_not_found")
    summary, own = _summary(found, tenant, parts.answering.counted(tenant).full), found.tenant == tenant.name
    if found.report is None:
        return {**summary, "message": found.message if own else None}
    view = AnswerView(found.report, named=own)
    return {**summary, **_details(found.report, view), "named": own}


def _summary(one: RecentRequest, tenant: Tenant, full: FullEstimate) -> dict[str, Any]:
    whose = {"tenant": one.tenant} if tenant.admin and not tenant.anonymous else {}
    ended = {"id": one.key, "request_id": one.id, **whose, "ended_s": one.ended_s, "outcome": str(one.outcome)}
    report = one.report
    if report is None:
        return {**ended, "error": one.error}
    return {
        **ended,
        "finish_reason": one.finish_reason,
        "method": report.method,
        "prompt_tokens": report.prompt_tokens,
        "tokens_not_computed": report.tokens_not_computed,
        "tokens_by_source": report.tokens_by_source,
        "looked_up_tokens": report.looked_up_tokens,
        "hits": dict(report.hits),
        "ttft_s": report.ttft_s,
        "full_ttft_s": full.ttft_s(report),
    }


def _details(report: ReuseReport, view: AnswerView) -> dict[str, Any]:
    """The prompt and the time to the first token, as bars with positions from 0 to 1 and as numbers."""
    chunks = [
        {
            "name": name,
            "kv_source": chunk.kv_source,
            "tier": chunk.tier,
            "tokens": chunk.tokens,
            "recomputed_tokens": chunk.recomputed_tokens,
            "reasons": dict(chunk.reasons),
        }
        for name, chunk in view.chunks
    ]
    return {
        "why": report.why,
        "parameters": dict(report.parameters),
        "new_tokens": report.new_tokens,
        "decode_s": report.decode_s,
        "prompt": [asdict(bar) for bar in view.parts],
        "recomputed": [asdict(bar) for bar in view.recomputed],
        "phases": [asdict(bar) for bar in view.phases],
        "chunks": chunks,
    }


def _stored(parts: Parts) -> Mapping[str, Mapping[str, float]]:
    """Bytes and segments by tier."""
    found = {one.name: one.values for one in parts.backend.samples()}
    segments = found.get("store_segments", {})
    return {
        tier: {"bytes": nbytes, "segments": segments.get(tier, 0)}
        for tier, nbytes in found.get("store_bytes", {}).items()
    }
