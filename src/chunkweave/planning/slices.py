"""Cuts a pass into slices that give the same KV, so that other requests need not wait for all of it."""

from dataclasses import replace

from chunkweave.planning.plan import Pass
from chunkweave.types import Span, joined


def can_be_cut(a_pass: Pass) -> bool:
    """Whether the tokens of a pass do not depend on one another but for causal attention.

    Then those of lower positions may go through all layers first. Rules, a start by evidence and a watched question
    look at all active tokens of a layer together; so such a pass runs whole, as does one that ends early or hides keys.
    """
    looks_around = a_pass.candidates or a_pass.rules or a_pass.start or a_pass.watch
    return not looks_around and a_pass.depth is None and not a_pass.hidden


def cut(a_pass: Pass, tokens: int) -> tuple[Pass, Pass | None]:
    """The first `tokens` (at least 1) positions of a pass that can be cut, and the others, None if there are none."""
    head: list[Span] = []
    tail: list[Span] = []
    left = tokens
    for span in joined(a_pass.required):
        middle = min(span.stop, span.start + left)
        left -= middle - span.start
        head += [Span(span.start, middle)] if middle > span.start else []
        tail += [Span(middle, span.stop)] if span.stop > middle else []
    return replace(a_pass, required=tuple(head)), replace(a_pass, required=tuple(tail)) if tail else None
