"""Cache-Craft's variants and its eviction through `chunkweave vllm-serve` over real vLLM (§3.3)."""

from random import Random

import pytest

from chunkweave import Chunk, Engine, ReuseConfig
from chunkweave.config import CaptureConfig
from tests.vllm.fronts import PASSAGES, QUESTION, ask, front_process, told

FIVE = (*PASSAGES, "The mill by the river was built of oak in one summer.", "Nets are mended in the old loft in May.")
CACHECRAFT = ("--method", "cachecraft:no-focus", "--no-enable-prefix-caching")
"""vLLM's own cache, which would answer a prompt that comes again, is off."""


def reported(front, *documents: str) -> dict:
    """The report of one answer over documents, in their order."""
    reuse = {"order": "fixed"}
    return ask(front.client, documents, reuse=reuse, max_tokens=1).model_extra["chunkweave"]


def recomputed(front, *documents: str) -> float:
    return reported(front, *documents)["recompute_fraction"] or 0.0


def at_random(front, chunks: list[str], requests: int) -> list[float]:
    """What requests for four of the chunks in random order recompute."""
    draw = Random(1)
    return [recomputed(front, *draw.sample(chunks, 4)) for _ in range(requests)]


def test_prompts_that_come_again_are_hardly_recomputed_if_variants_may_be_kept(tmp_path):
    last = {}
    for variants in ("5", "1"):
        folder = tmp_path / variants
        folder.mkdir()
        with front_process(folder, *CACHECRAFT, "--max-variants", variants) as front:
            reported(front, *FIVE[:4])
            shares = [recomputed(front, *FIVE[:0:-1]) for _ in range(5)]
            assert shares[0] > 0.4
            assert shares[4] <= 0.1
            others = told("in June", FIVE)
            assert front.post("/v1/cache/warm", {"documents": others})["computed"] == 5
            shares = at_random(front, others, 200 if variants == "5" else 100)
            assert shares[0] > 0.4, "behind neutral passages CCI is .5, and nothing of them is here"
            last[variants] = sum(shares[-50:])
            if variants == "5":
                assert last[variants] <= sum(shares[:50]) / 2
    assert last["1"] > 2 * last["5"]


@pytest.mark.parametrize("policy", ["reuse-frequency", "lfu"])
def test_reuse_frequency_keeps_what_saved_most(tmp_path, policy):
    """One exact reuse of a chunk saves its tokens; four of another behind a third save 1/CFO = 2 each."""
    once, often, before, last = FIVE[:4]
    asked = [(once,), (once,), (often,), *[(before, often)] * 4, (last,)]
    reuse = ReuseConfig(focus=False, capture=CaptureConfig(variant_fraction=None))
    with Engine.load("reader", dtype="float32", method="cachecraft", reuse=reuse) as probe:
        for documents in asked:
            probe.generate(QUESTION, [Chunk(text) for text in documents], max_new_tokens=1)
        budget = probe.store.used_bytes - 1
    options = (*CACHECRAFT, "--variant-fraction", "none", "--policy", policy, "--host-budget", str(budget))
    with front_process(tmp_path, *options) as front:
        reports = [reported(front, *documents) for documents in asked]
        assert [chunk["kv_source"] for chunk in reports[-2]["chunks"]][-2:] == ["prefix-exact", "reused"]
        stays = [reported(front, text)["chunks"][-1]["kv_source"] == "prefix-exact" for text in (once, often)]
    assert stays == ([True, False] if policy == "reuse-frequency" else [False, True])
