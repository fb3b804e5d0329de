"""Vector search in stages: the best rows so far after each, and how they are kept in one order."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import DimensionMismatchError, TopKError, UsageError

if TYPE_CHECKING:
    from chunkweave.retrieval.index import VectorIndex

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


def timed_stages(
    index: "VectorIndex",
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


def usual_top_k(chunks: int) -> int:
    """How many chunks a question gets where nobody says: 6, or all there are."""
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
