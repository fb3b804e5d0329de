"""Retrieve, order, weave, answer: a corpus and an engine behind one call."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from chunkweave.config import SamplingParams
from chunkweave.engine.engine import Engine
from chunkweave.engine.request import Answer
from chunkweave.metrics import ReuseReport
from chunkweave.retrieval.corpus import Corpus, CorpusChange, Progress, RetrievedChunk
from chunkweave.retrieval.rag_requests import Order, RagRequests, as_they_stood


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Chunks as they are asked about, with the seconds that embedding the question and searching took."""

    chunks: tuple[RetrievedChunk, ...]
    embed_s: float
    search_s: float


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


@dataclass(frozen=True, slots=True)
class RagAnswer:
    """An answer, and the chunks that it was given, in the order of the prompt; each knows its rank and score.

    The report's times begin when the engine got its request: `embed_s` and `search_s` come before them, or with
    `pipelining` partly beside them. `ttft_s` are all seconds from the question to the first piece of the answer.
    """

    answer: Answer
    retrieved: tuple[RetrievedChunk, ...]
    embed_s: float
    search_s: float
    ttft_s: float = 0.0
    pipelining: Pipelining | None = None

    @property
    def text(self) -> str:
        """What was answered."""
        return self.answer.text

    @property
    def report(self) -> ReuseReport:
        """What was reused for it, and where the time went."""
        return self.answer.report

    @property
    def non_overlapping_search_s(self) -> float:
        """Seconds of the search in which nothing was generated for its final result (RAGCache Table 3)."""
        return self.search_s - (0.0 if self.pipelining is None else self.pipelining.overlap_s)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        told = {
            "answer": self.text,
            "finish_reason": self.answer.finish_reason,
            "embed_s": self.embed_s,
            "search_s": self.search_s,
            "non_overlapping_search_s": self.non_overlapping_search_s,
            "ttft_s": self.ttft_s,
            "retrieved": [chunk.as_dict() for chunk in self.retrieved],
            "report": self.report.as_dict(),
        }
        return told if self.pipelining is None else {**told, "pipelining": asdict(self.pipelining)}


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
        self.engine = engine
        self.corpus = corpus
        self._requests = RagRequests(top_k=top_k, order=order, system=system, cache_salt=cache_salt)

    def retrieve(self, question: str, *, top_k: int | None = None) -> Retrieved:
        """The chunks for a question, the best first or as the pipeline's `order` has them. An empty corpus has none.

        Raises:
            TopKError: more chunks are asked for than there are.
            UsageError: the question is empty, or `order` returned other chunks than it was given.
        """
        started = time.perf_counter()
        k = self._requests.how_many(question, top_k, len(self.corpus))
        if top_k is None and k == 0:
            return Retrieved((), 0.0, 0.0)
        vector = self.corpus.embed_query(question)
        embedded = time.perf_counter()
        found = self.corpus.search(vector, k)
        searched = time.perf_counter()
        return Retrieved(self._requests.ordered(found), embedded - started, searched - embedded)

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
            [self._requests.request(question, retrieved.chunks, sampling)],
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
        request = self._requests.request(question, retrieved.chunks, sampling)
        for event in self.engine.stream(request, method=method, quality=quality, recompute_ratio=recompute_ratio):
            yield RagEvent(event.text, answer=None if event.answer is None else _answered(event.answer, retrieved))

    def precompute(self, *, progress: Progress | None = None) -> int:
        """Compute and store the context-free KV of every chunk of the corpus; returns how many were computed.

        Raises:
            PromptTooLongError: a chunk alone does not fit the model's context.
        """
        return self.engine.precompute(self.corpus.chunks(), cache_salt=self._requests.cache_salt, progress=progress)

    def remove(self, documents: Iterable[str]) -> CorpusChange:
        """Remove documents from the corpus, and from the engine's store what was computed of their chunks.

        Raises:
            UnknownDocumentError: an id is not there; nothing was removed.
            CorpusError: the corpus cannot be written; nothing was removed.
        """
        change = self.corpus.remove(documents)
        self.engine.forget(change.gone, cache_salt=self._requests.cache_salt)
        return change


def _answered(answer: Answer, retrieved: Retrieved) -> RagAnswer:
    ttft_s = retrieved.embed_s + retrieved.search_s + answer.report.ttft_s
    chunks = as_they_stood(retrieved.chunks, answer.report)
    return RagAnswer(answer, chunks, retrieved.embed_s, retrieved.search_s, ttft_s)
