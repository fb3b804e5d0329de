"""Builds indexes; IVF by faiss, searched in stages (RAGCache §6, pipelined vector search); its file in a corpus.

faiss is imported when an IVF index is built or read.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import CorpusError, EmbedderMismatchError, UsageError, install_extra
from chunkweave.retrieval.corpus_files import CorpusFiles, Manifest, digest_of
from chunkweave.retrieval.indexes import (
    FlatIndex,
    Hits,
    IndexConfig,
    IndexKind,
    SearchStage,
    VectorIndex,
    checked_query,
    checked_vectors,
    merged,
    top_hits,
)

logger = logging.getLogger(__name__)


INDEX_FILE, INDEX_NOTE = "index.faiss", "index.json"
_INDEX_FORMAT = 2

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

    def __init__(self, index: Any, config: IndexConfig) -> None:
        """Wrap a faiss index, which this object then owns; all sizes in `config` are chosen."""
        self.faiss_index: Final = index
        self.config: Final = config
        self._sizes: NDArray[np.int64] | None = None

    @property
    def dimension(self) -> int:
        """Columns of the vectors."""
        return int(self.faiss_index.d)

    def __len__(self) -> int:
        return int(self.faiss_index.ntotal)

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append rows; see `VectorIndex.add`."""
        self.faiss_index.add(checked_vectors(vectors, len(vectors), self.dimension))
        self._sizes = None

    def search(self, query: NDArray[np.float32], k: int) -> Hits:
        """The best `k` rows; see `VectorIndex.search`."""
        checked = self._checked(query, k)
        return _complete_top(lambda fetch: _first(self.faiss_index.search(checked, fetch)), k, len(self))

    def stages(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        """Search in stages; see `VectorIndex.stages`."""
        return self._stages(self._checked(query, k), k)

    def _checked(self, query: NDArray[np.float32], k: int) -> NDArray[np.float32]:
        """The query as `[1, dimension]`, if it is valid."""
        return checked_query(query, k, rows=len(self), dimension=self.dimension)[np.newaxis]

    def _stages(self, query: NDArray[np.float32], k: int) -> Iterator[SearchStage]:
        probes = self.config.probes
        proximity, lists = self.faiss_index.quantizer.search(query, probes)
        number = min(self.config.stages, probes)
        hits = Hits()
        distances = self.config.lists  # the centroids, compared before the first stage
        for stage, (start, stop) in enumerate(pairwise(_bounds(probes, number)), start=1):
            # faiss needs as many lists as it probes: lists of other stages are masked with -1, which it skips.
            inside = np.full_like(lists, _NO_LIST)
            inside[0, start:stop] = lists[0, start:stop]
            scan = self._scanner(query, inside, proximity)
            hits = merged([hits, _complete_top(scan, k, len(self))], k)
            distances += int(self._list_sizes()[lists[0, start:stop]].sum())
            yield SearchStage(hits, stage, stage == number, distances)
            distances = 0

    def _list_sizes(self) -> NDArray[np.int64]:
        """Vectors in each list, `[lists]`; read once, because a call for each list is slow."""
        if self._sizes is None:
            lists = self.faiss_index.invlists
            self._sizes = np.array([lists.list_size(one) for one in range(self.config.lists)], dtype=np.int64)
        return self._sizes

    def _scanner(
        self, query: NDArray[np.float32], lists: NDArray[np.int64], proximity: NDArray[np.float32]
    ) -> Callable[[int], _Scored]:
        return lambda fetch: _first(self.faiss_index.search_preassigned(query, fetch, lists, proximity))


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


def outgrown(index: VectorIndex, config: IndexConfig, rows: int) -> bool:
    """Whether an IVF index of `config`, trained on `rows` vectors, has at least 1.5 times the lists of `index`."""
    return isinstance(index, IvfIndex) and config.resolved(rows).lists >= 1.5 * index.config.lists


def build_index(config: IndexConfig, blocks: Sequence[NDArray[np.float32]], dimension: int) -> VectorIndex:
    """An index over the rows of all `blocks`, each `[rows, dimension]`, in their order.

    Raises:
        DimensionMismatchError: a block has another number of columns.
        UsageError: the kind needs faiss, and it is not installed.
    """
    if config.kind is IndexKind.FLAT:
        index: VectorIndex = FlatIndex(dimension)
    else:
        index = _trained(config.resolved(sum(map(len, blocks))), blocks, dimension)
    for block in blocks:
        index.add(block)
    return index


def _trained(config: IndexConfig, blocks: Sequence[NDArray[np.float32]], dimension: int) -> IvfIndex:
    """An empty index of the sizes in `config`, with centroids learned from a sample of `blocks`.

    Raises:
        DimensionMismatchError: a block has another number of columns.
        UsageError: faiss is not installed, or there is no vector to learn from.
    """
    faiss = import_faiss()
    if not any(map(len, blocks)):
        raise UsageError("an IVF index learns its lists from the vectors, and there are none")
    inverted = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimension), dimension, config.lists, faiss.METRIC_INNER_PRODUCT)
    inverted.nprobe = config.probes
    inverted.cp.seed = _SEED
    inverted.cp.min_points_per_centroid = 1
    sample = _sampled(blocks, config.lists * _TRAINING_VECTORS_A_LIST)
    inverted.train(checked_vectors(sample, len(sample), dimension))
    return IvfIndex(inverted, config)


