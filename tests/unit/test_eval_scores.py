"""Scores and intervals against values worked out by hand."""

import pytest

from chunkweave.calibration.summaries import (
    FidelitySample,
    f1,
    mean_interval,
    normalize,
    ratio_interval,
    rouge_l,
    summarize_fidelity,
)
from chunkweave_lab.summaries import best_scores, exact_match, jaccard


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


def test_exact_match_and_jaccard():
    assert exact_match("The pier", "pier!") == 1.0
    assert exact_match("piers", "pier") == 0.0
    assert jaccard("pier pier quay", "quay bell") == pytest.approx(1 / 3)


def test_rouge_l_is_about_order():
    assert rouge_l("quay of the north", "north quay") == pytest.approx(1 / 3)
    assert rouge_l("north quay", "north quay") == 1.0


def test_the_best_answer_counts_for_each_score():
    scores = best_scores("Orla and Finn", ["Finn and Orla", "Orla and Finn"])
    assert scores == {"f1": 1.0, "exact_match": 1.0, "rouge_l": 1.0, "jaccard": 1.0}


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


def test_free_answers_are_held_against_full_prefills_own_words():
    pytest.importorskip("rouge_score")
    common = {"kl": (0.0,), "agrees": (True,), "answer_nll": None, "identical": False, "f1": None}
    common |= {"ttft_s": 1.0, "flops_limit": 1.0, "recompute_fraction": 0.0, "prompt_tokens": 9}
    asked = [("the old harbour bell", "the old bell"), ("peat", "peat"), (None, None)]
    rows = summarize_fidelity(
        [
            {"full": FidelitySample(**common, text=full), "full-reuse": FidelitySample(**common, text=reused)}
            for full, reused in asked
        ]
    )
    assert rows[0].rouge_l_of_full == 1.0
    assert rows[1].rouge_l_of_full == pytest.approx((6 / 7 + 1) / 2)  # three words in order, of four and of three
    unanswered = summarize_fidelity([{name: FidelitySample(**common) for name in ("full", "full-reuse")}])
    assert unanswered[0].rouge_l_of_full is None
