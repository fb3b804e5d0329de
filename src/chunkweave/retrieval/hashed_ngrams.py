"""The built-in embedder: hashed word and character n-grams, without a model, without a download."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import log, sqrt
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import UsageError

HASHED_NGRAMS = "hashed-ngrams"
"""The embedder's name, as `make_embedder` takes it."""

_VERSION = 1
"""Part of the fingerprint; has to change with anything that changes a vector."""

_WORD = re.compile(r"\w+|[^\w\s]")
_CANCELLED = 1e-9
"""A vector shorter than this had features of opposite signs in the same columns, as one of a single letter may."""

_LEAST_DIMENSION = 64
_NGRAM_SIZES = (3, 4, 5)
_NGRAMS_WEIGHT = 1.0
_PAIR_WEIGHT = 0.3
_FUNCTION_WEIGHT = 0.1
_REMEMBERED_WORDS = 1 << 16
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        a about after all also an and any are as at be because been before but by can could did do does for from had has
        have he her his how i if in into is it its many may more most much my no not of on only or other our out over
        she should so some such than that the their them then there these they this those to up was we were what when
        where which who whom whose why will with would you your
        """,
    )
)


@dataclass(frozen=True, slots=True)
class _Features:
    """Hashed features of one word: columns and signed weights, both `[features]`."""

    columns: NDArray[np.int64]
    weights: NDArray[np.float64]


class HashedNgramEmbedder:
    """Texts as signed, hashed counts of words, pairs of neighbouring words, and character 3- to 5-grams.

    Finds passages that share words, or forms of a word, with the question; it knows no synonyms. There is nothing to
    train and no statistics of a collection (no idf): a text's vector depends on the text alone, and is the same on
    every machine. English function words count a tenth, as an idf would have it; repeats count with the logarithm of
    their number.

    Safe to use from several threads.
    """

    def __init__(self, dimension: int = 2048) -> None:
        """An embedder into `dimension` columns.

        Raises:
            UsageError: fewer than 64 columns: nearly every feature would share one.
        """
        if dimension < _LEAST_DIMENSION:
            raise UsageError(f"hashed n-grams need at least {_LEAST_DIMENSION} dimensions, not {dimension}")
        self._dimension = dimension
        self._features = lru_cache(_REMEMBERED_WORDS)(self._word_features)

    @property
    def name(self) -> str:
        """`hashed-ngrams`."""
        return HASHED_NGRAMS

    @property
    def fingerprint(self) -> str:
        """Version and dimension: all that a vector depends on beside its text."""
        return f"{HASHED_NGRAMS}-v{_VERSION}-d{self._dimension}"

    @property
    def dimension(self) -> int:
        """Columns of a vector."""
        return self._dimension

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors `[texts, dimension]` of length 1; a text of white space alone is the zero vector."""
        vectors = np.zeros((len(texts), self._dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self._embed(text)
        return vectors

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """The vector `[dimension]` of a question: that of the same text as a document."""
        return self._embed(text).astype(np.float32)

    def _embed(self, text: str) -> NDArray[np.float64]:
        words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
        if not words:
            return np.zeros(self._dimension)
        counts = Counter(words)
        found = [self._features(word) for word in counts]
        columns = np.concatenate([features.columns for features in found])
        weights = np.concatenate(
            [features.weights * (1 + log(counts[word])) for word, features in zip(counts, found, strict=True)]
        )
        pair_columns, pair_weights = self._pairs(words)
        columns, weights = np.concatenate([columns, pair_columns]), np.concatenate([weights, pair_weights])
        sums = np.bincount(columns, weights=weights, minlength=self._dimension)
        length = float(np.linalg.norm(sums))
        if length < _CANCELLED:
            sums = np.bincount(columns, weights=np.abs(weights), minlength=self._dimension)
            length = float(np.linalg.norm(sums))
        return sums / length

    def _pairs(self, words: list[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Hashed pairs of neighbouring words that are not both function words: columns and signed weights."""
        pairs = Counter(
            f"{first} {second}"
            for first, second in pairwise(words)
            if first not in _FUNCTION_WORDS and second not in _FUNCTION_WORDS
        )
        hashed = [self._column(f"2:{pair}") for pair in pairs]
        columns = np.array([column for column, _ in hashed], dtype=np.int64)
        counted = [sign * _PAIR_WEIGHT * (1 + log(n)) for (_, sign), n in zip(hashed, pairs.values(), strict=True)]
        return columns, np.array(counted, dtype=np.float64)

    def _word_features(self, word: str) -> _Features:
        """The word itself and, together as long a vector, its character n-grams with the word's ends marked."""
        marked = f"<{word}>"
        grams = [marked[i : i + size] for size in _NGRAM_SIZES for i in range(len(marked) - size + 1)]
        hashed = [self._column(f"1:{word}"), *(self._column(f"c:{gram}") for gram in grams)]
        importance = _FUNCTION_WEIGHT if word in _FUNCTION_WORDS or not word[0].isalnum() else 1.0
        each = _NGRAMS_WEIGHT / sqrt(len(grams)) if grams else 0.0
        weights = np.array([sign for _, sign in hashed], dtype=np.float64) * importance
        weights[1:] *= each
        return _Features(np.array([column for column, _ in hashed], dtype=np.int64), weights)

    def _column(self, feature: str) -> tuple[int, float]:
        """Column and sign of a feature. CRC-32 is the same everywhere; Python's own hash is not."""
        hashed = crc32(feature.encode("utf-8", "surrogatepass"))
        return (hashed >> 1) % self._dimension, 1.0 if hashed & 1 else -1.0
