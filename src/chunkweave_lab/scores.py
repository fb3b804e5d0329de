"""How right answers are, and intervals for means over questions by resampling the questions. Imports no torch."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from chunkweave.errors import UsageError, install_extra

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: the normalization of SQuAD 1.1's evaluation.

    >>> normalize("The  Harbour-Master's.")
    'harbourmasters'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if both are the same after normalization, else 0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both, counted with repetition (SQuAD 1.1).

    >>> f1("the old harbour of Skerrow", "Skerrow harbour")
    0.6666666666666666
    """
    predicted, wanted = normalize(prediction).split(), normalize(answer).split()
    if not predicted or not wanted:
        return float(predicted == wanted)
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def jaccard(prediction: str, answer: str) -> float:
    """Words in both over words in either, as sets.

    >>> jaccard("old harbour", "harbour bell")
    0.3333333333333333
    """
    predicted, wanted = set(normalize(prediction).split()), set(normalize(answer).split())
    return len(predicted & wanted) / len(predicted | wanted) if predicted | wanted else 1.0


def rouge_l(prediction: str, answer: str) -> float:
    """F-measure of the longest common subsequence of words, by the package rouge-score.

    Raises:
        UsageError: the package is not installed.
    """
    return float(_rouge_scorer().score(answer, prediction)["rougeL"].fmeasure)


def has_rouge() -> bool:
    """Whether the package that `rouge_l` takes is installed."""
    return find_spec("rouge_score") is not None


SCORES: dict[str, Callable[[str, str], float]] = {
    "f1": f1,
    "exact_match": exact_match,
    "rouge_l": rouge_l,
    "jaccard": jaccard,
}


def best_scores(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """Every score of `prediction` against the answer that it is best for; `answers` is not empty."""
    return {name: max(score(prediction, answer) for answer in answers) for name, score in SCORES.items()}


@cache
def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UsageError(f"ROUGE-L needs the package rouge-score: {install_extra('bench')}") from error
    return RougeScorer(["rougeL"])


RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean (or median) over questions and the 2.5th and 97.5th percentile of its bootstrap distribution."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap of a mean (Efron 1979); `values` is not empty.

    For two methods on the same questions give the differences: that is the paired bootstrap of DESIGN §8.
    """
    data = np.asarray(values, dtype=np.float64)
    return _interval(float(data.mean()), _resampled_means(data[:, None], seed)[:, 0])


def ratio_interval(values: Sequence[float], references: Sequence[float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean of `values` over that of `references`, paired: both of the same questions.

    The mean of `references` is not 0; samples in which it is are left out.
    """
    pairs = np.stack([np.asarray(values, dtype=np.float64), np.asarray(references, dtype=np.float64)], axis=1)
    means = _resampled_means(pairs, seed)
    means = means[means[:, 1] > 0.0]
    return _interval(float(pairs[:, 0].mean() / pairs[:, 1].mean()), means[:, 0] / means[:, 1])


def median_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap of a median, which stands in for the mean; `values` is not empty."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    return _interval(
        float(np.median(data)), np.median(data[rng.integers(0, len(data), (RESAMPLES, len(data)))], axis=1)
    )


def _resampled_means(data: np.ndarray, seed: int) -> np.ndarray:
    """`[questions, columns]` -> means of every column in each sample of the questions, `[RESAMPLES, columns]`."""
    rng = np.random.default_rng(seed)
    blocks = [data[rng.integers(0, len(data), (100, len(data)))].mean(axis=1) for _ in range(RESAMPLES // 100)]
    return np.concatenate(blocks)


def _interval(mean: float, samples: np.ndarray) -> Interval:
    low, high = np.percentile(samples, [2.5, 97.5])
    return Interval(mean, float(low), float(high))
