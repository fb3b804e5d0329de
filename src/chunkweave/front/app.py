"""The app around a front: what has documents is answered here, all else is vLLM's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import chunkweave
from chunkweave.front import routes
from chunkweave.front.service import FrontService
from chunkweave.server import refusals, routes_corpora
from chunkweave.server.gate import Gate

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
    for router in (routes.router, routes_corpora.router, routes.rest):
        app.include_router(router)
    refusals.install(app)
    app.add_middleware(Gate, service=service, limits=service.settings.limits, but=_WITHOUT_KEY)
    return app
