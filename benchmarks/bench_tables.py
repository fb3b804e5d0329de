"""Documentation tables of the results of `chunkweave bench` and `study`."""

from collections.abc import Mapping, Sequence
from typing import Any

from docs_tables import markdown_table

Row = Mapping[str, Any]


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """Every table of a result of `bench fidelity`, `bench ttft` or `study`, by name."""
    makers = {"fidelity": (fidelity, side_by_side, contexts), "ttft": (ttft,)}
    return {make.__name__.replace("_", "-"): make(result["rows"]) for make in makers.get(result["benchmark"], ())}


def fidelity(rows: Sequence[Row]) -> str:
    """Divergence from full prefill and agreement with it, and the speed-up of the same run beside its limit."""
    heads = ["method", "recomputed", "KL", "95 %", "left", "top-1", "same", "NLL", "95 %", "F1", "speed-up", "limit"]
    cells = [
        [
            f"`{row['method']}`",
            _or_dash(row["recompute_fraction"], ".1%"),
            _or_dash(row["kl"], ".4f"),
            "-" if row["kl"] is None else f"{row['kl_low']:.4f}..{row['kl_high']:.4f}",
            _or_dash(row["kl_of_full_reuse"], ".0%"),
            _or_dash(row["agreement"], ".1%"),
            _or_dash(row["identical"], ".0%"),
            _or_dash(row["answer_nll_minus_full"], "+.3f"),
            "-"
            if row["answer_nll_minus_full"] is None
            else f"{row['answer_nll_minus_full_low']:+.3f}..{row['answer_nll_minus_full_high']:+.3f}",
            _or_dash(row["f1"], ".3f"),
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}x",
            "-" if row["flops_limit"] is None else f"{row['flops_limit']:.2f}x",
        ]
        for row in rows
    ]
    return markdown_table(heads, cells)


SIDE_BY_SIDE = {
    "full": "full prefill",
    "full-in-slices": "full prefill with other rounding",
    "full-reuse {way}": "nothing recomputed (`full-reuse`)",
    "query:whole:late:stored {way}@5%": "`query-whole`, 5 % recomputed",
    "cacheblend {way}@15%": "`cacheblend`, 15 % recomputed",
    "query:whole:late:stored {way}@15%": "`query-whole`, 15 % recomputed",
}
"""The rows of the table of several data sets, by method and way to compute chunks, and how they are called there."""


def side_by_side(rows: Sequence[Row]) -> str:
    """Speed and fidelity on several data sets, one result file each: a cell has their figures in the files' order.

    Chunks are computed in contexts of their corpus, or behind neutral passages in files without that.
    """
    way = "corpus" if any(row["method"] == "full-reuse corpus" for row in rows) else "neutral"
    columns = {
        "first token sooner": ("speedup", ".1f", "x"),
        "remaining error": ("kl_of_full_reuse", ".0%", ""),
        "same top token": ("agreement", ".0%", ""),
        "same answer": ("identical", ".0%", ""),
    }
    cells = []
    files = sum(row["method"] == "full" for row in rows)
    for name, called in SIDE_BY_SIDE.items():
        own = [row for row in rows if row["method"] == name.format(way=way)]
        if len(own) == files:  # else a figure would seem to be of another file
            figures = (", ".join(_or_dash(row[key], form, unit) for row in own) for key, form, unit in columns.values())
            cells.append([called, *figures])
    return markdown_table(["", *columns], cells)


WAYS = {
    "": "alone",
    "neutral": "behind bundled neutral passages",
    "nearest:1:exact": "behind the nearest passages, one context, exact (FusionRAG)",
    "random:4": "mean over four contexts, random passages",
    "mixed:4": "mean over four contexts, two nearest, two random",
    "nearest:4": "mean over four contexts, nearest passages",
    "nearest:4:tokens=100": "mean over four contexts of 100 tokens, nearest passages",
    "corpus": "mean over four contexts, nearest passages",
}
"""Ways to compute chunks beforehand, as `--warm` names them, and how they are called in tables."""

AFTER_WAYS = {
    "nothing": "full-reuse{}",
    "`query-whole`, 5 %": "query:whole:late:stored{}@5%",
    "`query-whole`, 15 %": "query:whole:late:stored{}@15%",
    "`cacheblend`, 15 %": "cacheblend{}@15%",
}
"""What is recomputed over chunks that were computed in these ways, and the method's name of that row."""


def contexts(rows: Sequence[Row]) -> str:
    """Remaining error and same top token by way to compute chunks and by what is recomputed, of one result file."""
    by_name = {str(row["method"]).replace("@0.05", "@5%").replace("@0.15", "@15%"): row for row in rows}
    shown = {head: name for head, name in AFTER_WAYS.items() if name.format("") in by_name}
    cells = []
    for way, called in WAYS.items():
        suffix = f" {way}" if way else ""
        found = [by_name.get(name.format(suffix)) for name in shown.values()]
        if any(found):
            shares = [(row["kl_of_full_reuse"], row["agreement"]) if row else (None, None) for row in found]
            cells.append([called, *(f"{_or_dash(left, '.0%')}, {_or_dash(same, '.0%')}" for left, same in shares)])
    return markdown_table(["chunks computed", *shown], cells)


def ttft(rows: Sequence[Row]) -> str:
    """First tokens, speed-up over full prefill, the speed-up in FLOPs, and the recomputed work."""
    heads = ["method", "TTFT", "speed-up", "limit", "of limit", "recomputed"]
    cells = [
        [
            f"`{row['method']}`",
            f"{row['ttft_s']:.3g} s",
            f"{row['speedup']:.2f}x",
            f"{row['flops_limit']:.2f}x",
            f"{row['limit_share']:.0%}",
            _or_dash(row["recompute_fraction"], ".1%"),
        ]
        for row in rows
    ]
    return markdown_table(heads, cells)


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
