"""What the samples of benchmarks say: one row a contender. Imports no torch."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from chunkweave.metrics import ReuseReport
from chunkweave_lab.contenders import PROMPT_BASELINES
from chunkweave_lab.scores import Interval, has_rouge, mean_interval, median_interval, ratio_interval, rouge_l

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

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, without what became of each chunk."""
        return {**asdict(self), "report": {**asdict(self.report), "chunks": ()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "QualitySample":
        """What `as_dict` gave."""
        return cls(**{**data, "report": ReuseReport(**{**data["report"], "chunks": ()})})


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One contender over all questions.

    `f1_low`/`f1_high` and the ends of `f1_minus_full` (paired by question) are bootstrap percentiles. `gap_closed` is
    the share of the crossing kinds' F1 between `full-reuse` (0) and `full` (1), None where full has no lead or no
    question crosses. `rouge_l_of_full` is the mean ROUGE-L of its answers against full prefill's, right or wrong
    (Cache-Craft §5). `f1_by_kind` are means. `recompute_fraction` is a mean (None for a prompt baseline: there
    is none), `ttft_s` a median.
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
    loaded_fraction: float = 1.0
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


@dataclass(frozen=True, slots=True)
class FidelitySample:
    """One contender on one question, beside full prefill.

    `kl` has the divergence of its next-token distribution from full prefill's, D_KL(full || contender) in nats, and
    `agrees` whether both expect the same token most, at each position of full prefill's continuation; both are empty
    where the prompt is another one. `answer_nll` is in nats a token of the first right answer. `identical` says whether
    the continuation came out as full prefill's when it was decoded freely, `text` what it says, and `f1` what that is
    worth.
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
        """JSON-able, numbers as exact as they are worth."""
        rounded = {"kl": [float(f"{kl:.4g}") for kl in self.kl], "agrees": [int(agrees) for agrees in self.agrees]}
        return {**asdict(self), **rounded}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "FidelitySample":
        """What `as_dict` gave."""
        agrees = tuple(bool(agrees) for agrees in data["agrees"])
        return cls(**{**data, "kl": tuple(data["kl"]), "agrees": agrees})


@dataclass(frozen=True, slots=True)
class FidelityRow:
    """One contender over all questions; a value is None where it is not defined.

    `kl` and `agreement` are means over questions of the mean over positions, `kl_p90` is over all positions.
    `kl_of_full_reuse` is the mean divergence over that of full KV reuse: what is left of its error. `speedup` is the
    median over questions of full prefill's time to first token by the contender's. `answer_nll_minus_full` and
    `f1_minus_full` are paired by question, so are their intervals, and those of all others resample questions too:
    2.5th and 97.5th percentile of 2000 bootstrap samples. `rouge_l_of_full` is ROUGE-L of the free answers against full
    prefill's own, as Cache-Craft §5.2 has it, where rouge-score is installed. `value` is what its parameter was set to,
    if it was fitted.
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
    rouge_l_of_full: float | None = None
    rouge_l_of_full_low: float | None = None
    rouge_l_of_full_high: float | None = None
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
    """One row a contender, in the order of the first question's; some are on fewer questions.

    `values` has the fitted parameters by row; contenders that have none (None) get a row without anything measured.
    `reference` is the full prefill that the others are compared with, `reused` the full reuse whose error is all.
    """
    fitted = values or {}
    judges = reference, reused
    measured = [_fidelity_row(label, samples, judges, fitted.get(label)) for label in (samples[0] if samples else ())]
    return [*measured, *(FidelityRow(label, 0) for label, value in fitted.items() if value is None)]


def _fidelity_row(
    label: str, samples: Sequence[Mapping[str, FidelitySample]], judges: tuple[str, str], value: float | None
) -> FidelityRow:
    reference, all_reused = judges
    found = [one for one in samples if label in one]
    own, full = [one[label] for one in found], [one[reference] for one in found]
    pairs = list(zip(own, full, strict=True))
    compared = [one for one in own if one.kl]
    reused = [fmean(one[all_reused].kl) for one in found if one[label].kl]
    divergences = [fmean(one.kl) for one in compared]
    kl = mean_interval(divergences) if compared else None
    left = ratio_interval(divergences, reused) if compared and any(reused) else None
    agreement = mean_interval([fmean(one.agrees) for one in compared]) if compared else None
    identical = [one.identical for one in own if one.identical is not None]
    nll = [(a.answer_nll, b.answer_nll) for a, b in pairs if a.answer_nll is not None and b.answer_nll is not None]
    nll_lead = mean_interval([a - b for a, b in nll]) if nll else None
    f1 = [(a.f1, b.f1) for a, b in pairs if a.f1 is not None and b.f1 is not None]
    f1_lead = mean_interval([a - b for a, b in f1]) if f1 else None
    texts = [(a.text, b.text) for a, b in pairs if a.text is not None and b.text is not None]
    rouge = mean_interval([rouge_l(a, b) for a, b in texts]) if texts and has_rouge() else None
    speedup = median_interval([b.ttft_s / a.ttft_s for a, b in pairs])
    limit = median(one.flops_limit for one in own)
    fractions = [one.recompute_fraction for one in own if one.recompute_fraction is not None]
    return FidelityRow(
        label,
        len(own),
        *_ends(kl),
        percentile([kl for one in compared for kl in one.kl], 0.9) if compared else None,
        *_ends(left),
        *_ends(agreement),
        identical=fmean(identical) if identical else None,
        decoded=len(identical),
        answer_nll=fmean(a for a, _ in nll) if nll else None,
        answer_nll_minus_full=nll_lead.mean if nll_lead else None,
        answer_nll_minus_full_low=nll_lead.low if nll_lead else None,
        answer_nll_minus_full_high=nll_lead.high if nll_lead else None,
        f1=fmean(a for a, _ in f1) if f1 else None,
        f1_minus_full=f1_lead.mean if f1_lead else None,
        f1_minus_full_low=f1_lead.low if f1_lead else None,
        f1_minus_full_high=f1_lead.high if f1_lead else None,
        rouge_l_of_full=rouge.mean if rouge else None,
        rouge_l_of_full_low=rouge.low if rouge else None,
        rouge_l_of_full_high=rouge.high if rouge else None,
        speedup=speedup.mean,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        flops_limit=limit,
        limit_share=speedup.mean / limit,
        ttft_s=median(one.ttft_s for one in own),
        recompute_fraction=fmean(fractions) if fractions else None,
        prompt_tokens=fmean(one.prompt_tokens for one in own),
        value=value,
    )


def _ends(interval: Interval | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if interval is None else (interval.mean, interval.low, interval.high)
