"""The app around a front: what has documents is answered here, all else is vLLM's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import chunkweave
from chunkweave.server import routes as shared
from chunkweave.server.auth import Gate
from chunkweave.server.errors import install_error_handlers
from chunkweave.server.vllm_backend import routes
from chunkweave.server.vllm_backend.service import FrontService

_WITHOUT_KEY = ("/health", "/ready", "/ping", "/version", "/metrics")
"""For whoever runs the server. `/metrics` asks for an admin's key itself."""


def create_front(service: FrontService) -> FastAPI:
    """The HTTP interface of a front, which starts and stops with the app's lifespan.

    It answers from the first moment on; until vLLM is up it says how far that is.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())
        yield
        if not starting.done():
            starting.cancel()
        await asyncio.wait([starting])
        await service.stop()

    app = FastAPI(
        title="chunkweave before vLLM",
        version=chunkweave.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # vLLM's own is handed through
    )
    app.state.service = service
    for router in (routes.router, shared.corpora, routes.rest):
        app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(Gate, service=service, limits=service.settings.limits, but=_WITHOUT_KEY)
    return app
