"""The app around a service, and uvicorn around the app until a signal stops it."""

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

import chunkweave
from chunkweave.errors import UsageError
from chunkweave_server import page, routes
from chunkweave_server.backend import Stage
from chunkweave_server.errors import install_error_handlers
from chunkweave_server.gate import Gate
from chunkweave_server.service import OnStage, Service
from chunkweave_server.settings import ListenSettings

logger = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The HTTP interface of a service, which starts and stops with the app's lifespan.

    The app answers from the first moment on; until the service is ready it says how far that is. Over vLLM, known
    endpoints of vLLM that are not ours are vLLM's to answer, its schema too.
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
    app.state.service, app.state.limits, app.state.threads = service, service.limits, service.threads
    for router in (routes.completions, routes.corpora, routes.cache, routes.operation, routes.open_to_all):
        app.include_router(router)
    app.include_router(page.shell)
    app.include_router(page.pieces)
    install_error_handlers(app)
    if passthrough is None:
        app.include_router(routes.models)
    else:
        app.include_router(passthrough.router)
    own = ("GET", "/openapi.json" if passthrough is None else "/ping")
    app.add_middleware(
        Gate,
        settings=service.settings,
        keys=service.keys,
        limits=service.limits,
        require_ready=service.require_ready,
        without_key=frozenset({*routes.WITHOUT_KEY, *page.WITHOUT_KEY, own}),
    )
    return app


_AFTER_CANCEL_S = 5.0
"""What streams get to send their last event after they were ended."""


def listening_socket(settings: ListenSettings) -> socket.socket:
    """A socket on that address, before anything heavy is loaded. Its connections send every piece at once.

    Raises:
        UsageError: the address is taken, or none.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {settings.host}, port {settings.port}: {error}") from error
    # asyncio does so only for sockets that were made for TCP by number. Without, a stream's first token waits until the
    # client has acknowledged the head, which on a connection that is kept takes 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


_SWEEP_TICKS = 5
"""Between two looks at the connections; a tick is a tenth of a second."""


class StalledConnections:
    """Ends connections whose client keeps the server waiting. For each of these uvicorn waits for ever.

    That is: a request's head is not there `stalled_s` after its first byte, or after the connection; a body that nobody
    reads has not ended by then; of an answer nothing was taken in for so long; a closed connection still has something
    to send. A body that somebody reads is timed where it is read.
    """

    def __init__(self, stalled_s: float) -> None:
        self._stalled_s = stalled_s
        self._waiting: dict[H11Protocol, tuple[object, float]] = {}

    def sweep(self, connections: Iterable[H11Protocol], now_s: float) -> None:
        """Look at all connections, at a time of some clock in seconds; descriptors of those that end are free."""
        waiting: dict[H11Protocol, tuple[object, float]] = {}
        for one in tuple(connections):
            if (state := _waits_for(one)) is None:
                continue
            before, since_s = self._waiting.get(one, (None, now_s))
            since_s = since_s if before == state else now_s
            if now_s - since_s >= self._stalled_s:
                one.transport.abort()  # closing it would wait until the client takes in the rest
            else:
                waiting[one] = (state, since_s)
        self._waiting = waiting


def _waits_for(connection: H11Protocol) -> object:
    """What of its client a connection waits for, None for nothing. Another answer means that something came."""
    if connection.transport.is_closing():
        return "closing"
    if connection.flow.write_paused:
        return connection.transport.get_write_buffer_size()
    answering = connection.cycle is not None and not connection.cycle.response_complete
    return None if answering or connection.timeout_keep_alive_task is not None else "request"


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
            http=H11Protocol,  # uvicorn's other parser takes a head of any length
            ws="none",
        )
        super().__init__(config)
        self._stalled = StalledConnections(service.settings.listen.stalled_s)
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
        if counter % _SWEEP_TICKS == 0:
            self._stalled.sweep(cast("set[H11Protocol]", self.server_state.connections), time.monotonic())
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


_SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps the interpreter's lock while others want it; Python's own 5 ms are for few, long threads."""


def run(service: Service, sock: socket.socket) -> None:
    """Serve until a signal comes, in a process that does nothing else.

    Raises:
        ChunkweaveError: the service could not start.
    """
    # A thread that computes in Python makes the others wait that long for each of their calls into PyTorch: a generated
    # token makes a hundred of them.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    service.on_stage = partial(_freeze_when_ready, service.on_stage)
    Server(service).run(sockets=[sock])
    if service.failure is not None:
        raise service.failure


def _freeze_when_ready(on_stage: OnStage | None, stage: Stage, after_s: float) -> None:
    """Have the garbage collector leave alone what the start has made, modules and model: it is kept to the end.

    Looking through it takes a quarter of a second, in which every thread waits.
    """
    if stage is Stage.READY:
        gc.collect()
        gc.freeze()
    if on_stage is not None:
        on_stage(stage, after_s)
