"""Retrieved chunks, and the corpora that are searched in stages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from chunkweave.retrieval.sections import NO_PLACE, Place
from chunkweave.types import Chunk

DocumentName = tuple[str, int]
"""A chunk's name: its document, and its number within it."""


@dataclass(frozen=True, slots=True)
class RetrievedChunk:
    """A retrieved chunk: `rank` counts from 1, `score` is the cosine with the question's vector.

    `place` is its number within the document, from 0; `within` has its page and heading, if known.
    """

    chunk: Chunk
    document: str
    place: int
    rank: int
    score: float
    title: str
    metadata: Mapping[str, Any]
    within: Place = NO_PLACE

    @property
    def name(self) -> DocumentName:
        """Its name in the corpus."""
        return self.document, self.place

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "rank": self.rank,
            "score": self.score,
            "document": self.document,
            "place": self.place,
            "title": self.title,
            **self.within.as_dict(),
            "metadata": dict(self.metadata),
            "text": self.chunk.text,
        }


@dataclass(frozen=True, slots=True)
class RetrievalStage:
    """The best chunks after stage `number` (from 1) of a search; the stage took `seconds`.

    The chunks of the `last` stage are those of the search without stages. `distances` as in `SearchStage`.
    """

    chunks: tuple[RetrievedChunk, ...]
    number: int
    last: bool
    seconds: float
    distances: int


class StagedCorpus(Protocol):
    """A corpus that a `Retriever` searches; `chunkweave.Corpus` is one. Called in threads.

    `embed_query` returns what `search` takes: a vector, or anything else that the corpus searches by.
    """

    def __len__(self) -> int:
        """Number of chunks."""

    def embed_query(self, question: str) -> Any:
        """The vector of a question, `[dimension]`."""

    def search(self, question: Any, k: int) -> tuple[RetrievedChunk, ...]:
        """The `k` best chunks, best first."""

    def search_stages(self, question: Any, k: int) -> Iterator[RetrievalStage]:
        """Search in stages; the last has the chunks of `search`."""
