"""What a TTFT benchmark's samples say, one row a method. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Protocol

from chunkweave.metrics import ReuseReport


class TimedSample(Protocol):
    """One method's first token on one question, with its report if the method makes one."""

    @property
    def question(self) -> int: ...
    @property
    def method(self) -> str: ...
    @property
    def ttft_s(self) -> float: ...
    @property
    def report(self) -> ReuseReport | None: ...


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


def summarize(samples: Sequence[TimedSample], *, reference: str = "full") -> list[TtftRow]:
    """One row a method, the reference first, then in the order in which the methods first come.

    Samples of a question without a reference are left out: it was interrupted.
    """
    full = {sample.question: sample for sample in samples if sample.method == reference}
    methods = sorted(dict.fromkeys(sample.method for sample in samples), key=lambda method: method != reference)
    rows = []
    for method in methods:
        own = [sample for sample in samples if sample.method == method and sample.question in full]
        if own:
            rows.append(_row(method, own, full))
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


def _row(method: str, samples: Sequence[TimedSample], full: dict[int, TimedSample]) -> TtftRow:
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
        **_means(reports),
        **_phases(own),
    )


def _means(reports: Sequence[ReuseReport]) -> dict[str, float]:
    names = (
        "prompt_tokens",
        "prefix_exact_tokens",
        "reused_tokens",
        "recomputed_tokens",
        "computed_tokens",
        "recompute_fraction",
    )
    return {name: fmean(getattr(report, name) for report in reports) for name in names} if reports else {}


def _phases(reports: Sequence[ReuseReport]) -> dict[str, float]:
    names = ("lookup_s", "load_s", "weave_s")
    return {name: median(getattr(report, name) for report in reports) for name in names} if reports else {}
