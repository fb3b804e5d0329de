"""The page at `/`, and the endpoints that it polls: the methods, the last requests, and what reuse has saved.

The page is one static file without data, so it needs no key; its script is a client of the API. A tenant sees its own
requests, an admin all.
"""

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

import chunkweave
from chunkweave.errors import UsageError
from chunkweave.planning.method import about_method, parameters_of
from chunkweave.plugins import METHODS
from chunkweave_server.errors import Responses, error_responses
from chunkweave_server.gate import NEEDS_KEY, OfTenant
from chunkweave_server.observability import RecentRequest
from chunkweave_server.service import Parts, ReadyParts
from chunkweave_server.tenants import Tenant
from chunkweave_server.threads import in_thread

WITHOUT_KEY = (("GET", "/"),)
"""Methods and paths that need no key."""

_PAGE = files("chunkweave_server").joinpath("page.html").read_text(encoding="utf-8")
_EXACT = ("prefix", "full")
_UNCHANGED: Responses = {204: {"description": "nothing has changed since version `since`"}}


def _hash_of(tag: str) -> str:
    """The source that allows the page's only element of that name in a content security policy."""
    content = re.findall(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)[0]
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


_POLICY = (
    f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; img-src data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-store"}

shell = APIRouter(include_in_schema=False)
activity = APIRouter(prefix="/v1", tags=["operation"], dependencies=NEEDS_KEY)


@shell.get("/")
async def page() -> Response:
    """The page without data."""
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)


@activity.get("/server", responses=error_responses(503))
async def server(parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """The model, the reuse methods with their parameters, and the permissions of this key."""
    return {
        "model": parts.backend.name,
        "version": chunkweave.__version__,
        "methods": [described for name in METHODS.names if (described := _method(name)) is not None],
        "admin": tenant.admin,
        "tenants": not tenant.anonymous,
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
    recent = parts.observer.recent
    running, waiting = parts.answering.active(tenant)
    answered = list(recent.seen_by(tenant))
    unanswered = list(recent.seen_by(tenant, answered=False))
    newest = "-".join(seen[0].key if seen else "" for seen in (answered, unanswered))
    version = f"{newest}-{running}-{waiting}"
    if version == since:
        return Response(status_code=204)
    totals = parts.answering.counted(tenant)
    body: dict[str, Any] = {
        "object": "list",
        "version": version,
        "running": running,
        "waiting": waiting,
        "totals": totals.as_dict(),
        "data": [_summary(request, tenant) for request in answered[:limit]],
        "unanswered": [_summary(request, tenant) for request in unanswered[:limit]],
    }
    if tenant.admin:
        body["stored"] = await in_thread(lambda: _stored(parts))
    return JSONResponse(body)


def _summary(request: RecentRequest, tenant: Tenant) -> dict[str, Any]:
    owner = {"tenant": request.tenant} if tenant.admin and not tenant.anonymous else {}
    ended = {"request_id": request.id, **owner, "ended_s": request.ended_s, "outcome": str(request.outcome)}
    report = request.report
    if report is None:
        return {**ended, "error": request.error}
    return {
        **ended,
        "finish_reason": request.finish_reason,
        "method": report.method,
        "why": report.why,
        "prompt_tokens": report.prompt_tokens,
        "tokens_not_computed": report.tokens_not_computed,
        "tokens_by_source": report.tokens_by_source,
        "looked_up_tokens": report.looked_up_tokens,
        "hits": dict(report.hits),
        "ttft_s": report.ttft_s,
        "full_ttft_s": None if request.saved is None else report.queue_s + request.saved.full_s,
        "saved_s": None if request.saved is None else request.saved.seconds,
    }


def _stored(parts: Parts) -> Mapping[str, Mapping[str, float]]:
    """Bytes and segments by tier."""
    samples = {sample.name: sample.values for sample in parts.backend.samples()}
    segments = samples.get("store_segments", {})
    return {
        tier: {"bytes": nbytes, "segments": segments.get(tier, 0)}
        for tier, nbytes in samples.get("store_bytes", {}).items()
    }
