"""From a checked body to a running answer: retrieval, submission to the backend, and the record at its end."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from chunkweave.config import SamplingParams
from chunkweave.conversation.answer import AnswerEnd, Choice, PendingAnswer, WholeChoices
from chunkweave.errors import ChunkweaveError, NotRemovedError
from chunkweave.metrics import Savings
from chunkweave.models.gguf import READER_CANNOT_READ, READER_TOKENS_A_WORD
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.prompt.builder import PromptLimit
from chunkweave.prompt.request import Request
from chunkweave.prompt.tokenizer import tokens_a_word
from chunkweave.retrieval.indexes import usual_top_k
from chunkweave.retrieval.retrievers import RetrievedChunk
from chunkweave.retrieval.speculation import Found, Retriever, SpeculativeAnswer
from chunkweave.types import CacheUse, Chunk
from chunkweave_server.backend import Backend, BackendParts, Event, Forgotten, Submission
from chunkweave_server.corpora import Corpora
from chunkweave_server.errors import HttpError
from chunkweave_server.improving import Improver
from chunkweave_server.observability import Observer, RequestMeta
from chunkweave_server.requests import CompletionBody, check_limits, chunks_of
from chunkweave_server.tenants import Tenant, TenantCounts, TenantLimits
from chunkweave_server.threads import TenantThreads

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Retrieval:
    """The result of a corpus search, and the speculation during the search."""

    found: Found
    speculation: SpeculativeAnswer[Event]

    def shown(self, prefilled_s: float | None) -> dict[str, Any]:
        """The fields of the report about retrieval: chunks without their texts, and durations."""
        found = self.found
        speculation = self.speculation
        details = {
            "retrieved": [
                {key: value for key, value in chunk.as_dict().items() if key != "text"} for chunk in found.chunks
            ],
            "embed_s": found.embed_s,
            "search_s": found.search_s,
        }
        summary = speculation.summary(found.at_s, speculation.submitted_s, prefilled_s or found.at_s)
        if prefilled_s is None:
            summary = replace(summary, matched=False, overlap_s=0.0)
        if summary.started:
            return {**details, "pipelining": asdict(summary)}
        return {**details, "not_speculated": speculation.not_started(found)}

    def ranked(self, end: AnswerEnd) -> AnswerEnd:
        """The answer's end with chunks ranked as in the search result, if the speculation had another sequence."""
        report = self.speculation.ranked(end.report, self.found.chunks)
        if report is end.report:
            return end
        ranks = {old.rank: new.rank for old, new in zip(end.report.chunks, report.chunks, strict=True)}
        listed = [{**chunk, "rank": ranks[chunk["rank"]]} for chunk in end.shown["chunks"]]
        return replace(end, report=report, shown={**end.shown, "chunks": listed})


class RunningAnswer:
    """A running answer with the resources that it holds; `aclose` releases them."""

    def __init__(
        self,
        answering: "Answering",
        meta: RequestMeta,
        slot: ExitStack,
        salt: str,
        cache: CacheUse,
    ) -> None:
        self.salt = salt
        self._cache = cache
        self.end: AnswerEnd | None = None
        self.ended = asyncio.Event()
        self._answering = answering
        self._meta = meta
        self._slot = slot
        self._observed = False
        self.answer: PendingAnswer[Event] | None = None
        self.retrieval: _Retrieval | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Choice]:
        """The next pieces. Raises the errors of the backend."""
        assert self.answer is not None, "it has started"
        try:
            while True:
                event = await anext(aiter(self.answer))
                if (end := event.end) is not None:
                    self._conclude(end)
                if event.choices:
                    return event.choices
        except (ChunkweaveError, HttpError) as error:
            self._observed = True
            self._answering.observer.failed(self._meta, error)
            raise

    async def whole(self) -> list[Choice]:
        """All choices, when they are complete. Raises the errors of the backend."""
        whole = WholeChoices()
        async for pieces in self:
            whole.add(pieces)
        return whole.choices

    @property
    def tenant(self) -> str:
        """Name of the tenant that sent the request."""
        return self._meta.tenant

    def abort(self) -> None:
        """Abort the request in the backend; the reader of the answer gets an error."""
        if self.answer is not None:
            self.answer.abort()

    async def aclose(self) -> None:
        """End the request if it runs, and free the tenant's slot. Idempotent."""
        if not self._observed:
            self._observed = True
            self._answering.observer.given_up(self._meta)
        if self.retrieval is not None:
            await self.retrieval.speculation.aclose()
        if self.answer is not None:
            await self.answer.aclose()
        self._slot.close()
        self._answering.running.pop(self, None)
        self.ended.set()

    def _conclude(self, end: AnswerEnd) -> None:
        if self.retrieval is not None:
            end = self.retrieval.ranked(end)
            end = replace(end, shown={**end.shown, **self.retrieval.shown(end.prefilled_s)})
        if self._cache is not CacheUse.USE:
            end = replace(end, shown={**end.shown, "cache": self._cache})
        saved = self._answering.savings[self._meta.tenant].add(end.report)
        if saved is not None:
            end = replace(end, shown={**end.shown, **saved.as_dict()})
        self.end = end
        self._observed = True
        for counts in (self._answering.counts[self._meta.tenant], self._answering.counts_of_all):
            counts.add(end.report, saved)
        if self._answering.improving.on and self._cache is CacheUse.USE:
            self._answering.improving.served(self._meta.tenant, self.salt, end)
        self._answering.observer.answered(self._meta, end.report, finish_reason=end.finish_reason, saved=saved)


