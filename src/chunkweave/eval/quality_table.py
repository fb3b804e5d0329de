"""What a quality benchmark's samples say, one row a contender. Imports no torch."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Protocol

from chunkweave.eval.scores import mean_interval
from chunkweave.metrics import ReuseReport

CROSSING_KINDS = ("common", "which-two", "bridge", "comparison", "alias", "correction")
"""Kinds of question whose answer takes more than one passage."""

NOT_WORSE = -0.02
"""A contender is "not worse" if the paired interval of its F1 minus full's ends above this (DESIGN §8)."""


class ScoredSample(Protocol):
    """One contender's scores on one question."""

    @property
    def question(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def contender(self) -> str: ...
    @property
    def scores(self) -> dict[str, float]: ...
    @property
    def report(self) -> ReuseReport: ...


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One contender over all questions.

    `f1_low`/`f1_high` and the ends of `f1_minus_full` (paired by question) are bootstrap percentiles. `gap_closed` is
    the share of the crossing kinds' F1 between `full-reuse` (0) and `full` (1), None where full has no lead or no
    question crosses. `f1_by_kind` are means. `recompute_fraction` is a mean, `ttft_s` a median.
    """

    method: str
    questions: int
    f1: float
    f1_low: float
    f1_high: float
    exact_match: float
    rouge_l: float
    jaccard: float
    f1_minus_full: float
    f1_minus_full_low: float
    f1_minus_full_high: float
    not_worse: bool
    crossing_f1: float | None
    gap_closed: float | None
    recompute_fraction: float
    ttft_s: float
    flops_limit: float
    f1_by_kind: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def summarize_quality(samples: Sequence[ScoredSample]) -> list[QualityRow]:
    """One row a contender, in the order in which they first come; needs `full` and `full-reuse` among them."""
    by_contender: dict[str, dict[int, ScoredSample]] = defaultdict(dict)
    for sample in samples:
        by_contender[sample.contender][sample.question] = sample
    full = by_contender["full"]
    ends = (crossing_f1(by_contender["full-reuse"].values()), crossing_f1(full.values()))
    return [_row(name, own, full, ends) for name, own in by_contender.items()]


def crossing_f1(samples: Collection[ScoredSample]) -> float | None:
    """Mean F1 over the questions that cross passages; None if there are none."""
    crossing = [sample.scores["f1"] for sample in samples if sample.kind in CROSSING_KINDS]
    return fmean(crossing) if crossing else None


def _row(
    name: str,
    own: dict[int, ScoredSample],
    full: dict[int, ScoredSample],
    ends: tuple[float | None, float | None],
) -> QualityRow:
    samples = list(own.values())
    f1 = mean_interval([sample.scores["f1"] for sample in samples])
    lead = mean_interval([own[q].scores["f1"] - full[q].scores["f1"] for q in own if q in full])
    crossing = crossing_f1(samples)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        by_kind[sample.kind or "all"].append(sample.scores["f1"])
    return QualityRow(
        method=name,
        questions=len(samples),
        f1=f1.mean,
        f1_low=f1.low,
        f1_high=f1.high,
        exact_match=fmean(sample.scores["exact_match"] for sample in samples),
        rouge_l=fmean(sample.scores["rouge_l"] for sample in samples),
        jaccard=fmean(sample.scores["jaccard"] for sample in samples),
        f1_minus_full=lead.mean,
        f1_minus_full_low=lead.low,
        f1_minus_full_high=lead.high,
        not_worse=lead.low > NOT_WORSE,
        crossing_f1=crossing,
        gap_closed=_gap_closed(crossing, *ends),
        recompute_fraction=fmean(sample.report.recompute_fraction for sample in samples),
        ttft_s=median(sample.report.ttft_s for sample in samples),
        flops_limit=median(sample.report.flops_limit for sample in samples),
        f1_by_kind={kind: fmean(values) for kind, values in sorted(by_kind.items())},
    )


def _gap_closed(crossing: float | None, low: float | None, high: float | None) -> float | None:
    if crossing is None or low is None or high is None or high <= low:
        return None
    return (crossing - low) / (high - low)
