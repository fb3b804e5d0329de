"""Intervals for means over questions, by resampling the questions. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over questions and the 2.5th and 97.5th percentile of its bootstrap distribution."""

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


def _resampled_means(data: np.ndarray, seed: int) -> np.ndarray:
    """`[questions, columns]` -> means of every column in each sample of the questions, `[RESAMPLES, columns]`."""
    rng = np.random.default_rng(seed)
    blocks = [data[rng.integers(0, len(data), (100, len(data)))].mean(axis=1) for _ in range(RESAMPLES // 100)]
    return np.concatenate(blocks)


def _interval(mean: float, samples: np.ndarray) -> Interval:
    low, high = np.percentile(samples, [2.5, 97.5])
    return Interval(mean, float(low), float(high))
