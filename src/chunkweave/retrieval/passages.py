"""The chunks of a corpus by the row of their vectors, and what a search returns of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chunkweave.retrieval.corpus_files import Part, StoredDocument
from chunkweave.retrieval.indexes import Hits
from chunkweave.types import Chunk

DocumentName = tuple[str, int]
"""A chunk by its document and its place there."""


@dataclass(frozen=True, slots=True)
class RetrievedChunk:
    """A chunk that was found: `rank` counts from 1, `score` is the cosine with the question's vector.

    `place` is its number within the document, from 0.
    """

    chunk: Chunk
    document: str
    place: int
    rank: int
    score: float
    title: str
    metadata: Mapping[str, Any]

    @property
    def name(self) -> DocumentName:
        """What it is called in its corpus."""
        return self.document, self.place

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "rank": self.rank,
            "score": self.score,
            "document": self.document,
            "place": self.place,
            "title": self.title,
            "metadata": dict(self.metadata),
            "text": self.chunk.text,
        }


@dataclass(frozen=True, slots=True)
class RetrievalStage:
    """The best chunks known after stage `number` (from 1) of a search that took `seconds` for this stage.

    The chunks of the `last` stage are those of the search without stages. `distances` and `extra_distances` as in
    `SearchStage`.
    """

    chunks: tuple[RetrievedChunk, ...]
    number: int
    last: bool
    seconds: float
    distances: int
    extra_distances: int


def document_chunks(document: StoredDocument) -> list[Chunk]:
    """The chunks of a document, called as `split_text` calls them: by its id, and `#number` if there are several."""
    if len(document.chunks) == 1:
        return [Chunk(document.chunks[0], document.id)]
    return [Chunk(text, f"{document.id}#{place}") for place, text in enumerate(document.chunks)]


class Passages:
    """All chunks of the parts of a corpus, numbered like the rows of its index. Never changes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._documents = [document for part in parts for document in part.documents]
        self._starts = np.cumsum([0, *(len(document.chunks) for document in self._documents)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __iter__(self) -> Iterator[Chunk]:
        return (chunk for document in self._documents for chunk in document_chunks(document))

    def retrieved(self, hits: Hits) -> tuple[RetrievedChunk, ...]:
        """What the rows of a search stand for, in the same order."""
        found = zip(hits.rows, hits.scores, strict=True)
        return tuple(self._retrieved(row, rank, score) for rank, (row, score) in enumerate(found, start=1))

    def _retrieved(self, row: int, rank: int, score: float) -> RetrievedChunk:
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        document, place = self._documents[number], row - int(self._starts[number])
        chunk = document_chunks(document)[place]
        return RetrievedChunk(chunk, document.id, place, rank, score, document.title, document.metadata)
