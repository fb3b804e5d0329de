"""From reports to what is drawn: a prompt and its time as bars, shares by kind, and what full prefill would take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chunkweave.metrics import TOKEN_SOURCES, ChunkReport, ReuseReport
from chunkweave.types import Span


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of a line of length 1: where it starts, how long it is, its kind, and what it is."""

    start: float
    width: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class AnswerView:
    """One answer's prompt as a strip of parts, its time as a strip of phases, and both in words.

    With `named` false the parts have numbers for names.
    """

    report: ReuseReport
    named: bool = True

    @property
    def parts(self) -> list[Bar]:
        """The parts from the prompt's first token to its last; what cannot be stored, the question, is computed."""
        bars, at = [], 0
        for name, chunk in self.chunks:
            bars += self._computed(at, chunk.start)
            label = f"{name}: {chunk.tokens} tokens, {chunk.kv_source or 'source not known'}"
            bars.append(self._bar(Span(chunk.start, chunk.start + chunk.tokens), chunk.kv_source or "unknown", label))
            at = chunk.start + chunk.tokens
        return [*bars, *self._computed(at, self.report.prompt_tokens)]

    @property
    def recomputed(self) -> list[Bar]:
        """Which tokens were recomputed; gaps that nobody could see are closed."""
        gap = max(1, self.report.prompt_tokens // _CELLS)
        spans: list[Span] = []
        for span in (span for chunk in self.report.chunks for span in chunk.recomputed):
            if spans and span.start - spans[-1].stop < gap:
                spans[-1] = Span(spans[-1].start, span.stop)
            else:
                spans.append(span)
        return [self._bar(span, "recomputed", f"recomputed: {span.start} to {span.stop - 1}") for span in spans]

    @property
    def chunks(self) -> list[tuple[str, ChunkReport]]:
        """The parts that can be stored, each with what it is called."""
        called = (chunk.source if self.named else f"part {place}" for place, chunk in enumerate(self.report.chunks, 1))
        return list(zip(called, self.report.chunks, strict=True))

    @property
    def phases(self) -> list[Bar]:
        """Where the time from the request to the first token went."""
        report = self.report
        phases = report.phases
        behind = phases[-1][2]
        total = max(report.ttft_s, 1e-9)
        return [
            Bar(start / total, (stop - start) / total, name, f"{name} {(stop - start) * 1e3:.0f} ms")
            for name, start, stop in (*phases, ("rest", behind, report.ttft_s))
            if stop > start
        ]

    def _computed(self, start: int, stop: int) -> list[Bar]:
        if stop <= start:
            return []
        return [self._bar(Span(start, stop), "computed", f"question and frame: {stop - start} tokens, computed")]

    def _bar(self, span: Span, kind: str, label: str) -> Bar:
        total = max(1, self.report.prompt_tokens)
        return Bar(span.start / total, len(span) / total, kind, label)


_CELLS = 800
"""About as many can be told apart on a screen."""


def share_of_kinds(reports: Sequence[ReuseReport]) -> dict[str, float]:
    """Which share of all prompts' tokens became what, by `TOKEN_SOURCES`; all 0 without a prompt."""
    total = max(1, sum(report.prompt_tokens for report in reports))
    return {kind: sum(report.tokens_by_source[kind] for report in reports) / total for kind in TOKEN_SOURCES}


def share_of_tiers(reports: Iterable[ReuseReport]) -> dict[str, float]:
    """Which share of the tokens that can be stored was found, by tier."""
    found: dict[str, int] = {}
    looked_up = 0
    for report in reports:
        looked_up += report.looked_up_tokens
        for tier, tokens in report.hits.items():
            found[tier] = found.get(tier, 0) + tokens
    return {tier: tokens / looked_up for tier, tokens in sorted(found.items())} if looked_up else {}


@dataclass(frozen=True, slots=True)
class FullEstimate:
    """What full prefill would take here at least, from the requests that were computed for the most part.

    Their seconds behind the queue over their work: FLOPs; where these are not known, computed tokens. The least of
    these, since the others shared the machine with somebody.
    """

    seconds_per_work: float | None

    @classmethod
    def of(cls, reports: Iterable[ReuseReport]) -> "FullEstimate":
        """From what was answered of late."""
        least: float | None = None
        for report in reports:
            work, full = _work(report)
            if work >= _MOSTLY * full:
                rate = (report.ttft_s - report.queue_s) / work
                least = rate if least is None else min(rate, least)
        return cls(least)

    def ttft_s(self, report: ReuseReport) -> float | None:
        """Least seconds to the first token with full prefill; None while nothing was computed for the most part."""
        if self.seconds_per_work is None:
            return None
        return report.queue_s + self.seconds_per_work * _work(report)[1]


_MOSTLY = 0.8


def _work(report: ReuseReport) -> tuple[float, float]:
    """Of a prefill as it was, and of full prefill."""
    if report.full_prefill_flops:
        return report.prefill_flops, report.full_prefill_flops
    return float(report.computed_tokens + report.recomputed_tokens), float(report.prompt_tokens)
