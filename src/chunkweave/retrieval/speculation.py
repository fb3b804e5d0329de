"""Retrieval overlapped with prefill, for any backend: searches in threads, and requests that start before these end.

RAGCache §5.3 (dynamic speculative pipelining). A backend provides a `Submit` callable. Imports no torch.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Generic, TypeVar

from chunkweave.conversation.answer import PendingAnswer
from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.retrieval.faiss_indexes import search_in_one_thread
from chunkweave.retrieval.retrievers import DocumentName, RetrievedChunk, StagedCorpus

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT")
RequestT = TypeVar("RequestT", bound=Hashable)
DocumentT = TypeVar("DocumentT", bound=Hashable)


Submit = Callable[[Sequence[RetrievedChunk], bool], Awaitable[PendingAnswer[EventT]]]
"""Submits one question over these chunks, in the order of the prompt; the flag says whether it is speculative.

A speculative request uses only idle capacity, and its events are not read before it is confirmed.
"""


@dataclass(frozen=True, slots=True)
class Pipelining:
    """Speculations of one question during its search (RAGCache §5.3).

    Of `started` speculations, `terminated` were for lists that changed. If the last one `matched` the search's result,
    it is the answer. `overlap_s` is the time in which the search and the answer's own generation ran together.
    """

    started: int = 0
    terminated: int = 0
    matched: bool = False
    overlap_s: float = 0.0


class Action(StrEnum):
    """Action on a request after a stage of its search."""

    WAIT = "wait"
    """Nothing runs for the request, and nothing starts now."""
    START = "start"
    """Start a prefill for the provisional documents; a running one for others ends after its step."""
    KEEP = "keep"
    """The running prefill is for exactly these documents: let it run. After the last stage its result is the answer."""
    TERMINATE = "terminate"
    """The running prefill is for other documents and ends after its step; there is no capacity to start another."""
    GENERATE = "generate"
    """The search has ended: prefill the final documents; a running prefill for others ends after its step."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[DocumentT]):
    """An action for `documents`; `terminated` are the documents of a speculation that it ends, or None."""

    action: Action
    documents: tuple[DocumentT, ...]
    terminated: tuple[DocumentT, ...] | None = None


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Counters of speculations so far.

    `stages` counts all stages, last ones included. Of the `started` speculations, `terminated` were for documents that
    changed, and `matched` were for the search's result. `kept` stages confirmed a running speculation. `deferred`
    stages started none because of load. `regenerated` requests had speculations only for other documents than the final
    ones; `late` requests had none.
    """

    stages: int = 0
    started: int = 0
    kept: int = 0
    terminated: int = 0
    deferred: int = 0
    matched: int = 0
    regenerated: int = 0
    late: int = 0


@dataclass(slots=True)
class _Search(Generic[DocumentT]):
    """The documents of a request's speculation. `ever`: one was started."""

    speculation: tuple[DocumentT, ...] | None = None
    ever: bool = False


