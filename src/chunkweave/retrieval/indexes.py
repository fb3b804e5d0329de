"""Indexes over vectors: their protocol, search in stages, and an exact index that needs only NumPy."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import sqrt
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import DimensionMismatchError, TopKError, UsageError

_USUAL_TOP_K = 6
_ONE_STAGE_VALUES = 64_000_000
"""Values of all vectors up to which an exact search is one stage: about 20 ms, too short to prefill ahead."""


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

    `distances` counts the vectors (and centroids) that this stage compared with the question; `extra_distances` counts
    those of them that a search without stages does not compare.
    """

    hits: Hits
    number: int
    last: bool
    distances: int
    extra_distances: int = 0


class IndexKind(StrEnum):
    """How vectors are searched. All but `flat` need faiss."""

    FLAT = "flat"
    """Compares every vector with NumPy; exact."""
    FAISS_FLAT = "faiss-flat"
    """The same with faiss, in one stage."""
    IVF = "ivf"
    """Compares only the vectors in the lists whose centroids are nearest to the question."""
    HNSW = "hnsw"
    """Walks over a graph of near neighbours."""


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
        """Search in stages; the last has the hits of `search`. The call itself raises what `search` raises."""


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The kind of an index, and its sizes.

    `ivf` searches `probes` of `lists` lists; 0: chosen by the number of vectors. In the graph of `hnsw` a vector has
    `links` neighbours; `build_width` and `width` are faiss's efConstruction and efSearch, `probe_width` is the efSearch
    of the first stage. An IVF search is cut into `stages` slices; 1 also leaves out the first pass of `flat`.

    A corpus of at most `flat_up_to` vectors is searched flat. A larger one is searched flat until `Corpus.build_index`
    has built its index, so that no search waits for it. 0: the first search builds the index.

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
    flat_up_to: int = 0

    def __post_init__(self) -> None:
        if min(self.lists, self.probes, self.seed, self.flat_up_to) < 0:
            raise UsageError("lists, probes, seed and flat_up_to of an index cannot be negative")
        if self.links < 2 or min(self.build_width, self.width, self.probe_width, self.stages) < 1:
            raise UsageError("an index needs at least two links, and widths and stages of at least 1")
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
        return type(self)(**{**asdict(self), "lists": lists, "probes": probes})

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "kind": str(self.kind)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The configuration that `as_dict` wrote.

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
    """The stages of a search with the seconds that each took, without the caller's time between stages.

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
    """The query as contiguous float32 `[dimension]`, if it is valid.

    Raises:
        TopKError: `k` exceeds the rows of the index.
        UsageError: `k` is not positive.
        DimensionMismatchError: the query has another shape, or a value that is not finite.
    """
    if query.shape != (dimension,):
        raise DimensionMismatchError(f"the question's vector is {list(query.shape)}, those of the index [{dimension}]")
    if not np.isfinite(query).all():
        raise DimensionMismatchError("the question's vector has a value that is no finite number")
    check_top_k(k, rows)
    return np.ascontiguousarray(query, dtype=np.float32)


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
        kept = scores >= least  # includes all rows that tie for the last place, so that the lowest of them are taken
        rows, scores = rows[kept], scores[kept]
    order = np.lexsort((rows, -scores))[:k]
    return Hits(tuple(rows[order].tolist()), tuple(scores[order].tolist()))


def merged(found: Sequence[Hits], k: int) -> Hits:
    """The best `k` of several hits whose rows do not overlap."""
    rows = np.array([row for hits in found for row in hits.rows], dtype=np.int64)
    scores = np.array([score for hits in found for score in hits.scores], dtype=np.float32)
    return top_hits(rows, scores, k)


class Sketch:
    """All rows in few columns, for the first stage of an exact search (RAGCache §5.3).

    The columns are the principal directions of a sample of the rows. Rows that are near in these columns are then
    compared exactly.
    """

    def __init__(self, blocks: Sequence[NDArray[np.float32]], *, seed: int = 0) -> None:
        """Sketch the rows of `blocks`, each `[rows, dimension]`."""
        self._basis = _principal(sampled(blocks, _SKETCH_SAMPLE, seed), _SKETCH_COLUMNS)
        self._blocks: list[NDArray[np.float32]] = []
        self._count = 0
        for block in blocks:
            self.add(block)

    def __len__(self) -> int:
        return self._count

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append rows `[rows, dimension]`; the directions stay as they are."""
        self._blocks.append(vectors @ self._basis)
        self._count += len(vectors)
        if len(self._blocks) > _SKETCH_BLOCKS:
            self._blocks = [np.concatenate(self._blocks)]

    def nearest(self, query: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """The `count` rows that are nearest in the sketch, as ascending row numbers."""
        short = query @ self._basis
        scores = np.concatenate([block @ short for block in self._blocks])
        best = np.argpartition(scores, self._count - count)[self._count - count :]
        return np.sort(best).astype(np.int64)


_SKETCH_BLOCKS = 256
_SKETCH_SAMPLE = 1024
_SKETCH_COLUMNS = 64
_SKETCH_CANDIDATES = 256
_CANDIDATES_A_HIT = 16


def worth_sketching(rows: int, dimension: int, stages: int) -> bool:
    """Whether an exact search takes long enough for a first pass over a sketch."""
    return stages > 1 and rows * dimension > _ONE_STAGE_VALUES and dimension > 2 * _SKETCH_COLUMNS


def sampled(blocks: Sequence[NDArray[np.float32]], count: int, seed: int) -> NDArray[np.float32]:
    """At most `count` rows of all blocks, drawn without replacement."""
    rows = sum(map(len, blocks))
    if rows <= count:
        return np.concatenate(blocks)
    chosen = np.sort(np.random.default_rng(seed).choice(rows, count, replace=False))
    starts = np.cumsum([0, *map(len, blocks)])[:-1].tolist()
    # `chosen` counts rows over all blocks; each block is indexed from its own first row
    return np.concatenate(
        [
            block[chosen[(chosen >= start) & (chosen < start + len(block))] - start]
            for block, start in zip(blocks, starts, strict=True)
        ]
    )


def _principal(sample: NDArray[np.float32], columns: int) -> NDArray[np.float32]:
    """The principal directions `[dimension, columns]` of a sample, from the products of its rows."""
    products = sample.astype(np.float64) @ sample.T.astype(np.float64)
    values, vectors = np.linalg.eigh(products)
    kept = [place for place in range(len(values) - 1, -1, -1) if values[place] > 1e-9 * values[-1]][:columns]
    directions: NDArray[np.float32] = (sample.T @ (vectors[:, kept] / np.sqrt(values[kept]))).astype(np.float32)
    return directions


class FlatIndex:
    """Exact search over blocks of vectors, which are not copied.

    A search has one stage. With a `sketch` of all rows it has an earlier one, over the rows that the sketch finds.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension: Final = dimension
        self.sketch: Sketch | None = None
        self._blocks: list[NDArray[np.float32]] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append rows; see `VectorIndex.add`. A sketch that lacks them is not used."""
        self._blocks.append(checked_vectors(vectors, len(vectors), self.dimension))
        self._rows += len(vectors)

    def search(self, query: NDArray[np.float32], k: int) -> Hits:
        """The best `k` rows of all; see `VectorIndex.search`."""
        return self._all(checked_query(query, k, rows=self._rows, dimension=self.dimension), k)

    def stages(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        """Search the rows that the sketch finds, then all; see `VectorIndex.stages`."""
        return self._scan(checked_query(query, k, rows=self._rows, dimension=self.dimension), k)

    def _scan(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        sketch, candidates, number = self.sketch, max(_SKETCH_CANDIDATES, _CANDIDATES_A_HIT * k), 1
        if sketch is not None and len(sketch) == self._rows > candidates:
            rows, distances = sketch.nearest(query, candidates), self._rows + candidates
            hits = top_hits(rows, self._of(rows) @ query, k)
            yield SearchStage(hits, number, False, distances, extra_distances=distances)
            number += 1
        yield SearchStage(self._all(query, k), number, True, self._rows)

    def _all(self, query: NDArray[np.float32], k: int) -> Hits:
        scores = np.concatenate([block @ query for block in self._blocks])
        return top_hits(np.arange(self._rows), scores, k)

    def _of(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The vectors of `rows`, which are ascending."""
        starts = np.cumsum([0, *map(len, self._blocks)])
        return np.concatenate(
            [
                block[rows[(rows >= start) & (rows < start + len(block))] - start]
                for block, start in zip(self._blocks, starts[:-1].tolist(), strict=True)
            ]
        )
