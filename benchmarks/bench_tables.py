"""Tables of what `chunkweave bench` and `calibrate` wrote, for the documentation."""

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
        }
        return found | ({"recomputing": recomputing(result["figures"]["attention"])} if "figures" in result else {})
    makers = {"ttft": ttft, "loading": loading}
    return {name: make(rows) for name, make in makers.items() if name == result["benchmark"]}


def quality(rows: Sequence[Row]) -> str:
    """F1 with its interval, minus full prefill's, the share of the gap closed, and what it took."""
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


def own_answers(rows: Sequence[Row]) -> str:
    """Free answers against full prefill's own, of results that have them, beside the divergence."""
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
    """The curve of each method behind the references, and the qualities that a point is a method's least value for."""
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
    """First tokens, speed-up over full prefill, what it would be if time were FLOPs, and the work done again."""
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
    """First tokens by where segments come from and how they are loaded, beside what the controller expects."""
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


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
