"""Cache-Craft's variants and its eviction through `chunkweave vllm-serve` over real vLLM (§3.3)."""

import httpx

from chunkweave import Chunk, Engine, ReuseConfig
from tests.vllm.fronts import PASSAGES, QUESTION, ask, front_process, told

FIVE = (*PASSAGES, "The mill by the river was built of oak in one summer.", "Nets are mended in the old loft in May.")


def reported(front, *documents: str) -> dict:
    """The report of one answer over documents, in their order."""
    reuse = {"method": "cachecraft:alpha=1:no-focus", "order": "fixed"}
    return ask(front.client, documents, reuse=reuse, max_tokens=1).model_extra["chunkweave"]


def recomputed(front, documents) -> float:
    """What is recomputed where vLLM's own cache, which answers a prompt that comes again, has nothing."""
    httpx.post(f"{front.url}/reset_prefix_cache", timeout=60).raise_for_status()
    report = reported(front, *documents)
    assert report["engine_cached_tokens"] == 0
    return report["recompute_fraction"] or 0.0


def test_prompts_that_come_again_are_hardly_recomputed(front):
    """What random prompts recompute, by how many variants are kept: `tests/server/test_mechanisms.py`."""
    passages = told("in the rain", FIVE)
    reported(front, *passages[:4])
    warmed = told("in the snow", FIVE)
    assert front.post("/v1/cache/warm", {"documents": warmed})["computed"] == 5
    for documents in (passages[:0:-1], warmed[:4]):
        shares = [recomputed(front, documents) for _ in range(5)]
        assert shares[0] > 0.4
        assert shares[4] <= 0.1


def test_reuse_frequency_keeps_what_saved_most(tmp_path):
    """One exact reuse of a chunk saves its tokens; four of another behind a third save 1/CFO = 2 each.

    By number of uses the other one would stay.
    """
    once, often, before, last = FIVE[:4]
    asked = [(once,), (once,), (often,), *[(before, often)] * 4, (last,)]
    reuse = ReuseConfig(focus=False)
    with Engine.load("reader", dtype="float32", method="cachecraft", reuse=reuse) as probe:
        for documents in asked:
            probe.generate(QUESTION, [Chunk(text) for text in documents], max_new_tokens=1)
        budget = sum(record.nbytes for record in probe.store.records() if record.source != "turn") - 1
    options = ("--method", "cachecraft:no-focus", "--no-enable-prefix-caching")
    options += ("--policy", "reuse-frequency", "--host-budget", str(budget))
    with front_process(tmp_path, *options) as front:
        reports = [reported(front, *documents) for documents in asked]
        assert [chunk["kv_source"] for chunk in reports[-2]["chunks"]][-2:] == ["prefix-exact", "reused"]
        stays = [reported(front, text)["chunks"][-1]["kv_source"] == "prefix-exact" for text in (once, often)]
    assert stays == [True, False]
