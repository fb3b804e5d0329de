"""A server over one backend: its start in stages, its parts, and its stop."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from chunkweave.config import Backend as BackendName
from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.models.adapters import read_adapter
from chunkweave.retrieval.speculation import SpeculationCounts
from chunkweave.scheduling.queue import TenantWeights
from chunkweave_server.answering import Answering
from chunkweave_server.backend import Backend, BackendParts, Stage
from chunkweave_server.corpora import Corpora
from chunkweave_server.errors import NOT_READY_AGAIN_S, HttpError
from chunkweave_server.metrics import ServerMetrics, speculation_samples
from chunkweave_server.observability import Observer, open_traces
from chunkweave_server.settings import ANY_HOST, Settings
from chunkweave_server.tenants import ANONYMOUS, KeyRing, TenantLimits
from chunkweave_server.threads import TenantThreads, in_thread

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """The parts of a ready server."""

    backend: Backend
    answering: Answering
    corpora: Corpora
    limits: TenantLimits
    observer: Observer
    started: BackendParts

    async def metrics(self) -> bytes:
        """Prometheus metrics of this server and of the backend's other processes."""
        return await in_thread(self.observer.metrics.exposition) + await self.backend.metrics()


def make_backend(settings: Settings, model: str = "", vllm_flags: Sequence[str] = ()) -> Backend:
    """The backend that settings name. `model` and `vllm_flags` are passed to vLLM on its command line.

    Raises:
        ModelError: the adapter does not exist or cannot be used.
        UsageError: a flag of vLLM that is not allowed here.
    """
    if settings.model.backend is BackendName.VLLM:
        from chunkweave_server.vllm_backend.backend import VllmBackend
        from chunkweave_server.vllm_backend.process import VllmFlags

        adapter = None if settings.model.adapter is None else read_adapter(settings.model.adapter)
        return VllmBackend(settings, VllmFlags(model, (*settings.vllm_flags, *vllm_flags), adapter))
    from chunkweave_server.engine_backend import EngineBackend

    return EngineBackend(settings)


OnStage = Callable[[Stage, float], None]
"""Called at the beginning of each stage, with the stage and the seconds since the start."""


@dataclass(slots=True, eq=False)
class Service:
    """A server's state. Used in the event loop's thread only; `parts` is set from `READY` on.

    Requests are tokenized in `threads`.

    Raises:
        UsageError: other machines can reach the address, without keys and without `allow_anonymous`.
    """

    settings: Settings
    backend: Backend
    keys: KeyRing = field(default_factory=KeyRing)
    on_stage: OnStage | None = None
    stage: Stage = field(init=False)
    failure: Exception | None = None
    parts: Parts | None = None
    limits: TenantLimits = field(init=False)
    threads: TenantThreads = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    _started_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.stage = self.backend.first_stage
        self.limits = TenantLimits(self.settings.limits)
        self.threads = TenantThreads(weights=TenantWeights.parse(self.settings.batching.tenant_weight))
        listen = self.settings.listen
        if ANY_HOST in listen.cors_origins and not len(self.keys):
            raise UsageError("cors_origins * would let every page that a browser opens use this server: give API keys")
        if not len(self.keys) and not listen.loopback and not listen.allow_anonymous:
            raise UsageError(
                f"{listen.host} can be reached from other machines: give API keys (keys_file, CHUNKWEAVE_API_KEYS), "
                f"or allow_anonymous if anyone there may use the server"
            )

    async def start(self) -> None:
        """Start everything, stage by stage. The server already answers with its stage meanwhile.

        An error is kept in `failure`, and the stage becomes `FAILED`.
        """
        try:
            await self._start()
        except Exception as error:  # `run` raises it after the server has stopped
            if not isinstance(error, ChunkweaveError):
                logger.exception("the server cannot start")
            self.failure = error
            await self._stop_backend()
            self._enter(Stage.FAILED)

    async def stop(self) -> None:
        """Abort running answers, finish pending writes, and close everything."""
        self._enter(Stage.STOPPING)
        parts, self.parts = self.parts, None
        if parts is not None:
            parts.corpora.close()
            await parts.answering.close()
            await in_thread(parts.observer.close)
        await self._stop_backend()

    def end_answers(self) -> None:
        """Abort all running answers; their clients get an error that the server is stopping."""
        for running in list(self.parts.answering.running if self.parts is not None else ()):
            running.abort()

    def require_ready(self) -> Parts:
        """The parts of a ready server.

        Raises:
            HttpError: 503, the server is not ready or is stopping.
        """
        if self.parts is None or self.stage is not Stage.READY:
            raise HttpError(
                503, f"the server is not ready: {self.state}", code="not_ready", retry_after_s=NOT_READY_AGAIN_S
            )
        return self.parts

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return self.stage is Stage.READY and self.backend.unavailable is None

    @property
    def state(self) -> str:
        """The stage; of a ready server without an available backend, the reason."""
        unavailable = self.backend.unavailable if self.stage is Stage.READY else None
        return unavailable or str(self.stage)

    def refuse_new(self) -> None:
        """Refuse new requests from now on. Running answers continue."""
        self._enter(Stage.STOPPING)

    async def _start(self) -> None:
        self._enter(self.backend.first_stage)
        started = await self.backend.start(self.threads)
        self._enter(Stage.OPENING_CORPORA)
        corpora = await in_thread(lambda: self._corpora(started))
        observer = self._observer()
        answering = Answering(self.backend, started, corpora, self.limits, self.threads, observer)
        self.parts = Parts(self.backend, answering, corpora, self.limits, observer, started)
        corpora.make_indexes()
        if self.stage is not Stage.STOPPING:
            self._enter(Stage.READY)

    async def _stop_backend(self) -> None:
        self.threads.close()
        await self.backend.stop()

    def _observer(self) -> Observer:
        watch = self.settings.watch
        samples = [self.backend.samples, lambda: speculation_samples(self._speculations())]
        tenants = [tenant.name for tenant in self.keys.tenants] if watch.tenant_metrics else None
        metrics = ServerMetrics(self.backend.name, samples, tenants=tenants)
        return Observer(metrics, open_traces(watch.otlp_endpoint))

    def _speculations(self) -> SpeculationCounts:
        return SpeculationCounts() if self.parts is None else self.parts.answering.retriever.speculation.counts

    def _corpora(self, started: BackendParts) -> Corpora:
        limits = self.settings.limits
        corpus_settings = self.settings.corpora
        weights = TenantWeights.parse(self.settings.batching.tenant_weight)
        corpora = Corpora(started.tokenizer, corpus_settings, limits, weights=weights)
        for entry in corpus_settings.corpus:
            corpora.share(entry)
        corpora.load(self.keys.tenants if len(self.keys) else [ANONYMOUS])
        return corpora

    def _enter(self, stage: Stage) -> None:
        if stage is self.stage and stage is not self.backend.first_stage:
            return
        if self.stage is Stage.STOPPING and stage is not Stage.FAILED:
            return
        self.stage = stage
        if self.on_stage is not None:
            self.on_stage(stage, time.perf_counter() - self._started_s)


async def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _parts_of(request: Request) -> Parts:
    return (await _service_of(request)).require_ready()


AnyService = Annotated[Service, Depends(_service_of)]
"""For handlers: the app's service."""
ReadyParts = Annotated[Parts, Depends(_parts_of)]
"""For handlers: the parts of a server that is ready."""
