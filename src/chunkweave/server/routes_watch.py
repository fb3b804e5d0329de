"""`/metrics`, and `/v1/shadow`: how the server does, for whoever runs it."""

from dataclasses import asdict
from math import isfinite
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from chunkweave.scheduling.shadow import ShadowMonitor, ShadowStats
from chunkweave.server.access import NEEDS_KEY, AnyService, OfTenant, ReadyParts
from chunkweave.server.keys import Tenant, bearer
from chunkweave.server.metrics import CONTENT_TYPE
from chunkweave.server.refusals import RefusalError
from chunkweave.server.schema import refusals
from chunkweave.server.service import Parts
from chunkweave.server.threads import in_thread

router = APIRouter(tags=["operation"], dependencies=NEEDS_KEY)


@router.get("/metrics", response_class=Response, responses=refusals(401, 403, 503))
async def metrics(request: Request, service: AnyService, parts: ReadyParts) -> Response:
    """Prometheus metrics, in its text format. If there are API keys, an admin's is needed."""
    _require_admin(service.tenant_of(bearer(request.headers)))
    return Response(await in_thread(parts.observer.metrics.exposition), media_type=CONTENT_TYPE)


@router.get("/v1/shadow", responses=refusals(403, 404, 503))
async def shadow(parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """What holding woven answers against full prefill has shown. For admins."""
    return _shown(_monitor(parts, tenant).stats)


@router.post("/v1/shadow/switch-on", responses=refusals(403, 404, 503))
async def switch_on(parts: ReadyParts, tenant: OfTenant) -> dict[str, Any]:
    """Weave again after the shadow check has switched weaving off. For admins."""
    monitor = _monitor(parts, tenant)
    monitor.switch_on()
    return _shown(monitor.stats)


def _shown(stats: ShadowStats) -> dict[str, Any]:
    """JSON-able: an infinite divergence is null."""
    fields = asdict(stats).items()
    return {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in fields}


def _monitor(parts: Parts, tenant: Tenant) -> ShadowMonitor:
    _require_admin(tenant)
    if parts.engine.shadow is None:
        raise RefusalError(404, "no answers are checked here: the server was started without shadow_every")
    return parts.engine.shadow


def _require_admin(tenant: Tenant) -> None:
    if not tenant.admin:
        raise RefusalError(403, "only an admin may see what all tenants do together", code="not_admin")
