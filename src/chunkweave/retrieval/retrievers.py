"""Corpora that a pipeline searches, and retrieved chunks; retrievers of LangChain and LlamaIndex, not imported here."""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

from chunkweave.errors import UsageError
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

    The chunks of the `last` stage are those of the search without stages. `distances` and `extra_distances` as in
    `SearchStage`.
    """

    chunks: tuple[RetrievedChunk, ...]
    number: int
    last: bool
    seconds: float
    distances: int
    extra_distances: int


class StagedCorpus(Protocol):
    """A corpus that a pipeline searches; `chunkweave.Corpus` is one. Called in threads.

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


class RetrieverCorpus:
    """A retriever as a corpus: calls `invoke(question)` of LangChain or `retrieve(question)` of LlamaIndex.

    A question gets all that the retriever finds, or the first `top_k` of it; the total is not known. A chunk's name is
    the `source` or `file_name` in its metadata, else its id. Its score is the retriever's, or 0. Searches may come from
    several threads, if the retriever allows it.

    Raises:
        UsageError: the retriever has neither method.
    """

    def __init__(self, retriever: Any) -> None:
        search = getattr(retriever, "invoke", None) or getattr(retriever, "retrieve", None)
        if not callable(search):
            raise UsageError(
                f"{type(retriever).__name__} is neither a corpus nor a retriever: it has no invoke(question) as "
                "LangChain's have, and no retrieve(question) as LlamaIndex's"
            )
        self._search = search

    def __len__(self) -> int:
        return sys.maxsize

    def embed_query(self, question: str) -> Any:
        """The question: retrievers embed it themselves."""
        return question

    def search(self, question: Any, k: int) -> tuple[RetrievedChunk, ...]:
        """The first `k` chunks that it finds, or fewer; texts of white space alone are left out.

        Raises what the retriever raises.
        """
        found = [_read(one) for one in self._search(question)]
        kept = [one for one in found if one[0].strip()][:k]
        return tuple(_chunk(rank, *one) for rank, one in enumerate(kept, start=1))

    def search_stages(self, question: Any, k: int) -> Iterator[RetrievalStage]:
        """Search in one stage."""
        begun = time.perf_counter()
        chunks = self.search(question, k)
        yield RetrievalStage(chunks, 1, True, time.perf_counter() - begun, 0, 0)


def _read(found: Any) -> tuple[str, str, float, Mapping[str, Any]]:
    """Text, id, score and metadata of a LangChain document, or of a LlamaIndex node with its score."""
    if (text := getattr(found, "page_content", None)) is not None:
        metadata: Mapping[str, Any] = found.metadata or {}
        return text, getattr(found, "id", None) or "", _number(metadata.get("score")), metadata
    node = getattr(found, "node", found)
    if not hasattr(node, "get_content"):
        raise UsageError(f"a retriever found a {type(found).__name__}, which is no document of LangChain's and no node")
    score = _number(getattr(found, "score", None))
    return node.get_content(), getattr(node, "node_id", ""), score, node.metadata or {}


def _chunk(rank: int, text: str, own_id: str, score: float, metadata: Mapping[str, Any]) -> RetrievedChunk:
    named = [str(metadata[name]) for name in ("source", "file_name") if metadata.get(name)]
    source = next(iter([*named, own_id]), "") or f"{crc32(text.encode()):08x}"
    # Chunks of one source are distinguished by their start, if that is known, else by their text.
    place = metadata.get("start_index")
    place = place if isinstance(place, int) else crc32(text.encode())
    return RetrievedChunk(Chunk(text, source), source, place, rank, score, str(metadata.get("title", "")), metadata)


def _number(score: Any) -> float:
    return float(score) if isinstance(score, int | float) else 0.0
