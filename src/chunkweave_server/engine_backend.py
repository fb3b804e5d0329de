"""Our own engine as the server's backend."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from chunkweave.config import ReuseConfig
from chunkweave.conversation.answer import PendingAnswer
from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.engine.async_engine import AnswerStream, AsyncEngine
from chunkweave.engine.engine import Engine, EngineOptions
from chunkweave.engine.grammar import GrammarCompiler
from chunkweave.errors import RequestAbortedError, UsageError
from chunkweave.kv.request_cache import keep_freed_memory
from chunkweave.models.gguf import is_bundled_reader
from chunkweave.models.threads import use_threads
from chunkweave.ordering.arrangement import COUNTS_FILE
from chunkweave.prompt.builder import PromptLimit
from chunkweave.prompt.contexts import ContextPool
from chunkweave.prompt.find_chunks import ChunkFinder, TokenTable
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.prompt.rendering import rendered_chat
from chunkweave.prompt.request import Request
from chunkweave.prompt.runs import RunIndex
from chunkweave.prompt.template import INSTRUCTION, calls_in_template
from chunkweave.store.records import EarlierRuns, RemovedTexts, SegmentRecord
from chunkweave.types import Chunk, ChunkId, Context
from chunkweave.weaving.stores import eviction_order
from chunkweave_server.backend import (
    BackendParts,
    Event,
    Forgotten,
    Stage,
    Submission,
    Warmings,
    context_pool,
    reads,
    storable_parts,
)
from chunkweave_server.chats import ChatPrompts, details_of
from chunkweave_server.errors import NOT_READY_AGAIN_S, HttpError
from chunkweave_server.improving import Improver
from chunkweave_server.metrics import (
    MetricSample,
    batching_samples,
    comparison_samples,
    kernel_samples,
    store_samples,
)
from chunkweave_server.requests import CompletionBody, PromptBody, refuse_for_engine
from chunkweave_server.settings import Settings
from chunkweave_server.structured import BEGIN, Grammars, ParsedAnswer, form_of, with_plain_tools
from chunkweave_server.threads import TenantThreads, in_thread

logger = logging.getLogger(__name__)

_FLUSH_S = 30.0


class EngineBackend:
    """One engine in this process, with its batching thread.

    `engine`, `batching` and `cache` are set by `start`.
    """

    def __init__(self, settings: Settings, load: Callable[[Settings], Engine] | None = None) -> None:
        """`load` makes the engine for the settings; None: `load_engine`."""
        self.name = settings.model.name
        self.first_stage = Stage.LOADING_MODEL
        self.passthrough = None
        self.engine: Engine
        self.batching: AsyncEngine
        self.cache: EngineCache
        self._settings = settings
        self._load = load or load_engine
        self._threads: TenantThreads | None = None
        self._finding = threading.Lock()
        self._finder: ChunkFinder | None = None

    @property
    def unavailable(self) -> str | None:
        """Set after the engine's thread ended because of a bug."""
        return "the engine has stopped" if self.batching.closed else None

    async def start(self, threads: TenantThreads) -> BackendParts:
        """Load the model and start the batching thread."""
        engine = self.engine = await in_thread(lambda: self._load(self._settings))
        await in_thread(lambda: engine.preparer.load_counts(self._counts_file))
        self.batching = AsyncEngine(engine, self._settings.batching)
        self.cache = EngineCache(engine, self.batching, threads, self._settings)
        self.cache.improving.start()
        self._threads = threads
        if self._settings.finding.find_chunks:
            await in_thread(self._make_finder)
        self._grammars = Grammars(GrammarCompiler(engine.loaded.tokenizer), threads)
        self._chats = ChatPrompts(engine.builder, self.name, engine.loaded.fingerprint)
        self._template_has_tools = await in_thread(partial(calls_in_template, engine.loaded.tokenizer, BEGIN))
        return BackendParts(
            engine.loaded.tokenizer,
            engine.calibration is not None or engine.comparisons is not None,
            min(engine.loaded.model.geometry.max_positions, self.batching.most_tokens),
            max_prefill_batch=self._settings.fleet.max_prefill_batch or 1,
            speculate=self._settings.fleet.speculate,
            order=engine.preparer.order,
            reads_worlds_only=is_bundled_reader(self._settings.model.model),
            reorders=self.batching.reorders,
        )

    async def stop(self) -> None:
        """Stop the batching thread, finish pending writes, and close the engine."""
        threads, self._threads = self._threads, None
        if threads is None:
            return
        await self.cache.improving.close()
        await in_thread(self.batching.close)
        await in_thread(lambda: self.engine.preparer.save_counts(self._counts_file))
        await in_thread(self._close)

    def check(self, body: CompletionBody) -> None:
        """Refuse unknown models, fields that only vLLM supports, and wrong forms of answers.

        Raises:
            HttpError: 400, such a field; 404, another model; 501, a library is missing; 503, the engine has stopped.
        """
        if self.unavailable:
            message = f"the server is not ready: {self.unavailable}"
            raise HttpError(503, message, code="not_ready", retry_after_s=NOT_READY_AGAIN_S)
        if body.model not in (None, self.name):
            message = f"no model {body.model!r}: this server serves {self.name!r}"
            raise HttpError(404, message, param="model", code="model_not_found")
        refuse_for_engine(body)
        if body.has_form:
            form_of(body)

    async def submit(self, submission: Submission, *, speculative: bool = False) -> PendingAnswer[Event]:
        """Tokenize and submit in a thread: a long prompt must not delay the next tokens of other requests."""
        body = submission.body
        request = submission.request
        form = form_of(body) if body.has_form else None
        if form is not None:
            grammar = await self._grammars.compiled(submission.tenant, form)
            request = replace(request, sampling=replace(request.sampling, grammar=grammar))
        chat = details_of(body)
        finds = self._finds(body)
        build = None
        if (chat.variables or chat.exchanges) and not self._template_has_tools:
            usual = "" if finds else INSTRUCTION
            tools = chat.variables.get("tools", ())
            exchanges = body.question.exchanges
            request = with_plain_tools(request, tools, exchanges, usual=usual)
            chat = chat.without_tools
        if finds:
            build = partial(self._found, body)
        elif chat.variables or chat.exchanges:
            build = partial(self._chats.build, chat)
        work = partial(
            self.batching.submit,
            request,
            build=build,
            method_request=submission.method_request,
            loop=asyncio.get_running_loop(),
            speculative=speculative,
            tenant=submission.tenant,
            answers=submission.body.n,
            finder=self._make_finder() if finds else None,
        )
        assert self._threads is not None, "it has started"
        stream = await self._threads.run(submission.tenant, work, undo=AnswerStream.aclose)
        return ParsedAnswer(stream, form) if form is not None and form.calls else stream

    def samples(self) -> Iterator[MetricSample]:
        """Metrics of the engine, the store and idle-time work."""
        yield from batching_samples(self.batching.stats)
        yield from kernel_samples()
        yield from store_samples(self.engine.store)
        yield from self.cache.improving.samples()
        if (comparisons := self.engine.comparisons) is not None:
            counts = {name: getattr(comparisons, name) for name in ("compared", "dropped", "failed")}
            yield from comparison_samples(comparisons.evidence, counts)

    async def metrics(self) -> bytes:
        """Empty: there are no other processes."""
        return b""

    def _finds(self, body: CompletionBody) -> bool:
        return body.finds_chunks(self._settings.finding.find_chunks)

    def _found(self, body: CompletionBody, request: Request, limit: PromptLimit) -> Prompt:
        """The prompt of a request as its client sent it, in parts that are found in it. Called in a thread."""
        builder = self.engine.builder
        finder = self._make_finder()
        salt = request.cache_salt
        if isinstance(body, PromptBody):
            return builder.plain_text(request.question, finder, cache_salt=salt, limit=limit)
        texts = [message.text for message in body.messages]
        calls = [call.function.arguments for message in body.messages for call in message.tool_calls]
        tools = json.dumps(body.template_variables, ensure_ascii=False)
        limit.check_characters(sum(map(len, (*texts, *calls, tools))), "messages and tools")
        begun = body.messages[-1].role == "assistant"  # it is continued, even if it is empty
        messages = body.chat[: -1 if begun else None]
        variables = body.template_variables
        if not self._template_has_tools and (body.tools or body.question.exchanges):
            messages = request.messages
            variables = body.chat_template_kwargs
        rendered = rendered_chat(builder.tokenizer, messages, variables)
        if rendered is not None:
            return builder.plain(rendered, finder, continued=request.continued, cache_salt=salt, limit=limit)
        built = builder.build(
            request.question,
            system=request.system,
            history=request.history,
            continued=request.continued,
            limit=limit,
        )
        return builder.recut(built.token_ids, finder, cache_salt=salt)

    def _make_finder(self) -> ChunkFinder:
        with self._finding:
            if self._finder is None:
                table = TokenTable.of(self.engine.loaded.tokenizer)
                store = self.engine.store
                runs = RunIndex(lambda chunk: store.chunk_tokens(chunk) > 0)
                self._finder = ChunkFinder(table, runs, earlier=EarlierRuns(store.records()))
                self.cache.finder = self._finder
            return self._finder

    @property
    def _counts_file(self) -> Path | None:
        folder = self._settings.store.cache_dir
        return None if folder is None else folder / self.engine.loaded.fingerprint / COUNTS_FILE

    def _close(self) -> None:
        if not self.engine.store.flush(_FLUSH_S):
            logger.warning("some segments were not written in time")
        self.engine.close()


