"""What the answers of a study say: rows with intervals, and the cheapest ratio of each method. Imports no torch."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from docs_tables import command_block, markdown_table

from chunkweave.eval.scores import mean_interval, ratio_interval
from chunkweave.eval.summaries import CROSSING_KINDS
from chunkweave.planning.calibration import rising_fit

NEAR = 0.01
"""A method is near full prefill if its F1 is at most this much less."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One contender in one setting.

    `minus_full` is paired by question; `gap_closed` is the share of the way from full reuse to full prefill on the
    kinds that cross passages; the ends of both are bootstrap percentiles. `same` is the share of answers that are word
    for word full prefill's.
    """

    setting: str
    contender: str
    questions: int
    f1: float
    minus_full: float
    minus_full_low: float
    minus_full_high: float
    gap_closed: float | None
    gap_closed_low: float | None
    gap_closed_high: float | None
    same: float
    recompute_fraction: float
    f1_by_kind: dict[str, float] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The method with its settings."""
        return self.contender.partition("@")[0]

    @property
    def value(self) -> float | None:
        """Ratio or alpha, if the method takes one."""
        value = self.contender.partition("@")[2]
        return float(value) if value else None


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The least value of a method's parameter that is near full prefill; None if none of those tried is.

    Of the F1 by value, the never-falling curve closest to it decides, so that one lucky point does not.
    """

    setting: str
    method: str
    value: float | None
    minus_full: float | None
    minus_full_low: float | None
    recompute_fraction: float | None


@dataclass(frozen=True, slots=True)
class StudyReport:
    """All rows, and what follows from them."""

    rows: tuple[StudyRow, ...]
    cheapest: tuple[Cheapest, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def tables(self) -> Iterator[tuple[str, str]]:
        """(title, Markdown table) of every setting, then the cheapest ratios, then F1 by kind."""
        for setting in dict.fromkeys(row.setting for row in self.rows):
            rows = [row for row in self.rows if row.setting == setting]
            yield f"{setting}, {rows[0].questions} questions", main_table(rows)
        yield "Least recomputation within 0.01 F1 of full prefill", cheapest_table(self.cheapest)
        first = self.rows[0].setting if self.rows else ""
        yield f"F1 by kind of question, {first}", kinds_table([row for row in self.rows if row.setting == first])


def summarize_study(lines: Sequence[Line]) -> StudyReport:
    """Rows over the questions that all contenders of a setting have answered."""
    rows = []
    for setting in dict.fromkeys(line["setting"] for line in lines):
        own = [line for line in lines if line["setting"] == setting]
        answers: dict[str, dict[int, Line]] = defaultdict(dict)
        for line in own:
            answers[line["contender"]][line["question"]] = line
        if not {"full", "full-reuse"} <= answers.keys():
            continue
        shared = set.intersection(*(set(found) for found in answers.values()))
        rows += [_row(setting, name, answers, sorted(shared)) for name in answers if shared]
    return StudyReport(tuple(rows), tuple(_cheapest(rows)))


def _row(setting: str, name: str, answers: dict[str, dict[int, Line]], questions: list[int]) -> StudyRow:
    own, full, reuse = ([answers[who][q] for q in questions] for who in (name, "full", "full-reuse"))
    lead = mean_interval([one["f1"] - best["f1"] for one, best in zip(own, full, strict=True)])
    triples = [t for t in zip(own, full, reuse, strict=True) if t[1]["kind"] in CROSSING_KINDS]
    closed = None
    if triples and sum(best["f1"] - worst["f1"] for _, best, worst in triples) > 0:
        gained = [one["f1"] - worst["f1"] for one, _, worst in triples]
        closed = ratio_interval(gained, [best["f1"] - worst["f1"] for _, best, worst in triples])
    by_kind: dict[str, list[float]] = defaultdict(list)
    for line in own:
        by_kind[line["kind"]].append(line["f1"])
    return StudyRow(
        setting=setting,
        contender=name,
        questions=len(questions),
        f1=fmean(line["f1"] for line in own),
        minus_full=lead.mean,
        minus_full_low=lead.low,
        minus_full_high=lead.high,
        gap_closed=None if closed is None else closed.mean,
        gap_closed_low=None if closed is None else closed.low,
        gap_closed_high=None if closed is None else closed.high,
        same=fmean(one["text"] == best["text"] for one, best in zip(own, full, strict=True)),
        recompute_fraction=fmean(line["fraction"] for line in own),
        f1_by_kind={kind: fmean(values) for kind, values in sorted(by_kind.items())},
    )


def _cheapest(rows: Sequence[StudyRow]) -> Iterator[Cheapest]:
    curves: dict[tuple[str, str], list[StudyRow]] = defaultdict(list)
    for row in rows:
        if row.value is not None:
            curves[row.setting, row.method].append(row)
    for (setting, method), curve in curves.items():
        curve.sort(key=lambda row: row.value or 0.0)
        fitted = rising_fit([row.minus_full for row in curve])
        found = next((row for row, fit in zip(curve, fitted, strict=True) if fit >= -NEAR), None)
        if found is None:
            yield Cheapest(setting, method, None, None, None, None)
        else:
            figures = (found.value, found.minus_full, found.minus_full_low, found.recompute_fraction)
            yield Cheapest(setting, method, *figures)


def main_table(rows: Sequence[StudyRow]) -> str:
    """Contenders with intervals, the share of the gap closed, and what it took."""
    heads = ["method", "recompute fraction", "F1", "minus `full`", "95 %", "gap closed", "95 %", "same answer"]
    return markdown_table(
        heads,
        [
            [
                f"`{row.contender}`",
                f"{row.recompute_fraction:.3f}",
                f"{row.f1:.3f}",
                f"{row.minus_full:+.3f}",
                f"{row.minus_full_low:+.3f}..{row.minus_full_high:+.3f}",
                percent(row.gap_closed),
                f"{percent(row.gap_closed_low)}..{percent(row.gap_closed_high)}",
                percent(row.same),
            ]
            for row in rows
        ],
    )


def cheapest_table(cheapest: Sequence[Cheapest]) -> str:
    """One row a method, one column a setting: the value and the recompute fraction that goes with it."""
    settings = list(dict.fromkeys(one.setting for one in cheapest))
    found = {(one.method, one.setting): one for one in cheapest}
    rows = []
    for method in dict.fromkeys(one.method for one in cheapest):
        cells = [f"`{method}`"]
        for setting in settings:
            one = found.get((method, setting))
            if one is None or one.value is None:
                cells.append("" if one is None else "none")
            else:
                cells.append(f"{one.value:g} ({one.recompute_fraction:.3f})")
        rows.append(cells)
    return markdown_table(["method", *settings], rows)


def kinds_table(rows: Sequence[StudyRow]) -> str:
    """F1 by kind of question."""
    kinds = list(rows[0].f1_by_kind) if rows else []
    return markdown_table(
        ["method", *kinds],
        [[f"`{row.contender}`", *(f"{row.f1_by_kind[kind]:.3f}" for kind in kinds)] for row in rows],
    )


def percent(share: float | None) -> str:
    """A share, or a dash where there is none."""
    return "-" if share is None else f"{share:.0%}"


def tables(result: dict[str, Any]) -> dict[str, str]:
    """The tables of a study's result for the documentation: all below the command, or the settings' alone."""
    report = StudyReport(
        tuple(StudyRow(**row) for row in result["rows"]), tuple(Cheapest(**one) for one in result["cheapest"])
    )
    shown = [f"**{title}**\n\n{table}" for title, table in report.tables()]
    return {
        "query-study": "\n\n".join([command_block(result["command"]), *shown]),
        "query-settings": "\n\n".join(shown[: len(dict.fromkeys(row.setting for row in report.rows))]),
    }
