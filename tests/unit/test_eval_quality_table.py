"""Rows from samples, by hand."""

from dataclasses import dataclass, replace

import pytest

from chunkweave.metrics import ReuseReport
from chunkweave_lab.summaries import summarize_quality

REPORT = ReuseReport("full", 10, 0, 0, 0, 10, 0.0, 0.0, 0.0, 0.0, 0.1, 0.1, 0.0, 0, 1.0, 2.0)


@dataclass(frozen=True)
class Sample:
    question: int
    kind: str
    contender: str
    text: str
    scores: dict[str, float]
    report: ReuseReport = REPORT


def samples(contender, f1s, fraction=0.0):
    kinds = ("single", "common", "bridge", "common")
    report = replace(REPORT, recompute_fraction=fraction)
    return [
        Sample(
            i,
            kinds[i],
            contender,
            f"{contender} says",
            dict.fromkeys(("f1", "exact_match", "rouge_l", "jaccard"), f1),
            report,
        )
        for i, f1 in enumerate(f1s)
    ]


def test_rows_say_where_each_contender_stands_between_full_reuse_and_full():
    rows = summarize_quality(
        [
            *samples("full", (1.0, 1.0, 1.0, 0.7)),
            *samples("full-reuse", (1.0, 0.3, 0.6, 0.0)),
            *samples("cacheblend@0.15", (1.0, 1.0, 0.6, 0.5), fraction=0.2),
        ]
    )
    full, reuse, blend = rows
    assert [row.method for row in rows] == ["full", "full-reuse", "cacheblend@0.15"]
    assert full.crossing_f1 == pytest.approx(0.9)
    assert reuse.crossing_f1 == pytest.approx(0.3)
    assert (full.gap_closed, reuse.gap_closed) == (1.0, 0.0)
    assert blend.gap_closed == pytest.approx(2 / 3)
    assert blend.f1_minus_full == pytest.approx(-0.15)
    assert blend.f1_minus_full_low <= -0.15 <= blend.f1_minus_full_high
    assert (full.rouge_l_of_full, reuse.rouge_l_of_full) == pytest.approx((1.0, 0.8))
    assert full.not_worse
    assert not reuse.not_worse
    assert blend.recompute_fraction == pytest.approx(0.2)
    assert blend.f1_by_kind == {"bridge": 0.6, "common": 0.75, "single": 1.0}


def test_without_crossing_kinds_there_is_no_gap():
    one = [replace(sample, kind="single") for sample in samples("full", (1.0, 0.5))]
    rows = summarize_quality([*one, *(replace(sample, contender="full-reuse") for sample in one)])
    assert all(row.gap_closed is None and row.crossing_f1 is None for row in rows)