class Speculation(Generic[RequestT, DocumentT]):
    """Algorithm 2 of RAGCache for many requests at once: it decides, and neither searches nor computes.

    A speculation starts if a stage finds new documents and fewer than `max_prefill_batch` requests are pending, so that
    it uses idle capacity only. Documents are compared as a list; a caller that compares sets sorts it.

    Deviation: the printed algorithm starts only when the list changes, so a list that was found under load never
    starts, even if the search continues for long. Theorem 5.1 lets it start once the pool has room. So does this class.
    """

    def __init__(self, *, max_prefill_batch: int) -> None:
        """Begin without requests.

        Raises:
            UsageError: `max_prefill_batch` is not positive.
        """
        if max_prefill_batch < 1:
            raise UsageError(f"max_prefill_batch must be at least 1, not {max_prefill_batch}")
        self._max_prefill_batch = max_prefill_batch
        self._searches: dict[RequestT, _Search[DocumentT]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> SpeculationCounts:
        """A snapshot of the counters."""
        return SpeculationCounts(**self._counts)

    def on_stage(self, request: RequestT, documents: Sequence[DocumentT], pending: int) -> Decision[DocumentT]:
        """Decide after a stage that is not the last; `documents` are best first.

        Args:
            request: the request of the search; its first stage registers it.
            documents: the provisional top-k.
            pending: requests that wait for prefill or are in it (the pool's size), without this one's speculation.
        """
        search = self._searches.setdefault(request, _Search())
        named = tuple(documents)
        self._counts["stages"] += 1
        if search.speculation == named:
            self._counts["kept"] += 1
            return Decision(Action.KEEP, named)
        terminated = self._terminate(search)
        if pending < self._max_prefill_batch:
            search.speculation = named
            search.ever = True
            self._counts["started"] += 1
            return Decision(Action.START, named, terminated)
        self._counts["deferred"] += 1
        return Decision(Action.WAIT if terminated is None else Action.TERMINATE, named, terminated)

    def on_final(self, request: RequestT, documents: Sequence[DocumentT]) -> Decision[DocumentT]:
        """Decide after the last stage, and forget the request: KEEP if it runs for `documents`, else GENERATE."""
        search = self._searches.pop(request, None) or _Search()
        named = tuple(documents)
        self._counts["stages"] += 1
        if search.speculation == named:
            self._counts["matched"] += 1
            return Decision(Action.KEEP, named)
        terminated = self._terminate(search)
        self._counts["regenerated" if search.ever else "late"] += 1
        return Decision(Action.GENERATE, named, terminated)

    def abort(self, request: RequestT) -> tuple[DocumentT, ...] | None:
        """Forget a cancelled request; returns the documents of the speculation that the caller must end, or None."""
        search = self._searches.pop(request, None)
        return None if search is None else self._terminate(search)

    def failed(self, request: RequestT) -> None:
        """Forget the request's speculation, which failed; the next stage may start another."""
        search = self._searches.get(request)
        if search is not None:
            search.speculation = None

    @property
    def running(self) -> int:
        """Requests with a speculation that was neither confirmed nor ended."""
        return sum(search.speculation is not None for search in list(self._searches.values()))

    def _terminate(self, search: _Search[DocumentT]) -> tuple[DocumentT, ...] | None:
        terminated, search.speculation = search.speculation, None
        if terminated is not None:
            self._counts["terminated"] += 1
        return terminated


@dataclass(frozen=True, slots=True)
class Found:
    """The best chunks so far, best first, and whether the search has ended (`last`).

    `embed_s` and `search_s` are the seconds that it took until `at_s`, by `time.perf_counter`. `stages` counts the
    stages so far; 0 for a search without stages.
    """

    chunks: tuple[RetrievedChunk, ...] = ()
    last: bool = True
    embed_s: float = 0.0
    search_s: float = 0.0
    at_s: float = 0.0
    stages: int = 0


class NotStarted(StrEnum):
    """Why no speculation started during a search."""

    OFF = "speculate is off"
    BUSY = "other requests were pending"
    ONE_STAGE = "the search has one stage"
    SHORT = "the search ended before an earlier stage was of use"


class Retriever:
    """Searches corpora in threads and decides about speculations. Belongs to one event loop.

    A search runs in stages if a speculation may start; under load, or without `speculate`, it is one stage.
    """

    def __init__(
        self,
        pending: Callable[[], int],
        *,
        speculate: bool = True,
        max_prefill_batch: int = 1,
    ) -> None:
        """Begin without searches.

        Args:
            pending: counts the requests that wait for prefill or are in it, speculative ones included; called in any
                thread.
            speculate: whether to prefill during searches.
            max_prefill_batch: a speculation starts if fewer requests are pending.

        Raises:
            UsageError: `max_prefill_batch` is not positive.
        """
        self.speculation: Speculation[object, DocumentName] = Speculation(max_prefill_batch=max_prefill_batch)
        self.pending = pending
        self.speculates: Final = speculate
        self._max_prefill_batch = max_prefill_batch
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, "chunkweave-search", initializer=search_in_one_thread)

    def question(self, submit: Submit[EventT], *, by_set: bool = False) -> "SpeculativeAnswer[EventT]":
        """The requests of one question, which `submit` submits. The caller closes it.

        `by_set`: the same chunks in another order are the same request, as with a free order.
        """
        return SpeculativeAnswer(self, submit, by_set=by_set)

    async def search(
        self,
        corpus: StagedCorpus,
        question: str,
        k: int,
        *,
        on_stage: Callable[[tuple[RetrievedChunk, ...]], Awaitable[None]] | None = None,
    ) -> Found:
        """The `k` best chunks; `on_stage` receives the best so far after every stage but the last.

        Without `on_stage` there is one stage. A stage that ends while `on_stage` runs replaces an earlier unread one.
        No thread uses the corpus any more when this returns or raises.

        Raises:
            ChunkweaveError: what the corpus or `on_stage` raises.
        """
        staged = (lambda: False) if on_stage is None else self._worth_stages
        search = _SearchThread(self._threads, corpus, question, k, staged=staged)
        try:
            while not (found := await search.next()).last:
                if on_stage is not None:
                    await on_stage(found.chunks)
            return found
        finally:
            search.cancel()
            await search.left()

    async def close(self) -> None:
        """Wait for running searches, and end the threads."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _worth_stages(self) -> bool:
        """Whether a speculation may start. Stages cost calls, and under load they are of no use."""
        return self.speculates and self.pending() <= self._max_prefill_batch


class _SearchThread:
    """One question's search in a thread of a pool. A stage starts even if the one before was not read."""

    def __init__(
        self, pool: Executor, corpus: StagedCorpus, question: str, k: int, *, staged: Callable[[], bool]
    ) -> None:
        """Submit the search. If `staged` returns false, the whole search is one stage; the search's thread calls it."""
        self._corpus = corpus
        self._question = question
        self._k = k
        self._staged = staged
        self._loop = asyncio.get_running_loop()
        self._unread = asyncio.Event()
        self._newest: Found | BaseException | None = None
        self._cancelled = False
        self._work_left = pool.submit(self._work)
        self._work_left.add_done_callback(self._ended)

    async def next(self) -> Found:
        """Wait for an unread stage, and return the newest.

        Raises what the corpus raises.
        """
        await self._unread.wait()
        self._unread.clear()
        assert self._newest is not None, "something is unread"
        if isinstance(self._newest, BaseException):
            raise self._newest
        return self._newest

    def cancel(self) -> None:
        """End the search after its current stage. Idempotent; no effect on a search that has ended."""
        self._cancelled = True
        self._work_left.cancel()

    async def left(self) -> None:
        """After `cancel`: wait until the thread does not use the corpus any more, also if this wait is cancelled."""
        work = asyncio.gather(asyncio.wrap_future(self._work_left), return_exceptions=True)
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def _work(self) -> None:
        for found in self._stages():
            self._publish(found)
            if self._cancelled:
                return

    def _ended(self, work: Future[None]) -> None:
        error = None if work.cancelled() else work.exception()
        if error is not None:
            self._publish(error)

    def _stages(self) -> Iterator[Found]:
        submitted_s = time.perf_counter()
        vector = self._corpus.embed_query(self._question)
        began_s = time.perf_counter()
        embed_s = began_s - submitted_s
        if not self._staged():
            chunks = self._corpus.search(vector, self._k)
            now_s = time.perf_counter()
            yield Found(chunks, True, embed_s, now_s - began_s, now_s)
            return
        for stage in self._corpus.search_stages(vector, self._k):
            now_s = time.perf_counter()
            yield Found(stage.chunks, stage.last, embed_s, now_s - began_s, now_s, stage.number)

    def _publish(self, newest: Found | BaseException) -> None:
        try:
            self._loop.call_soon_threadsafe(self._put, newest)
        except RuntimeError:
            logger.debug("the event loop of a search is closed")
            self._cancelled = True

    def _put(self, newest: Found | BaseException) -> None:
        self._newest = newest
        self._unread.set()


