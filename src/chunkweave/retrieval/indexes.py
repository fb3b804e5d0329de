"""Indexes over vectors: their protocol, search in stages, and an exact index that needs only NumPy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import sqrt
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import DimensionMismatchError, TopKError, UsageError

_USUAL_TOP_K = 6


@dataclass(frozen=True, slots=True)
class Hits:
    """Rows of an index by falling score, equal scores by row. Both tuples are `[found]`.

    A score is the inner product with the question's vector, the cosine for vectors of length 1.
    """

    rows: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class SearchStage:
    """The result after stage `number` of a search, counted from 1.

    `distances` counts the vectors (and centroids) that this stage compared with the question.
    """

    hits: Hits
    number: int
    last: bool
    distances: int


class IndexKind(StrEnum):
    """How vectors are searched."""

    FLAT = "flat"
    """Compares every vector with NumPy; exact."""
    IVF = "ivf"
    """Compares only the vectors in the lists whose centroids are nearest to the question; needs faiss."""


class VectorIndex(Protocol):
    """Vectors by row number from 0, in the order in which they were added. Searching may run in several threads."""

    def __len__(self) -> int: ...

    def search(self, query: NDArray[np.float32], k: int) -> Hits:
        """The best `k` rows for a query `[dimension]`; an index that does not look at all rows may find fewer.

        Raises:
            TopKError: `k` exceeds the rows of the index.
            UsageError: `k` is not positive.
            DimensionMismatchError: the query has another shape.
        """

    def stages(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        """Search in stages; the last has the hits of `search`. The call itself raises what `search` raises."""


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The kind of an index, and its sizes.

    `ivf` searches `probes` of `lists` lists, in `stages` slices; 0 lists or probes: chosen by the number of vectors.

    A corpus of at most `flat_up_to` vectors is searched flat. A larger one is searched flat until `Corpus.build_index`
    has built its index, so that no search waits for it.

    Raises:
        UsageError: a value is out of range.
    """

    kind: IndexKind = IndexKind.FLAT
    lists: int = 0
    probes: int = 0
    stages: int = 4
    flat_up_to: int = 0

    def __post_init__(self) -> None:
        if min(self.lists, self.probes, self.flat_up_to) < 0:
            raise UsageError("lists, probes and flat_up_to of an index cannot be negative")
        if self.stages < 1:
            raise UsageError("a search has at least one stage")
        if self.lists and self.probes > self.lists:
            raise UsageError(f"{self.probes} probes of {self.lists} lists")

    def resolved(self, rows: int) -> Self:
        """The same with `lists` and `probes` chosen for `rows` vectors.

        About 4 sqrt(rows) lists, with at least 39 vectors on average (as faiss's k-means requires); an eighth of them
        is probed.
        """
        lists = self.lists or max(1, min(round(4 * sqrt(rows)), rows // 39))
        lists = min(lists, max(1, rows))
        probes = min(self.probes or max(1, round(lists / 8)), lists)
        return replace(self, lists=lists, probes=probes)


def checked_query(query: NDArray[np.float32], k: int, *, rows: int, dimension: int) -> NDArray[np.float32]:
    """The query as contiguous float32 `[dimension]`, if it is valid.

    Raises:
        TopKError: `k` exceeds the rows of the index.
        UsageError: `k` is not positive.
        DimensionMismatchError: the query has another shape, or a value that is not finite.
    """
    checked: NDArray[np.float32] = checked_vectors(query[np.newaxis], 1, dimension)[0]
    check_top_k(k, rows)
    return checked


def check_top_k(k: int, chunks: int) -> None:
    """Check `k` against the number of chunks.

    Raises:
        TopKError: there are fewer than `k` chunks.
        UsageError: `k` is not positive.
    """
    if k < 1:
        raise UsageError(f"top-k must be at least 1, not {k}")
    if chunks == 0:
        raise TopKError("there is nothing to search: add documents first")
    if k > chunks:
        raise TopKError(f"the {k} best of {chunks} chunks were asked for: ask for at most {chunks}")


def checked_vectors(vectors: NDArray[np.float32], rows: int, dimension: int) -> NDArray[np.float32]:
    """`vectors` as contiguous float32 `[rows, dimension]`.

    Raises:
        DimensionMismatchError: they have another shape, or a value that is not finite.
    """
    if vectors.shape != (rows, dimension):
        raise DimensionMismatchError(f"expected vectors [{rows}, {dimension}], got {list(vectors.shape)}")
    if not np.isfinite(vectors).all():
        raise DimensionMismatchError("a vector has a value that is no finite number")
    return np.ascontiguousarray(vectors, dtype=np.float32)


def usual_top_k(chunks: int) -> int:
    """Default number of chunks per question: 6, or all if there are fewer."""
    return min(_USUAL_TOP_K, chunks)


def top_hits(rows: NDArray[np.int64], scores: NDArray[np.float32], k: int) -> Hits:
    """The best `k` of scored rows, `[candidates]` each and in any order; fewer if there are fewer."""
    if len(scores) > k:
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        best = scores >= least  # includes all rows that tie for the last place, so that the lowest of them are taken
        rows = rows[best]
        scores = scores[best]
    order = np.lexsort((rows, -scores))[:k]
    return Hits(tuple(rows[order].tolist()), tuple(scores[order].tolist()))


def merged(parts: Sequence[Hits], k: int) -> Hits:
    """The best `k` of several hits whose rows do not overlap."""
    rows = np.array([row for hits in parts for row in hits.rows], dtype=np.int64)
    scores = np.array([score for hits in parts for score in hits.scores], dtype=np.float32)
    return top_hits(rows, scores, k)


class FlatIndex:
    """Exact search over vectors float32 `[rows, dimension]`, which are not copied. A search has one stage."""

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self._vectors: Final = vectors

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, query: NDArray[np.float32], k: int) -> Hits:
        """The best `k` rows of all; see `VectorIndex.search`."""
        rows, dimension = self._vectors.shape
        query = checked_query(query, k, rows=rows, dimension=dimension)
        return top_hits(np.arange(rows), self._vectors @ query, k)

    def stages(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        """Search all rows in one stage; see `VectorIndex.stages`."""
        return iter([SearchStage(self.search(query, k), 1, True, len(self))])
