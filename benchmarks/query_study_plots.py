"""Draws a study: F1 against the recompute fraction, one picture a setting. Needs matplotlib (extra `bench`)."""

from collections import defaultdict
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from query_study_report import StudyReport, StudyRow


def plot_study(report: StudyReport, folder: Path, study: str) -> None:
    """One PNG for every setting, `query-STUDY-SETTING.png` in `folder`."""
    for setting in dict.fromkeys(row.setting for row in report.rows):
        name = setting.replace(",", "").replace(" ", "-")
        _plot([row for row in report.rows if row.setting == setting], folder / f"query-{study}-{name}.png", setting)


def _plot(rows: list[StudyRow], path: Path, setting: str) -> None:
    figure = Figure(figsize=(8.0, 5.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[str, list[StudyRow]] = defaultdict(list)
    for row in rows:
        if row.value is not None:
            lines[row.method].append(row)
    for method, points in lines.items():
        points.sort(key=lambda row: row.recompute_fraction)
        low = [row.minus_full - row.minus_full_low for row in points]
        high = [row.minus_full_high - row.minus_full for row in points]
        fractions = [row.recompute_fraction for row in points]
        drawn = [row.minus_full for row in points]
        axes.errorbar(fractions, drawn, yerr=[low, high], marker="o", capsize=2, linewidth=1.2, label=method)
    reuse = next(row for row in rows if row.contender == "full-reuse")
    axes.axhline(0.0, color="black", linewidth=1, label="full prefill")
    axes.axhline(reuse.minus_full, color="gray", linewidth=1, linestyle="--", label="full reuse")
    axes.set_xlabel("recompute fraction (share of reused-chunk tokens x layers computed again)")
    axes.set_ylabel("F1 minus that of full prefill")
    axes.set_title(f"{setting}, {rows[0].questions} questions")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png")
