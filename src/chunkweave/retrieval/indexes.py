"""Indexes over vectors: what one must do, how they are searched in stages, and the one that needs only NumPy."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from math import sqrt
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import DimensionMismatchError, TopKError, UsageError

_USUAL_TOP_K = 6


@dataclass(frozen=True, slots=True)
class Hits:
    """Rows of an index, the best first: by falling score, equal scores by row. Both are `[found]`.

    A score is the inner product with the question's vector, the cosine for vectors of length 1.
    """

    rows: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class SearchStage:
    """What is known after stage `number` of a search, counted from 1.

    `distances` is how many vectors (and centroids) this stage compared with the question; `extra_distances` how many
    of them a search without stages would not have.
    """

    hits: Hits
    number: int
    last: bool
    distances: int
    extra_distances: int = 0


class IndexKind(StrEnum):
    """How vectors are searched. All but `flat` need faiss."""

    FLAT = "flat"
    """Every vector is compared, with NumPy; exact."""
    FAISS_FLAT = "faiss-flat"
    """The same with faiss."""
    IVF = "ivf"
    """Only the vectors of the lists whose centroids are nearest to the question."""
    HNSW = "hnsw"
    """A walk over a graph of near neighbours."""


class VectorIndex(Protocol):
    """Vectors by row number from 0, in the order in which they were added. Searching may run in several threads."""

    @property
    def dimension(self) -> int:
        """Columns of the vectors."""

    def __len__(self) -> int: ...

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append rows `[rows, dimension]`.

        Raises:
            DimensionMismatchError: they have another number of columns.
        """

    def search(self, query: NDArray[np.float32], k: int) -> Hits:
        """The best `k` rows for a query `[dimension]`; an index that does not look at all rows may find fewer.

        Raises:
            TopKError: `k` exceeds the rows of the index.
            UsageError: `k` is not positive.
            DimensionMismatchError: the query has another shape.
        """

    def stages(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        """The same in stages; the hits of the last are those of `search`. Raises what `search` raises, at once."""


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Which index, and its sizes; 0 means: choose by the number of vectors.

    `probes` of `lists` are searched by `ivf`. `links` a vector has in the graph of `hnsw`; `build_width` and `width`
    are faiss's efConstruction and efSearch, `probe_width` the efSearch of the first stage. `stages` is into how many
    slices flat and IVF searches are cut.

    Raises:
        UsageError: a value is out of range.
    """

    kind: IndexKind = IndexKind.FLAT
    lists: int = 0
    probes: int = 0
    links: int = 32
    build_width: int = 80
    width: int = 128
    probe_width: int = 16
    stages: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.lists, self.probes, self.seed) < 0:
            raise UsageError("lists, probes and seed of an index cannot be negative")
        if self.links < 2 or min(self.build_width, self.width, self.probe_width, self.stages) < 1:
            raise UsageError("an index needs at least two links, and widths and stages of at least 1")
        if self.lists and self.probes > self.lists:
            raise UsageError(f"{self.probes} probes of {self.lists} lists")

    def resolved(self, rows: int) -> Self:
        """The same with `lists` and `probes` chosen for `rows` vectors.

        About 4 sqrt(rows) lists, but none of fewer than 39 vectors on average (what faiss's k-means asks for); an
        eighth of them is probed.
        """
        lists = self.lists or max(1, min(round(4 * sqrt(rows)), rows // 39))
        lists = min(lists, max(1, rows))
        probes = min(self.probes or max(1, round(lists / 8)), lists)
        return type(self)(**{**asdict(self), "lists": lists, "probes": probes})

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "kind": str(self.kind)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """What `as_dict` wrote.

        Raises:
            UsageError: a key or a value is not one of an index.
        """
        try:
            return cls(**{**data, "kind": IndexKind(data["kind"])})
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not the settings of an index: {error}") from error


def timed_stages(
    index: VectorIndex,
    query: NDArray[np.float32],
    k: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[SearchStage, float]]:
    """The stages of a search with the seconds that each took; what the caller does between two counts for neither.

    Closing the iterator ends the search.

    Raises:
        TopKError: `k` exceeds the rows of the index.
        UsageError: `k` is not positive.
        DimensionMismatchError: the query has another shape than `[dimension]`.
    """
    stages = index.stages(query, k)

    def timed() -> Iterator[tuple[SearchStage, float]]:
        started = clock()
        for stage in stages:
            yield stage, clock() - started
            started = clock()

    return timed()


def checked_query(query: NDArray[np.float32], k: int, *, rows: int, dimension: int) -> NDArray[np.float32]:
    """The query as contiguous float32 `[dimension]`, if it can be searched for.

    Raises:
        TopKError: `k` exceeds the rows of the index.
        UsageError: `k` is not positive.
        DimensionMismatchError: the query has another shape, or a value that is no finite number.
    """
    if query.shape != (dimension,):
        raise DimensionMismatchError(f"the question's vector is {list(query.shape)}, those of the index [{dimension}]")
    if not np.isfinite(query).all():
        raise DimensionMismatchError("the question's vector has a value that is no finite number")
    check_top_k(k, rows)
    return np.ascontiguousarray(query, dtype=np.float32)


def check_top_k(k: int, chunks: int) -> None:
    """Refuse a `k` that cannot be answered.

    Raises:
        TopKError: there are fewer chunks than that.
        UsageError: it is not positive.
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
        DimensionMismatchError: they have another shape, or a value that is no finite number.
    """
    if vectors.shape != (rows, dimension):
        raise DimensionMismatchError(f"expected vectors [{rows}, {dimension}], got {list(vectors.shape)}")
    if not np.isfinite(vectors).all():
        raise DimensionMismatchError("a vector has a value that is no finite number")
    return np.ascontiguousarray(vectors, dtype=np.float32)


def usual_top_k(chunks: int) -> int:
    """How many chunks a question gets by default: 6, or all there are."""
    return min(_USUAL_TOP_K, chunks)


def top_hits(rows: NDArray[np.int64], scores: NDArray[np.float32], k: int) -> Hits:
    """The best `k` of scored rows, `[candidates]` each and in any order; fewer if there are fewer."""
    if len(scores) > k:
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        kept = scores >= least  # all that tie for the last place, so that the least rows of them can be taken
        rows, scores = rows[kept], scores[kept]
    order = np.lexsort((rows, -scores))[:k]
    return Hits(tuple(rows[order].tolist()), tuple(scores[order].tolist()))


def merged(found: Sequence[Hits], k: int) -> Hits:
    """The best `k` of hits over rows that do not overlap."""
    rows = np.array([row for hits in found for row in hits.rows], dtype=np.int64)
    scores = np.array([score for hits in found for score in hits.scores], dtype=np.float32)
    return top_hits(rows, scores, k)


class FlatIndex:
    """Exact search over blocks of vectors, which are kept as they were given and not copied."""

    def __init__(self, dimension: int, *, stages: int = 4) -> None:
        self.dimension: Final = dimension
        self._stages = stages
        self._blocks: list[NDArray[np.float32]] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append rows; see `VectorIndex.add`."""
        self._blocks.append(checked_vectors(vectors, len(vectors), self.dimension))
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
        return self._scan(checked_query(query, k, rows=self._rows, dimension=self.dimension), k)

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
