"""What the samples of quality and TTFT benchmarks say: one row a contender, and the quality plot. Imports no torch."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.eval.scores import mean_interval
from chunkweave.metrics import ReuseReport

CROSSING_KINDS = ("common", "which-two", "bridge", "comparison", "alias", "correction")
"""Kinds of question whose answer takes more than one passage."""

NOT_WORSE = -0.02
"""A contender is "not worse" if the paired interval of its F1 minus full's ends above this (DESIGN §8)."""


@dataclass(frozen=True, slots=True)
class QualitySample:
    """One contender's answer to one question, its scores, and its report."""

    question: int
    kind: str
    contender: str
    text: str
    scores: dict[str, float]
    report: ReuseReport


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


def summarize_quality(samples: Sequence[QualitySample]) -> list[QualityRow]:
    """One row a contender, in the order in which they first come; needs `full` and `full-reuse` among them."""
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
)


@dataclass(frozen=True, slots=True)
class TtftRow:
    """One method over all questions.

    `speedup` is the median over questions of the reference's time by this method's, on the same question in the same
    run; `flops_limit` what it would be if time were FLOPs, `limit_share` the share of that reached. Tokens are means
    over questions. `lookup_s`, `load_s` and `weave_s` are medians.
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
    lookup_s: float = 0.0
    load_s: float = 0.0
    weave_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def summarize(samples: Sequence[TtftSample], *, reference: str = "full") -> list[TtftRow]:
    """One row a method, the reference first, then in the order in which the methods first come.

    Samples of a question without a reference are left out: it was interrupted.
    """
    full = {sample.question: sample for sample in samples if sample.method == reference}
    methods = sorted(dict.fromkeys(sample.method for sample in samples), key=lambda method: method != reference)
    rows = []
    for method in methods:
        own = [sample for sample in samples if sample.method == method and sample.question in full]
        if own:
            rows.append(_ttft_row(method, own, full))
    return rows


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


def _ttft_row(method: str, samples: Sequence[TtftSample], full: dict[int, TtftSample]) -> TtftRow:
    times = [sample.ttft_s for sample in samples]
    ratios = [full[sample.question].ttft_s / sample.ttft_s for sample in samples]
    own = [sample.report for sample in samples if sample.report is not None]
    # A contender without reports is a plain forward: it computes what the reference computes.
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


def plot_quality(rows: Sequence[QualityRow], path: Path, title: str) -> None:
    """F1 against recompute fraction, one line a method over its ratios, with bootstrap intervals; a PNG at `path`.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install 'chunkweave[bench]'") from error
    figure = Figure(figsize=(7.2, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[str, list[QualityRow]] = defaultdict(list)
    for row in rows:
        lines[row.method.partition("@")[0]].append(row)
    for name, points in lines.items():
        points.sort(key=lambda row: row.recompute_fraction)
        if name in ("full", "prefix"):
            if name == "full":
                axes.axhline(points[0].f1, color="black", linewidth=1, label="full prefill")
            continue
        axes.errorbar(
            [row.recompute_fraction for row in points],
            [row.f1 for row in points],
            yerr=[[row.f1 - row.f1_low for row in points], [row.f1_high - row.f1 for row in points]],
            marker="o",
            capsize=2,
            linewidth=1.5,
            label=name,
        )
    axes.set_xlabel("recompute fraction (share of reused-chunk tokens x layers computed again)")
    axes.set_ylabel("F1")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")
