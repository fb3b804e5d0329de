"""Scores of answers, and summaries of benchmark samples: one row per contender. Imports no torch."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from chunkweave.calibration.summaries import f1, mean_interval, normalize, percentile, rouge_l
from chunkweave.metrics import ReuseReport

PROMPT_BASELINES = ("map-reduce", "map-rerank", "compress")
"""Contenders that change the prompt and reuse no KV of chunks (`prompt_baselines`)."""

CROSSING_KINDS = ("common", "which-two", "bridge", "comparison", "alias", "correction")
"""Kinds of question whose answer needs more than one passage."""

NOT_WORSE = -0.02
"""A contender is "not worse" if the lower end of the paired interval of its F1 minus full's is above this."""


def exact_match(prediction: str, answer: str) -> float:
    """1 if both are equal after normalization, else 0."""
    return float(normalize(prediction) == normalize(answer))


def jaccard(prediction: str, answer: str) -> float:
    """Words in both over words in either, as sets.

    >>> jaccard("old harbour", "harbour bell")
    0.3333333333333333
    """
    predicted, wanted = set(normalize(prediction).split()), set(normalize(answer).split())
    return len(predicted & wanted) / len(predicted | wanted) if predicted | wanted else 1.0


SCORES: dict[str, Callable[[str, str], float]] = {
    "f1": f1,
    "exact_match": exact_match,
    "rouge_l": rouge_l,
    "jaccard": jaccard,
}


