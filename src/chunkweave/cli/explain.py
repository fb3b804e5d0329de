"""`chunkweave ask --explain`: a plan as a table, with a strip of every reused chunk's tokens."""

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from chunkweave.cli.tables import times, token_line
from chunkweave.metrics import ReuseReport
from chunkweave.planning.explanation import PartExplanation, PlanExplanation
from chunkweave.planning.plan import KVSource
from chunkweave.types import Span

STRIP_CELLS = 64
"""Most cells of a strip; a longer chunk has several tokens in a cell."""

KEPT, PARTLY = "·", "▁"
SHADES = "░▒▓█"
"""Under a third, under two thirds, more, and all of a cell's tokens recomputed."""


def explanation(plan: PlanExplanation, report: ReuseReport) -> RenderableType:
    """The whole plan: totals, parts, strips, passes, times."""
    shown: list[RenderableType] = [token_line(report), part_table(plan.parts)]
    lines = strip_lines(plan.parts)
    if lines:
        shown += [Text("\n".join([*lines, strip_legend(plan)])), ""]
    for place, words in enumerate(plan.passes, start=1):
        shown.append(f"pass {place} of {len(plan.passes)}: {words}")
    if plan.stop is not None:
        focused = [
            part.source for part in plan.parts if Span(part.start, part.start + part.tokens) in plan.stop.focused
        ]
        names = ", ".join(focused) or "none"
        shown.append(Text(f"stopped at layer {plan.stop.layer} of {plan.num_layers}; focused: {names}"))
    shown.append(f"recomputed share of the reused chunks' work: {report.recompute_fraction:.3f}")
    shown.append(times(report))
    return Group(*shown)


def part_table(parts: Sequence[PartExplanation]) -> Table:
    """One row a part."""
    table = Table()
    table.add_column("part", overflow="fold")
    table.add_column("tokens", justify="right")
    table.add_column("KV source")
    table.add_column("variant", overflow="fold")
    for name in ("CCI", "overlap", "CFO", "recomputed"):
        table.add_column(name, justify="right")
    for part in parts:
        table.add_row(
            escape(part.source),
            str(part.tokens),
            str(part.kv_source),
            escape(variant_words(part)),
            *(_score(value) for value in (part.cci, part.overlap, part.cfo)),
            _recomputed(part),
        )
    return table


def variant_words(part: PartExplanation) -> str:
    """Which segment was taken, by the chunks that it was computed behind.

    >>> variant_words(PartExplanation("chunk", "a", 0, 9, KVSource.REUSED, "d3f0" * 8, ("b", "c")))
    'd3f0d3f0 in context of 2 chunks (b, c)'
    """
    if part.variant is None:
        return "-"
    if part.context is None:
        return part.variant[:8]
    if not part.context:
        return f"{part.variant[:8]} {'alone' if part.alone else 'as first chunk'}"
    count = f"{len(part.context)} chunk{'s' if len(part.context) > 1 else ''}"
    return f"{part.variant[:8]} in context of {count} ({', '.join(part.context)})"


def strip_lines(parts: Sequence[PartExplanation], cells: int = STRIP_CELLS) -> list[str]:
    """A named strip for every reused part."""
    reused = [part for part in parts if part.kv_source is KVSource.REUSED]
    width = max((len(part.source) for part in reused), default=0)
    return [
        f"{part.source:<{width}}  {token_strip(part.tokens, part.recomputed, part.partly, cells=cells)}"
        for part in reused
    ]


def token_strip(
    tokens: int, recomputed: Sequence[Span], partly: Sequence[Span] = (), *, cells: int = STRIP_CELLS
) -> str:
    """Which of a part's tokens were recomputed, from its first to its last, in at most `cells` characters.

    >>> token_strip(8, [Span(0, 2), Span(7, 8)], cells=4)
    '█··▒'
    >>> token_strip(4, [Span(0, 1)], [Span(2, 4)])
    '█·▁▁'
    """
    width = min(tokens, cells)
    edges = [tokens * cell // width for cell in range(width + 1)]
    return "".join(_cell(Span(*edge), recomputed, partly) for edge in pairwise(edges))


def strip_legend(plan: PlanExplanation) -> str:
    """What the characters of the strips mean."""
    legend = f"{KEPT} kept   {SHADES} some to all of a cell's tokens recomputed"
    return f"{legend}   {PARTLY} recomputed below layer {plan.stop.layer} only" if plan.stop is not None else legend


def _cell(cell: Span, recomputed: Sequence[Span], partly: Sequence[Span]) -> str:
    tokens = _overlap(cell, recomputed)
    if not tokens:
        return PARTLY if _overlap(cell, partly) else KEPT
    return SHADES[tokens * (len(SHADES) - 1) // len(cell)]


def _overlap(cell: Span, spans: Sequence[Span]) -> int:
    return sum(max(0, min(cell.stop, span.stop) - max(cell.start, span.start)) for span in spans)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _recomputed(part: PartExplanation) -> str:
    if part.kv_source is not KVSource.REUSED:
        return "all" if part.kv_source is KVSource.COMPUTED else "-"
    below = sum(len(span) for span in part.partly)
    stopped = f" + {below} below layer {part.stopped_at_layer}" if below else ""
    return f"{part.recomputed_tokens}{stopped}"
