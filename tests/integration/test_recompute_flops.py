"""What fixing chunks costs: no dense layer on a hit, and the question's second look is cheap."""

from math import ceil

import pytest

from chunkweave.planning.outcome import prefill_flops
from chunkweave.planning.plan import KVSource
from tests.integration.weaving import make_bench, make_prompt
from tests.toys import toy_model

SIZES = (40, 40, 40, 40)


@pytest.mark.parametrize("alpha", [0.3, 0.6])
@pytest.mark.parametrize("focus", [False, True])
def test_at_equal_tokens_cachecraft_takes_fewer_flops_than_cacheblend(alpha, focus):
    """CacheBlend computes layer 0, and q, k, v of layer 1, for all reused tokens to find those that it goes on with."""
    bench = make_bench(toy_model("llama"))
    bench.prefill(make_prompt(SIZES, order=(3, 1, 0, 2)), "full", keep=True)
    prompt = make_prompt(SIZES)
    craft = bench.prefill(prompt, "cachecraft", alpha=alpha, focus=focus, check_layers=(1,))
    reused = craft.plan.tokens(KVSource.REUSED)
    count = craft.plan.passes[0].candidate_tokens
    assert reused == sum(SIZES)
    assert 0 < count < reused
    blend = bench.prefill(prompt, "cacheblend", ratio=count / reused)
    assert blend.plan.passes[0].keep_top[0].count in (count, ceil(count / reused * reused))
    geometry = bench.loaded.model.geometry
    assert prefill_flops(geometry, list(craft.work)) < prefill_flops(geometry, list(blend.work))
    assert all(bool(layer.evidence_keys) <= focus for layer in craft.work)
    assert craft.work[0].evidence_keys == (sum(range(162, 167)) if focus else 0), "the question's five tokens"
    if not focus:
        assert [layer.kept_tokens for layer in craft.work] == [count + 6] * geometry.num_layers
