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
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [data[rng.integers(0, len(data), (100, len(data)))].mean(axis=1) for _ in range(RESAMPLES // 100)]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(data.mean()), float(low), float(high))