class SpeculativeAnswer(Generic[EventT]):
    """One question's requests during its search and after it (RAGCache §5.3, Algorithm 2). The caller closes it.

    At most one request runs. Events of a speculation are held back until the search confirms it. A speculation that
    fails or is refused counts as not started. Stages are lists in the order of the prompt. With `by_set`, the same
    chunks in any order match; the answer then has the order of the stage that started it.
    """

    def __init__(self, retriever: Retriever, submit: Submit[EventT], *, by_set: bool = False) -> None:
        self._speculates = retriever.speculates
        self._by_set = by_set
        self._sent: tuple[RetrievedChunk, ...] = ()
        self._no_room = False
        self._speculation = retriever.speculation
        self._pending = retriever.pending
        self._submit = submit
        self._answer: PendingAnswer[EventT] | None = None
        self._started = 0
        self._terminated = 0
        self._matched = False
        self.submitted_s = 0.0
        """When the newest request was submitted, by `time.perf_counter`."""

    async def on_stage(self, chunks: Sequence[RetrievedChunk]) -> None:
        """Act on a stage that is not the last and found `chunks`."""
        self._drop_failed()
        answer_waits = self._answer is not None and not self._answer.begun
        decision = self._speculation.on_stage(self, self._key(chunks), max(0, self._pending() - answer_waits))
        if decision.terminated is not None:
            await self._terminate()
        self._no_room |= decision.action in (Action.WAIT, Action.TERMINATE)
        if decision.action is Action.START:
            try:
                await self.start(chunks, speculative=True)
                self._started += 1
            except ChunkweaveError as error:
                logger.debug("nothing is computed ahead: %s", error)
                self._no_room = True
                self._speculation.failed(self)

    async def final(self, chunks: Sequence[RetrievedChunk]) -> PendingAnswer[EventT] | None:
        """After the last stage: the request that was started for exactly these chunks, not confirmed yet; else None."""
        self._drop_failed()
        decision = self._speculation.on_final(self, self._key(chunks))
        if decision.terminated is not None:
            await self._terminate()
        self._matched = decision.action is Action.KEEP and self._answer is not None
        return self._answer if self._matched else None

    def summary(self, search_end_s: float, began_s: float, ended_s: float) -> Pipelining:
        """The question's speculations; its answer was computed from `began_s` to `ended_s`."""
        matched = self._matched and self._answer is not None and not self._answer.failed
        overlap_s = max(0.0, min(search_end_s, ended_s) - began_s) if matched else 0.0
        return Pipelining(self._started, self._terminated, matched, overlap_s)

    def ranked(self, report: ReuseReport, chunks: Sequence[RetrievedChunk]) -> ReuseReport:
        """The report of the newest request, with ranks of its chunks in `chunks` instead of those when submitted."""
        places = {chunk.name: place for place, chunk in enumerate(chunks)}
        ranks = [places[chunk.name] for chunk in self._sent]
        if ranks == sorted(ranks):
            return report
        reports = (chunk if chunk.rank is None else replace(chunk, rank=ranks[chunk.rank]) for chunk in report.chunks)
        return replace(report, chunks=tuple(reports))

    def not_started(self, found: Found) -> NotStarted | None:
        """Why no speculation started during the search that ended with `found`; None if one did."""
        if self._started:
            return None
        if not self._speculates:
            return NotStarted.OFF
        if self._no_room or not found.stages:
            return NotStarted.BUSY
        return NotStarted.ONE_STAGE if found.stages == 1 else NotStarted.SHORT

    async def aclose(self) -> None:
        """Cancel a prefill that has not ended. Idempotent."""
        self._speculation.abort(self)
        if self._answer is not None:
            await self._answer.aclose()

    async def start(self, chunks: Sequence[RetrievedChunk], *, speculative: bool) -> PendingAnswer[EventT]:
        """Submit the question over `chunks`; raises what `submit` raises."""
        self.submitted_s, self._sent = time.perf_counter(), tuple(chunks)
        self._answer = await self._submit(chunks, speculative)
        return self._answer

    def _key(self, chunks: Sequence[RetrievedChunk]) -> list[DocumentName]:
        """A key of the request over `chunks`: requests with equal keys are the same."""
        names = [chunk.name for chunk in chunks]
        return sorted(names) if self._by_set else names

    async def _terminate(self) -> None:
        if self._answer is not None:
            await self._answer.aclose()
            self._answer = None
            self._terminated += 1

    def _drop_failed(self) -> None:
        if self._answer is not None and self._answer.failed:
            self._answer = None
            self._speculation.failed(self)
