"""What a running front is made of, from the start of its vLLM servers to their end."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from chunkweave.chunking.tokenizer import TextTokenizer
from chunkweave.errors import ChunkweaveError
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.retrieval.speculation import SpeculationCounts
from chunkweave.scheduling.shadow import ShadowMonitor
from chunkweave.server.auth import ANONYMOUS, KeyRing, Tenant, refuse_open_door, tenant_of
from chunkweave.server.corpora import Corpora
from chunkweave.server.errors import HttpError
from chunkweave.server.limits import TenantLimits
from chunkweave.server.metrics import ServerMetrics
from chunkweave.server.observability import Observer, open_traces
from chunkweave.server.service import OnStage, Stage
from chunkweave.server.settings import Settings
from chunkweave.server.threads import in_thread
from chunkweave.server.vllm_backend.answering import FrontAnswering
from chunkweave.server.vllm_backend.fleet import Fleet, fleet_samples, labelled
from chunkweave.server.vllm_backend.process import Launch, ProcessState, VllmFlags, VllmProcess
from chunkweave.server.vllm_backend.prompting import Prompting, chooser_for, load_tokenizer
from chunkweave.server.vllm_backend.reports import ReportInbox
from chunkweave.server.vllm_backend.shadow import FrontShadow
from chunkweave.server.vllm_backend.upstream import Upstream, UpstreamLostError
from chunkweave.vllm.report_socket import VARIABLE

logger = logging.getLogger(__name__)


_USUAL_CONTEXT = 4096
_POLL_S = 0.5
_WATCH_S = 2.0


@dataclass(slots=True)
class FrontParts:
    """What a front has once it is ready."""

    answering: FrontAnswering
    corpora: Corpora
    fleet: Fleet
    observer: Observer
    shadow: ShadowMonitor | None


@dataclass(slots=True, eq=False)
class FrontService:
    """A front's state. Belongs to the event loop's thread; `parts` is there from `READY` on.

    `tokenizer` and `transport` take the places of what is loaded and of the network, for tests.
    """

    settings: Settings
    flags: VllmFlags
    keys: KeyRing = field(default_factory=KeyRing)
    on_stage: OnStage | None = None
    tokenizer: TextTokenizer | None = None
    transport: Callable[[str], httpx.AsyncBaseTransport] | None = None
    stage: Stage = Stage.STARTING_VLLM
    failure: Exception | None = None
    parts: FrontParts | None = None
    limits: TenantLimits = field(init=False)
    processes: list[VllmProcess] = field(default_factory=list)
    _upstreams: list[Upstream] = field(default_factory=list)
    _watching: list["asyncio.Task[None]"] = field(default_factory=list)
    _inbox: ReportInbox | None = None
    _started_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.limits = TenantLimits(self.settings.limits)
        refuse_open_door(self.settings.listen, self.keys)

    @property
    def ready(self) -> bool:
        """Whether requests are answered: something is up."""
        return self.stage is Stage.READY and self.parts is not None and self.parts.fleet.ready

    async def start(self) -> None:
        """Start everything, while the front already tells how far it is. What goes wrong is kept in `failure`."""
        try:
            await self._start()
        except ChunkweaveError as error:
            self.failure = error
        except Exception as error:  # the server ends, and whoever runs it learns why
            logger.exception("the front cannot start")
            self.failure = error
        if self.failure is not None:
            await self._stop_servers()
            self._enter(Stage.FAILED)

    async def stop(self) -> None:
        """End what is under way, then the vLLM servers."""
        self._enter(Stage.STOPPING)
        parts, self.parts = self.parts, None
        if parts is not None:
            for running in list(parts.answering.running):
                await running.aclose()
            if parts.answering.shadow is not None:
                await parts.answering.shadow.close()
            await parts.answering.retriever.close()
            await in_thread(parts.observer.close)
        await self._stop_servers()

    def refuse_new(self) -> None:
        """From now on answer nothing new; what is under way goes on."""
        self._enter(Stage.STOPPING)

    def end_answers(self) -> None:
        """End all running answers now; their clients are told that the front stops."""
        for running in list(self.parts.answering.running if self.parts is not None else ()):
            running.end()

    def tenant_of(self, key: str | None) -> Tenant:
        """Whose request it is.

        Raises:
            HttpError: 401, a key is needed, and this is none.
        """
        return tenant_of(self.keys, key)

    def require_ready(self) -> FrontParts:
        """The parts.

        Raises:
            HttpError: 503, they are not there yet, or any more.
        """
        if self.parts is None or self.stage is not Stage.READY:
            raise HttpError(503, f"the server is not ready: {self.stage}", code="not_ready", retry_after_s=2)
        return self.parts

    async def metrics(self) -> bytes:
        """Ours, and those of every vLLM server that answers."""
        parts = self.require_ready()
        ours = await in_thread(parts.observer.metrics.exposition)
        up = [replica for replica in parts.fleet.replicas if replica.up]
        texts = await asyncio.gather(*(replica.upstream.text("/metrics") for replica in up), return_exceptions=True)
        found = {replica.name: text for replica, text in zip(up, texts, strict=True) if isinstance(text, str)}
        return ours + labelled(found).encode()

    async def _start(self) -> None:
        self._enter(Stage.STARTING_VLLM)
        fleet_settings = self.settings.fleet
        if fleet_settings.upstream:
            names = [f"upstream-{number}" for number in range(len(fleet_settings.upstream))]
            urls = dict(zip(names, fleet_settings.upstream, strict=True))
            if fleet_settings.report_socket is not None:
                self._inbox = await _open_inbox(fleet_settings.report_socket)
        else:
            self._inbox = await _open_inbox()
            self.processes = [self._process(number) for number in range(fleet_settings.replicas)]
            urls = {process.name: process.url for process in self.processes}
        self._upstreams = [self._upstream(name, url) for name, url in urls.items()]
        fleet = Fleet(self._upstreams, self.settings)
        tokenizer, _ = await asyncio.gather(in_thread(self._tokenizer), self._start_servers(fleet))
        most_tokens = await self._upstreams[0].most_tokens() or _USUAL_CONTEXT
        parts = await in_thread(partial(self._parts, fleet, tokenizer, most_tokens))
        if self.stage is not Stage.STOPPING:
            self.parts = parts
            self._enter(Stage.READY)

    async def _start_servers(self, fleet: Fleet) -> None:
        if not self.processes:
            await asyncio.gather(*(self._until_up(one) for one in self._upstreams))
            for one in self._upstreams:
                fleet.up(one.name)
                self._watching.append(asyncio.create_task(self._follow(one, fleet), name=f"watch {one.name}"))
            return
        self._fleet_of_processes(fleet)
        await asyncio.gather(*(process.start() for process in self.processes))

    def _fleet_of_processes(self, fleet: Fleet) -> None:
        for process in self.processes:
            process.on_state = partial(_tell, fleet, process.name)

    async def _until_up(self, upstream: Upstream) -> None:
        until_s = time.monotonic() + self.settings.fleet.start_timeout_s
        while True:
            try:
                await upstream.text("/health")
                return
            except UpstreamLostError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(_POLL_S)

    async def _follow(self, upstream: Upstream, fleet: Fleet) -> None:
        """Say whether a server that somebody else runs is up."""
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                await upstream.text("/health")
                fleet.up(upstream.name)
            except UpstreamLostError as error:
                logger.warning("%s", error)
                fleet.down(upstream.name)

    async def _stop_servers(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self.processes))
        for upstream in self._upstreams:
            await upstream.close()
        if self._inbox is not None:
            self._inbox.close()

    def _process(self, number: int) -> VllmProcess:
        fleet = self.settings.fleet
        assert self._inbox is not None, "reports come from processes of ours"
        secrets = self.settings.connector_environment()
        environment = {VARIABLE: self._inbox.path, **secrets, **fleet.environments().get(number, {})}
        launch = Launch(
            lambda port: self.flags.command(port, self.settings.connector_config()), environment, fleet.start_timeout_s
        )
        return VllmProcess(f"replica-{number}", launch)

    def _upstream(self, name: str, url: str) -> Upstream:
        return Upstream(name, url, transport=None if self.transport is None else self.transport(url))

    def _tokenizer(self) -> TextTokenizer:
        if self.tokenizer is not None:
            return self.tokenizer
        flags = {name: self.flags.value(f"--{name.replace('_', '-')}") for name in ("revision", "chat_template")}
        return load_tokenizer(self.flags.tokenizer, flags)

    def _parts(self, fleet: Fleet, tokenizer: TextTokenizer, most_tokens: int) -> FrontParts:
        usual, shadowing = self.settings.requests, self.settings.shadow
        monitor = None if shadowing is None else ShadowMonitor(shadowing)
        chooser = chooser_for(
            self.flags.source,
            method=usual.method,
            quality=usual.quality,
            reuse=self.settings.reuse,
            dtype=self.flags.value("--dtype"),
        )
        prompting = Prompting(
            tokenizer,
            model=self.flags.name,
            most_tokens=most_tokens,
            chooser=chooser,
            usual_order=ChunkOrder.parse(usual.order or ""),
            conversations=self.settings.conversations,
            shadow=monitor,
        )
        corpora, observer = self._corpora(tokenizer), self._observer(fleet, monitor)
        shadow = None if monitor is None else FrontShadow(monitor, fleet)
        answering = FrontAnswering(prompting, fleet, self._inbox, corpora, self.limits, self.settings, observer, shadow)
        return FrontParts(answering, corpora, fleet, observer, monitor)

    def _observer(self, fleet: Fleet, monitor: ShadowMonitor | None) -> Observer:
        watch = self.settings.watch
        metrics = ServerMetrics(
            self.flags.name,
            shadow=monitor,
            tenants=[tenant.name for tenant in self.keys.tenants] if watch.tenant_metrics else None,
            speculation=self._speculations,
            others=[lambda: fleet_samples(fleet, self._restarts(), self._retries())],
        )
        return Observer(metrics, open_traces(watch.otlp_endpoint))

    def _speculations(self) -> SpeculationCounts:
        return SpeculationCounts() if self.parts is None else self.parts.answering.speculation.counts

    def _restarts(self) -> dict[str, int]:
        return {process.name: process.restarts for process in self.processes}

    def _retries(self) -> int:
        return 0 if self.parts is None else self.parts.answering.retries

    def _corpora(self, tokenizer: TextTokenizer) -> Corpora:
        limits, asked = self.settings.limits, self.settings.corpora
        corpora = Corpora(
            tokenizer, asked.data_dir, max_corpora=limits.max_corpora, max_chunks=limits.max_corpus_chunks
        )
        for entry in asked.corpus:
            corpora.share(entry)
        corpora.load(self.keys.tenants if len(self.keys) else [ANONYMOUS])
        return corpora

    def _enter(self, stage: Stage) -> None:
        if stage is self.stage and stage is not Stage.STARTING_VLLM:
            return
        self.stage = stage
        if self.on_stage is not None:
            self.on_stage(stage, time.perf_counter() - self._started_s)


async def _open_inbox(path: Path | None = None) -> ReportInbox:
    inbox = ReportInbox(path)
    await inbox.open()
    return inbox


def _tell(fleet: Fleet, name: str, state: ProcessState) -> None:
    with suppress(StopIteration):
        (fleet.up if state is ProcessState.UP else fleet.down)(name)
