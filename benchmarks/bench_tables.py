"""Documentation tables of the results of `chunkweave bench` and `calibrate`."""

from collections.abc import Mapping, Sequence
from typing import Any

from docs_tables import markdown_table

Row = Mapping[str, Any]


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """Every table of a result of `bench quality`, `fidelity`, `ttft` or `loading`, or of `calibrate`, by name."""
    rows = result["rows"]
    if result["benchmark"] == "calibrate":
        return {"calibration": calibration(result)}
    if result["benchmark"] == "quality":
        return {"quality": quality(rows), "quality-by-kind": quality_by_kind(rows)}
    if result["benchmark"] == "fidelity":
        found = {
            "fidelity": fidelity(rows),
            "fidelity-headline": fidelity_headline(rows),
            "own-answers": own_answers(rows),
            "side-by-side": side_by_side(rows),
            "contexts": contexts(rows),
        }
        return found | ({"recomputing": recomputing(result["figures"]["attention"])} if "figures" in result else {})
    makers = {"ttft": ttft, "loading": loading}
    return {name: make(rows) for name, make in makers.items() if name == result["benchmark"]}


def quality(rows: Sequence[Row]) -> str:
    """F1 with its interval, minus full prefill's, the share of the gap closed, and the cost."""
    heads = ["method", "F1", "95 %", "minus `full`", "95 %", "crossing F1", "gap closed", "recompute fraction"]
    cells = [
        [
            f"`{row['method']}`",
            f"{row['f1']:.3f}",
            f"{row['f1_low']:.3f}..{row['f1_high']:.3f}",
            f"{row['f1_minus_full']:+.3f}",
            f"{row['f1_minus_full_low']:+.3f}..{row['f1_minus_full_high']:+.3f}",
            _or_dash(row["crossing_f1"], ".3f"),
            _or_dash(row["gap_closed"], ".0%"),
            _or_dash(row["recompute_fraction"], ".3f"),
        ]
        for row in rows
    ]
    return markdown_table(heads, cells)


def quality_by_kind(rows: Sequence[Row]) -> str:
    """F1 by kind of question."""
    kinds = list(rows[0]["f1_by_kind"])
    return markdown_table(
        ["method", *kinds],
        [[f"`{row['method']}`", *(f"{row['f1_by_kind'][kind]:.2f}" for kind in kinds)] for row in rows],
    )


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


HEADLINE = (
    *("full", "full-in-slices", "prefix", "full-reuse"),
    *("epic@5%", "cacheblend@5%", "query@5%"),
    *("epic@15%", "cacheblend@15%", "query@15%", "query@30%"),
    *("full-reuse neutral", "cacheblend neutral@5%", "query neutral@5%", "query:whole:late:stored neutral@5%"),
    *("cacheblend neutral@15%", "query neutral@15%", "query:whole:late:stored neutral@15%"),
)
"""The rows of the short table of `bench fidelity`."""


