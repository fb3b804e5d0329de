"""The index that needs nothing but NumPy: every vector is compared."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from chunkweave.retrieval.embedders import checked_vectors
from chunkweave.retrieval.stages import Hits, SearchStage, checked_query, merged, top_hits


class FlatIndex:
    """Exact search over blocks of vectors, which are kept as they were given and not copied."""

    def __init__(self, dimension: int, *, stages: int = 4) -> None:
        self._dimension = dimension
        self._stages = stages
        self._blocks: list[NDArray[np.float32]] = []
        self._rows = 0

    @property
    def dimension(self) -> int:
        """Columns of the vectors."""
        return self._dimension

    def __len__(self) -> int:
        return self._rows

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append rows; see `VectorIndex.add`."""
        self._blocks.append(checked_vectors(vectors, len(vectors), self._dimension))
        self._rows += len(vectors)

    def search(self, query: NDArray[np.float32], k: int) -> Hits:
        """The best `k` rows of all; see `VectorIndex.search`.

        Goes through the same slices as `stages`: a matrix product over other slices may round differently.
        """
        hits = Hits()
        for stage in self.stages(query, k):
            hits = stage.hits
        return hits

    def stages(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        """One stage for each slice of the rows; see `VectorIndex.stages`."""
        return self._scan(checked_query(query, k, rows=self._rows, dimension=self._dimension), k)

    def _scan(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        number = min(self._stages, self._rows)
        bounds = np.linspace(0, self._rows, number + 1).astype(int).tolist()
        hits = Hits()
        for stage, (start, stop) in enumerate(pairwise(bounds), start=1):
            scores = self._scores(query, start, stop)
            hits = merged([hits, top_hits(np.arange(start, stop), scores, k)], k)
            yield SearchStage(hits, stage, stage == number, stop - start)

    def _scores(self, query: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
        """Inner products of the rows `start <= row < stop`."""
        scores, first = [], 0
        for block in self._blocks:
            inside = block[max(0, start - first) : max(0, stop - first)]
            if len(inside):
                scores.append(inside @ query)
            first += len(block)
        return np.concatenate(scores)
