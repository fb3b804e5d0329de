"""Our own engine as the server's backend."""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from chunkweave.engine.async_engine import AnswerStream, AsyncEngine
from chunkweave.engine.engine import Engine, EngineOptions
from chunkweave.errors import RequestAbortedError, UsageError
from chunkweave.kv.request_cache import keep_freed_memory
from chunkweave.models.threads import keep_within_cpus
from chunkweave.ordering.arrangement import COUNTS_FILE
from chunkweave.scheduling.shadow import ShadowMonitor
from chunkweave.store.index import TieredLease
from chunkweave.types import Chunk, ChunkId, SegmentId
from chunkweave.weaving.stores import eviction_order
from chunkweave_server.backend import BackendParts, Stage, Submission, storable_parts
from chunkweave_server.errors import NOT_READY_AGAIN_S, HttpError
from chunkweave_server.metrics import MetricSample, batching_samples, store_samples
from chunkweave_server.requests import CompletionBody, refuse_for_engine
from chunkweave_server.settings import Settings
from chunkweave_server.threads import TenantThreads, in_thread

logger = logging.getLogger(__name__)

_FLUSH_S = 30.0


class EngineBackend:
    """One engine in this process, with its batching thread.

    `engine`, `batching` and `cache` are there once it has started.
    """

    def __init__(self, settings: Settings, load: Callable[[Settings], Engine] | None = None) -> None:
        """`load` makes the engine that settings ask for; None is `load_engine`."""
        self.name = settings.model.name
        self.first_stage = Stage.LOADING_MODEL
        self.passthrough = None
        self.engine: Engine
        self.batching: AsyncEngine
        self.cache: EngineCache
        self._settings = settings
        self._load = load or load_engine
        self._threads: TenantThreads | None = None

    @property
    def unavailable(self) -> str | None:
        """An engine that a bug ended answers no more."""
        return "the engine has stopped" if self.batching.closed else None

    @property
    def shadow(self) -> ShadowMonitor | None:
        """The engine's shadow check, if it has one."""
        return self.engine.shadow

    async def start(self, threads: TenantThreads) -> BackendParts:
        """Load the model and start the batching thread."""
        engine = self.engine = await in_thread(lambda: self._load(self._settings))
        await in_thread(lambda: engine.preparer.load_counts(self._counts_file))
        self.batching = AsyncEngine(engine, self._settings.batching)
        self.cache = EngineCache(engine, self.batching, threads, self._settings.limits.pin_budget_bytes)
        self._threads = threads
        return BackendParts(
            engine.loaded.tokenizer,
            engine.calibration is not None,
            min(engine.loaded.model.geometry.max_positions, self.batching.most_tokens),
            max_prefill_batch=self._settings.fleet.max_prefill_batch or 1,
            speculate=self._settings.fleet.speculate,
            order=engine.preparer.order,
            reorders=self.batching.reorders,
        )

    async def stop(self) -> None:
        """Close the thread, write what is still to be written, and close the engine."""
        threads, self._threads = self._threads, None
        if threads is None:
            return
        await in_thread(self.batching.close)
        await in_thread(lambda: self.engine.preparer.save_counts(self._counts_file))
        self.cache.release_all()
        await in_thread(self._close)

    def check(self, body: CompletionBody) -> None:
        """Refuse fields that only vLLM has, and other models."""
        if self.unavailable:
            message = f"the server is not ready: {self.unavailable}"
            raise HttpError(503, message, code="not_ready", retry_after_s=NOT_READY_AGAIN_S)
        if body.model not in (None, self.name):
            message = f"no model {body.model!r}: this server has {self.name!r}"
            raise HttpError(404, message, param="model", code="model_not_found")
        refuse_for_engine(body)

    async def submit(self, submission: Submission, *, speculative: bool = False) -> AnswerStream:
        """Tokenize and submit in a thread: a long prompt must not keep others from their next token."""
        work = partial(
            self.batching.submit,
            submission.request,
            method_request=submission.method_request,
            loop=asyncio.get_running_loop(),
            speculative=speculative,
            tenant=submission.tenant,
        )
        assert self._threads is not None, "it has started"
        return await self._threads.run(submission.tenant, work, undo=AnswerStream.aclose)

    def samples(self) -> Iterator[MetricSample]:
        """What the engine does and what is stored."""
        yield from batching_samples(self.batching.stats)
        yield from store_samples(self.engine.store)

    async def metrics(self) -> bytes:
        """There are no other processes."""
        return b""

    @property
    def _counts_file(self) -> Path | None:
        folder = self._settings.store.cache_dir
        return None if folder is None else folder / self.engine.loaded.fingerprint / COUNTS_FILE

    def _close(self) -> None:
        if not self.engine.store.flush(_FLUSH_S):
            logger.warning("some segments were not written in time")
        self.engine.close()


