"""Retrieval beside prefill, for any backend: searches in threads, and requests that start ahead of their end.

RAGCache §5.3 (dynamic speculative pipelining). A backend takes part with a `Submit` callable. Imports no torch.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Generic, TypeVar

from chunkweave.conversation.answer import PendingAnswer
from chunkweave.errors import ChunkweaveError, DeadlineError, RequestEndedError, UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.retrieval.faiss_indexes import search_in_one_thread
from chunkweave.retrieval.retrievers import DocumentName, RetrievedChunk, StagedCorpus

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT")
RequestT = TypeVar("RequestT", bound=Hashable)
DocumentT = TypeVar("DocumentT", bound=Hashable)


Submit = Callable[[Sequence[RetrievedChunk], bool], Awaitable[PendingAnswer[EventT]]]
"""Submits one question over these chunks, in the order of the prompt; the flag says whether it is speculative.

A speculative request takes only capacity that is idle, and its events are not read before it is confirmed.
"""


@dataclass(frozen=True, slots=True)
class Pipelining:
    """What was computed for one question while its search went on (RAGCache §5.3).

    Of `started` speculations `terminated` were for lists that changed; if the last one `matched` what the search ended
    with, it is the answer. `overlap_s` is for how long the search and the answer's own generation went on together.
    """

    started: int = 0
    terminated: int = 0
    matched: bool = False
    overlap_s: float = 0.0


class Action(StrEnum):
    """What is to be done with a request after a stage of its search."""

    WAIT = "wait"
    """Nothing runs for it, and nothing is to be started now."""
    START = "start"
    """Start prefilling for the provisional documents; what ran for others, if anything, ends after its step."""
    KEEP = "keep"
    """What runs is for these very documents: let it run. After the last stage its result is the answer."""
    TERMINATE = "terminate"
    """What runs is for other documents and ends after its current step; there is no room for a new start."""
    GENERATE = "generate"
    """The search is over: compute for the final documents; what ran for others, if anything, ends after its step."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[DocumentT]):
    """An action, for `documents`; `terminated` are the documents whose speculation ends with it, if there was one."""

    action: Action
    documents: tuple[DocumentT, ...]
    terminated: tuple[DocumentT, ...] | None = None


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """What happened to speculations so far.

    `stages` were looked at, the last ones included. `started` speculations; of these `terminated` were for documents
    that changed, `matched` for what the search ended with. `kept` stages confirmed what was running. `deferred` stages
    would have started one but for the load. `regenerated` requests had begun for other documents than the final
    ones, `late` ones had begun for none.
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
    """What a request's search has named last, and what was started for it."""

    documents: tuple[DocumentT, ...] | None = None
    speculation: tuple[DocumentT, ...] | None = None
    ever: bool = False


