"""Searches the chunks of a corpus at one commit, and builds their index beside searches."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from chunkweave.retrieval.corpus_files import CorpusFiles, Manifest, Part, StoredDocument
from chunkweave.retrieval.faiss_indexes import (
    IvfIndex,
    available,
    build_index,
    outgrown,
    save_index,
    stored_index,
)
from chunkweave.retrieval.indexes import (
    FlatIndex,
    Hits,
    IndexConfig,
    IndexKind,
    VectorIndex,
    timed_stages,
)
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
    `saved_rows`: rows of the index that are on disk.
    """

    index: VectorIndex | None = None
    looked: bool = True
    saved_rows: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True, eq=False)
class MadeIndex:
    """An index that `Corpus.make_index` built, and the `Built` that it is for."""

    index: VectorIndex
    built: Built


_MOST_COPIES = 16
"""Rows that are read for each chunk that is asked for, where texts come several times."""


class Searcher:
    """The chunks of a corpus at one commit, numbered like the rows of their index. Thread-safe.

    The index is read or built when it is first needed.
    """

    def __init__(self, manifest: Manifest, parts: Sequence[Part], files: CorpusFiles | None, built: Built) -> None:
        """Search `parts`; `built` has their first rows already, or all."""
        self._manifest = manifest
        self._parts = tuple(parts)
        self._files = files
        self._flat_index: FlatIndex | None = None
        self.built: Final = built

    def grown(self, manifest: Manifest, parts: Sequence[Part]) -> Self:
        """A searcher over `parts`, which begin with the rows of this one. It shares `built`."""
        return type(self)(manifest, parts, self._files, self.built)

    @property
    def config(self) -> IndexConfig:
        """The configuration of the index."""
        return IndexConfig.from_dict(dict(self._manifest.index))

    @property
    def kind(self) -> IndexKind:
        """The kind of index for this number of rows. With `flat_up_to`: `flat` up to it, or if faiss is missing."""
        config = self.config
        small = self._count <= config.flat_up_to
        return IndexKind.FLAT if config.flat_up_to and (small or not available(config.kind)) else config.kind

    @property
    def searched_by(self) -> IndexKind:
        """The kind of index that searches use now."""
        waits = self.config.flat_up_to and self.built.index is None
        return IndexKind.FLAT if waits else self.kind

    @property
    def outdated(self) -> bool:
        """Whether `make` has something to build, or may find it on disk."""
        if self.kind is IndexKind.FLAT:
            return False
        index = self.built.index
        return self._count > 0 and (index is None or outgrown(index, self.config, self._count))

    def chunks(self) -> list[Chunk]:
        """All chunks, in the order of rows."""
        return [chunk for part in self._parts for document in part.documents for chunk in document_chunks(document)]

    def search(self, vector: NDArray[np.float32], k: int) -> tuple[RetrievedChunk, ...]:
        """The `k` best chunks; see `Corpus.search`."""
        index = self.index()
        found = self._retrieved(index.search(vector, k))
        if len(found) < k:
            found = self._retrieved(index.search(vector, min(_MOST_COPIES * k, self._count)))
        return found[:k]

    def stages(self, vector: NDArray[np.float32], k: int) -> Iterator[RetrievalStage]:
        """Search in stages; see `Corpus.search_stages`."""
        stages = timed_stages(self.index(), vector, k)
        return (
            RetrievalStage(
                found if len(found := self._retrieved(stage.hits)) == k or not stage.last else self.search(vector, k),
                stage.number,
                stage.last,
                seconds,
                stage.distances,
            )
            for stage, seconds in stages
        )

    def index(self) -> VectorIndex:
        """The index for searches: the built one, completed with missing rows; else that on disk; else a new one.

        With `flat_up_to`, searches do not wait for an index: they compare every vector while there is none.

        Raises:
            UsageError: it needs an extra that is not installed.
            EmbedderMismatchError: the index on disk was made by another embedder.
        """
        built = self.built
        with built.lock:
            if self.kind is IndexKind.FLAT:
                return self._flat()
            if built.index is None and self._files is not None and not built.looked:
                built.index = stored_index(self._files, self._manifest, self._blocks)
                built.saved_rows = 0 if built.index is None else len(built.index)
            built.looked = True
            if built.index is None:
                if self.config.flat_up_to:
                    return self._flat()
                built.index = build_index(self.config, self._blocks, self._manifest.dimension)
            _complete(built.index, self._blocks)
            return built.index

    def make(self) -> MadeIndex | None:
        """Build an index that makes searches faster, while searches run; None if there is nothing to build.

        Raises what `index` raises.
        """
        if self.kind is IndexKind.FLAT:
            return None
        if self._count:
            self.index()
        if not self.outdated:
            return None
        return MadeIndex(build_index(self.config, self._blocks, self._manifest.dimension), self.built)

    def take(self, made: MadeIndex, *, keep: bool) -> None:
        """Use `made` in searches, if all its rows still exist; missing rows are added first.

        It is written before searches use it, so that no search waits for the disk.

        Raises:
            CorpusError: it cannot be written; searches use it nevertheless.
        """
        built, saved_rows = self.built, 0
        if made.built is not built:
            return
        _complete(made.index, self._blocks)
        try:
            if keep and self._files is not None and isinstance(made.index, IvfIndex):
                save_index(self._files, self._manifest, made.index, self._blocks)
                saved_rows = len(made.index)
        finally:
            with built.lock:
                built.index, built.saved_rows = made.index, saved_rows

    def save(self) -> None:
        """Store the index in the folder, if there is one and the index is of a kind that takes time to build.

        Raises:
            CorpusError: it cannot be written.
            UsageError: it needs an extra that is not installed.
        """
        if self._files is None or self.kind is IndexKind.FLAT or not self._parts:
            return
        index = self.index()
        with self.built.lock:
            if isinstance(index, IvfIndex) and len(index) != self.built.saved_rows:
                save_index(self._files, self._manifest, index, self._blocks)
                self.built.saved_rows = len(index)

    @property
    def _count(self) -> int:
        return sum(map(len, self._parts))

    @property
    def _blocks(self) -> list[NDArray[np.float32]]:
        return [part.vectors for part in self._parts]

    def _flat(self) -> FlatIndex:
        """The flat index, which is the vectors themselves."""
        if self._flat_index is None:
            self._flat_index = FlatIndex(self._manifest.dimension)
            _complete(self._flat_index, self._blocks)
        return self._flat_index

    @cached_property
    def _rows(self) -> tuple[list[StoredDocument], NDArray[np.int64]]:
        """The documents, and the row at which each starts, `[documents + 1]`."""
        documents = [document for part in self._parts for document in part.documents]
        return documents, np.cumsum([0, *(len(document.chunks) for document in documents)])

    def _retrieved(self, hits: Hits) -> tuple[RetrievedChunk, ...]:
        """The chunks of the hits; of chunks with the same text, the best one alone."""
        documents, starts = self._rows
        found: dict[str, RetrievedChunk] = {}
        for row, score in zip(hits.rows, hits.scores, strict=True):
            number = int(np.searchsorted(starts, row, side="right")) - 1
            document, place = documents[number], row - int(starts[number])  # of all chunks -> of the document's
            chunk = document_chunks(document)[place]
            if chunk.text not in found:
                about = (document.title, document.metadata, document.place_of(place))
                found[chunk.text] = RetrievedChunk(chunk, document.id, place, len(found) + 1, score, *about)
        return tuple(found.values())


def _complete(index: VectorIndex, blocks: Sequence[NDArray[np.float32]]) -> None:
    """Append the rows of `blocks` that an index of the first rows lacks."""
    first = 0
    for block in blocks:
        if len(index) < first + len(block):
            index.add(block[len(index) - first :])
        first += len(block)
