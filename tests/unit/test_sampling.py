"""Greedy, nucleus and seeded sampling."""

from collections import Counter

import pytest
import torch

from chunkweave.config import SamplingParams
from chunkweave.engine.decode import Sampler

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draw(params: SamplingParams, times: int = 400) -> Counter[int]:
    sampler = Sampler(params)
    return Counter(sampler.choose(LOGITS) for _ in range(times))


def test_greedy_takes_the_first_of_the_likeliest():
    assert Sampler(SamplingParams()).choose(torch.tensor([1.0, 3.0, 3.0])) == 1


def test_a_nucleus_holds_the_fewest_tokens_that_reach_it():
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.5, seed=0))) == {0}
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.51, seed=0))) == {0, 1}
    assert set(draw(SamplingParams(temperature=1.0, top_p=1.0, seed=0))) == {0, 1, 2, 3}


@pytest.mark.parametrize("params", [{"top_p": 5e-324}, {"temperature": 5e-324}, {"temperature": 1e308}])
def test_settings_at_the_edge_of_what_a_number_can_be(params):
    drawn = draw(SamplingParams(**{"temperature": 1.0, "seed": 0} | params))
    assert set(drawn) == ({0, 1, 2, 3} if params.get("temperature", 0) > 1 else {0})


def test_temperature_sharpens_and_flattens():
    cold, warm = (draw(SamplingParams(temperature=t, seed=0))[0] for t in (0.3, 3.0))
    assert cold > 300 > 200 > warm


def test_equal_seeds_draw_equally():
    assert draw(SamplingParams(temperature=1.0, seed=5)) == draw(SamplingParams(temperature=1.0, seed=5))
