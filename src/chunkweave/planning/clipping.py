"""Cuts a pass down to a stretch of its prompt, where the rest is in a cache already, or somebody else's to compute."""

from dataclasses import replace
from itertools import compress
from math import ceil

from chunkweave.planning.plan import Pass
from chunkweave.types import Scattered, Span


def clipped(a_pass: Pass, first: int, stop: int) -> Pass:
    """The pass without the positions below `first` and from `stop` on.

    Of what rules and start keep there are as many as the stretch has of the candidates, rounded up. A question that is
    watched or followed must lie in it.
    """
    required = tuple(inside for span in a_pass.required if (inside := _within(span, first, stop)))
    flags = [first <= position < stop for span in a_pass.candidates for position in span.positions()]
    if all(flags):
        return replace(a_pass, required=required)
    share = sum(flags) / len(flags)
    return replace(
        a_pass,
        required=required,
        candidates=tuple(part for span in a_pass.candidates if (part := _candidates(span, first, stop))),
        rules=(
            *(replace(rule, count=ceil(rule.count * share)) for rule in a_pass.keep_top),
            *([a_pass.stop_unfocused] if a_pass.stop_unfocused is not None else []),
        ),
        start=a_pass.start
        and replace(
            a_pass.start,
            count=ceil(a_pass.start.count * share),
            weights=tuple(compress(a_pass.start.weights, flags)),
        ),
    )


def _within(span: Span, first: int, stop: int) -> Span | None:
    start, end = max(first, span.start), min(stop, span.stop)
    return Span(start, end) if start < end else None


def _candidates(span: Span | Scattered, first: int, stop: int) -> Span | Scattered | None:
    if isinstance(span, Span):
        return _within(span, first, stop)
    offsets = tuple(offset for offset in span.offsets if first <= span.start + offset < stop)
    return replace(span, offsets=offsets) if offsets else None
