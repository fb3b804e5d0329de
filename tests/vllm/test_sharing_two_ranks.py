"""Requests at once over the same new chunks, where two ranks share the heads."""

from tests.vllm.prompts import Given, tokens
from tests.vllm.serving import serving
from tests.vllm.test_sharing import TOGETHER, computed, one_by_one, run, six_over_the_same


def test_two_ranks_share_alike(checkpoint):
    ranks = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with serving(checkpoint("llama"), **TOGETHER, **ranks) as served:
        alone = one_by_one(served, six_over_the_same(), "cacheblend", 0.1)
        plain = [served.send(Given([tokens(900)]).plain()) for _ in range(3)]  # so that the six are there at once
        prompts = six_over_the_same()
        together = run(served, [*(served.send(prompt.ask("cacheblend", 0.1)) for prompt in prompts), *plain])[:6]
    assert sum(map(computed, together)) <= 1.1 * sum(map(computed, alone))
