"""Searches the chunks of a corpus as it was at one commit."""

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from chunkweave.retrieval.corpus_files import CorpusFiles, Manifest, Part
from chunkweave.retrieval.indexes import IndexConfig, IndexKind, VectorIndex, build_index, timed_stages
from chunkweave.retrieval.passages import Passages, RetrievalStage, RetrievedChunk


class Searcher:
    """Chunks and their index. The index is read or made when it is first needed. Safe to use from several threads."""

    def __init__(
        self,
        manifest: Manifest,
        parts: Sequence[Part],
        files: CorpusFiles | None,
        index: VectorIndex | None = None,
    ) -> None:
        """Over `parts`; `index` holds their first rows already, or all, and is this object's from now on."""
        self._manifest = manifest
        self._parts = tuple(parts)
        self._files = files
        self._index = index
        self._lock = threading.Lock()

    def grown(self, manifest: Manifest, parts: Sequence[Part]) -> Self:
        """A searcher over `parts`, which begin with the rows of this one: it takes the index over, if that can grow."""
        return type(self)(manifest, parts, self._files, None if self._is_flat else self._index)

    @property
    def config(self) -> IndexConfig:
        """How vectors are searched, as it was asked for."""
        return IndexConfig.from_dict(dict(self._manifest.index))

    @cached_property
    def passages(self) -> Passages:
        """The chunks by row."""
        return Passages(self._parts)

    def search(self, vector: NDArray[np.float32], k: int) -> tuple[RetrievedChunk, ...]:
        """The `k` best chunks; see `Corpus.search`."""
        return self.passages.retrieved(self.index().search(vector, k))

    def stages(self, vector: NDArray[np.float32], k: int) -> Iterator[RetrievalStage]:
        """The same in stages; see `Corpus.search_stages`."""
        stages, passages = timed_stages(self.index(), vector, k), self.passages
        return (
            RetrievalStage(
                passages.retrieved(stage.hits),
                stage.number,
                stage.last,
                seconds,
                stage.distances,
                stage.extra_distances,
            )
            for stage, seconds in stages
        )

    def index(self) -> VectorIndex:
        """The index over all parts: the one that was taken over, with what it lacks; else that on disk; else a new one.

        Raises:
            UsageError: it needs an extra that is not installed.
            EmbedderMismatchError: the index on disk was made by another embedder.
        """
        blocks = [part.vectors for part in self._parts]
        with self._lock:
            index = self._stored_index() if self._index is None else self._index
            if index is None:
                index = build_index(self.config, blocks, self._manifest.dimension)
            elif len(index) < sum(map(len, blocks)):
                index.add(np.concatenate(blocks)[len(index) :])
            self._index = index
            return index

    def save(self) -> None:
        """Keep the index in the folder, if there is one and the index is of a kind that takes time to make.

        Raises:
            CorpusError: it cannot be written.
            UsageError: it needs an extra that is not installed.
        """
        if self._files is None or self._is_flat or not self._parts:
            return
        from chunkweave.retrieval.faiss_indexes import FaissIndex
        from chunkweave.retrieval.index_file import save_index

        index = self.index()
        assert isinstance(index, FaissIndex), "all kinds but flat are faiss's"
        save_index(self._files, self._manifest, index)

    @property
    def _is_flat(self) -> bool:
        """Whether the index is no more than the vectors themselves."""
        return self.config.kind is IndexKind.FLAT

    def _stored_index(self) -> VectorIndex | None:
        if self._files is None or self._is_flat:
            return None
        from chunkweave.retrieval.index_file import stored_index

        return stored_index(self._files, self._manifest)
