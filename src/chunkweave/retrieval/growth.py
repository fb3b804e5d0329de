"""How large a corpus may become, checked with every chunk that is cut for it."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from chunkweave.retrieval.corpus_files import StoredDocument
from chunkweave.retrieval.documents import CorpusDocument

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """Most chunks and bytes of a corpus, and whether to go on; bytes as `document_bytes` counts them.

    `stopped` is asked between chunks, in the thread that changes the corpus.
    """

    max_chunks: int = sys.maxsize
    max_bytes: int = sys.maxsize
    stopped: Callable[[], bool] = lambda: False


def document_bytes(document: StoredDocument, dimension: int) -> int:
    """Bytes of a document's names, metadata and chunks in UTF-8, and of its vectors of `dimension` columns."""
    return _head_bytes(document) + sum(_chunk_bytes(text, dimension) for text in document.chunks)


class Growth:
    """What one change may still add to a corpus. Used by one thread."""

    def __init__(self, limits: GrowthLimits, *, chunks: int, nbytes: int, dimension: int) -> None:
        """For a corpus that has so many `chunks` and bytes now."""
        self._limits = limits
        self._chunks = chunks
        self._nbytes = nbytes
        self._dimension = dimension

    def take(
        self, document: CorpusDocument, pieces: Iterable[str], replaced: StoredDocument | None
    ) -> StoredDocument | None:
        """The document of these `pieces` in the place of `replaced`, which leaves; the pieces are counted as they come.

        None, and no more pieces are asked for, if there is no room for it, or the change is stopped.
        """
        bare = StoredDocument(document.id, document.title, document.digest, (), dict(document.metadata))
        chunks, nbytes = self._chunks, self._nbytes + _head_bytes(bare)
        if replaced is not None:
            chunks, nbytes = chunks - len(replaced.chunks), nbytes - document_bytes(replaced, self._dimension)
        texts: list[str] = []
        for text in pieces:
            nbytes += _chunk_bytes(text, self._dimension)
            texts.append(text)
            full = chunks + len(texts) > self._limits.max_chunks or nbytes > self._limits.max_bytes
            if full or self._limits.stopped():
                return None
        self._chunks, self._nbytes = chunks + len(texts), nbytes
        return StoredDocument(bare.id, bare.title, bare.digest, tuple(texts), bare.metadata)


def _head_bytes(document: StoredDocument) -> int:
    return len(json.dumps([document.id, document.title, document.metadata], ensure_ascii=False).encode())


def _chunk_bytes(text: str, dimension: int) -> int:
    return len(text.encode()) + _FLOAT_BYTES * dimension
