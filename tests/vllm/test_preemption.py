"""Requests that vLLM throws out of a full KV cache and takes up again."""

from dataclasses import replace

import pytest

from tests.vllm.conftest import SLICED
from tests.vllm.prompts import Scenario, computed_alone, computed_in_context, one_missing
from tests.vllm.serving import alike, serving

NEW_TOKENS = 48


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-caching", "no-prefix-caching"])
def cramped(request, checkpoint):
    """Room for two prompts with their answers, not for four."""
    options = {**SLICED, "num_gpu_blocks_override": 20, "max_model_len": 320, "enable_prefix_caching": request.param}
    with serving(checkpoint("llama"), **options) as served:
        yield served


@pytest.mark.parametrize("method", ["cacheblend", "full-reuse", "prefix", "query", "cachecraft"])
def test_tokens_are_those_without_preemption(sliced, cramped, method):
    scenarios: list[Scenario] = [computed_alone(), one_missing(1), computed_in_context(), computed_alone()]
    asks = [replace(scenario.prompt.ask(method, 0.15, NEW_TOKENS), top=3) for scenario in scenarios]
    for served in (sliced, cramped):
        for scenario in scenarios:
            scenario.precompute(served)
    undisturbed = [sliced.answer(ask)[0] for ask in asks]
    before = cramped.metric("vllm:num_preemptions")
    found = cramped.answer(*asks)
    assert cramped.metric("vllm:num_preemptions") > before
    for one, wanted in zip(found, undisturbed, strict=True):
        alike(one, wanted)
        assert one.report.get("recomputed", []) == wanted.report.get("recomputed", [])
    assert cramped.blocks_are_free()
