"""From a checked body to an answer that comes: retrieval, tokenizing in a thread, the engine, and who must be told."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Self

from chunkweave.config import SamplingParams
from chunkweave.engine.async_engine import AnswerStream, AsyncEngine
from chunkweave.engine.engine import Engine
from chunkweave.engine.request import Request, StreamEvent
from chunkweave.errors import ChunkweaveError, RequestAbortedError, UnknownRequestError
from chunkweave.retrieval.pipeline import RagPipeline, Retrieved
from chunkweave.server.auth import Tenant
from chunkweave.server.corpora import Corpora
from chunkweave.server.errors import HttpError
from chunkweave.server.limits import Slot, TenantCounts, TenantLimits
from chunkweave.server.observability import Observer, RequestMeta
from chunkweave.server.requests import (
    CompletionBody,
    Question,
    ReuseField,
    answer_tokens,
    check_documents,
    check_earlier,
    check_reuse,
    chunks_of,
)
from chunkweave.server.settings import LimitSettings
from chunkweave.server.threads import in_thread, to_its_end
from chunkweave.types import Chunk


class RunningAnswer:
    """An answer as it comes, with all that has to be given back when it ends. Leave it by `aclose`."""

    def __init__(
        self, answering: "Answering", tenant: Tenant, stream: AnswerStream, slot: Slot, asked: RequestMeta
    ) -> None:
        self.retrieved: Retrieved | None = None
        self.texts: frozenset[str] = frozenset()
        self.ended = asyncio.Event()
        self._answering = answering
        self._tenant = tenant
        self._stream = stream
        self._slot = slot
        self._asked = asked
        self._told = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        try:
            event = await anext(self._stream)
        except ChunkweaveError as error:
            self._told = True
            self._answering.observer.failed(self._asked, error)
            raise
        if event.answer is not None:
            self._told = True
            self._answering.counts[self._tenant.name].add(event.answer.report)
            self._answering.observer.answered(self._asked, event.answer)
        return event

    def end(self) -> None:
        """Have the engine end the request; whoever reads the answer learns it as an error."""
        with suppress(UnknownRequestError):
            self._answering.batching.abort(self._stream.id)

    async def aclose(self) -> None:
        """End the request if it runs, and free the tenant's place; a second time is harmless."""
        if not self._told:
            self._told = True
            self._answering.observer.given_up(self._asked)
        await self._stream.aclose()
        self._slot.release()
        self._answering.running.pop(self, None)
        self.ended.set()


