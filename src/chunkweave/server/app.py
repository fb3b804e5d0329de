"""The app around a service, and uvicorn around the app until a signal stops it."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

import chunkweave
from chunkweave.errors import UsageError
from chunkweave.server import routes
from chunkweave.server.auth import Gate
from chunkweave.server.backend import Stage
from chunkweave.server.errors import install_error_handlers
from chunkweave.server.service import Service
from chunkweave.server.settings import ListenSettings

logger = logging.getLogger(__name__)


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
    app.add_middleware(Gate, service=service, but=without_key)
    return app


_AFTER_CANCEL_S = 5.0
"""What streams get to send their last event after they were ended."""


def listening_socket(settings: ListenSettings) -> socket.socket:
    """A socket on that address, before anything heavy is loaded.

    Raises:
        UsageError: the address is taken, or none.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {settings.host}, port {settings.port}: {error}") from error


class Server(uvicorn.Server):
    """uvicorn that ends gently: it accepts nothing new, lets answers end for a while, then ends them in good form.

    A second signal ends it at once.
    """

    def __init__(self, service: Service, *, log_level: str = "warning") -> None:
        config = uvicorn.Config(
            create_app(service),
            log_level=log_level,
            access_log=False,
            server_header=False,
            log_config=None,
            timeout_graceful_shutdown=int(service.settings.listen.graceful_s + _AFTER_CANCEL_S),
            timeout_keep_alive=30,
        )
        super().__init__(config)
        self._service = service
        self._graceful_s = service.settings.listen.graceful_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - all signals mean the same
        """What a signal does; unlike uvicorn's own it is not raised again afterwards, so that the exit code is 0."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; a service that could not start ends the server."""
        if self._service.stage is Stage.FAILED:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let answers end for `graceful_s`, end the others, then close everything."""
        self._service.refuse_new()
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        await asyncio.sleep(self._graceful_s)
        logger.warning("answers that have not ended are ended now")
        self._service.end_answers()


def run(service: Service, sock: socket.socket) -> None:
    """Serve until a signal comes.

    Raises:
        ChunkweaveError: the service could not start.
    """
    Server(service).run(sockets=[sock])
    if service.failure is not None:
        raise service.failure
