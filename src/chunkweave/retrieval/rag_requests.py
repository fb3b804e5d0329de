"""From questions and the chunks that were found for them to requests for an engine."""

from collections import Counter
from collections.abc import Callable, Sequence

from chunkweave.config import SamplingParams
from chunkweave.engine.request import Request
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.retrieval.corpus import RetrievedChunk
from chunkweave.retrieval.indexes import usual_top_k

Order = Callable[[Sequence[RetrievedChunk]], Sequence[RetrievedChunk]]
"""Retrieved chunks, the best first -> the same chunks in the order in which they stand in the prompt."""


class RagRequests:
    """How a pipeline asks: how many chunks a question gets, in which order, with which instruction and salt."""

    def __init__(self, *, top_k: int | None, order: Order | str, system: str | None, cache_salt: str) -> None:
        """As a pipeline is told.

        Raises:
            UsageError: `top_k` is not positive, or there is no such order.
        """
        if top_k is not None and top_k < 1:
            raise UsageError(f"top-k must be at least 1, not {top_k}")
        self.cache_salt = cache_salt
        self._top_k = top_k
        self._order = None if isinstance(order, str) else order
        self._said = ChunkOrder.parse(order) if isinstance(order, str) else ChunkOrder.FIXED
        self._system = system

    def how_many(self, question: str, asked: int | None, chunks: int) -> int:
        """Chunks for a question over a corpus of `chunks`, of which `asked` were asked for; 0 if there are none.

        Raises:
            UsageError: the question is empty.
        """
        if not question.strip():
            raise UsageError("the question is empty")
        asked = self._top_k if asked is None else asked
        return usual_top_k(chunks) if asked is None else asked

    def ordered(self, found: tuple[RetrievedChunk, ...]) -> tuple[RetrievedChunk, ...]:
        """What was found, the best first, in the order of the prompt.

        Raises:
            UsageError: `order` returned other chunks than it was given.
        """
        if self._order is None:
            return found
        ordered = tuple(self._order(found))
        if Counter(chunk.rank for chunk in ordered) != Counter(chunk.rank for chunk in found):
            raise UsageError("order has to return the chunks that it was given, each once")
        return ordered

    def request(self, question: str, chunks: Sequence[RetrievedChunk], sampling: SamplingParams | None) -> Request:
        """The question over chunks in the order of the prompt."""
        given = [found.chunk for found in chunks]
        return Request(question, given, self._system, sampling or SamplingParams(), self.cache_salt, self._said)


def as_they_stood(chunks: Sequence[RetrievedChunk], report: ReuseReport) -> tuple[RetrievedChunk, ...]:
    """The chunks of a request in the order in which the engine put them into the prompt."""
    return tuple(chunks[chunk.rank] for chunk in report.chunks if chunk.rank is not None)