class EngineCache:
    """What `/v1/cache` does to the engine's chunks. Pins last as long as the server.

    One lease for each pinned chunk of each tenant, on its segments at the time of pinning. Belongs to the event loop's
    thread, but for what it hands to the tenants' threads.
    """

    pins = True

    def __init__(self, engine: Engine, batching: AsyncEngine, threads: TenantThreads, budget_bytes: int) -> None:
        """A tenant may pin `budget_bytes` of segments."""
        self._engine = engine
        self._batching = batching
        self._threads = threads
        self._budget_bytes = budget_bytes
        self._pinning = threading.Lock()
        self._leases: dict[str, dict[ChunkId, TieredLease]] = {}

    async def warm(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Compute what is not stored of chunks, one after the other and behind all requests; returns how many were.

        Raises:
            ChunkweaveError: what `AsyncEngine.precompute` raises; those before it are computed.
        """
        computed, loop = 0, asyncio.get_running_loop()
        for chunk in chunks:
            begin = partial(self._batching.precompute, chunk, cache_salt=salt, loop=loop, tenant=tenant)
            stream = await self._threads.run(tenant, begin, undo=_end)
            if stream is not None:
                async with stream:
                    await stream.answer()
                computed += 1
        return computed

    async def pin(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Pin what is stored of chunks; returns how many segments are."""
        ids = await self._ids(chunks, salt, tenant)
        return await self._threads.run(tenant, lambda: self._pin(tenant, ids))

    async def unpin(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Take pins back; returns how many chunks were pinned."""
        ids = await self._ids(chunks, salt, tenant)
        return await self._threads.run(tenant, lambda: self._unpin(tenant, ids))

    async def forget(self, tenant: str, texts: Sequence[str], salt: str) -> int:
        """Remove chunks beside the steps: the store is made for several threads."""
        ids = await self._ids([Chunk(text) for text in texts], salt, tenant)
        with suppress(RequestAbortedError):  # the engine has stopped
            # What has ended is stored by then, and removed below.
            await asyncio.wrap_future(self._batching.between_steps(lambda: None))
        return await self._threads.run(tenant, lambda: self._engine.store.forget_chunks(ids))

    async def clear(self) -> int:
        """Remove everything of all tenants; returns how many segments there were."""
        before = len(self._engine.store)
        await in_thread(self._engine.store.clear)
        return before

    def stats(self) -> Mapping[str, Any]:
        """What all tiers hold, what they evict first, and what the engine does."""
        store = self._engine.store
        counts = {"store": asdict(store.stats), "engine": asdict(self._batching.stats)}
        return {**counts, "eviction": {"engine": eviction_order(store)}}

    def release_all(self) -> None:
        """Take all pins back."""
        with self._pinning:
            for leases in self._leases.values():
                for lease in leases.values():
                    lease.release()
            self._leases.clear()

    async def _ids(self, chunks: Sequence[Chunk], salt: str, tenant: str) -> list[ChunkId]:
        """The ids of chunks, each once, without those that no context can hold: nothing can be stored of these."""
        parts = await storable_parts(self._engine.preparer, self._threads, tenant, chunks, salt)
        return list(dict.fromkeys(part.id for part in parts if part.id is not None))

    def _pin(self, tenant: str, ids: Sequence[ChunkId]) -> int:
        with self._pinning:
            own = self._leases.setdefault(tenant, {})
            wanted = {*ids, *own}
            records = [record for record in self._engine.store.records() if record.chunk_id in wanted]
            if sum(record.nbytes for record in records) > self._budget_bytes:
                message = f"more than {self._budget_bytes} bytes would be pinned"
                raise HttpError(403, message, code="pin_budget_exceeded")
            segments: dict[ChunkId, list[SegmentId]] = defaultdict(list)
            for record in records:
                segments[record.chunk_id].append(record.id)
            pinned = 0
            for chunk in ids:
                lease = self._engine.store.lease(segments[chunk])
                if lease.ids:
                    own[chunk] = lease
                    pinned += len(lease.ids)
            return pinned

    def _unpin(self, tenant: str, ids: Sequence[ChunkId]) -> int:
        with self._pinning:
            own = self._leases.get(tenant, {})
            found = [lease for chunk in ids if (lease := own.pop(chunk, None)) is not None]
            for lease in found:
                lease.release()
            return len(found)


async def _end(stream: AnswerStream | None) -> None:
    if stream is not None:
        await stream.aclose()


def engine_options(settings: Settings) -> EngineOptions:
    """What settings say of an engine, whatever its model is."""
    return {
        "store": settings.store,
        "method": settings.requests.method,
        "quality": settings.requests.quality,
        "reuse": replace(settings.reuse, capture=settings.capture),
        "order": settings.requests.order or "",
        "ordering": settings.ordering,
        "conversations": settings.conversations,
        "shadow": settings.shadow,
        "compute": settings.compute,
    }


def load_engine(settings: Settings) -> Engine:
    """The engine that settings ask for.

    Raises:
        ModelError: the model cannot be loaded or driven.
        UsageError: no model, or a device, method or quality that does not exist.
    """
    model, options = settings.model, engine_options(settings)
    keep_freed_memory()
    keep_within_cpus()
    if model.shape is not None:
        return Engine.load_shape(model.shape, device=model.device, dtype=model.dtype, weights=model.weights, **options)
    if model.model is None:
        raise UsageError("which model? give model: a checkpoint folder, a GGUF file, or `reader`")
    where = {"device": model.device, "dtype": model.dtype, "weights": model.weights}
    return Engine.load(model.model, adapter=model.adapter, **where, **options)
