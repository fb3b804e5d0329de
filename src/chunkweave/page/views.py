"""Turns a report into bars: the parts of its prompt, and the phases of its time."""

from dataclasses import dataclass

from chunkweave.metrics import ChunkReport, ReuseReport
from chunkweave.types import Span


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a line of length 1: its start, width, kind and label."""

    start: float
    width: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class AnswerView:
    """Bars of one answer: its prompt by part, and its time by phase.

    If `named` is false, parts have numbers instead of names.
    """

    report: ReuseReport
    named: bool = True

    @property
    def parts(self) -> list[Bar]:
        """The parts from the prompt's first token to its last; tokens between parts that can be stored are computed."""
        bars, at = [], 0
        for name, chunk in self.chunks:
            bars += self._computed(at, chunk.start)
            label = f"{name}: {chunk.tokens} tokens, {chunk.kv_source or 'source not known'}"
            bars.append(self._bar(Span(chunk.start, chunk.start + chunk.tokens), chunk.kv_source or "unknown", label))
            at = chunk.start + chunk.tokens
        return [*bars, *self._computed(at, self.report.prompt_tokens)]

    @property
    def recomputed(self) -> list[Bar]:
        """The recomputed tokens; gaps that are too narrow to be seen are closed."""
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
        """The parts that can be stored, each with its name."""
        called = (chunk.source if self.named else f"part {place}" for place, chunk in enumerate(self.report.chunks, 1))
        return list(zip(called, self.report.chunks, strict=True))

    @property
    def phases(self) -> list[Bar]:
        """The phases between the request and its first token."""
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
"""About as many tokens can be distinguished on a screen."""
