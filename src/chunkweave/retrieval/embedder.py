"""What turns texts into vectors, and the embedders by name."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import DimensionMismatchError
from chunkweave.retrieval.hashed_ngrams import HASHED_NGRAMS, HashedNgramEmbedder


class Embedder(Protocol):
    """Texts to vectors of length 1. Implementations may be called from several threads."""

    @property
    def name(self) -> str:
        """What `make_embedder` makes the same embedder from, or any name for one of your own."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever a vector would: vectors of two fingerprints are never compared."""

    @property
    def dimension(self) -> int:
        """Columns of a vector."""

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of texts that are to be found, float32 `[texts, dimension]`."""

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """The vector of a question, float32 `[dimension]`."""


def make_embedder(name: str = HASHED_NGRAMS) -> Embedder:
    """`hashed-ngrams` (built in), `minilm` (an extra), or a folder or hub name for sentence-transformers.

    Raises:
        UsageError: the extra is not installed, or there is no such model.
    """
    if name == HASHED_NGRAMS:
        return HashedNgramEmbedder()
    from chunkweave.retrieval.sentence_model import SentenceTransformerEmbedder

    return SentenceTransformerEmbedder(name)


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
