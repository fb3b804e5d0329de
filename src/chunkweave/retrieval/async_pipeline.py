"""Retrieve, order, weave, answer, for many questions at once, and with prefill beside the search (RAGCache §5.3)."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from math import isfinite

from chunkweave.config import SamplingParams
from chunkweave.engine.async_engine import AnswerStream, AsyncEngine
from chunkweave.errors import DeadlineError, UsageError
from chunkweave.retrieval.anticipation import Anticipation
from chunkweave.retrieval.corpus import DocumentName, RetrievedChunk
from chunkweave.retrieval.faiss_indexes import search_in_one_thread
from chunkweave.retrieval.pipeline import RagAnswer, RagEvent
from chunkweave.retrieval.rag_requests import Order, RagRequests, as_they_stood
from chunkweave.retrieval.search_thread import Found, SearchThread, StagedCorpus
from chunkweave.scheduling.speculation import Speculation, SpeculationCounts


class AsyncRagPipeline:
    """`RagPipeline` over an `AsyncEngine`: any number of questions at a time, in one event loop.

    Every search has a thread of its own, and runs in stages unless requests are queueing up by then. While it goes on,
    the engine computes for the best chunks so far if it has nothing else to do; what is computed is shown only when the
    search has ended with these very chunks, so that answers are those without speculation. A chunk that another list
    has in the same place is reused.

    Owns neither corpus nor engine.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        corpus: StagedCorpus,
        *,
        top_k: int | None = None,
        order: Order | str = "free",
        system: str | None = None,
        cache_salt: str = "",
        speculate: bool = True,
        max_prefill_batch: int = 1,
        max_searches: int | None = None,
    ) -> None:
        """Put a corpus before an engine.

        Args:
            engine: answers; must not be closed before its questions are answered.
            corpus: is searched, in threads.
            top_k: chunks a question gets; None = 6, or all there are.
            order: `free`, `fixed` (the best first), or what puts them in order, as in `RagPipeline`. It is asked after
                every stage, so it should say the same of the same chunks.
            system: instruction; None = the template's own.
            cache_salt: separates tenants, as in `Request`.
            speculate: whether to compute ahead of searches; without it they have no stages.
            max_prefill_batch: a speculation starts if fewer requests wait for, or are in, prefill. 1 is right where
                one prefill fills the processor, as on CPUs; more where a step takes several at no more cost.
            max_searches: searches at a time, each in a thread; others wait. None = one for each core.

        Raises:
            UsageError: `top_k`, `max_prefill_batch` or `max_searches` is not positive, or there is no such order.
        """
        if max_searches is not None and max_searches < 1:
            raise UsageError(f"max_searches must be at least 1, not {max_searches}")
        self.engine = engine
        self.corpus = corpus
        self._requests = RagRequests(top_k=top_k, order=order, system=system, cache_salt=cache_salt)
        self._speculate = speculate
        self._max_prefill_batch = max_prefill_batch
        self._threads = ThreadPoolExecutor(
            max_searches or os.cpu_count() or 1, "chunkweave-search", initializer=search_in_one_thread
        )
        self._speculation: Speculation[Anticipation, DocumentName] = Speculation(max_prefill_batch=max_prefill_batch)

    @property
    def counts(self) -> SpeculationCounts:
        """What happened to speculations so far."""
        return self._speculation.counts

    async def answer(
        self,
        question: str,
        *,
        top_k: int | None = None,
        sampling: SamplingParams | None = None,
        method: str | None = None,
        quality: str | None = None,
        recompute_ratio: float | None = None,
        deadline_s: float | None = None,
    ) -> RagAnswer:
        """The whole answer. Arguments as for `stream`, and it raises what that raises."""
        events = self.stream(
            question,
            top_k=top_k,
            sampling=sampling,
            method=method,
            quality=quality,
            recompute_ratio=recompute_ratio,
            deadline_s=deadline_s,
        )
        answer = None
        async with aclosing(events):
            async for event in events:
                answer = event.answer
        assert answer is not None, "the last event has the answer"
        return answer

    async def stream(
        self,
        question: str,
        *,
        top_k: int | None = None,
        sampling: SamplingParams | None = None,
        method: str | None = None,
        quality: str | None = None,
        recompute_ratio: float | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[RagEvent, None]:
        """The chunks, then the answer in pieces as tokens come; the last event carries the whole `RagAnswer`.

        `method`, `quality` and `recompute_ratio` are as in `Engine.generate`. `deadline_s` seconds from now it ends
        with `DeadlineError`. Closing the generator ends the search after its current stage, and what the engine does
        for it after its current step.

        Raises, with the first event or a later one:
            TopKError: more chunks are asked for than there are.
            UsageError: what `AsyncEngine.submit` refuses, or `order` returned other chunks.
            PromptTooLongError: the chunks and the question do not fit.
            QueueFullError: as many requests wait as may.
            RequestEndedError: there is no answer: deadline, the engine was closed, or it failed twice.
        """
        asked_s = time.perf_counter()
        if deadline_s is not None and not (isfinite(deadline_s) and deadline_s > 0):
            raise UsageError(f"deadline_s must be a positive number of seconds, not {deadline_s}")
        until_s = None if deadline_s is None else asked_s + deadline_s
        k = self._requests.how_many(question, top_k, len(self.corpus))

        def submit(chunks: Sequence[RetrievedChunk], speculative: bool) -> AnswerStream:
            return self.engine.submit(
                self._requests.request(question, chunks, sampling),
                method=method,
                quality=quality,
                recompute_ratio=recompute_ratio,
                deadline_s=_left(until_s),
                speculative=speculative,
            )

        anticipation = Anticipation(self.engine, self._speculation, submit)
        try:
            found = await self._search(question, k, anticipation, until_s) if k or top_k is not None else _NOTHING
            chunks = self._requests.ordered(found.chunks)
            yield RagEvent("", retrieved=chunks)
            ttft_s = None
            pieces = anticipation.answer_over(chunks, until_s=until_s)
            async with aclosing(pieces):
                async for event in pieces:
                    ttft_s = time.perf_counter() - asked_s if ttft_s is None else ttft_s
                    if event.answer is None:
                        yield RagEvent(event.text)
                        continue
                    told = anticipation.told(event.answer, found.at_s) if self._speculate else None
                    stood = as_they_stood(chunks, event.answer.report)
                    answer = RagAnswer(event.answer, stood, found.embed_s, found.search_s, ttft_s, told)
                    yield RagEvent(event.text, answer=answer)
        finally:
            await anticipation.aclose()

    async def _search(self, question: str, k: int, anticipation: Anticipation, until_s: float | None) -> Found:
        """Search to the end, and have the engine compute ahead meanwhile."""
        search = SearchThread(self._threads, self.corpus, question, k, staged=self._worth_stages)
        try:
            while True:
                found = await asyncio.wait_for(search.next(), _left(until_s))
                if found.last:
                    return found
                await anticipation.on_stage(self._requests.ordered(found.chunks))
        except TimeoutError:
            raise DeadlineError("the search was not over in the time that the question was given") from None
        finally:
            search.cancel()

    def _worth_stages(self) -> bool:
        """Whether there may be time to compute ahead: stages cost calls, and under load nothing would come of them."""
        return self._speculate and self.engine.stats.pending <= self._max_prefill_batch


_NOTHING = Found((), True, 0.0, 0.0, 0.0)


def _left(until_s: float | None) -> float | None:
    """Seconds until then.

    Raises:
        DeadlineError: it is over.
    """
    if until_s is None:
        return None
    left_s = until_s - time.perf_counter()
    if left_s <= 0:
        raise DeadlineError("the question was not answered in the time that it was given")
    return left_s
