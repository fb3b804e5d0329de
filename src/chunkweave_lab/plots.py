"""Pictures of benchmark rows. Imports no torch; imports matplotlib for the first picture."""

from base64 import b64encode
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from chunkweave.calibration.summaries import FidelityRow
from chunkweave.errors import UsageError, install_extra
from chunkweave_lab.summaries import QualityRow, TtftRow


def require_matplotlib() -> None:
    """Check before a long run that pictures can be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(f"plots need matplotlib: {install_extra('bench')}")


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure, its one-line description, and the path of its PNG, if any."""

    figure: Any
    caption: str
    png: Path | None = None

    def save(self) -> None:
        """Write the PNG, if a path is given."""
        if self.png is not None:
            self.figure.savefig(self.png, format="png")

    @property
    def data_url(self) -> str:
        """The picture as an SVG data URL, for a self-contained page."""
        drawn = BytesIO()
        self.figure.savefig(drawn, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{b64encode(drawn.getvalue()).decode()}"


def ttft_figure(rows: Sequence[TtftRow], title: str) -> Any:
    """Time to first token by method (median, 10th and 90th percentile), and the prompt's tokens by KV source."""
    figure, (times, tokens) = _figure(panels=2)
    names = [row.method for row in rows]
    medians = [row.ttft_median_s * 1e3 for row in rows]
    spread = [
        [(row.ttft_median_s - row.ttft_p10_s) * 1e3 for row in rows],
        [(row.ttft_p90_s - row.ttft_median_s) * 1e3 for row in rows],
    ]
    times.barh(names, medians, xerr=spread, color="#3f8fd6", ecolor="black", capsize=3)
    times.set(xlabel="time to first token, ms: median, 10th to 90th percentile")
    for place, row in enumerate(rows):
        times.annotate(f"{row.speedup:.2f}x", (0, place), xytext=(4, 0), textcoords="offset points", va="center")
    begun = [0.0] * len(rows)
    for kind, colour in _TOKEN_COLOURS.items():
        counts = [getattr(row, f"{kind.replace('-', '_')}_tokens") for row in rows]
        tokens.barh(names, counts, left=begun, color=colour, label=kind)
        begun = [start + count for start, count in zip(begun, counts, strict=True)]
    tokens.set(xlabel="tokens of a prompt, mean")
    tokens.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=4, fontsize=8, frameon=False)
    for axes in (times, tokens):
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
    figure.suptitle(title)
    return figure


_TOKEN_COLOURS = {"prefix-exact": "#1b7f5c", "reused": "#58b38f", "recomputed": "#d97706", "computed": "#9aa4b2"}
"""Colours of KV sources, as on the page."""


def fidelity_figure(rows: Sequence[FidelityRow], title: str) -> Any:
    """Mean divergence against speed-up, one line per method from least to most recomputation."""
    figure, axes = _figure()
    by_name = {row.method: row for row in rows if row.kl is not None and row.speedup is not None}
    lines: dict[str, list[FidelityRow]] = defaultdict(list)
    floor = next((row for row in by_name.values() if row.method.startswith("full-in-slices")), None)
    for row in by_name.values():
        if row.kl and row is not floor:
            lines[row.method.partition("@")[0]].append(row)
    for name, points in lines.items():
        points.sort(key=lambda row: row.recompute_fraction or 0.0)
        kl = [(row.kl or 0.0, row.kl_low or 0.0, row.kl_high or 0.0) for row in points]
        _line(axes, [row.speedup for row in points], kl, name)
    if floor is not None:
        axes.axhline(floor.kl, color="black", linewidth=1, label="noise floor: full in slices")
    axes.set_yscale("log")
    axes.set_xlabel("speed-up of the first token over full prefill (median over questions)")
    axes.set_ylabel("mean KL(full prefill || method), nats")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def deviations_figure(found: Mapping[str, Any], rows: Sequence[FidelityRow], title: str) -> Any:
    """CacheBlend's Figures 6 to 8 from the output of `summarize_deviations`.

    Left: attention deviation by share of recomputed tokens, with the methods of `rows` at their recompute fractions.
    Middle: distribution of the tokens' KV deviation on some layers. Right: rank correlation of KV deviation between
    layers.
    """
    figures, deviation = found["figures"], found["deviation"]
    figure, (left, middle, right) = _figure(panels=3)
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for point in figures["attention"]:
        lines[point["tokens"]].append(point)
    for name, points in lines.items():
        deviations = [(point["mean"], point["mean_low"], point["mean_high"]) for point in points]
        label = f"{name} tokens" if name == "random" else f"{name} KV deviation"
        _line(left, [point["ratio"] for point in points], deviations, label)
    for row in rows:
        if row.method in deviation and row.recompute_fraction:
            at = row.recompute_fraction, fmean(deviation[row.method]["attention"])
            left.plot(*at, marker="x", color="black", linestyle="none")
            left.annotate(row.method, at, xytext=(3, 3), textcoords="offset points", fontsize=7)
    left.set(
        xlabel="share of the reused tokens recomputed", ylabel="attention deviation, mean of layers", ylim=(0, None)
    )
    layers = len(figures["kv"]["quantiles"])
    for layer in dict.fromkeys((1, layers // 4, layers // 2, layers - 1)):
        middle.plot(figures["kv"]["quantiles"][layer], figures["kv"]["shares"], label=f"layer {layer}")
    middle.set(xscale="log", xlabel="KV deviation of a token (L2)", ylabel="share of the tokens below")
    for name, first, label in (("next", 1, "and the next"), ("first", 2, "and layer 1")):
        values = figures["rank_correlation"][name]
        right.plot(range(first, first + len(values)), values, marker="o", markersize=3, label=f"the layer {label}")
    right.set(xlabel="layer", ylabel="Spearman's rank correlation of KV deviation", ylim=(None, 1))
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    return figure


def _line(axes: Any, across: Sequence[float | None], up: Sequence[tuple[float, float, float]], label: str) -> None:
    """Joined points with intervals; each of `up` is (value, low, high)."""
    spread = [[value - low for value, low, _ in up], [high - value for value, _, high in up]]
    axes.errorbar(across, [value for value, _, _ in up], yerr=spread, marker="o", capsize=2, linewidth=1.5, label=label)


def _figure(panels: int = 1) -> tuple[Any, Any]:
    """An empty figure and its axes, those of several panels in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2 if panels == 1 else 4.8 * panels, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels)


def quality_figure(rows: Sequence[QualityRow], title: str) -> Any:
    """F1 against recompute fraction, one line per method over its ratios, with bootstrap intervals.

    Full prefill and prompt baselines have no such fraction and are horizontal lines.
    """
    figure, axes = _figure()
    lines: dict[str, list[QualityRow]] = defaultdict(list)
    baselines = [row for row in rows if row.recompute_fraction is None]
    for row in rows:
        if row not in baselines:
            lines[row.method.partition("@")[0]].append(row)
    for name, points in lines.items():
        points.sort(key=lambda row: row.recompute_fraction or 0.0)
        if name in ("full", "prefix"):
            if name == "full":
                axes.axhline(points[0].f1, color="black", linewidth=1, label="full prefill")
            continue
        found = [(row.f1, row.f1_low, row.f1_high) for row in points]
        _line(axes, [row.recompute_fraction or 0.0 for row in points], found, name)
    for number, row in enumerate(baselines):
        axes.axhline(row.f1, color=f"C{9 - number % 10}", linewidth=1, linestyle=":", label=row.method)
    axes.set_xlabel("recompute fraction (share of reused-chunk tokens x layers recomputed)")
    axes.set_ylabel("F1")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