class EngineCache:
    """The commands of `/v1/cache` on the engine's chunks.

    Used in the event loop's thread only, except for work that it runs in the tenants' threads.
    """

    def __init__(self, engine: Engine, batching: AsyncEngine, threads: TenantThreads, settings: Settings) -> None:
        self.improving = Improver(settings.improving, engine.preparer, self)
        self.finder: ChunkFinder | None = None
        self._engine = engine
        self._batching = batching
        self._threads = threads
        self._warmings = Warmings()

    async def warm(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Compute missing chunks one by one, with lower priority than requests; returns how many were computed.

        Raises:
            ChunkweaveError: a chunk was not computed; chunks before it are computed.
        """
        computed = 0
        pool = await context_pool(self._engine.preparer, self._threads, tenant, chunks, salt)
        with self._warmings.begun() as gone:
            for chunk in chunks:
                computed += await self._warm_one(tenant, chunk, pool, salt, gone)
        await in_thread(partial(self._engine.preparer.drop_first_passes, pool))
        parts = [] if pool is None else [part for part in pool.parts if part.id not in gone]
        means = {part.id: ("", self.stored(part) or ()) for part in parts if part.id is not None}
        self.improving.warmed(tenant, salt, parts, {chunk: mean for chunk, mean in means.items() if mean[1]})
        return computed

    async def _warm_one(
        self, tenant: str, chunk: Chunk, pool: ContextPool | None, salt: str, gone: AbstractSet[ChunkId]
    ) -> bool:
        """Compute a chunk; returns whether anything was computed.

        It starts again without the removed chunks (`gone`) if chunks were removed meanwhile: the removal may have
        deleted KV that a context was woven from, and the mean needs all its contexts.
        """
        computed = False
        removed_count = -1
        while removed_count != len(gone):
            removed_count = len(gone)
            begin = partial(self._batching.beforehand, chunk, pool, without=gone, cache_salt=salt)
            work = await self._threads.run(tenant, begin)
            while (prepared := await self._threads.run(tenant, partial(next, work, None))) is not None:
                if reads(prepared.prompt, gone):
                    break
                await self._compute(tenant, prepared, gone)
                computed = True
        return computed

    async def _compute(self, tenant: str, prepared: PreparedRequest, gone: AbstractSet[ChunkId]) -> None:
        try:
            await self.compute(prepared, tenant)
        except RequestAbortedError:
            if not reads(prepared.prompt, gone):
                raise

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits, and no call warms chunks."""
        return self._batching.idle and not self._warmings

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a prompt."""
        return min(self._batching.most_tokens, self._engine.preparer.context_tokens)

    def stored(self, part: PromptPart) -> Sequence[Context] | None:
        """The contexts of a chunk's stored mean; empty if it has none."""
        assert part.id is not None, "a chunk has an id"
        return next((record.contexts for record in self._engine.store.means(part.id)), ())

    async def compute(self, prepared: PreparedRequest, tenant: str, place: str = "") -> tuple[str, float]:
        """Compute and store a prompt with lower priority than requests.

        Returns `place`, and the seconds without the time of waiting.

        Raises:
            RequestAbortedError: a chunk that it reads is being removed, or the engine is closed.
        """
        with self._warmings.begun() as gone:
            options: dict[str, Any] = {"tenant": tenant, "unwanted": partial(reads, prepared.prompt, gone)}
            begin = partial(self._batching.compute, prepared, loop=asyncio.get_running_loop(), **options)
            async with await self._threads.run(tenant, begin, undo=_end) as stream:
                report = (await stream.answer()).report
        return place, report.lookup_s + report.load_s + report.weave_s

    async def settle(self, salt: str, parts: Sequence[PromptPart]) -> None:  # noqa: ARG002
        """Remove the first passes of chunks that have a mean."""
        chunks = {part.id for part in parts if part.id is not None}
        alone = not self._engine.preparer.neutral_tokens
        await in_thread(partial(self._engine.store.drop_first_passes, chunks, alone=alone))

    async def forget(self, tenant: str, texts: Sequence[str], salt: str) -> Forgotten:
        """Remove the KV of chunks in a thread, while the engine steps: the store is thread-safe."""
        parts = await storable_parts(self._engine.preparer, self._threads, tenant, [*map(Chunk, texts)], salt)
        ids = list(dict.fromkeys(part.id for part in parts if part.id is not None))
        held = self._engine.removed_texts([part.token_ids for part in parts], salt)
        self._warmings.removed(ids)
        await self.improving.removed(ids)
        with suppress(RequestAbortedError):  # the engine has stopped
            # What read the chunks has ended by then, and is removed below, or ends before the next step.
            await asyncio.wrap_future(self._batching.between_steps(partial(self._forget_in_work, frozenset(ids))))
        readers: list[SegmentRecord] = []
        try:
            removed = await self._threads.run(tenant, lambda: self._forget(ids, held, readers))
        finally:
            for record in (reader for reader in readers if reader.contexts):
                self.improving.has_mean(tenant, salt, "", record)
            queued = self.improving.queue({("", record.chunk_id) for record in readers})
        return Forgotten(removed, queued)

    async def clear(self) -> int:
        """Remove everything of all tenants; returns the number of removed segments."""
        segments = len(self._engine.store)
        await self.improving.cleared()
        with suppress(RequestAbortedError):
            await asyncio.wrap_future(self._batching.between_steps(partial(self._forget_in_work, None)))
        if self.finder is not None:
            self.finder.clear()
        await in_thread(self._engine.store.clear)
        return segments

    def stats(self) -> Mapping[str, Any]:
        """Statistics of store and engine, the order of eviction, and idle-time work."""
        store = self._engine.store
        counts = {"store": asdict(store.stats), "engine": asdict(self._batching.stats)}
        learned = {}
        if (comparisons := self._engine.comparisons) is not None:
            learned = {"learned": {**comparisons.evidence.shown(), "pending": comparisons.pending}}
        return {**counts, "eviction": {"engine": eviction_order(store)}, **self.improving.stats(), **learned}

    def _forget_in_work(self, gone: frozenset[ChunkId] | None) -> None:
        """Forget what unfinished work holds of chunks (None: of all). Called between two steps."""
        self._engine.runner.means.forget(gone)
        if self._engine.comparisons is not None:
            self._engine.comparisons.drop_all()

    def _forget(self, ids: Sequence[ChunkId], texts: RemovedTexts, readers: list[SegmentRecord]) -> int:
        """Remove chunks and the segments computed from them. Appends the records of the latter to `readers`."""
        if self.finder is not None:
            ids = (*ids, *self.finder.forget(texts.are_in))
        store = self._engine.store
        gone = frozenset(ids)
        if self.improving.on:
            remaining = (record for record in store.records() if record.chunk_id not in gone)
            readers.extend(record for record in remaining if not gone.isdisjoint(record.sources))
        return store.forget_chunks(ids, texts)


async def _end(stream: AnswerStream | None) -> None:
    if stream is not None:
        await stream.aclose()


def engine_options(settings: Settings) -> EngineOptions:
    """The options of an engine that do not depend on its model."""
    return {
        "store": settings.store,
        "method": settings.requests.method,
        "quality": settings.requests.quality,
        "reuse": ReuseConfig(capture=settings.capture, choice=settings.requests.choice),
        "order": settings.requests.order or "",
        "ordering": settings.ordering,
        "compare": settings.improving.compare,
        "compute": settings.compute,
    }


def load_engine(settings: Settings) -> Engine:
    """Load the engine for the settings. Sets this process's threads and memory allocation.

    Raises:
        ModelError: the model cannot be loaded or is not supported.
        UsageError: no model, or an unknown device, method or quality.
    """
    model = settings.model
    options = engine_options(settings)
    keep_freed_memory()
    use_threads(model.threads)
    if model.shape is not None:
        return Engine.load_shape(model.shape, device=model.device, dtype=model.dtype, weights=model.weights, **options)
    if model.model is None:
        raise UsageError("no model: give a checkpoint folder, a GGUF file, or `smollm2`")
    where = {"device": model.device, "dtype": model.dtype, "weights": model.weights}
    return Engine.load(model.model, adapter=model.adapter, **where, **options)
