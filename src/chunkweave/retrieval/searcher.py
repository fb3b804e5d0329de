"""Searches the chunks of a corpus at one commit, and builds their index beside searches."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chunkweave.retrieval.corpus_store import CorpusContents, CorpusStore, StoredDocument
from chunkweave.retrieval.faiss_indexes import IvfIndex, available, build_index, outgrown
from chunkweave.retrieval.indexes import FlatIndex, Hits, IndexConfig, IndexKind, SearchStage, VectorIndex
from chunkweave.retrieval.retrievers import RetrievalStage, RetrievedChunk
from chunkweave.types import Chunk


def document_chunks(document: StoredDocument) -> list[Chunk]:
    """The chunks of a document, named as by `split_text`: its id, and `#number` if there are several."""
    if len(document.chunks) == 1:
        return [Chunk(document.chunks[0], document.id)]
    return [Chunk(text, f"{document.id}#{place}") for place, text in enumerate(document.chunks)]


@dataclass(slots=True, eq=False)
class Built:
    """Index of a corpus, which its searchers share while rows are only added.

    `index` has the first rows, or all; it changes under `lock`. `looked`: the index on disk was read.
    """

    index: IvfIndex | None = None
    looked: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True, eq=False)
class MadeIndex:
    """A finished index and the corpus version it was built from; dropped if documents were removed since."""

    index: IvfIndex
    built: Built


_MOST_COPIES = 16
"""Rows that are read for each chunk that is asked for, where texts come several times."""


class Searcher:
    """The chunks of a corpus at one commit, numbered like the rows of their index. Thread-safe.

    The index on disk is read by the first search that needs it.
    """

    def __init__(self, contents: CorpusContents, store: CorpusStore | None, built: Built) -> None:
        """Search `contents`; `built` has their first rows already, or all."""
        self.config: Final[IndexConfig] = contents.settings.index
        self.built: Final = built
        self._contents = contents
        self._rows = len(contents.vectors)
        self._store = store

    @property
    def kind(self) -> IndexKind:
        """The kind of index for this number of rows: `flat` up to `flat_up_to`, or if faiss is missing."""
        small = self._rows <= self.config.flat_up_to
        return IndexKind.FLAT if small or not available(self.config.kind) else self.config.kind

    @property
    def searched_by(self) -> IndexKind:
        """The kind of index that searches use now."""
        return IndexKind.FLAT if self.built.index is None else self.kind

    @property
    def outdated(self) -> bool:
        """Whether `make` has something to build, or may find it on disk."""
        if self.kind is IndexKind.FLAT:
            return False
        index = self.built.index
        return index is None or outgrown(index, self._rows, self.config)

    def search(self, vector: NDArray[np.float32], k: int) -> tuple[RetrievedChunk, ...]:
        """The `k` best chunks; see `Corpus.search`."""
        index = self.index()
        chunks = self._retrieved(index.search(vector, k))
        if len(chunks) < k:
            chunks = self._retrieved(index.search(vector, min(_MOST_COPIES * k, self._rows)))
        return chunks[:k]

    def stages(self, vector: NDArray[np.float32], k: int) -> Iterator[RetrievalStage]:
        """Search in stages; see `Corpus.search_stages`."""
        return self._timed(self.index().stages(vector, k), vector, k)

    def _timed(self, stages: Iterator[SearchStage], vector: NDArray[np.float32], k: int) -> Iterator[RetrievalStage]:
        """The stages with the seconds that each took, without the caller's time between stages."""
        started_s = perf_counter()
        for stage in stages:
            chunks = self._retrieved(stage.hits)
            if stage.last and len(chunks) < k:
                chunks = self.search(vector, k)
            yield RetrievalStage(chunks, stage.number, stage.last, perf_counter() - started_s, stage.distances)
            started_s = perf_counter()

    def index(self) -> VectorIndex:
        """The index for searches: the built one, or that on disk, completed with missing rows; else all vectors.

        No search waits for an index: while there is none, searches compare every vector.
        """
        flat = FlatIndex(self._contents.vectors)
        if self.kind is IndexKind.FLAT:
            return flat
        built = self.built
        with built.lock:
            if built.index is None and not built.looked:
                built.index = self._stored_index()
            built.looked = True
            if built.index is None:
                return flat
            self._complete(built.index)
            return built.index

    def make(self) -> MadeIndex | None:
        """Build an index that makes searches faster, while searches run; None if there is nothing to build."""
        self.index()
        return MadeIndex(build_index(self.config, self._contents.vectors), self.built) if self.outdated else None

    def take(self, made: MadeIndex, *, keep: bool) -> None:
        """Use `made` in searches, if all its rows still exist; missing rows are added first.

        It is written before searches use it, so that no search waits for the disk.

        Raises:
            CorpusError: it cannot be written; searches use it nevertheless.
        """
        if made.built is not self.built:
            return
        self._complete(made.index)
        try:
            if keep:
                self._write(made.index)
        finally:
            with self.built.lock:
                self.built.index = made.index

    def save(self) -> None:
        """Store the index that searches use, if the corpus has a folder.

        Raises:
            CorpusError: it cannot be written.
        """
        index = self.index()
        if isinstance(index, IvfIndex):
            with self.built.lock:
                self._write(index)

    def _write(self, index: IvfIndex) -> None:
        if self._store is not None and index.stored_rows != len(index):
            self._store.write_index(self._contents.generation, index.as_stored())
            index.stored_rows = len(index)

    def _stored_index(self) -> IvfIndex | None:
        stored = None if self._store is None else self._store.read_index(self._contents.generation)
        return None if stored is None else IvfIndex.restored(stored, self._contents.vectors)

    def _complete(self, index: IvfIndex) -> None:
        """Append the rows that an index of the first rows lacks."""
        if len(index) < self._rows:
            index.add(self._contents.vectors[len(index) :])

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The row at which each document starts, `[documents + 1]`."""
        return np.cumsum([0, *(len(document.chunks) for document in self._contents.documents)])

    def _retrieved(self, hits: Hits) -> tuple[RetrievedChunk, ...]:
        """The chunks of the hits; of chunks with the same text, the best one alone."""
        retrieved: dict[str, RetrievedChunk] = {}
        for row, score in zip(hits.rows, hits.scores, strict=True):
            number = int(np.searchsorted(self._starts, row, side="right")) - 1
            document = self._contents.documents[number]
            place = row - int(self._starts[number])  # of all chunks -> of the document's
            chunk = document_chunks(document)[place]
            if chunk.text not in retrieved:
                about = (document.title, document.metadata, document.place_of(place))
                retrieved[chunk.text] = RetrievedChunk(chunk, document.id, place, len(retrieved) + 1, score, *about)
        return tuple(retrieved.values())
