"""How close each contender came to full prefill over all questions, with bootstrap intervals. Imports no torch."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: the normalization of SQuAD 1.1's evaluation.

    >>> normalize("The  Harbour-Master's.")
    'harbourmasters'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both, counted with repetition (SQuAD 1.1).

    >>> f1("the old harbour of Skerrow", "Skerrow harbour")
    0.6666666666666666
    """
    predicted = normalize(prediction).split()
    wanted = normalize(answer).split()
    if not predicted or not wanted:
        return float(predicted == wanted)
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision = shared / len(predicted)
    recall = shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean (or median) over questions and the 2.5th and 97.5th percentile of its bootstrap distribution."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap of a mean (Efron 1979); `values` is not empty.

    For two methods on the same questions give the differences: that is the paired bootstrap.
    """
    data = np.asarray(values, dtype=np.float64)
    return _interval(float(data.mean()), _resampled_means(data[:, None], seed)[:, 0])


def ratio_interval(values: Sequence[float], references: Sequence[float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean of `values` over that of `references`, paired: both of the same questions.

    The mean of `references` must not be 0; bootstrap samples in which it is 0 are skipped.
    """
    pairs = np.stack([np.asarray(values, dtype=np.float64), np.asarray(references, dtype=np.float64)], axis=1)
    means = _resampled_means(pairs, seed)
    means = means[means[:, 1] > 0.0]
    return _interval(float(pairs[:, 0].mean() / pairs[:, 1].mean()), means[:, 0] / means[:, 1])


