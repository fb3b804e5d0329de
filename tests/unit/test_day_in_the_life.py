"""The day's plan: who asks when, for what, and in which conversation."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TEXTS = {f"text {number}": [f"question {number}"] for number in range(200)}


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import day_in_the_life

    yield day_in_the_life
    del sys.modules["day_in_the_life"]


def test_arrivals_follow_the_day(program):
    times = program.arrivals(4000, 1000.0, 1.5, seed=0)
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 1000
    night = sum(time < 100 or time > 900 for time in times)
    noon = sum(400 <= time < 600 for time in times)
    assert (noon / 4000, night / 4000) == pytest.approx((0.2935, 0.1065), abs=0.02)


def test_requests_drift_and_turns_follow_what_came_before(program):
    made = program.day(2000, TEXTS, 4, 1.0, seed=0)
    first, last = ({text for one in part for text in one.documents[:1]} for part in (made[:100], made[-100:]))
    assert len(first & last) < len(first) / 2
    turns = [(number, one.earlier) for number, one in enumerate(made) if one.earlier is not None]
    assert 100 < len(turns) < 800
    assert all(earlier < number for number, earlier in turns)
    assert len({earlier for _, earlier in turns}) == len(turns)
    assert {len(one.documents) for one in made if one.earlier is None} == {4}
    assert all(one.question == TEXTS[one.documents[0]][0] for one in made if one.earlier is None)


def test_what_comes_first_is_the_same_for_the_same_seed(program):
    once, again, other = (program.day(50, TEXTS, 4, 1.0, seed=seed) for seed in (1, 1, 2))
    assert once == again != other
    assert all(a <= b for a, b in pairwise(program.arrivals(50, 1.0, 1.0, seed=1)))
