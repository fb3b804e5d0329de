"""Retrieve, order, weave, answer: a corpus and an engine behind one call."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chunkweave.config import SamplingParams
from chunkweave.engine.answer import Answer, Request
from chunkweave.engine.engine import Engine
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.ordering.ordering_config import ChunkOrder
from chunkweave.retrieval.corpus import Corpus, CorpusChange, Progress
from chunkweave.retrieval.passages import RetrievedChunk
from chunkweave.retrieval.stages import usual_top_k

Order = Callable[[Sequence[RetrievedChunk]], Sequence[RetrievedChunk]]
"""Retrieved chunks, the best first -> the same chunks in the order in which they stand in the prompt."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Chunks as they are asked about, with the seconds that embedding the question and searching took."""

    chunks: tuple[RetrievedChunk, ...]
    embed_s: float
    search_s: float


@dataclass(frozen=True, slots=True)
class RagAnswer:
    """An answer, and the chunks that it was given, in the order of the prompt; each knows its rank and score.

    The report's times begin when the chunks are there: `embed_s` and `search_s` come before them.
    """

    answer: Answer
    retrieved: tuple[RetrievedChunk, ...]
    embed_s: float
    search_s: float

    @property
    def text(self) -> str:
        """What was answered."""
        return self.answer.text

    @property
    def report(self) -> ReuseReport:
        """What was reused for it, and where the time went."""
        return self.answer.report

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "answer": self.text,
            "finish_reason": self.answer.finish_reason,
            "embed_s": self.embed_s,
            "search_s": self.search_s,
            "retrieved": [chunk.as_dict() for chunk in self.retrieved],
            "report": self.report.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class RagEvent:
    """A piece of an answer as it comes. The first has no text, but the chunks; the last has the whole `answer`.

    The answer has the chunks in the order of the prompt, the first event as they were found.
    """

    text: str
    retrieved: tuple[RetrievedChunk, ...] | None = None
    answer: RagAnswer | None = None


class RagPipeline:
    """Answers questions from the chunks of a corpus that are nearest to them.

    Owns neither corpus nor engine: close the engine yourself. Like the engine it takes one call at a time.
    """

    def __init__(
        self,
        engine: Engine,
        corpus: Corpus,
        *,
        top_k: int | None = None,
        order: Order | str = "free",
        system: str | None = None,
        cache_salt: str = "",
    ) -> None:
        """Put a corpus before an engine.

        Args:
            engine: answers; its method and quality hold for calls that name none.
            corpus: is searched.
            top_k: chunks a question gets; None = 6, or all there are.
            order: in which order they stand in the prompt: `free` = as is best for reuse, `fixed` = the best first, or
                what puts them in order.
            system: instruction; None = the template's own.
            cache_salt: separates tenants, as in `Request`.

        Raises:
            UsageError: `top_k` is not positive, or there is no such order.
        """
        if top_k is not None and top_k < 1:
            raise UsageError(f"top-k must be at least 1, not {top_k}")
        self.engine = engine
        self.corpus = corpus
        self._top_k = top_k
        self._order = None if isinstance(order, str) else order
        self._said = ChunkOrder.parse(order) if isinstance(order, str) else ChunkOrder.FIXED
        self._system = system
        self._cache_salt = cache_salt

    def retrieve(self, question: str, *, top_k: int | None = None) -> Retrieved:
        """The chunks for a question, the best first or as the pipeline's `order` has them. An empty corpus has none.

        Raises:
            TopKError: more chunks are asked for than there are.
            UsageError: the question is empty, or `order` returned other chunks than it was given.
        """
        if not question.strip():
            raise UsageError("the question is empty")
        asked = self._top_k if top_k is None else top_k
        started = time.perf_counter()
        k = usual_top_k(len(self.corpus)) if asked is None else asked
        if asked is None and k == 0:
            return Retrieved((), 0.0, 0.0)
        vector = self.corpus.embed_query(question)
        embedded = time.perf_counter()
        found = self.corpus.search(vector, k)
        searched = time.perf_counter()
        return Retrieved(self._ordered(found), embedded - started, searched - embedded)

    def answer(
        self,
        question: str,
        *,
        top_k: int | None = None,
        sampling: SamplingParams | None = None,
        method: str | None = None,
        quality: str | None = None,
        recompute_ratio: float | None = None,
    ) -> RagAnswer:
        """Retrieve and answer. `method`, `quality` and `recompute_ratio` as in `Engine.generate`.

        Raises:
            TopKError: more chunks are asked for than there are.
            UsageError: what `Engine.generate` refuses, or `order` returned other chunks.
            PromptTooLongError: the chunks and the question do not fit the model's context.
        """
        retrieved = self.retrieve(question, top_k=top_k)
        answer = self.engine.generate_batch(
            [self._request(question, retrieved, sampling)],
            method=method,
            quality=quality,
            recompute_ratio=recompute_ratio,
        )[0]
        return _answered(answer, retrieved)

    def stream(
        self,
        question: str,
        *,
        top_k: int | None = None,
        sampling: SamplingParams | None = None,
        method: str | None = None,
        quality: str | None = None,
        recompute_ratio: float | None = None,
    ) -> Iterator[RagEvent]:
        """The chunks, then the answer in pieces as tokens come; the last event carries the whole `RagAnswer`.

        Raises what `answer` raises, with the first event.
        """
        retrieved = self.retrieve(question, top_k=top_k)
        yield RagEvent("", retrieved=retrieved.chunks)
        request = self._request(question, retrieved, sampling)
        for event in self.engine.stream(request, method=method, quality=quality, recompute_ratio=recompute_ratio):
            yield RagEvent(event.text, answer=None if event.answer is None else _answered(event.answer, retrieved))

    def precompute(self, *, progress: Progress | None = None) -> int:
        """Compute and store the context-free KV of every chunk of the corpus; returns how many were computed.

        Raises:
            PromptTooLongError: a chunk alone does not fit the model's context.
        """
        return self.engine.precompute(self.corpus.chunks(), cache_salt=self._cache_salt, progress=progress)

    def remove(self, documents: Iterable[str]) -> CorpusChange:
        """Remove documents from the corpus, and from the engine's store what was computed of their chunks.

        Raises:
            UnknownDocumentError: an id is not there; nothing was removed.
            CorpusError: the corpus cannot be written; nothing was removed.
        """
        change = self.corpus.remove(documents)
        self.engine.forget(change.gone, cache_salt=self._cache_salt)
        return change

    def _request(self, question: str, retrieved: Retrieved, sampling: SamplingParams | None) -> Request:
        chunks = [found.chunk for found in retrieved.chunks]
        return Request(question, chunks, self._system, sampling or SamplingParams(), self._cache_salt, self._said)

    def _ordered(self, found: tuple[RetrievedChunk, ...]) -> tuple[RetrievedChunk, ...]:
        if self._order is None:
            return found
        ordered = tuple(self._order(found))
        if Counter(chunk.rank for chunk in ordered) != Counter(chunk.rank for chunk in found):
            raise UsageError("order has to return the chunks that it was given, each once")
        return ordered


def _answered(answer: Answer, retrieved: Retrieved) -> RagAnswer:
    ranks = [chunk.rank for chunk in answer.report.chunks if chunk.rank is not None]
    chunks = tuple(retrieved.chunks[rank] for rank in ranks)
    return RagAnswer(answer, chunks, retrieved.embed_s, retrieved.search_s)
