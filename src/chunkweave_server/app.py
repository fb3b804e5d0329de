"""The ASGI app of a service, and the uvicorn server that runs it until a signal stops it."""

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
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

import chunkweave
from chunkweave.errors import UsageError
from chunkweave_server import page, routes
from chunkweave_server.backend import Stage
from chunkweave_server.embeddings import embeddings
from chunkweave_server.errors import install_error_handlers
from chunkweave_server.fields import CAPPED_HEADER, UNKNOWN_HEADER
from chunkweave_server.gate import Gate
from chunkweave_server.service import OnStage, Service
from chunkweave_server.settings import ListenSettings

logger = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The HTTP interface of a service. The app's lifespan starts and stops the service.

    The app accepts requests at once; until the service is ready, the error names its stage. With the vLLM backend,
    other known endpoints of vLLM, including its schema, are forwarded to vLLM.
    """
    passthrough = service.backend.passthrough

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())
        yield
        if passthrough is not None:  # starting vLLM can be cancelled; loading a model cannot
            starting.cancel()
        await asyncio.wait([starting])
        await service.stop()

    app = FastAPI(
        title="chunkweave",
        version=chunkweave.__version__,
        description="OpenAI-compatible answers over documents, whose KV cache is kept and reused chunk by chunk.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads scripts from another site
        redoc_url=None,
        openapi_url="/openapi.json" if passthrough is None else None,
    )
    app.state.service, app.state.limits, app.state.threads = service, service.limits, service.threads
    for router in (routes.completions, routes.corpora, routes.cache, routes.operation, routes.open_to_all):
        app.include_router(router)
    app.include_router(embeddings)
    app.include_router(page.activity)
    app.include_router(page.shell)
    install_error_handlers(app)
    if passthrough is None:
        app.include_router(routes.models)
    else:
        app.include_router(passthrough.router)
    open_endpoint = ("GET", "/openapi.json" if passthrough is None else "/ping")
    app.add_middleware(
        Gate,
        settings=service.settings,
        keys=service.keys,
        limits=service.limits,
        require_ready=service.require_ready,
        without_key=frozenset({*routes.WITHOUT_KEY, *page.WITHOUT_KEY, open_endpoint}),
    )
    if origins := service.settings.listen.cors_origins:
        app.add_middleware(  # outside of the gate: browsers ask without a key, and must read its refusals
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-chunkweave", UNKNOWN_HEADER, CAPPED_HEADER, "x-request-id", "retry-after"),
        )
    return app


_AFTER_CANCEL_S = 5.0
"""Time for streams to send their last event after they were aborted."""


def listening_socket(settings: ListenSettings) -> socket.socket:
    """A listening socket, made before anything large is loaded. Its connections send every piece at once.

    Raises:
        UsageError: the address is invalid or in use.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {settings.host}, port {settings.port}: {error}") from error
    # asyncio sets TCP_NODELAY only on sockets that were made with IPPROTO_TCP. Without it a stream's first token waits
    # until the client has acknowledged the headers: 40 ms on a connection that is kept alive.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


_SWEEP_TICKS = 5
"""Ticks between two checks of the connections; a tick is 0.1 s."""


class StalledConnections:
    """Closes connections whose client stalls; uvicorn has no limit for them.

    It closes a connection if one of these lasts `stalled_s` seconds: a request's headers are incomplete; a body that no
    handler reads is incomplete; the client reads nothing of an answer; a closing connection still has bytes to send.
    The gate times bodies that a handler reads.
    """

    def __init__(self, stalled_s: float) -> None:
        self._stalled_s = stalled_s
        self._waiting: dict[H11Protocol, tuple[object, float]] = {}

    def sweep(self, connections: Iterable[H11Protocol], now_s: float) -> None:
        """Check all connections and abort the stalled ones. `now_s` is the time of any monotonic clock."""
        waiting: dict[H11Protocol, tuple[object, float]] = {}
        for connection in tuple(connections):
            if (state := _waits_for(connection)) is None:
                continue
            earlier_state, since_s = self._waiting.get(connection, (None, now_s))
            since_s = since_s if earlier_state == state else now_s
            if now_s - since_s >= self._stalled_s:
                connection.transport.abort()  # `close` would wait until the client reads the rest
            else:
                waiting[connection] = (state, since_s)
        self._waiting = waiting


def _waits_for(connection: H11Protocol) -> object:
    """What a connection waits for from its client; None if it waits for nothing. A changed value means progress."""
    if connection.transport.is_closing():
        return "closing"
    if connection.flow.write_paused:
        return connection.transport.get_write_buffer_size()
    answering = connection.cycle is not None and not connection.cycle.response_complete
    return None if answering or connection.timeout_keep_alive_task is not None else "request"


class Server(uvicorn.Server):
    """uvicorn with a graceful stop: refuse new requests, wait for running answers, then abort the rest with an error.

    A second signal stops it at once.
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
            http=H11Protocol,  # uvicorn's other parser does not limit the size of headers
            ws="none",
        )
        super().__init__(config)
        self._stalled = StalledConnections(service.settings.listen.stalled_s)
        self._service = service
        self._graceful_s = service.settings.listen.graceful_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - all signals mean the same
        """Handle a signal. Unlike uvicorn's handler it does not raise the signal again, so the exit code is 0."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Check connections and the service; called every 0.1 s. Stops the server if the service could not start."""
        if self._service.stage is Stage.FAILED:
            self.should_exit = True
        if counter % _SWEEP_TICKS == 0:
            self._stalled.sweep(cast("set[H11Protocol]", self.server_state.connections), time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait up to `graceful_s` for answers, abort the others, then close everything."""
        self._service.refuse_new()
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        await asyncio.sleep(self._graceful_s)
        logger.warning("aborting the answers that are still running")
        self._service.end_answers()


_SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps the interpreter's lock while others wait for it; Python's default is 5 ms."""


def run(service: Service, sock: socket.socket) -> None:
    """Serve until a signal arrives. Changes the switch interval and the garbage collector of the whole process.

    Raises:
        ChunkweaveError: the service could not start.
    """
    # A thread that computes in Python delays others by up to this interval at each of their calls into PyTorch, about
    # a hundred for each generated token.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    service.on_stage = partial(_freeze_when_ready, service.on_stage)
    Server(service).run(sockets=[sock])
    if service.failure is not None:
        raise service.failure


def _freeze_when_ready(on_stage: OnStage | None, stage: Stage, after_s: float) -> None:
    """Exclude all objects made at startup (modules, model) from garbage collection: they live as long as the process.

    Scanning them takes a quarter of a second, during which all threads wait.
    """
    if stage is Stage.READY:
        gc.collect()
        gc.freeze()
    if on_stage is not None:
        on_stage(stage, after_s)
