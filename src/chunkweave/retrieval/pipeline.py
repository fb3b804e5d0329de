"""Retrieve, order, weave, answer: a corpus and an engine behind one call, one question at a time or many at once."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Unpack

from chunkweave.config import SamplingParams
from chunkweave.conversation.answer import Answer, StreamEvent
from chunkweave.engine.async_engine import AnswerStream, AsyncEngine
from chunkweave.engine.engine import Engine
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.planning.method_choice import MethodOptions
from chunkweave.prompt.request import Request
from chunkweave.retrieval.corpus import Corpus, CorpusChange, Progress
from chunkweave.retrieval.indexes import usual_top_k
from chunkweave.retrieval.retrievers import RetrievedChunk, RetrieverCorpus, StagedCorpus
from chunkweave.retrieval.speculation import Found, Pipelining, Retriever, SpeculationCounts, left_s

Order = Callable[[Sequence[RetrievedChunk]], Sequence[RetrievedChunk]]
"""Takes retrieved chunks, best first, and returns the same chunks in the order of the prompt."""

SomeRetriever = Any
"""A retriever of LangChain or LlamaIndex; `RetrieverCorpus` describes the methods that it needs."""


@dataclass(frozen=True, slots=True)
class RagAnswer:
    """An answer, and its chunks with rank and score, in the order of the prompt.

    The report's times begin when the engine receives the request. `embed_s` and `search_s` come before them; with
    `pipelining` they may overlap. `ttft_s` is the time from the question to the first piece of the answer.

    >>> from chunkweave import Corpus, CorpusDocument, Engine, RagPipeline
    >>> corpus = Corpus()
    >>> change = corpus.add([CorpusDocument("choir", "The Selmond Choir is led by Otto Gunmark.")])
    >>> with Engine.load("reader") as engine:
    ...     answer = RagPipeline(engine, corpus).answer("Who leads the Selmond Choir?")
    >>> answer.text.strip(), [str(found.document) for found in answer.retrieved]
    ('Otto Gunmark', ['choir'])
    """

    answer: Answer
    retrieved: tuple[RetrievedChunk, ...]
    embed_s: float
    search_s: float
    ttft_s: float = 0.0
    pipelining: Pipelining | None = None

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.answer.text

    @property
    def report(self) -> ReuseReport:
        """The reuse report: KV sources and times."""
        return self.answer.report

    @property
    def non_overlapping_search_s(self) -> float:
        """Seconds of the search in which nothing was generated for its final result (RAGCache Table 3)."""
        return self.search_s - (0.0 if self.pipelining is None else self.pipelining.overlap_s)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        data = {
            "answer": self.text,
            "finish_reason": self.answer.finish_reason,
            "embed_s": self.embed_s,
            "search_s": self.search_s,
            "non_overlapping_search_s": self.non_overlapping_search_s,
            "ttft_s": self.ttft_s,
            "retrieved": [chunk.as_dict() for chunk in self.retrieved],
            "report": self.report.as_dict(),
        }
        return data if self.pipelining is None else {**data, "pipelining": asdict(self.pipelining)}


@dataclass(frozen=True, slots=True)
class RagEvent:
    """A piece of an answer. The first event has the chunks and no text; the last has the whole `answer`.

    The answer has the chunks in the order of the prompt; the first event has them before the engine reorders them.
    """

    text: str
    retrieved: tuple[RetrievedChunk, ...] | None = None
    answer: RagAnswer | None = None


class _QuestionMaker:
    """Base of both pipelines: number of chunks per question, their order, instruction and salt."""

    def __init__(self, top_k: int | None, order: Order | str, system: str | None, cache_salt: str) -> None:
        if top_k is not None and top_k < 1:
            raise UsageError(f"top-k must be at least 1, not {top_k}")
        self._cache_salt = cache_salt
        self._top_k = top_k
        self._order = None if isinstance(order, str) else order
        self._chunk_order = ChunkOrder.parse(order) if isinstance(order, str) else ChunkOrder.FIXED
        self._system = system

    def _how_many(self, question: str, top_k: int | None, corpus: StagedCorpus) -> int:
        """Number of chunks to search for; 0 if the corpus is empty and no number was given.

        Raises:
            UsageError: the question is empty.
        """
        if not question.strip():
            raise UsageError("the question is empty")
        top_k = self._top_k if top_k is None else top_k
        if top_k is not None:
            return top_k
        return len(corpus) if isinstance(corpus, RetrieverCorpus) else usual_top_k(len(corpus))

    def _ordered(self, found: tuple[RetrievedChunk, ...]) -> tuple[RetrievedChunk, ...]:
        """The found chunks, given best first, in the order of the prompt.

        Raises:
            UsageError: `order` returned other chunks than it was given.
        """
        if self._order is None:
            return found
        ordered = tuple(self._order(found))
        if Counter(chunk.rank for chunk in ordered) != Counter(chunk.rank for chunk in found):
            raise UsageError("order must return the chunks that it was given, each once")
        return ordered

    def _request(self, question: str, chunks: Sequence[RetrievedChunk], sampling: SamplingParams | None) -> Request:
        """A request: the question over chunks in the order of the prompt."""
        given = [found.chunk for found in chunks]
        return Request(question, given, self._system, sampling or SamplingParams(), self._cache_salt, self._chunk_order)


def _searched(corpus: Any) -> Any:
    """The corpus itself, or a retriever as a corpus.

    Raises:
        UsageError: it is neither.
    """
    return corpus if hasattr(corpus, "embed_query") and hasattr(corpus, "search") else RetrieverCorpus(corpus)


class RagPipeline(_QuestionMaker):
    """Answers questions over the nearest chunks of a corpus, or over the chunks that a retriever finds.

    Owns neither corpus nor engine: the caller closes the engine. Takes one call at a time, as the engine does.

    >>> from chunkweave import Corpus, CorpusDocument, Engine, RagPipeline
    >>> corpus = Corpus()
    >>> change = corpus.add([CorpusDocument("choir", "The Selmond Choir is led by Otto Gunmark.")])
    >>> with Engine.load("reader") as engine:
    ...     print(RagPipeline(engine, corpus, top_k=1).answer("Who leads the Selmond Choir?").text.strip())
    Otto Gunmark
    """

    def __init__(
        self,
        engine: Engine,
        corpus: Corpus | SomeRetriever,
        *,
        top_k: int | None = None,
        order: Order | str = "fixed",
        system: str | None = None,
        cache_salt: str = "",
    ) -> None:
        """Connect a corpus and an engine.

        Args:
            engine: its method and quality apply to calls that name none.
            corpus: the corpus to search, or a retriever of LangChain or LlamaIndex.
            top_k: chunks per question; None = 6, or all if there are fewer; of a retriever all that it finds.
            order: order of the chunks in the prompt: `fixed` = best first, `free` = reordered to maximize reuse, or a
                function that orders them.
            system: instruction; None = the template's own.
            cache_salt: separates tenants, as in `Request`.

        Raises:
            UsageError: `top_k` is not positive, there is no such order, or `corpus` is neither of the two.
        """
        super().__init__(top_k, order, system, cache_salt)
        self.engine = engine
        self.corpus: Corpus | RetrieverCorpus = _searched(corpus)

    def retrieve(self, question: str, *, top_k: int | None = None) -> Found:
        """The chunks for a question, best first or in the pipeline's `order`. An empty corpus has none.

        Raises:
            TopKError: more chunks are asked for than there are.
            UsageError: the question is empty, or `order` returned other chunks than it was given.
        """
        started = time.perf_counter()
        k = self._how_many(question, top_k, self.corpus)
        if top_k is None and k == 0:
            return Found()
        vector = self.corpus.embed_query(question)
        embedded = time.perf_counter()
        found = self.corpus.search(vector, k)
        searched = time.perf_counter()
        return Found(self._ordered(found), True, embedded - started, searched - embedded, searched)

    def answer(
        self,
        question: str,
        *,
        top_k: int | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[MethodOptions],
    ) -> RagAnswer:
        """Retrieve and answer; `options` such as `method` and `recompute_ratio` are those of `Engine.generate`.

        Raises:
            TopKError: more chunks are asked for than there are.
            UsageError: what `Engine.generate` refuses, or `order` returned other chunks.
            PromptTooLongError: the chunks and the question do not fit the model's context.
        """
        retrieved = self.retrieve(question, top_k=top_k)
        answer = self.engine.generate_batch([self._request(question, retrieved.chunks, sampling)], **options)[0]
        return _answered(answer, retrieved)

    def stream(
        self,
        question: str,
        *,
        top_k: int | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[MethodOptions],
    ) -> Iterator[RagEvent]:
        """Yield the chunks, then the answer in pieces; the last event has the whole `RagAnswer`.

        The first event raises what `answer` raises.
        """
        retrieved = self.retrieve(question, top_k=top_k)
        yield RagEvent("", retrieved=retrieved.chunks)
        request = self._request(question, retrieved.chunks, sampling)
        for event in self.engine.stream(request, **options):
            yield RagEvent(event.text, answer=None if event.answer is None else _answered(event.answer, retrieved))

    def precompute(self, *, progress: Progress | None = None) -> int:
        """Compute and store KV of every chunk of the corpus ahead of requests; returns how many were computed.

        Raises:
            PromptTooLongError: a chunk alone does not fit the model's context.
            UsageError: there is a retriever instead of a corpus, whose chunks are not known before they are found.
        """
        chunks = self._listed("Engine.precompute").chunks()
        return self.engine.precompute(chunks, cache_salt=self._cache_salt, progress=progress)

    def remove(self, documents: Iterable[str]) -> CorpusChange:
        """Remove documents from the corpus, and KV of their chunks from the engine's store.

        Raises:
            UnknownDocumentError: an id is not there; nothing was removed.
            CorpusError: the corpus cannot be written; nothing was removed.
            NotRemovedError: the documents were removed, but not all of their KV.
            UsageError: there is a retriever instead of a corpus.
        """
        change = self._listed("Engine.forget").remove(documents)
        self.engine.forget(change.gone, cache_salt=self._cache_salt)
        return change

    def _listed(self, instead: str) -> Corpus:
        if isinstance(self.corpus, RetrieverCorpus):
            raise UsageError(f"a retriever does not list its chunks: give them to {instead}")
        return self.corpus


class AsyncRagPipeline(_QuestionMaker):
    """`RagPipeline` over an `AsyncEngine`: any number of questions at a time, in one event loop.

    Each search runs in a thread, and in stages unless other requests are pending. Meanwhile, an idle engine prefills
    the best chunks found so far. Its events are delivered only if the search ends with exactly these chunks, so that
    speculation does not change answers. A chunk that another list has at the same position is reused.

    Owns neither corpus nor engine.

    >>> import asyncio
    >>> from chunkweave import AsyncEngine, AsyncRagPipeline, Corpus, CorpusDocument, Engine
    >>> corpus = Corpus()
    >>> change = corpus.add([CorpusDocument("choir", "The Selmond Choir is led by Otto Gunmark.")])
    >>> async def ask(engine, *questions):
    ...     async with AsyncEngine(engine) as batching:
    ...         pipeline = AsyncRagPipeline(batching, corpus)
    ...         return await asyncio.gather(*(pipeline.answer(question) for question in questions))
    >>> with Engine.load("reader") as engine:
    ...     [answer.text.strip() for answer in asyncio.run(ask(engine, "Who leads the Selmond Choir?"))]
    ['Otto Gunmark']
    """

    def __init__(
        self,
        engine: AsyncEngine,
        corpus: StagedCorpus | SomeRetriever,
        *,
        top_k: int | None = None,
        order: Order | str = "fixed",
        system: str | None = None,
        cache_salt: str = "",
        speculate: bool = True,
        max_prefill_batch: int = 1,
        max_searches: int | None = None,
    ) -> None:
        """Connect a corpus and an engine.

        Args:
            engine: must stay open until its questions are answered.
            corpus: the corpus to search, in threads; or a retriever of LangChain or LlamaIndex, which has no stages.
            top_k: chunks per question; None = 6, or all if there are fewer; of a retriever all that it finds.
            order: as in `RagPipeline`. A function is called after every stage, so it should return the same order for
                the same chunks.
            system: instruction; None = the template's own.
            cache_salt: separates tenants, as in `Request`.
            speculate: whether to prefill during searches; without it, searches have no stages.
            max_prefill_batch: a speculation starts if fewer requests wait for prefill or are in it. Use 1 if one
                prefill fills the processor, as on CPUs; more if a step takes several at no more cost.
            max_searches: maximum searches at a time, each in a thread; others wait. None = one per core.

        Raises:
            UsageError: `top_k`, `max_prefill_batch` or `max_searches` is not positive, there is no such order, or
                `corpus` is neither of the two.
        """
        super().__init__(top_k, order, system, cache_salt)
        self.engine = engine
        self.corpus: StagedCorpus = _searched(corpus)
        self._speculate = speculate
        self._retriever = Retriever(
            lambda: self.engine.stats.pending,
            speculate=speculate,
            max_prefill_batch=max_prefill_batch,
            max_searches=max_searches,
        )

    @property
    def counts(self) -> SpeculationCounts:
        """Counters of speculations so far."""
        return self._retriever.speculation.counts

    async def answer(
        self,
        question: str,
        *,
        top_k: int | None = None,
        sampling: SamplingParams | None = None,
        deadline_s: float | None = None,
        **options: Unpack[MethodOptions],
    ) -> RagAnswer:
        """The whole answer. Arguments and errors are those of `stream`."""
        events = self.stream(question, top_k=top_k, sampling=sampling, deadline_s=deadline_s, **options)
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
        deadline_s: float | None = None,
        **options: Unpack[MethodOptions],
    ) -> AsyncGenerator[RagEvent, None]:
        """Yield the chunks, then the answer in pieces; the last event has the whole `RagAnswer`.

        `options` such as `method` and `recompute_ratio` are those of `Engine.generate`. After `deadline_s` seconds it
        raises `DeadlineError`. Closing the generator ends the search after its current stage, and the engine's request
        after the current step.

        Raises, with the first event or a later one:
            TopKError: more chunks are asked for than there are.
            UsageError: what `AsyncEngine.submit` refuses, or `order` returned other chunks.
            PromptTooLongError: the chunks and the question do not fit.
            QueueFullError: the queue is full.
            RequestEndedError: there is no answer: deadline, the engine was closed, or it failed twice.
        """
        asked_s = time.perf_counter()
        if deadline_s is not None and not (isfinite(deadline_s) and deadline_s > 0):
            raise UsageError(f"deadline_s must be a positive number of seconds, not {deadline_s}")
        until_s = None if deadline_s is None else asked_s + deadline_s
        k = self._how_many(question, top_k, self.corpus)

        async def submit(chunks: Sequence[RetrievedChunk], speculative: bool) -> AnswerStream:
            request = self._request(question, chunks, sampling)
            return self.engine.submit(request, deadline_s=left_s(until_s), speculative=speculative, **options)

        async def on_stage(found: tuple[RetrievedChunk, ...]) -> None:
            await ahead.on_stage(self._ordered(found))

        by_set = self._order is None and self._chunk_order is ChunkOrder.FREE and self.engine.reorders
        ahead = self._retriever.question(submit, by_set=by_set)
        try:
            found = Found()
            if k or top_k is not None:
                found = await self._retriever.search(self.corpus, question, k, on_stage=on_stage, until_s=until_s)
            chunks = self._ordered(found.chunks)
            yield RagEvent("", retrieved=chunks)
            ttft_s = None
            events: AsyncGenerator[StreamEvent, None] = ahead.answer_over(chunks, until_s=until_s)
            async with aclosing(events):
                async for event in events:
                    ttft_s = time.perf_counter() - asked_s if ttft_s is None else ttft_s
                    if event.answer is None:
                        yield RagEvent(event.text)
                        continue
                    report = ahead.ranked(event.answer.report, chunks)
                    began_s = ahead.submitted_s + report.queue_s
                    ended_s = ahead.submitted_s + report.ttft_s + report.decode_s
                    pipelining = ahead.summary(found.at_s, began_s, ended_s) if self._speculate else None
                    in_prompt = _in_prompt_order(chunks, report)
                    answer = RagAnswer(
                        replace(event.answer, report=report),
                        in_prompt,
                        found.embed_s,
                        found.search_s,
                        ttft_s,
                        pipelining,
                    )
                    yield RagEvent(event.text, answer=answer)
        finally:
            await ahead.aclose()


def _answered(answer: Answer, retrieved: Found) -> RagAnswer:
    ttft_s = retrieved.embed_s + retrieved.search_s + answer.report.ttft_s
    chunks = _in_prompt_order(retrieved.chunks, answer.report)
    return RagAnswer(answer, chunks, retrieved.embed_s, retrieved.search_s, ttft_s)


def _in_prompt_order(chunks: Sequence[RetrievedChunk], report: ReuseReport) -> tuple[RetrievedChunk, ...]:
    """The chunks of a request in the order in which the engine put them into the prompt."""
    return tuple(chunks[chunk.rank] for chunk in report.chunks if chunk.rank is not None)