class Speculation(Generic[RequestT, DocumentT]):
    """Algorithm 2 of RAGCache for many requests at once: it decides, and neither searches nor computes.

    A speculation is started when a stage names new documents and fewer than `max_prefill_batch` requests are pending,
    so that it takes idle capacity only. It is for the list that it is given: who compares sets sorts it.

    One deviation: the printed algorithm starts only where the list changes, so that a list that was named under load
    is never started, however long the search goes on after it. Theorem 5.1 lets it start once the pool has room; so
    does this, unless `retry` is switched off.
    """

    def __init__(self, *, max_prefill_batch: int, retry: bool = True) -> None:
        """No request is being searched for yet.

        Raises:
            UsageError: the batch holds nothing.
        """
        if max_prefill_batch < 1:
            raise UsageError(f"max_prefill_batch must be at least 1, not {max_prefill_batch}")
        self._max_prefill_batch = max_prefill_batch
        self._retry = retry
        self._searches: dict[RequestT, _Search[DocumentT]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> SpeculationCounts:
        """A snapshot of the counters."""
        return SpeculationCounts(**self._counts)

    def on_stage(self, request: RequestT, documents: Sequence[DocumentT], pending: int) -> Decision[DocumentT]:
        """A stage that is not the last has named `documents`, best first.

        Args:
            request: whose search it is; its first stage begins it.
            documents: the provisional top-k.
            pending: requests that wait for, or are in, prefill (the pool's size), without this one's speculation.
        """
        search = self._searches.setdefault(request, _Search())
        named = tuple(documents)
        changed = named != search.documents
        search.documents = named
        self._counts["stages"] += 1
        if search.speculation == named:
            self._counts["kept"] += 1
            return Decision(Action.KEEP, named)
        terminated = self._terminate(search)
        if not changed and not self._retry:
            return Decision(Action.WAIT, named)
        if pending < self._max_prefill_batch:
            search.speculation = named
            search.ever = True
            self._counts["started"] += 1
            return Decision(Action.START, named, terminated)
        self._counts["deferred"] += 1
        return Decision(Action.WAIT if terminated is None else Action.TERMINATE, named, terminated)

    def on_final(self, request: RequestT, documents: Sequence[DocumentT]) -> Decision[DocumentT]:
        """The search is over: KEEP if what runs is for `documents`, else GENERATE. The request is then forgotten."""
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
        """The request is given up; returns the documents whose speculation is to be ended, None if none runs."""
        search = self._searches.pop(request, None)
        return None if search is None else self._terminate(search)

    def failed(self, request: RequestT) -> None:
        """What ran for the request is lost; the next stage may start it anew."""
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
    """The best chunks so far, the best first, and whether the search is over.

    `embed_s` and `search_s` are the seconds that it has taken, `at_s` when that was by `time.perf_counter`. `stages` it
    had so far; 0 if it was asked for none.
    """

    chunks: tuple[RetrievedChunk, ...] = ()
    last: bool = True
    embed_s: float = 0.0
    search_s: float = 0.0
    at_s: float = 0.0
    stages: int = 0


class NotStarted(StrEnum):
    """Why nothing was computed ahead of a search."""

    OFF = "speculate is off"
    CONVERSATION = "a turn of a conversation begins once"
    BUSY = "other requests were pending"
    ONE_STAGE = "the search has one stage"
    SHORT = "the search ended before an earlier stage was of use"


class Retriever:
    """Searches corpora in threads and decides what is computed ahead of them. Belongs to one event loop.

    A search runs in stages while requests may be computed ahead; under load, or without `speculate`, it is one stage.
    """

    def __init__(
        self,
        pending: Callable[[], int],
        *,
        speculate: bool = True,
        max_prefill_batch: int = 1,
        max_searches: int | None = None,
    ) -> None:
        """No question is being searched for yet.

        Args:
            pending: counts the requests that wait for, or are in, prefill, speculative ones included. Any thread.
            speculate: whether to compute ahead of searches.
            max_prefill_batch: a speculation starts if fewer requests are pending.
            max_searches: searches at a time, each in a thread; others wait. None = one for each core.

        Raises:
            UsageError: `max_prefill_batch` or `max_searches` is not positive.
        """
        if max_searches is not None and max_searches < 1:
            raise UsageError(f"max_searches must be at least 1, not {max_searches}")
        self.speculation: Speculation[object, DocumentName] = Speculation(max_prefill_batch=max_prefill_batch)
        self.pending = pending
        self.speculates: Final = speculate
        self._max_prefill_batch = max_prefill_batch
        self._threads = ThreadPoolExecutor(
            max_searches or os.cpu_count() or 1, "chunkweave-search", initializer=search_in_one_thread
        )

    def question(self, submit: Submit[EventT], *, by_set: bool = False) -> "SpeculativeAnswer[EventT]":
        """A question that is about to be searched for, answered by what `submit` returns. Close it.

        `by_set`: the same chunks in another sequence are the same request, as with a free order.
        """
        return SpeculativeAnswer(self, submit, by_set=by_set)

    async def search(
        self,
        corpus: StagedCorpus,
        question: str,
        k: int,
        *,
        on_stage: Callable[[tuple[RetrievedChunk, ...]], Awaitable[None]] | None = None,
        until_s: float | None = None,
        wait_for_thread: bool = False,
    ) -> Found:
        """The `k` best chunks; `on_stage` learns the best so far after every stage but the last.

        Without `on_stage` there is one stage. A stage that comes while `on_stage` runs replaces an earlier one that was
        not seen. With `wait_for_thread` the
        corpus is not used any more when this returns or raises, however it ends; else a stage may still be running.

        Raises:
            DeadlineError: the search was not over at `until_s` by `time.perf_counter`.
            ChunkweaveError: what the corpus or `on_stage` raises.
        """
        staged = (lambda: False) if on_stage is None else self._worth_stages
        search = _SearchThread(self._threads, corpus, question, k, staged=staged)
        try:
            while not (found := await asyncio.wait_for(search.next(), left_s(until_s))).last:
                if on_stage is not None:
                    await on_stage(found.chunks)
            return found
        except TimeoutError:
            raise DeadlineError("the search was not over in the time that the question was given") from None
        finally:
            search.cancel()
            if wait_for_thread:
                await search.left()

    async def close(self) -> None:
        """Give the threads up, once their searches have ended."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _worth_stages(self) -> bool:
        """Whether there may be time to compute ahead: stages cost calls, and under load nothing would come of them."""
        return self.speculates and self.pending() <= self._max_prefill_batch


class _SearchThread:
    """One question's search in a thread of a pool. It goes on to the next stage at once, read or not."""

    def __init__(
        self, pool: Executor, corpus: StagedCorpus, question: str, k: int, *, staged: Callable[[], bool]
    ) -> None:
        """Start as soon as a thread is free; unless it is `staged` by then, there is one stage, the whole search.

        `staged` is called in that thread.
        """
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
        """What is known after the newest stage, once there is one that was not read yet.

        Raises whatever the corpus raises.
        """
        await self._unread.wait()
        self._unread.clear()
        assert self._newest is not None, "something is unread"
        if isinstance(self._newest, BaseException):
            raise self._newest
        return self._newest

    def cancel(self) -> None:
        """End the search after its current stage. A second time is harmless, and so is one that is over."""
        self._cancelled = True
        self._work_left.cancel()

    async def left(self) -> None:
        """Behind `cancel`: wait until the corpus is not used any more; a cancellation is passed on only then."""
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
    """One question's requests while its search goes on, and after it (RAGCache §5.3, Algorithm 2). Close it.

    At most one request is under way. What a speculation gives is held back until the search has confirmed it; one that
    fails, or is refused, is as if it had not been started. Stages are lists in the order of the prompt, or `by_set` any
    sequence of its chunks: a match then has the sequence of the stage that started it.
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
        """A stage that is not the last has named `chunks`."""
        self._drop_failed()
        own = self._answer is not None and not self._answer.begun
        decision = self._speculation.on_stage(self, self._key(chunks), max(0, self._pending() - own))
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
        """The search is over: what was started for exactly these chunks, not confirmed yet; None if nothing was."""
        self._drop_failed()
        decision = self._speculation.on_final(self, self._key(chunks))
        if decision.terminated is not None:
            await self._terminate()
        self._matched = decision.action is Action.KEEP and self._answer is not None
        return self._answer if self._matched else None

    async def answer_over(
        self, chunks: Sequence[RetrievedChunk], *, until_s: float | None = None
    ) -> AsyncGenerator[EventT, None]:
        """The search is over: the events of the answer over `chunks`, computed already or from now on.

        A confirmed speculation that fails before its first event is submitted again, unless `until_s` has passed.

        Raises:
            ChunkweaveError: what `submit` and its answers raise.
        """
        started = await self.final(chunks)
        if started is not None:
            started.confirm()
            shown = False
            try:
                async for event in started:
                    shown = True
                    yield event
                return
            except RequestEndedError as error:
                if shown or (until_s is not None and time.perf_counter() >= until_s):
                    raise
                logger.warning("a speculation failed (%s); its request is computed anew", error)
                self._matched = False
        async for event in await self.start(chunks, speculative=False):
            yield event

    def summary(self, search_end_s: float, began_s: float, ended_s: float) -> Pipelining:
        """What happened, once the answer is there; it was computed from `began_s` to `ended_s`."""
        matched = self._matched and self._answer is not None and not self._answer.failed
        overlap_s = max(0.0, min(search_end_s, ended_s) - began_s) if matched else 0.0
        return Pipelining(self._started, self._terminated, matched, overlap_s)

    def ranked(self, report: ReuseReport, chunks: Sequence[RetrievedChunk]) -> ReuseReport:
        """The report of the newest request with the ranks that its chunks have among `chunks`, not when submitted."""
        places = {chunk.name: place for place, chunk in enumerate(chunks)}
        ranks = [places[chunk.name] for chunk in self._sent]
        if ranks == sorted(ranks):
            return report
        found = (one if one.rank is None else replace(one, rank=ranks[one.rank]) for one in report.chunks)
        return replace(report, chunks=tuple(found))

    def not_started(self, found: Found) -> NotStarted | None:
        """Why nothing was computed ahead of the search that ended with `found`; None if something was."""
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
        """What makes the request over `chunks` the same as another one."""
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


def left_s(until_s: float | None) -> float | None:
    """Seconds until then by `time.perf_counter`; None if there is no such time.

    Raises:
        DeadlineError: it is over.
    """
    if until_s is None:
        return None
    seconds = until_s - time.perf_counter()
    if seconds <= 0:
        raise DeadlineError("the question was not answered in the time that it was given")
    return seconds