def fidelity_headline(rows: Sequence[Row]) -> str:
    """Speed and fidelity of the best known methods, each beside its limit."""
    heads = ["method", "recomputed", "first token sooner", "limit", "KL from `full`", "left", "top-1 agreement"]
    by_name = {row["method"]: row for row in rows}
    cells = [
        [
            f"`{row['method']}`",
            _or_dash(row["recompute_fraction"], ".1%"),
            f"{row['speedup']:.2f}x",
            f"{row['flops_limit']:.2f}x",
            f"{row['kl']:.4f}",
            f"{row['kl_of_full_reuse']:.0%}",
            f"{row['agreement']:.1%}",
        ]
        for row in (by_name[name] for name in HEADLINE if name in by_name)
        if row["kl"] is not None
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


def own_answers(rows: Sequence[Row]) -> str:
    """Free answers compared with full prefill's, in results that have them, and the divergence."""
    heads = ["method", "recomputed", "ROUGE-L", "95 %", "same", "KL", "95 %", "left"]
    cells = [
        [
            f"`{row['method']}`",
            _or_dash(row["recompute_fraction"], ".1%"),
            f"{row['rouge_l_of_full']:.3f}",
            f"{row['rouge_l_of_full_low']:.3f}..{row['rouge_l_of_full_high']:.3f}",
            _or_dash(row["identical"], ".0%"),
            _or_dash(row["kl"], ".4f"),
            "-" if row["kl"] is None else f"{row['kl_low']:.4f}..{row['kl_high']:.4f}",
            _or_dash(row["kl_of_full_reuse"], ".0%"),
        ]
        for row in rows
        if row.get("rouge_l_of_full") is not None
    ]
    return markdown_table(heads, cells)


def calibration(record: Row) -> str:
    """The references, then the curve of each method, with the qualities for which a point is the least value."""
    heads = ["method", "parameter", "chunks", "KL", "95 %", "top-1", "95 %", "speed-up", "recomputed", "least for"]
    lines = []
    for point in (*record["references"], *record["points"]):
        measured = point in record["points"]
        least = {quality: one["least"].get(point["method"]) for quality, one in record["targets"].items()}
        lines.append(
            [
                f"`{point['method']}`",
                f"{point['value']:g}" if measured else "",
                f"`{point['warm']}`",
                f"{point['kl']:.4f}",
                f"{point['kl_low']:.4f}..{point['kl_high']:.4f}",
                f"{point['agreement']:.1%}",
                f"{point['agreement_low']:.1%}..{point['agreement_high']:.1%}",
                f"{point['speedup']:.2f}x",
                f"{point['recompute_fraction']:.1%}",
                ", ".join(name for name, value in least.items() if measured and value == point["value"]),
            ]
        )
    return markdown_table(heads, lines)


def recomputing(points: Sequence[Row]) -> str:
    """Attention deviation by the share of tokens recomputed, those of highest KV deviation beside random ones."""
    choices, ratios = (list(dict.fromkeys(point[name] for point in points)) for name in ("tokens", "ratio"))
    found = {(point["tokens"], point["ratio"]): point for point in points}
    cells = [
        [f"{ratio:.0%}", *(cell for choice in choices for cell in _attention_cells(found[choice, ratio]))]
        for ratio in ratios
    ]
    return markdown_table(["recomputed", *(head for choice in choices for head in (choice, "95 %", "left"))], cells)


def _attention_cells(point: Row) -> list[str]:
    return [f"{point['mean']:.3f}", f"{point['mean_low']:.3f}..{point['mean_high']:.3f}", f"{point['left']:.0%}"]


def ttft(rows: Sequence[Row]) -> str:
    """First tokens, speed-up over full prefill, the speed-up in FLOPs, and the recomputed work."""
    heads = ["method", "TTFT", "speed-up", "10..90 %", "limit", "of limit", "recompute fraction"]
    cells = [
        [
            f"`{row['method']}`",
            f"{row['ttft_median_s']:.3g} s",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_p10']:.2f}..{row['speedup_p90']:.2f}",
            f"{row['flops_limit']:.2f}x",
            f"{row['limit_share']:.0%}",
            _or_dash(row["recompute_fraction"], ".3f"),
        ]
        for row in rows
    ]
    return markdown_table(heads, cells)


def loading(rows: Sequence[Row]) -> str:
    """First tokens by source of segments and way of loading, with the controller's predictions."""
    heads = ["from", "quotient", "loading", "TTFT", "of memory", "predicted", "error"]
    cells = [
        [
            row["source"],
            f"{row['quotient']:.2g}",
            row["mode"],
            f"{row['ttft_median_s']:.2f} s",
            f"{row['ratio_to_memory']:.2f}x",
            f"{row['predicted_s']:.2f} s",
            f"{row['prediction_error']:+.0%}",
        ]
        for row in rows
    ]
    return markdown_table(heads, cells)


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