def best_scores(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """Each score of `prediction`, maximized over `answers`, which must not be empty."""
    return {name: max(score(prediction, answer) for answer in answers) for name, score in SCORES.items()}


@dataclass(frozen=True, slots=True)
class QualitySample:
    """One contender's answer to one question, its scores, and its report."""

    question: int
    kind: str
    contender: str
    text: str
    scores: dict[str, float]
    report: ReuseReport

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, without the reports of chunks."""
        return {**asdict(self), "report": {**asdict(self.report), "chunks": ()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "QualitySample":
        """The inverse of `as_dict`."""
        return cls(**{**data, "report": ReuseReport(**{**data["report"], "chunks": ()})})


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One contender over all questions.

    `f1_low`/`f1_high` and the ends of `f1_minus_full` (paired by question) are bootstrap percentiles. `gap_closed` is
    the F1 of the crossing kinds on a scale from `full-reuse` (0) to `full` (1); None if full has no lead or no question
    crosses passages. `rouge_l_of_full` is the mean ROUGE-L of its answers against full prefill's, right or wrong
    (Cache-Craft §5). `f1_by_kind` are means. `recompute_fraction` is a mean (None for prompt baselines), `ttft_s` a
    median.
    """

    method: str
    questions: int
    f1: float
    f1_low: float
    f1_high: float
    exact_match: float
    rouge_l: float
    rouge_l_of_full: float
    jaccard: float
    f1_minus_full: float
    f1_minus_full_low: float
    f1_minus_full_high: float
    not_worse: bool
    crossing_f1: float | None
    gap_closed: float | None
    recompute_fraction: float | None
    ttft_s: float
    flops_limit: float
    f1_by_kind: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def summarize_quality(samples: Sequence[QualitySample]) -> list[QualityRow]:
    """One row per contender, in order of first occurrence; `full` and `full-reuse` must be among them."""
    by_contender: dict[str, dict[int, QualitySample]] = defaultdict(dict)
    for sample in samples:
        by_contender[sample.contender][sample.question] = sample
    full = by_contender["full"]
    ends = (crossing_f1(by_contender["full-reuse"].values()), crossing_f1(full.values()))
    return [_quality_row(name, own, full, ends) for name, own in by_contender.items()]


def crossing_f1(samples: Collection[QualitySample]) -> float | None:
    """Mean F1 over the questions that cross passages; None if there are none."""
    crossing = [sample.scores["f1"] for sample in samples if sample.kind in CROSSING_KINDS]
    return fmean(crossing) if crossing else None


def _quality_row(
    name: str,
    own: dict[int, QualitySample],
    full: dict[int, QualitySample],
    ends: tuple[float | None, float | None],
) -> QualityRow:
    samples = list(own.values())
    own_f1 = mean_interval([sample.scores["f1"] for sample in samples])
    lead = mean_interval([own[q].scores["f1"] - full[q].scores["f1"] for q in own if q in full])
    crossing = crossing_f1(samples)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        by_kind[sample.kind or "all"].append(sample.scores["f1"])
    return QualityRow(
        method=name,
        questions=len(samples),
        f1=own_f1.mean,
        f1_low=own_f1.low,
        f1_high=own_f1.high,
        exact_match=fmean(sample.scores["exact_match"] for sample in samples),
        rouge_l=fmean(sample.scores["rouge_l"] for sample in samples),
        rouge_l_of_full=fmean(rouge_l(own[q].text, full[q].text) for q in own if q in full),
        jaccard=fmean(sample.scores["jaccard"] for sample in samples),
        f1_minus_full=lead.mean,
        f1_minus_full_low=lead.low,
        f1_minus_full_high=lead.high,
        not_worse=lead.low > NOT_WORSE,
        crossing_f1=crossing,
        gap_closed=_gap_closed(crossing, *ends),
        recompute_fraction=None
        if name.partition("@")[0] in PROMPT_BASELINES
        else fmean(sample.report.recompute_fraction for sample in samples),
        ttft_s=median(sample.report.ttft_s for sample in samples),
        flops_limit=median(sample.report.flops_limit for sample in samples),
        f1_by_kind={kind: fmean(values) for kind, values in sorted(by_kind.items())},
    )


def _gap_closed(crossing: float | None, low: float | None, high: float | None) -> float | None:
    if crossing is None or low is None or high is None or high <= low:
        return None
    return (crossing - low) / (high - low)


@dataclass(frozen=True, slots=True)
class TtftSample:
    """One contender's first token on one question; `report` is None for the Hugging Face forward."""

    question: int
    method: str
    ttft_s: float
    report: ReuseReport | None


_TOKENS = (
    "prompt_tokens",
    "prefix_exact_tokens",
    "reused_tokens",
    "recomputed_tokens",
    "computed_tokens",
    "recompute_fraction",
    "loaded_fraction",
)


@dataclass(frozen=True, slots=True)
class TtftRow:
    """One method over all questions.

    `speedup` is the median over questions of the reference's time divided by this method's, on the same question in the
    same run; `flops_limit` is the same for FLOPs instead of time, `limit_share` the part of it that is reached. Tokens
    are means over questions. `lookup_s`, `load_s` and `weave_s` are medians.
    """

    method: str
    questions: int
    ttft_median_s: float
    ttft_p10_s: float
    ttft_p90_s: float
    speedup: float
    speedup_p10: float
    speedup_p90: float
    flops_limit: float
    limit_share: float
    prompt_tokens: float = 0.0
    prefix_exact_tokens: float = 0.0
    reused_tokens: float = 0.0
    recomputed_tokens: float = 0.0
    computed_tokens: float = 0.0
    recompute_fraction: float = 0.0
    loaded_fraction: float = 1.0
    lookup_s: float = 0.0
    load_s: float = 0.0
    weave_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def summarize(samples: Sequence[TtftSample], *, reference: str = "full") -> list[TtftRow]:
    """One row per method: the reference, then methods in order of first occurrence.

    Samples of a question without a reference are skipped: it was interrupted.
    """
    full = {sample.question: sample for sample in samples if sample.method == reference}
    methods = sorted(dict.fromkeys(sample.method for sample in samples), key=lambda method: method != reference)
    rows = []
    for method in methods:
        own = [sample for sample in samples if sample.method == method and sample.question in full]
        if own:
            rows.append(_ttft_row(method, own, full))
    return rows


def _ttft_row(method: str, samples: Sequence[TtftSample], full: dict[int, TtftSample]) -> TtftRow:
    times = [sample.ttft_s for sample in samples]
    ratios = [full[sample.question].ttft_s / sample.ttft_s for sample in samples]
    own = [sample.report for sample in samples if sample.report is not None]
    # A contender without reports is a plain forward: it computes the same as the reference.
    reports = own or [report for sample in samples if (report := full[sample.question].report) is not None]
    speedup = median(ratios)
    limit = median(report.flops_limit for report in reports) if reports else 1.0
    return TtftRow(
        method=method,
        questions=len(samples),
        ttft_median_s=median(times),
        ttft_p10_s=percentile(times, 0.1),
        ttft_p90_s=percentile(times, 0.9),
        speedup=speedup,
        speedup_p10=percentile(ratios, 0.1),
        speedup_p90=percentile(ratios, 0.9),
        flops_limit=limit,
        limit_share=speedup / limit,
        **_averages(reports, fmean, _TOKENS),
        **_averages(own, median, ("lookup_s", "load_s", "weave_s")),
    )


def _averages(
    reports: Sequence[ReuseReport], average: Callable[[Iterable[float]], float], names: Sequence[str]
) -> dict[str, float]:
    return {name: average(getattr(report, name) for report in reports) for name in names} if reports else {}
