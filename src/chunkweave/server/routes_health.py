"""`/health`, `/ready` and `/version`: for whoever runs the server; no key is needed."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

import chunkweave
from chunkweave.server.access import AnyService

router = APIRouter(tags=["operation"])


@router.get("/health")
async def health() -> dict[str, str]:
    """200 as long as the process answers at all."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"description": "not yet, or not any more; `stage` says how far it is"}})
async def ready(service: AnyService) -> JSONResponse:
    """200 if requests are answered, else 503."""
    is_ready = service.ready
    return JSONResponse({"ready": is_ready, "stage": str(service.stage)}, 200 if is_ready else 503)


@router.get("/version")
async def version() -> dict[str, Any]:
    """The version of chunkweave."""
    return {"version": chunkweave.__version__}
