"""Costs from sizes alone, and the sizes of published models."""

import pytest

from chunkweave.planning.cost import known_shape
from chunkweave.planning.outcome import full_prefill_flops
from chunkweave_lab.simulator.analytic_cost import analytic_cost

MISTRAL = known_shape("mistral-7b").geometry


def test_a_full_prefill_takes_its_operations():
    cost = analytic_cost(MISTRAL, flops_per_s=50e12, overhead_s=0.5)
    for tokens in (32, 2048, 8192):
        assert cost.prefill(tokens) == pytest.approx(0.5 + full_prefill_flops(MISTRAL, tokens) / 50e12)


def test_tokens_behind_a_cached_prefix_cost_what_is_left_of_the_whole():
    cost = analytic_cost(MISTRAL, flops_per_s=1.0)
    behind = cost.prefill(2048, 2048)
    assert cost.prefill(2048) < behind < cost.prefill(4096)
    # The prefix's own work, without the two single rows of the last layer, is what the cache saves.
    assert behind == pytest.approx(cost.prefill(4096) - cost.prefill(2048), rel=0.02)


def test_the_kv_of_a_token_is_that_of_the_paper():
    cost = analytic_cost(MISTRAL, flops_per_s=1.0, tier_bytes_per_s={"host": 1e9})
    assert cost.kv_bytes_per_token == 131_072, "Table 1 of RAGCache: 0.125 MiB"
    assert cost.load(1000, "host") == pytest.approx(0.131072)
