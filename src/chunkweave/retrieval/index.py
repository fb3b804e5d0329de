"""Indexes over vectors: what one must do, which kinds there are, and how their sizes are chosen."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import sqrt
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import UsageError
from chunkweave.retrieval.stages import Hits, SearchStage


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


def check_available(kind: IndexKind) -> None:
    """Find out before documents are embedded for nothing.

    Raises:
        UsageError: the kind needs faiss, and it is not installed.
    """
    if kind is not IndexKind.FLAT:
        from chunkweave.retrieval.faiss_indexes import import_faiss

        import_faiss()


def build_index(config: IndexConfig, blocks: Sequence[NDArray[np.float32]], dimension: int) -> VectorIndex:
    """An index over the rows of all `blocks`, each `[rows, dimension]`, in their order.

    Raises:
        DimensionMismatchError: a block has another number of columns.
        UsageError: the kind needs faiss, and it is not installed.
    """
    if config.kind is IndexKind.FLAT:
        from chunkweave.retrieval.flat_index import FlatIndex

        index: VectorIndex = FlatIndex(dimension, stages=config.stages)
    else:
        from chunkweave.retrieval.faiss_indexes import new_faiss_index

        index = new_faiss_index(config.resolved(sum(map(len, blocks))), blocks, dimension)
    for block in blocks:
        index.add(block)
    return index
