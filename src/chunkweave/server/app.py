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

    The app answers from the first moment on; until the service is ready it says how far that is. Over vLLM, whatever
    is not ours is vLLM's to answer, its schema too.
    """
    passthrough = service.backend.passthrough

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())
        yield
        if passthrough is not None:  # loading a model cannot be interrupted
            starting.cancel()
        await asyncio.wait([starting])
        await service.stop()

    app = FastAPI(
        title="chunkweave",
        version=chunkweave.__version__,
        description="OpenAI-compatible answers over documents, whose KV cache is kept and reused chunk by chunk.",
        lifespan=lifespan,
        docs_url=None,  # the page loads scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json" if passthrough is None else None,
    )
    app.state.service = service
    for router in (routes.completions, routes.corpora, routes.cache, routes.operation, routes.open_to_all):
        app.include_router(router)
    install_error_handlers(app)
    if passthrough is None:
        app.include_router(routes.models)
    else:
        app.include_router(passthrough.router)  # comes last: it takes every path
    without_key = None if passthrough is None else routes.WITHOUT_KEY
    app.add_middleware(Gate, service=service, limits=service.settings.limits, but=without_key)
    return app