def median_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap of a median, which is in the field `mean`; `values` must not be empty."""
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


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all values lie, linear between neighbours.

    >>> percentile([4.0, 1.0, 2.0], 0.25)
    1.5
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class FidelitySample:
    """One contender on one question, compared with full prefill.

    At each position of full prefill's continuation, `kl` is the divergence D_KL(full || contender) of the next-token
    distributions in nats, and `agrees` whether both have the same most likely token. `answer_nll` is in nats per
    token of the first right answer. `identical` is whether the contender's greedy answer equals full prefill's: decoded
    freely, or, if it was not, by all of `agrees`. `text` is the answer that was decoded freely, and `f1` its score
    against the nearest right answer.
    """

    kl: tuple[float, ...]
    agrees: tuple[bool, ...]
    answer_nll: float | None
    identical: bool | None
    f1: float | None
    ttft_s: float
    flops_limit: float
    recompute_fraction: float | None
    prompt_tokens: int
    text: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """A JSON-able dictionary with rounded numbers."""
        rounded = {"kl": [float(f"{kl:.4g}") for kl in self.kl], "agrees": [int(agrees) for agrees in self.agrees]}
        return {**asdict(self), **rounded}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "FidelitySample":
        """The inverse of `as_dict`."""
        agrees = tuple(bool(agrees) for agrees in data["agrees"])
        return cls(**{**data, "kl": tuple(data["kl"]), "agrees": agrees})


@dataclass(frozen=True, slots=True)
class FidelityRow:
    """One contender over all questions; undefined values are None.

    `kl` and `agreement` are means over questions of the mean over positions, `kl_p90` is over all positions.
    `kl_of_full_reuse` is the mean divergence divided by that of full KV reuse: the remaining share of its error.
    `speedup` is the median over questions of full prefill's time to first token divided by the contender's.
    `answer_nll_minus_full` and `f1_minus_full` are paired by question. Intervals resample questions: 2.5th and 97.5th
    percentile of 2000 bootstrap samples. `decoded` counts the answers that `identical` compares. `value` is the
    parameter's value if it was fitted.
    """

    method: str
    questions: int
    kl: float | None = None
    kl_low: float | None = None
    kl_high: float | None = None
    kl_p90: float | None = None
    kl_of_full_reuse: float | None = None
    kl_of_full_reuse_low: float | None = None
    kl_of_full_reuse_high: float | None = None
    agreement: float | None = None
    agreement_low: float | None = None
    agreement_high: float | None = None
    identical: float | None = None
    decoded: int = 0
    answer_nll: float | None = None
    answer_nll_minus_full: float | None = None
    answer_nll_minus_full_low: float | None = None
    answer_nll_minus_full_high: float | None = None
    f1: float | None = None
    f1_minus_full: float | None = None
    f1_minus_full_low: float | None = None
    f1_minus_full_high: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    flops_limit: float | None = None
    limit_share: float | None = None
    ttft_s: float | None = None
    recompute_fraction: float | None = None
    prompt_tokens: float | None = None
    value: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def summarize_fidelity(
    samples: Sequence[Mapping[str, FidelitySample]],
    values: Mapping[str, float | None] | None = None,
    *,
    reference: str = "full",
    reused: str = "full-reuse",
) -> list[FidelityRow]:
    """One row per contender, in the order of the first question; some have fewer questions.

    `values` are the fitted parameters by row; a contender whose value is None gets a row without measurements.
    `reference` is the full prefill that the others are compared with, `reused` the full reuse whose error counts as 1.
    """
    fitted = values or {}
    judges = reference, reused
    measured = [_fidelity_row(label, samples, judges, fitted.get(label)) for label in (samples[0] if samples else ())]
    return [*measured, *(FidelityRow(label, 0) for label, value in fitted.items() if value is None)]


def _fidelity_row(
    label: str, samples: Sequence[Mapping[str, FidelitySample]], judges: tuple[str, str], value: float | None
) -> FidelityRow:
    reference, all_reused = judges
    having = [sample for sample in samples if label in sample]
    of_label = [sample[label] for sample in having]
    full = [sample[reference] for sample in having]
    pairs = list(zip(of_label, full, strict=True))
    compared = [sample for sample in of_label if sample.kl]
    reused = [fmean(sample[all_reused].kl) for sample in having if sample[label].kl]
    divergences = [fmean(sample.kl) for sample in compared]
    remaining = ratio_interval(divergences, reused) if compared and any(reused) else None
    identical = [sample.identical for sample in of_label if sample.identical is not None]
    nll = [(a.answer_nll, b.answer_nll) for a, b in pairs if a.answer_nll is not None and b.answer_nll is not None]
    f1 = [(a.f1, b.f1) for a, b in pairs if a.f1 is not None and b.f1 is not None]
    speedup = median_interval([b.ttft_s / a.ttft_s for a, b in pairs])
    limit = median(sample.flops_limit for sample in of_label)
    fractions = [sample.recompute_fraction for sample in of_label if sample.recompute_fraction is not None]
    return FidelityRow(
        label,
        len(of_label),
        kl_p90=percentile([kl for sample in compared for kl in sample.kl], 0.9) if compared else None,
        identical=_mean(identical),
        decoded=len(identical),
        answer_nll=_mean([a for a, _ in nll]),
        f1=_mean([a for a, _ in f1]),
        flops_limit=limit,
        limit_share=speedup.mean / limit,
        ttft_s=median(sample.ttft_s for sample in of_label),
        recompute_fraction=_mean(fractions),
        prompt_tokens=fmean(sample.prompt_tokens for sample in of_label),
        value=value,
        **_ends("kl", divergences),
        **_ends("kl_of_full_reuse", remaining),
        **_ends("agreement", [fmean(sample.agrees) for sample in compared]),
        **_ends("answer_nll_minus_full", [a - b for a, b in nll]),
        **_ends("f1_minus_full", [a - b for a, b in f1]),
        **_ends("speedup", speedup),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _ends(name: str, of: Interval | Sequence[float] | None) -> dict[str, float]:
    """A row's fields for an interval, or for the mean of values by question; empty for None."""
    if not of:
        return {}
    interval = of if isinstance(of, Interval) else mean_interval(of)
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
