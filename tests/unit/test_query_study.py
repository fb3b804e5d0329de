"""The arithmetic of the query study: rows, cheapest values, resumed answers, tables."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from query_study_answers import Answers  # noqa: E402
from query_study_report import StudyReport, summarize_study, tables  # noqa: E402

KINDS = ("common", "single", "bridge", "single")


def lines(scores: dict[str, list[float]], setting: str = "6 passages") -> list[dict]:
    """Answers whose text is their score, so that equal scores are the same answer."""
    return [
        {
            "setting": setting,
            "question": number,
            "kind": KINDS[number],
            "contender": name,
            "f1": f1,
            "fraction": 0.1,
            "text": str(f1),
        }
        for name, found in scores.items()
        for number, f1 in enumerate(found)
    ]


SCORES = {
    "full": [1.0, 1.0, 0.5, 1.0],
    "full-reuse": [0.0, 1.0, 0.5, 1.0],
    "query@0.1": [1.0, 0.5, 0.5, 1.0],
    "query@0.05": [0.75, 1.0, 0.5, 1.0],
}


def test_a_row_is_what_one_would_work_out_by_hand():
    rows = {row.contender: row for row in summarize_study(lines(SCORES)).rows}
    row = rows["query@0.05"]
    assert (row.f1, row.minus_full) == (pytest.approx(0.8125), pytest.approx(-0.0625))
    assert row.gap_closed == pytest.approx(0.75)
    assert row.same == 0.75
    assert row.f1_by_kind == {"bridge": 0.5, "common": 0.75, "single": 1.0}
    assert (rows["full"].gap_closed, rows["full-reuse"].gap_closed) == (1.0, 0.0)
    assert (row.method, row.value) == ("query", 0.05)
    assert row.minus_full_low <= row.minus_full <= row.minus_full_high


def test_only_questions_that_all_have_answered_count():
    some = [line for line in lines(SCORES) if line["question"] < 3 or line["contender"] != "query@0.1"]
    assert {row.questions for row in summarize_study(some).rows} == {3}


def test_a_setting_without_its_ends_is_left_out():
    assert summarize_study(lines({"full": [1.0] * 4, "query@0.1": [1.0] * 4})).rows == ()


def test_the_cheapest_value_is_the_first_of_the_fitted_curve_that_is_near():
    full = {"full": [1.0] * 4, "full-reuse": [0.0] * 4}
    curve = {
        f"query@{ratio}": [f1] * 4 for ratio, f1 in ((0.3, 1.0), (0.02, 0.9), (0.05, 1.0), (0.1, 0.97), (0.2, 1.0))
    }
    (found,) = summarize_study(lines({**full, **curve})).cheapest
    assert found.value == 0.2, "0.05 was lucky: the next dearer one is not near"
    (none,) = summarize_study(lines({**full, "query@0.1": [0.9] * 4})).cheapest
    assert none.value is None


def test_tables_survive_json():
    report = summarize_study(lines(SCORES))
    result = json.loads(json.dumps({"command": "python study", **report.as_dict()}))
    text = tables(result)["query-study"]
    assert "    python study" in text
    assert "| `query@0.05` | 0.100 | 0.812 | -0.062 |" in text
    assert isinstance(report, StudyReport)


def test_an_interrupted_study_goes_on(tmp_path):
    path, origin = tmp_path / "answers.jsonl", {"seed": 1}
    first, second = lines({"full": [1.0, 0.5]})
    Answers(path, origin).add(first)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"cut of')
    again = Answers(path, origin)
    again.add(second)
    assert list(Answers(path, origin).found.values()) == [first, second]
    assert not Answers(path, {"seed": 2}).found