class Answering:
    """Starts answers and tracks the running ones. Not thread-safe: used in the event loop's thread only."""

    def __init__(
        self,
        backend: Backend,
        parts: BackendParts,
        corpora: Corpora,
        limits: TenantLimits,
        threads: TenantThreads,
        observer: Observer,
    ) -> None:
        self.counts: dict[str, TenantCounts] = defaultdict(TenantCounts)
        self.counts_of_all = TenantCounts()
        self.savings = defaultdict[str, Savings](Savings)  # no tenant learns how long others' prompts take
        self.running: dict[RunningAnswer, None] = {}
        self.observer = observer
        self.retriever = Retriever(self._pending, speculate=parts.speculate, max_prefill_batch=parts.max_prefill_batch)
        self._backend = backend
        self._parts = parts
        self._corpora = corpora
        self._limits = limits
        self._threads = threads
        self._starting: dict[RunningAnswer, None] = {}
        self._submitted: dict[PendingAnswer[Event], None] = {}
        self._sweeps: set[asyncio.Task[None]] = set()
        self._may_be_unreadable = parts.reads_worlds_only

    async def start(self, tenant: Tenant, body: CompletionBody, meta: RequestMeta) -> RunningAnswer:
        """Search the corpus if the request names one, and submit the request to the backend.

        Raises:
            HttpError: too many requests or documents, or an unknown corpus.
            ChunkweaveError: the backend's `submit` raised it.
        """
        try:
            slot = self._limits.occupy(tenant.name)
            try:  # the running answer owns the slot once it is returned
                return await self._started(tenant, body, meta, slot)
            except BaseException:
                slot.close()
                raise
        except asyncio.CancelledError:
            self.observer.given_up(meta)
            raise
        except (ChunkweaveError, HttpError) as error:
            self.observer.failed(meta, error)
            raise

    @property
    def improving(self) -> Improver:
        """Computes means of chunks in idle time."""
        return self._backend.cache.improving

    async def forget(self, tenant: Tenant, texts: Iterable[str], cache_salt: str = "") -> Forgotten:
        """Remove the KV of a tenant's chunks from every tier.

        A running request that computes one of them stores it again; it is removed again when that request has ended.

        Raises:
            NotRemovedError: some copies could not be removed; all others are removed.
        """
        gone = frozenset(texts)
        salt = tenant.salt(cache_salt)
        if not gone:
            return Forgotten()
        used_before = self._under(salt)  # a request that ends during the removal may store its chunk after it
        try:
            return await self._backend.cache.forget(tenant.name, sorted(gone), salt)
        finally:
            if using := used_before | self._under(salt):
                sweep = asyncio.create_task(self._forget_after(using, sorted(gone), salt, tenant))
                self._sweeps.add(sweep)
                sweep.add_done_callback(self._sweeps.discard)

    def active(self, tenant: Tenant) -> tuple[int, int]:
        """Numbers of running and of pending requests: the tenant's own; for an admin those of all tenants."""
        seen = [answer for answer in self.running if tenant.admin or answer.tenant == tenant.name]
        begun = sum(answer.answer is not None and answer.answer.begun for answer in seen)
        return begun, len(seen) - begun

    def counted(self, tenant: Tenant) -> TenantCounts:
        """Totals of the tenant's answers; for an admin those of all tenants."""
        return self.counts_of_all if tenant.admin else self.counts[tenant.name]

    async def check_length(self, tenant: Tenant, text: str, what: str = "the question") -> None:
        """Refuse a text that fits no prompt, before expensive work.

        Raises:
            PromptTooLongError: the text is too long.
        """
        parts = self._parts
        limit = PromptLimit(self._parts.most_tokens)
        if limit.doubts(text):
            await self._threads.run(tenant.name, lambda: limit.check(parts.tokenizer, text, what))

    async def swept(self) -> None:
        """Wait until all pending removals have ended."""
        while self._sweeps:
            await asyncio.wait(self._sweeps)

    async def close(self) -> None:
        """Abort all running answers and wait for pending removals."""
        for running in list(self.running):
            running.abort()
        await asyncio.sleep(0)  # readers get the error first
        for running in list(self.running):
            await running.aclose()
        await self.swept()
        await self.retriever.close()

    async def _started(self, tenant: Tenant, body: CompletionBody, meta: RequestMeta, slot: ExitStack) -> RunningAnswer:
        arrived_s = time.perf_counter()
        reuse = body.chunkweave
        salt = tenant.salt(body.cache_salt)
        question = body.question
        self._backend.check(body)
        most_tokens = check_limits(body, self._limits.settings, calibrated=self._parts.calibrated)
        sampling = SamplingParams(most_tokens, body.temperature, body.top_p, body.seed, body.stops, body.alternatives)

        async def submit(chunks: Sequence[Chunk], *, speculative: bool) -> PendingAnswer[Event]:
            self._warn_of_unreadable(chunks)
            request = Request(
                question.text,
                chunks,
                question.system,
                sampling,
                salt,
                reuse.order,
                tenant.name,
                question.history,
                continued=question.continued,
                cache=CacheUse(reuse.cache),
            )
            submission = Submission(request, reuse.method_request, body, arrived_s, tenant.name)
            answer = await self._backend.submit(submission, speculative=speculative)
            self._note(answer)
            return answer

        running = RunningAnswer(self, meta, slot, salt, CacheUse(reuse.cache))
        if reuse.corpus is not None:
            return await self._started_from_corpus(tenant, reuse.corpus, body, submit, running)
        with self._starts(running):
            running.answer = await submit(chunks_of(body.documents), speculative=False)
        return running

    async def _started_from_corpus(
        self,
        tenant: Tenant,
        corpus: str,
        body: CompletionBody,
        submit: Callable[..., Awaitable[PendingAnswer[Event]]],
        running: RunningAnswer,
    ) -> RunningAnswer:
        """Start an answer over the nearest chunks of a corpus; prefill may begin before the search has ended."""

        async def submit_found(chunks: Sequence[RetrievedChunk], speculative: bool) -> PendingAnswer[Event]:
            return await submit([chunk.chunk for chunk in chunks], speculative=speculative)

        await self.check_length(tenant, body.question.text)
        named_order = body.chunkweave.order
        order = self._parts.order if named_order is None else ChunkOrder.parse(named_order)
        by_set = order is ChunkOrder.FREE and self._parts.reorders
        speculation = self.retriever.question(submit_found, by_set=by_set)
        try:
            found = await self._retrieve(tenant, corpus, body.question.text, body, speculation)
            running.retrieval = _Retrieval(found, speculation)
            with self._starts(running):
                if (started := await speculation.final(found.chunks)) is None:
                    running.answer = await speculation.start(found.chunks, speculative=False)
                else:
                    started.confirm()
                    running.answer = started
        except BaseException:
            await speculation.aclose()
            raise
        return running

    @contextmanager
    def _starts(self, running: RunningAnswer) -> Iterator[None]:
        """Mark an answer as starting: chunks that are forgotten meanwhile are forgotten again when it ends."""
        self._starting[running] = None
        try:
            yield
            self.running[running] = None
        except BaseException:
            running.ended.set()
            raise
        finally:
            del self._starting[running]

    async def _retrieve(
        self, tenant: Tenant, name: str, question: str, body: CompletionBody, speculation: SpeculativeAnswer[Event]
    ) -> Found:
        """The best chunks of a corpus; preliminary results start speculative prefills."""
        reuse = body.chunkweave

        async def on_stage(chunks: tuple[RetrievedChunk, ...]) -> None:
            if len(chunks) == k:  # the result never has fewer
                await speculation.on_stage(chunks)

        served = self._corpora.get(tenant, name)
        async with self._corpora.locked(served):
            size = len(served.corpus)
            wanted = usual_top_k(size) if reuse.top_k is None else min(reuse.top_k, size) or reuse.top_k
            k = min(self._limits.settings.max_documents, wanted)
            if not k:
                return Found()
            return await self.retriever.search(served.corpus, question, k, on_stage=on_stage)

    def _warn_of_unreadable(self, chunks: Sequence[Chunk]) -> None:
        """Log once that the model is the bundled reader and cannot read these chunks."""
        if not self._may_be_unreadable:
            return
        if tokens_a_word(self._parts.tokenizer, (chunk.text for chunk in chunks)) > READER_TOKENS_A_WORD:
            self._may_be_unreadable = False
            logger.warning("%s (logged once)", READER_CANNOT_READ)

    def _pending(self) -> int:
        """Number of requests, including speculative ones, without a first piece yet."""
        return sum(not answer.begun for answer in list(self._submitted))

    def _note(self, answer: PendingAnswer[Event]) -> None:
        for ended in [answer for answer in self._submitted if answer.begun]:
            del self._submitted[ended]
        self._submitted[answer] = None

    def _under(self, salt: str) -> set[RunningAnswer]:
        """The running answers that may store KV of a removed text: it may be anywhere in their messages."""
        return {answer for answer in (*self._starting, *self.running) if answer.salt == salt}

    async def _forget_after(
        self, using: Iterable[RunningAnswer], texts: Sequence[str], salt: str, tenant: Tenant
    ) -> None:
        for running in using:
            await running.ended.wait()
        with suppress(NotRemovedError):  # logged; the store retries it
            await self._backend.cache.forget(tenant.name, texts, salt)