def _sampled(blocks: Sequence[NDArray[np.float32]], count: int) -> NDArray[np.float32]:
    """At most `count` rows of all blocks, drawn without replacement."""
    rows = np.concatenate(blocks)
    if len(rows) <= count:
        return rows
    return rows[np.sort(np.random.default_rng(_SEED).choice(len(rows), count, replace=False))]


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
            found = rows >= 0
            return top_hits(rows[found], scores[found], k)
        fetch = min(2 * fetch, limit)


def _first(found: tuple[NDArray[np.float32], NDArray[np.int64]]) -> _Scored:
    scores, rows = found
    return scores[0], rows[0]


def _bounds(count: int, slices: int) -> list[int]:
    bounds: list[int] = np.linspace(0, count, slices + 1).astype(int).tolist()
    return bounds


def save_index(files: CorpusFiles, manifest: Manifest, index: IvfIndex, blocks: Sequence[NDArray[np.float32]]) -> None:
    """Write the index, then a note that identifies its rows: the first rows of `blocks`.

    Raises:
        CorpusError: they cannot be written.
    """
    data = import_faiss().serialize_index(index.faiss_index).tobytes()
    note = {
        "format": _INDEX_FORMAT,
        "fingerprint": manifest.fingerprint,
        "dimension": index.dimension,
        "rows": len(index),
        "rows_digest": _digest_of_rows(blocks, len(index)),
        "asked": dict(manifest.index),
        "config": index.config.as_dict(),
        "digest": digest_of(data),
    }
    files.write({INDEX_FILE: data, INDEX_NOTE: (json.dumps(note, indent=1) + "\n").encode()})


def stored_index(files: CorpusFiles, manifest: Manifest, blocks: Sequence[NDArray[np.float32]]) -> IvfIndex | None:
    """The index on disk, if it has the first rows of `blocks` and these settings; None if it must be built.

    Rows that were added later are not in it. An index of other vectors or settings is ignored. So is a damaged one,
    with a line in the log.

    Raises:
        EmbedderMismatchError: it was made by another embedder.
        UsageError: faiss is not installed.
    """
    try:
        note: dict[str, Any] = json.loads((files.folder / INDEX_NOTE).read_text(encoding="utf-8"))
        if note["format"] != _INDEX_FORMAT:
            return None
        if note["fingerprint"] != manifest.fingerprint or note["dimension"] != manifest.dimension:
            raise EmbedderMismatchError(
                f"{files.folder / INDEX_FILE} was made by the embedder {note['fingerprint']} with {note['dimension']} "
                f"dimensions, the corpus by {manifest.fingerprint} with {manifest.dimension}: remove the index"
            )
        if note["asked"] != dict(manifest.index) or note["rows_digest"] != _digest_of_rows(blocks, note["rows"]):
            return None
        data = (files.folder / INDEX_FILE).read_bytes()
        if digest_of(data) != note["digest"]:
            raise CorpusError("its checksum is wrong")
        faiss_index = import_faiss().deserialize_index(np.frombuffer(data, dtype=np.uint8))
        return IvfIndex(faiss_index, IndexConfig.from_dict(note["config"]))
    except FileNotFoundError:
        return None
    except (EmbedderMismatchError, UsageError):
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, CorpusError) as error:
        logger.warning("%s is not used, the index is built again: %s", files.folder / INDEX_FILE, error)
        return None


def _digest_of_rows(blocks: Sequence[NDArray[np.float32]], rows: int) -> str:
    """Hash of the first `rows` vectors, or of all if there are fewer; does not depend on the cut into blocks."""
    digest = hashlib.blake2b(digest_size=16)
    for block in blocks:
        digest.update(np.ascontiguousarray(block[: max(0, rows)]).data)
        rows -= len(block)
    return digest.hexdigest()
