"""The app around a service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import chunkweave
from chunkweave.server import routes
from chunkweave.server.auth import Gate
from chunkweave.server.errors import install_error_handlers
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
    for router in (routes.completions, routes.corpora, routes.cache, routes.operation, routes.open_to_all):
        app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(Gate, service=service, limits=service.settings.limits)
    return app
