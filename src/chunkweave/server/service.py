"""What a running server is made of, from its start in stages to its end."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from chunkweave.engine.async_engine import AsyncEngine
from chunkweave.engine.engine import Engine, EngineOptions
from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.server.answering import Answering
from chunkweave.server.auth import ANONYMOUS, KeyRing, Tenant, refuse_open_door, tenant_of
from chunkweave.server.corpora import Corpora
from chunkweave.server.errors import HttpError
from chunkweave.server.limits import TenantLimits
from chunkweave.server.metrics import ServerMetrics
from chunkweave.server.observability import Observer, open_traces
from chunkweave.server.pinned import PinnedChunks
from chunkweave.server.settings import Settings
from chunkweave.server.threads import in_thread

logger = logging.getLogger(__name__)

_FLUSH_S = 30.0


class Stage(StrEnum):
    """How far a server is."""

    LOADING_MODEL = "loading the model"
    OPENING_CORPORA = "opening corpora"
    STARTING_ENGINE = "starting the engine"
    STARTING_VLLM = "starting vLLM"
    READY = "ready"
    FAILED = "failed to start"
    BROKEN = "the engine has stopped"
    STOPPING = "stopping"


@dataclass(slots=True)
class Parts:
    """What a server has once it is ready."""

    engine: Engine
    batching: AsyncEngine
    corpora: Corpora
    answering: Answering
    pins: PinnedChunks
    observer: Observer


OnStage = Callable[[Stage, float], None]
"""Called with each stage as it begins, and the seconds since the start."""


@dataclass(slots=True, eq=False)
class Service:
    """A server's state. Belongs to the event loop's thread; `parts` is there from `READY` on."""

    settings: Settings
    keys: KeyRing = field(default_factory=KeyRing)
    on_stage: OnStage | None = None
    make_engine: Callable[[Settings], Engine] | None = None
    stage: Stage = Stage.LOADING_MODEL
    failure: Exception | None = None
    parts: Parts | None = None
    limits: TenantLimits = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    _started_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.limits = TenantLimits(self.settings.limits)
        refuse_open_door(self.settings.listen, self.keys)

    async def start(self) -> None:
        """Load everything, stage by stage, while the server already tells how far it is.

        What goes wrong is kept in `failure`.
        """
        try:
            await self._start()
        except ChunkweaveError as error:
            self.failure = error
        except Exception as error:  # the server ends, and whoever runs it learns why
            logger.exception("the server cannot start")
            self.failure = error
        if self.failure is not None:
            self._enter(Stage.FAILED)

    async def stop(self) -> None:
        """End what is under way, write what is still to be written, and close everything."""
        self._enter(Stage.STOPPING)
        parts, self.parts = self.parts, None
        if parts is None:
            return
        await in_thread(parts.batching.close)
        for running in list(parts.answering.running):
            await running.aclose()
        await parts.answering.swept()
        parts.pins.release_all()
        await in_thread(parts.observer.close)
        await in_thread(lambda: self._close(parts.engine))

    def end_answers(self) -> None:
        """End all running answers now; their clients are told that the server stops."""
        for running in list(self.parts.answering.running if self.parts is not None else ()):
            running.end()

    def tenant_of(self, key: str | None) -> Tenant:
        """Whose request it is.

        Raises:
            HttpError: 401, a key is needed, and this is none.
        """
        return tenant_of(self.keys, key)

    def require_ready(self) -> Parts:
        """The parts.

        Raises:
            HttpError: 503, they are not there yet, or any more.
        """
        if self.parts is None or not self.ready:
            raise HttpError(503, f"the server is not ready: {self.stage}", code="not_ready", retry_after_s=2)
        return self.parts

    @property
    def ready(self) -> bool:
        """Whether requests are answered. An engine that a bug ended is found out here."""
        if self.stage is Stage.READY and self.parts is not None and self.parts.batching.closed:
            self._enter(Stage.BROKEN)
        return self.stage is Stage.READY

    def refuse_new(self) -> None:
        """From now on answer nothing new; what is under way goes on."""
        self._enter(Stage.STOPPING)

    async def _start(self) -> None:
        self._enter(Stage.LOADING_MODEL)
        engine = await in_thread(lambda: (self.make_engine or load_engine)(self.settings))
        try:
            self._enter(Stage.OPENING_CORPORA)
            corpora = await in_thread(lambda: self._corpora(engine))
        except BaseException:
            await in_thread(engine.close)
            raise
        self._enter(Stage.STARTING_ENGINE)
        batching = AsyncEngine(engine, self.settings.batching)
        observer = self._observer(engine, batching)
        answering = Answering(engine, batching, corpora, self.limits, self.settings.limits, observer)
        pins = PinnedChunks(engine, batching, self.settings.limits)
        self.parts = Parts(engine, batching, corpora, answering, pins, observer)
        if self.stage is not Stage.STOPPING:
            self._enter(Stage.READY)

    def _observer(self, engine: Engine, batching: AsyncEngine) -> Observer:
        watch = self.settings.watch
        metrics = ServerMetrics(
            self.settings.model.name,
            batching=lambda: batching.stats,
            store=engine.store,
            shadow=engine.shadow,
            tenants=[tenant.name for tenant in self.keys.tenants] if watch.tenant_metrics else None,
        )
        return Observer(metrics, open_traces(watch.otlp_endpoint))

    def _corpora(self, engine: Engine) -> Corpora:
        limits, asked = self.settings.limits, self.settings.corpora
        corpora = Corpora(
            engine.loaded.tokenizer, asked.data_dir, max_corpora=limits.max_corpora, max_chunks=limits.max_corpus_chunks
        )
        for entry in asked.corpus:
            corpora.share(entry)
        corpora.load(self.keys.tenants if len(self.keys) else [ANONYMOUS])
        return corpora

    def _close(self, engine: Engine) -> None:
        if not engine.store.flush(_FLUSH_S):
            logger.warning("some segments were not written in time")
        engine.close()

    def _enter(self, stage: Stage) -> None:
        if stage is not self.stage or stage is Stage.LOADING_MODEL:
            self.stage = stage
            if self.on_stage is not None:
                self.on_stage(stage, time.perf_counter() - self._started_s)


def load_engine(settings: Settings) -> Engine:
    """The engine that settings ask for.

    Raises:
        ModelError: the model cannot be loaded or driven.
        UsageError: no model, or a device, method or quality that does not exist.
    """
    model = settings.model
    options: EngineOptions = {
        "store": settings.store,
        "method": settings.requests.method,
        "quality": settings.requests.quality,
        "reuse": settings.reuse,
        "order": settings.requests.order or "",
        "ordering": settings.ordering,
        "conversations": settings.conversations,
        "shadow": settings.shadow,
        "compute": settings.compute,
    }
    if model.shape is not None:
        return Engine.load_shape(model.shape, device=model.device, dtype=model.dtype, **options)
    if model.model is None:
        raise UsageError("which model? give model, a checkpoint folder or `reader`")
    return Engine.load(Path(model.model), device=model.device, dtype=model.dtype, **options)
