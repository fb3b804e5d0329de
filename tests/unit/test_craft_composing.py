"""Where composing pays: the region by hand, and what a replay finds and grows."""

import sys
from pathlib import Path

import pytest

from chunkweave.ordering.ordering import OrderingConfig
from chunkweave_lab.simulator.trace import Arrival, Part

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from craft_composing import QUESTIONS, RATIOS, Shares, region, region_table, regions, shares_of, shares_table  # noqa: E402


def test_at_the_edges_of_the_region_all_together_compute_just_as_many_times_fewer_tokens():
    least, most = region(0.15, 0.05)
    assert (least, most) == (pytest.approx(0.296, abs=1e-3), pytest.approx(0.931, abs=1e-3))
    for p in (least, most):
        assert Shares(0.05, p, 0.0, p).gain(0.15) == pytest.approx(1.3)
    assert Shares(0.05, least - 0.01, 0.0, least - 0.01).gain(0.15) < 1.3
    assert Shares(0.05, most + 0.01, 0.0, most + 0.01).gain(0.15) < 1.3
    assert Shares(0.05, 0.5, 0.2, 0.5).gain(0.15) < 1.0, "growth is not free"


def test_where_questions_are_most_of_a_prompt_nothing_helps():
    assert region(0.15, 0.8) is None
    assert len(regions()) == len(RATIOS) * len(QUESTIONS)
    assert region_table().splitlines()[4] == "| 15% | 26% to 97% | 30% to 93% | 36% to 86% | 49% to 73% |"


def test_a_replay_grows_one_chunk_once_its_path_has_come_often_enough():
    same = [Arrival(float(number), (Part("a", 10), Part("b", 30))) for number in range(6)]
    config = OrderingConfig("frequency", continuation_threshold=3)
    early, late = (shares_of(same, config, warm_up=n, question_tokens=10) for n in (2, 4))
    # Request 3 computes the first chunk again, request 4 the second one behind it, those after it find both.
    assert early.question == pytest.approx(0.2)
    assert early.grown == pytest.approx(40 / 200)
    assert early.exact == pytest.approx((0 + 10 + 40 + 40) / 200), "of equal counts the lesser name stands first"
    assert (late.exact, late.grown, late.exact_alone) == (pytest.approx(0.8), 0.0, pytest.approx(0.8))
    assert early.exact_alone == pytest.approx(0.8)
    never = shares_of(same, OrderingConfig("frequency", continuation_threshold=None), warm_up=2, question_tokens=10)
    assert (never.exact, never.grown) == (0.0, 0.0)
    row = {"workload": "same", "zipf": 1.0, "warm_up": 4, **late.as_dict()}
    assert shares_table([row]).splitlines()[-1].startswith("| same | 1.0 | 4 | 20.0% | 80.0% | 0.0% | 80.0% |")
