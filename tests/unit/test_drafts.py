"""Drafts are copied from the longest, latest match; how many follows from acceptance and measured times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.scheduling.drafts import Drafts, StepCosts


def test_the_answer_itself_is_searched_as_it_grows():
    drafts = Drafts([1, 2])
    answer = [8, 9, 6]
    assert drafts.find(answer, 4) == ()
    assert drafts.find([*answer, *range(20, 200), 8, 9], 2) == (6, 20)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60), st.integers(1, 9))
def test_matches_equal_those_of_a_plain_search(tokens: list[int], cut: int, most: int):
    cut = min(cut, len(tokens))

    def shared(stop: int) -> int:
        return next((n for n in range(16) if n >= stop or tokens[stop - 1 - n] != tokens[-1 - n]), 16)

    best = max(range(1, len(tokens)), key=lambda stop: (shared(stop), stop), default=0)
    expected = tokens[best : best + most] if best and shared(best) else []
    assert list(Drafts(tokens[:cut]).find(tokens[cut:], most)) == expected


def test_acceptance_follows_what_was_accepted_and_recovers():
    drafts = Drafts([1, 1])
    assert drafts.acceptance == 0.5
    for _ in range(20):
        drafts.find((), 4)
        drafts.checked(4, 4)
    assert drafts.acceptance > 0.9
    for _ in range(40):
        drafts.find((), 4)
        drafts.checked(4, 0)
    low = drafts.acceptance
    assert low < 0.2
    for _ in range(40):
        drafts.find((), 4)
    assert drafts.acceptance > 0.4, "a request that was switched off tries again"


def test_many_drafts_if_rows_are_free_and_none_if_each_costs_a_step():
    free, dear = StepCosts(), StepCosts()
    for costs, row_s in ((free, 0.0), (dear, 1.0)):
        for _ in range(30):
            costs.ran(1, 0, 1.0)
            for drafted in range(1, 9):
                costs.ran(1, drafted, 1.0 + row_s * drafted)
    assert free.allot([(8, 0.9)], 100) == [8]
    assert free.allot([(8, 0.9)], 3) == [3]
    assert dear.allot([(8, 0.9)], 100) == [0]


def test_a_jump_of_the_time_is_respected():
    costs = StepCosts()
    for _ in range(30):
        costs.ran(1, 0, 1.0)
        for drafted in range(1, 9):
            costs.ran(1, drafted, 1.1 if drafted <= 2 else 2.5)
    assert costs.allot([(8, 0.7)], 100) == [2]


def test_in_a_batch_drafts_go_where_they_are_most_likely_right():
    costs = StepCosts()
    counts = costs.allot([(8, 0.95), (8, 0.05), (0, 0.5)], 4)
    assert counts == [4, 0, 0]
    assert costs.allot([], 4) == []


def test_one_slow_step_does_not_switch_drafts_off():
    costs = StepCosts()
    for _ in range(10):
        costs.ran(1, 0, 1.0)
        costs.ran(1, 4, 1.05)
    costs.ran(1, 4, 30.0)
    assert costs.allot([(4, 0.8)], 100) == [4]


def test_a_step_without_drafts_is_measured_first_and_again_later():
    costs = StepCosts()
    assert costs.stale(1)
    costs.ran(1, 0, 1.0)
    assert not costs.stale(1)
    assert costs.stale(2)
    for _ in range(40):
        costs.ran(1, 2, 1.0)
    assert costs.stale(1)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_clock_without_progress_is_harmless(seconds: float):
    costs = StepCosts()
    costs.ran(1, 0, seconds)
    costs.ran(1, 4, seconds)
    assert sum(costs.allot([(8, 0.9)], 100)) > 0
