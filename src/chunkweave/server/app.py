"""The app around a service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import chunkweave
from chunkweave.server import refusals, routes_cache, routes_completions, routes_corpora, routes_health, routes_watch
from chunkweave.server.gate import Gate
from chunkweave.server.service import Service


def create_app(service: Service) -> FastAPI:
    """The HTTP interface of a service, which starts and stops with the app's lifespan.

    The app answers from the first moment on; until the service is ready it says how far that is.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())
        yield
        await asyncio.wait([starting])  # loading a model cannot be interrupted
        await service.stop()

    app = FastAPI(
        title="chunkweave",
        version=chunkweave.__version__,
        description="OpenAI-compatible answers over documents, whose KV cache is kept and reused chunk by chunk.",
        lifespan=lifespan,
        docs_url=None,  # the page loads scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    for routes in (routes_completions, routes_corpora, routes_cache, routes_watch, routes_health):
        app.include_router(routes.router)
    refusals.install(app)
    app.add_middleware(Gate, service=service, limits=service.settings.limits)
    return app