class Answering:
    """Starts answers and knows which are under way. Belongs to the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        batching: AsyncEngine,
        corpora: Corpora,
        limits: TenantLimits,
        settings: LimitSettings,
        observer: Observer,
    ) -> None:
        self.counts: dict[str, TenantCounts] = defaultdict(TenantCounts)
        self.running: dict[RunningAnswer, None] = {}
        self._engine = engine
        self.batching = batching
        self.observer = observer
        self._corpora = corpora
        self._limits = limits
        self.settings = settings
        self._sweeps: set[asyncio.Task[None]] = set()

    async def start(
        self, tenant: Tenant, question: Question, body: CompletionBody, asked: RequestMeta
    ) -> RunningAnswer:
        """Retrieve if need be, and let the request wait for its turn.

        Raises:
            HttpError: too many requests, too many documents, a corpus that is not there.
            ChunkweaveError: what `AsyncEngine.submit` raises.
        """
        try:
            slot = self._limits.occupy(tenant.name)
            try:
                return await self._started(tenant, question, body, slot, asked)
            except BaseException:
                slot.release()
                raise
        except asyncio.CancelledError:
            self.observer.given_up(asked)
            raise
        except (ChunkweaveError, HttpError) as error:
            self.observer.failed(asked, error)
            raise

    async def forget(self, tenant: Tenant, texts: Iterable[str], cache_salt: str = "") -> int:
        """Remove the KV of a tenant's chunks from every tier; returns how many copies of segments there were.

        A request that is computing one of them now will store it once more; it is removed again when that has ended.
        """
        gone = frozenset(texts)
        if not gone:
            return 0
        salt = tenant.salt(cache_salt)
        removed = await self._forget(gone, salt)
        using = [running for running in self.running if running.texts & gone]
        if using:
            sweep = asyncio.create_task(self._forget_after(using, gone, salt))
            self._sweeps.add(sweep)
            sweep.add_done_callback(self._sweeps.discard)
        return removed

    async def warm(self, tenant: Tenant, chunks: Sequence[Chunk], cache_salt: str = "") -> int:
        """Compute what is not stored of chunks, one between any two steps; returns how many were computed."""
        salt = tenant.salt(cache_salt)
        slot = self._limits.occupy(tenant.name)
        try:
            computed = 0
            for chunk in chunks:
                work = self.batching.between_steps(partial(self._engine.precompute, [chunk], cache_salt=salt))
                computed += await asyncio.wrap_future(work)
            return computed
        finally:
            slot.release()

    async def swept(self) -> None:
        """Wait until what is to be removed is removed."""
        while self._sweeps:
            await asyncio.wait(self._sweeps)

    async def _started(
        self, tenant: Tenant, question: Question, body: CompletionBody, slot: Slot, asked: RequestMeta
    ) -> RunningAnswer:
        reuse, salt = body.chunkweave, tenant.salt(body.cache_salt)
        check_documents(len(body.documents), self.settings)
        check_reuse(reuse, self.settings, calibrated=self._engine.calibration is not None)
        check_earlier(self._engine.conversations, reuse.conversation_id, salt, earlier=question.earlier)
        most_tokens = answer_tokens(body.answer_tokens, self.settings)
        retrieved = await self._retrieve(tenant, question, reuse)
        chunks = chunks_of(body.documents) if retrieved is None else tuple(found.chunk for found in retrieved.chunks)
        request = Request(
            question.text,
            chunks,
            question.system,
            SamplingParams(most_tokens, body.temperature, body.top_p, body.seed, body.stops),
            salt,
            reuse.order,
            reuse.conversation_id,
        )
        running = RunningAnswer(self, tenant, await self._submit(request, reuse), slot, asked)
        running.retrieved, running.texts = retrieved, frozenset(chunk.text for chunk in chunks)
        self.running[running] = None
        return running

    async def _submit(self, request: Request, reuse: ReuseField) -> AnswerStream:
        """Tokenize and submit in a thread: a long prompt must not keep others from their next token."""
        loop = asyncio.get_running_loop()
        submitted = asyncio.ensure_future(
            asyncio.to_thread(
                self.batching.submit,
                request,
                method=reuse.method,
                quality=reuse.quality,
                recompute_ratio=reuse.recompute_ratio,
                loop=loop,
            )
        )
        try:
            return await to_its_end(submitted)
        except asyncio.CancelledError:
            if submitted.done() and not submitted.cancelled() and submitted.exception() is None:
                await submitted.result().aclose()
            raise

    async def _retrieve(self, tenant: Tenant, question: Question, reuse: ReuseField) -> Retrieved | None:
        if reuse.corpus is None:
            return None
        served = self._corpora.get(tenant, reuse.corpus)
        async with self._corpora.locked(served):
            pipeline = RagPipeline(self._engine, served.corpus)
            return await in_thread(lambda: pipeline.retrieve(question.text, top_k=reuse.top_k))

    async def _forget(self, texts: frozenset[str], salt: str) -> int:
        work = self.batching.between_steps(lambda: self._engine.forget(sorted(texts), cache_salt=salt))
        return await asyncio.wrap_future(work)

    async def _forget_after(self, using: Sequence[RunningAnswer], texts: frozenset[str], salt: str) -> None:
        for running in using:
            await running.ended.wait()
        try:
            await self._forget(texts, salt)
        except RequestAbortedError:
            await in_thread(lambda: self._engine.forget(sorted(texts), cache_salt=salt))
