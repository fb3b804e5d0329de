"""IVF indexes by faiss, searched in stages (RAGCache §6, pipelined vector search).

faiss is imported when an index is built or read.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import UsageError, install_extra
from chunkweave.retrieval.corpus_store import StoredIndex
from chunkweave.retrieval.indexes import (
    Hits,
    IndexConfig,
    IndexKind,
    SearchStage,
    checked_query,
    checked_vectors,
    merged,
    top_hits,
)

_TRAINING_VECTORS_A_LIST = 64
_NO_LIST = -1
_SEED = 0

_Scored = tuple[NDArray[np.float32], NDArray[np.int64]]


def search_in_one_thread() -> None:
    """Make faiss searches of this thread single-threaded from now on; no effect without faiss.

    For threads that search beside a model: a search's helper threads spin while they wait for one another, on the cores
    that the model uses, and both took twice as long in a measurement.
    """
    if find_spec("faiss") is not None:
        import_faiss().omp_set_num_threads(1)


class IvfIndex:
    """Inverted lists around centroids, over inner products; a stage is a slice of the probed lists, nearest first.

    Rows are numbered in the order in which they were added. Each probed list is scanned once, for any number of stages,
    so that stages cost calls, but no distances.
    """

    def __init__(self, config: IndexConfig, centroids: NDArray[np.float32]) -> None:
        """An empty index with these `centroids`, `[lists, dimension]`; all sizes in `config` are chosen.

        Raises:
            UsageError: faiss is not installed.
        """
        faiss = import_faiss()
        self.config: Final = config
        self.dimension: Final = centroids.shape[1]
        self.stored_rows = 0
        """The first rows, which the corpus's file has."""
        self._centroids: Final = centroids
        quantizer = faiss.IndexFlatIP(self.dimension)
        quantizer.add(centroids)
        self._faiss_index = faiss.IndexIVFFlat(quantizer, self.dimension, config.lists, faiss.METRIC_INNER_PRODUCT)
        self._faiss_index.nprobe = config.probes
        self._lists = np.zeros(0, dtype=np.int64)  # the list of each row
        self._sizes = np.zeros(config.lists, dtype=np.int64)  # the rows of each list

    @classmethod
    def restored(cls, stored: StoredIndex, vectors: NDArray[np.float32]) -> "IvfIndex":
        """A stored index, whose rows are the first of `vectors`."""
        index = cls(stored.config, stored.centroids)
        index.stored_rows = len(stored.lists)
        index._append(vectors[: index.stored_rows], stored.lists)
        return index

    def as_stored(self) -> StoredIndex:
        """The form in which a corpus stores it."""
        return StoredIndex(self.config, self._centroids, self._lists)

    def __len__(self) -> int:
        return len(self._lists)

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append rows `[rows, dimension]`.

        Raises:
            DimensionMismatchError: they have another number of columns.
        """
        vectors = checked_vectors(vectors, len(vectors), self.dimension)
        _, nearest = self._faiss_index.quantizer.search(vectors, 1)
        self._append(vectors, nearest[:, 0])

    def _append(self, vectors: NDArray[np.float32], lists: NDArray[np.int64]) -> None:
        faiss = import_faiss()
        vectors = np.ascontiguousarray(vectors)
        lists = np.ascontiguousarray(lists)
        self._faiss_index.add_core(len(vectors), faiss.swig_ptr(vectors), None, faiss.swig_ptr(lists))
        self._lists = np.concatenate([self._lists, lists])
        self._sizes += np.bincount(lists, minlength=self.config.lists)

    def search(self, query: NDArray[np.float32], k: int) -> Hits:
        """The best `k` rows; see `VectorIndex.search`."""
        checked = self._checked(query, k)
        return _complete_top(lambda fetch: _first(self._faiss_index.search(checked, fetch)), k, len(self))

    def stages(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        """Search in stages; see `VectorIndex.stages`."""
        return self._stages(self._checked(query, k), k)

    def _checked(self, query: NDArray[np.float32], k: int) -> NDArray[np.float32]:
        """The query as `[1, dimension]`, if it is valid."""
        return checked_query(query, k, rows=len(self), dimension=self.dimension)[np.newaxis]

    def _stages(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        probes = self.config.probes
        proximity, lists = self._faiss_index.quantizer.search(query, probes)
        number = min(self.config.stages, probes)
        hits = Hits()
        distances = self.config.lists  # the centroids, compared before the first stage
        for stage, (start, stop) in enumerate(pairwise(_bounds(probes, number)), start=1):
            # faiss needs as many lists as it probes: lists of other stages are masked with -1, which it skips.
            inside = np.full_like(lists, _NO_LIST)
            inside[0, start:stop] = lists[0, start:stop]
            scan = self._scanner(query, inside, proximity)
            hits = merged([hits, _complete_top(scan, k, len(self))], k)
            distances += int(self._sizes[lists[0, start:stop]].sum())
            yield SearchStage(hits, stage, stage == number, distances)
            distances = 0

    def _scanner(
        self, query: NDArray[np.float32], lists: NDArray[np.int64], proximity: NDArray[np.float32]
    ) -> Callable[[int], _Scored]:
        return lambda fetch: _first(self._faiss_index.search_preassigned(query, fetch, lists, proximity))


def check_available(kind: IndexKind) -> None:
    """Check that a kind of index can be built, before documents are embedded.

    Raises:
        UsageError: the kind needs faiss, and it is not installed.
    """
    if kind is not IndexKind.FLAT:
        import_faiss()


def available(kind: IndexKind) -> bool:
    """Whether the library of a kind is installed."""
    return kind is IndexKind.FLAT or find_spec("faiss") is not None


def outgrown(index: IvfIndex, rows: int, config: IndexConfig) -> bool:
    """Whether an index of `config`, trained on `rows` vectors, has at least 1.5 times the lists of `index`."""
    return config.resolved(rows).lists >= 1.5 * index.config.lists


def build_index(config: IndexConfig, vectors: NDArray[np.float32]) -> IvfIndex:
    """An IVF index over `vectors`, `[rows, dimension]`, with centroids learned from a sample of them.

    Raises:
        UsageError: faiss is not installed, or there is no vector to learn from.
    """
    faiss = import_faiss()
    rows, dimension = vectors.shape
    if rows == 0:
        raise UsageError("an IVF index learns its lists from the vectors, and there are none")
    config = config.resolved(rows)
    trained = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimension), dimension, config.lists, faiss.METRIC_INNER_PRODUCT)
    trained.cp.seed = _SEED
    trained.cp.min_points_per_centroid = 1
    sample = vectors
    if rows > config.lists * _TRAINING_VECTORS_A_LIST:
        random = np.random.default_rng(_SEED)
        sample = vectors[np.sort(random.choice(rows, config.lists * _TRAINING_VECTORS_A_LIST, replace=False))]
    trained.train(checked_vectors(sample, len(sample), dimension))
    index = IvfIndex(config, trained.quantizer.reconstruct_n(0, config.lists))
    index.add(vectors)
    return index


def import_faiss() -> Any:
    """The module `faiss`.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UsageError(f"this index needs faiss: {install_extra('retrieval')}, or use `flat`") from error
    return faiss


def _complete_top(search: Callable[[int], _Scored], k: int, limit: int) -> Hits:
    """The best `k` by falling score, equal scores by row, of a search that does not order equal scores.

    Fetches more rows until the last score is below the k-th, or until there are no more, so that all rows that tie with
    the k-th are there. Otherwise, of two equal texts a staged search could find another one than the search without
    stages.
    """
    fetch = min(k + 1, limit)
    while True:
        scores, rows = search(fetch)
        if fetch == limit or rows[-1] < 0 or scores[-1] < scores[k - 1]:
            valid = rows >= 0
            return top_hits(rows[valid], scores[valid], k)
        fetch = min(2 * fetch, limit)


def _first(results: tuple[NDArray[np.float32], NDArray[np.int64]]) -> _Scored:
    """The only row of the results of a batch of one query."""
    scores, rows = results
    return scores[0], rows[0]


def _bounds(count: int, slices: int) -> list[int]:
    bounds: list[int] = np.linspace(0, count, slices + 1).astype(int).tolist()
    return bounds
