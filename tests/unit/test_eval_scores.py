"""Scores and intervals against values worked out by hand."""

import pytest

from chunkweave.calibration.summaries import (
    f1,
    mean_interval,
    normalize,
    percentile,
    ratio_interval,
)


def test_normalization_is_that_of_squad():
    assert normalize(" The Quay's  bell, a\tbuoy ") == "quays bell buoy"


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("Skerrow", "skerrow.", 1.0),
        ("in Skerrow", "Skerrow", 2 / 3),
        ("north north pier", "north pier", 0.8),
        ("pier", "quay", 0.0),
        ("", "", 1.0),
        ("the", "a", 1.0),
        ("", "quay", 0.0),
    ],
)
def test_f1(prediction, answer, score):
    assert f1(prediction, answer) == pytest.approx(score)


def test_an_interval_holds_its_mean_and_narrows_with_more_questions():
    few, more = mean_interval([0.0, 1.0] * 10), mean_interval([0.0, 1.0] * 1000)
    assert few.mean == more.mean == 0.5
    assert few.low < more.low < 0.5 < more.high < few.high
    assert more.high - more.low == pytest.approx(2 * 1.96 * 0.5 / 2000**0.5, rel=0.15)
    assert mean_interval([0.3] * 5).low == pytest.approx(0.3)


def test_a_ratio_is_paired_by_question():
    hard_and_easy = [0.1, 1.0] * 50
    same = ratio_interval(hard_and_easy, hard_and_easy)
    assert (same.mean, same.low, same.high) == (1.0, 1.0, 1.0)  # apart, both means would vary
    half = ratio_interval([value / 2 for value in hard_and_easy], hard_and_easy)
    assert (half.mean, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5))
    lost = ratio_interval([0.0] * 10 + hard_and_easy[10:], hard_and_easy)
    assert lost.mean == pytest.approx(0.9)
    assert lost.low < 0.9 < lost.high < 1.0


def test_samples_without_anything_to_compare_with_are_left_out_of_a_ratio():
    rare = ratio_interval([1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert (rare.mean, rare.low, rare.high) == (1.0, 1.0, 1.0)


def test_an_interval_is_repeatable_by_seed():
    values = [0.1, 0.9, 0.4, 0.0, 1.0, 0.7]
    assert mean_interval(values, seed=3) == mean_interval(values, seed=3) != mean_interval(values, seed=4)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.1, 1.3)])
def test_percentile_is_linear_between_neighbours(share, value):
    assert percentile([3.0, 1.0, 4.0, 2.0], share) == pytest.approx(value)
