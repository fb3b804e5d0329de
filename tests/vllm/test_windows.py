"""Layers with a window have blocks for their windows alone: what leaves them, a weave and the store do without."""

from dataclasses import replace

import pytest

from tests.vllm.checkpoints import make_checkpoint
from tests.vllm.own_engine import own_engine
from tests.vllm.prompts import Given, computed_alone, one_missing, tokens
from tests.vllm.reference_families import reference_of
from tests.vllm.serving import IN_PROCESS, serving

TOLERANCE = 5e-4
FAMILIES = {
    "gemma3_text": ({}, 2, 23),
    "mistral": ({"sliding_window": 48}, 1, 10),
}
"""With how many tables a request has (Mistral's layers all have the same window), and with blocks for one prompt of 512
tokens in the layers without a window, and for a window and a step in the others.
"""


@pytest.fixture(scope="module", params=FAMILIES)
def windowed(request, tmp_path_factory):
    """A server, what its model computes, our own engine with it, and the tables of a request."""
    changes, tables, blocks = FAMILIES[request.param]
    room = {"max_model_len": 512, "block_size": 32, "num_gpu_blocks_override": blocks}
    folder = make_checkpoint(tmp_path_factory.mktemp("windowed"), request.param, **changes)
    own = own_engine(folder)
    with serving(folder, max_num_batched_tokens=64, max_num_seqs=4, **room, **IN_PROCESS) as served:
        assert served.worker("chunkweave_state")[0]["weaves"]
        yield served, reference_of(folder), own, tables


def store(scenario, served, own):
    """Let both have the scenario's chunks."""
    own.precompute(scenario)
    scenario.precompute(served)


def equal(got, wanted):
    return (got.log_probs[0] - wanted).abs().max().item() <= TOLERANCE


def test_a_weave_has_no_blocks_for_what_has_left_the_windows(windowed):
    served, _, own, tables = windowed
    scenario = computed_alone()
    store(scenario, served, own)
    got = served.answer(scenario.prompt.ask("cacheblend", 0.15))[0]
    assert got.report["reused_tokens"] > 0
    assert equal(got, own.prefill(scenario.prompt, "cacheblend", {"ratio": 0.15}).log_probs)
    begins = served.worker("chunkweave_woven_blocks")[0]
    assert len(begins) == tables
    assert max(begins) > 0, "all blocks are there: the prompt is too short to show anything"


def test_parts_longer_than_a_step_and_a_window_are_stored(windowed):
    """Of their beginning the windowed layers have no blocks any more when vLLM computes their end."""
    served, reference, *_ = windowed
    chunks = [tokens(200), tokens(40)]
    before = served.worker("chunkweave_records")[0].keys()
    served.answer(Given(chunks).ask("prefix"))
    records = served.worker("chunkweave_records")[0]
    assert [records[name]["exact"] for name in records.keys() - before] == [True, True]
    assert served.blocks_are_free()  # forgets vLLM's own prefix cache
    again = Given(chunks)
    got = served.answer(again.ask("prefix"))[0]
    assert got.report["prefix_exact_tokens"] >= 241 // 32 * 32 - 1
    assert equal(got, reference.log_probs(again.ids))


def test_what_is_missing_between_stored_chunks_is_computed_and_stored(windowed):
    served, _, own, _ = windowed
    scenario = one_missing(1)
    store(scenario, served, own)
    before = served.worker("chunkweave_records")[0].keys()
    got = served.answer(scenario.prompt.ask("full-reuse"))[0]
    assert equal(got, own.prefill(scenario.prompt, "full-reuse", {}).log_probs)
    (new,) = served.worker("chunkweave_records")[0].keys() - before
    assert served.worker("chunkweave_is_of", new, list(scenario.prompt.chunks[1])) == [True]


@pytest.mark.parametrize("method", ["cacheblend", "prefix"])
def test_the_same_request_again_has_the_same_answer(windowed, method):
    """A woven one begins at 0 again; an exact one goes on from vLLM's own cache."""
    served, _, own, _ = windowed
    scenario = computed_alone()
    store(scenario, served, own)
    wanted = own.prefill(scenario.prompt, method, {"ratio": 0.3}).log_probs
    got = [served.answer(scenario.prompt.ask(method, 0.3))[0] for _ in range(2)]
    assert all(equal(one, wanted) for one in got)
    assert got[1].report["computed_tokens"] < len(scenario.prompt.ids) / 2


@pytest.mark.parametrize("method", ["cacheblend", "full-reuse", "prefix"])
def test_tokens_are_those_without_preemption(windowed, method):
    served, *_ = windowed
    scenarios = [computed_alone() for _ in range(4)]
    for scenario in scenarios:
        scenario.precompute(served)
    asks = [replace(scenario.prompt.ask(method, 0.15, 90), top=3) for scenario in scenarios]
    undisturbed = [served.answer(ask)[0] for ask in asks]
    before = served.metric("vllm:num_preemptions")
    found = served.answer(*asks)
    assert served.metric("vllm:num_preemptions") > before
    assert [one.tokens for one in found] == [wanted.tokens for wanted in undisturbed]
    assert served.blocks_are_free()


def test_a_weave_that_fails_is_computed_by_vllm(windowed):
    served, reference, _, _ = windowed
    scenario = computed_alone()
    scenario.precompute(served)
    wanted = reference.log_probs(scenario.prompt.ids)
    with served.broken_layer(1):
        got = served.answer(scenario.prompt.ask("full-reuse"))[0]
    assert equal(got, wanted)
    assert (got.report["method"], got.report["effective_method"]) == ("full-reuse", "full")
    assert served.blocks_are_free()
