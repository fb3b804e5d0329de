"""Pictures of benchmark results. Needs matplotlib (extra `bench`); imports no torch."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from chunkweave.errors import UsageError
from chunkweave.eval.quality_table import QualityRow


def plot_quality(rows: Sequence[QualityRow], path: Path, title: str) -> None:
    """F1 against recompute fraction, one line a method over its ratios, with bootstrap intervals; a PNG at `path`.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install 'chunkweave[bench]'") from error
    figure = Figure(figsize=(7.2, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[str, list[QualityRow]] = defaultdict(list)
    for row in rows:
        lines[row.method.partition("@")[0]].append(row)
    for name, points in lines.items():
        points.sort(key=lambda row: row.recompute_fraction)
        if name in ("full", "prefix"):
            if name == "full":
                axes.axhline(points[0].f1, color="black", linewidth=1, label="full prefill")
            continue
        axes.errorbar(
            [row.recompute_fraction for row in points],
            [row.f1 for row in points],
            yerr=[[row.f1 - row.f1_low for row in points], [row.f1_high - row.f1 for row in points]],
            marker="o",
            capsize=2,
            linewidth=1.5,
            label=name,
        )
    axes.set_xlabel("recompute fraction (share of reused-chunk tokens x layers computed again)")
    axes.set_ylabel("F1")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")
