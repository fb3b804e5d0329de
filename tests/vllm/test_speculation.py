"""Speculative decoding without a draft model: drafts are accepted and rejected, and answers are those without it."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.vllm.conftest import SLICED
from tests.vllm.prompts import Given, Scenario, alone, computed_alone, computed_in_context, one_missing, tokens
from tests.vllm.reference import Reference
from tests.vllm.serving import Ask, Got, Served, alike, serving

TOLERANCE = 5e-4
NEW_TOKENS = 40
REPETITIVE = {"tie_word_embeddings": True, "initializer_range": 0.07}
"""Weights so small that a model with one embedding often answers with the token that it read, but not always."""
DRAFTS = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"num_speculative_tokens": 4},
}
MISSING = pytest.mark.skipif(find_spec("arctic_inference") is None, reason="vLLM needs arctic-inference for it")
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


@pytest.fixture(scope="module")
def plain(checkpoint):
    with serving(checkpoint("llama", **REPETITIVE), **SLICED) as served:
        yield served


@pytest.fixture(scope="module", params=["ngram", pytest.param("suffix", marks=MISSING)])
def drafting(request, checkpoint):
    speculative = {"method": request.param, **DRAFTS[request.param]}
    folder = checkpoint("llama", **REPETITIVE)
    with serving(folder, **SLICED, speculative_config=speculative) as served:
        assert served.worker("chunkweave_state")[0]["weaves"]
        yield served


def drafts(served: Served) -> tuple[float, float]:
    """Draft tokens so far: accepted and rejected ones."""
    accepted = served.metric(ACCEPTED)
    return accepted, served.metric(DRAFTED) - accepted


def answered_with_both(served: Served, *asks: Ask) -> list[Got]:
    """The answers, for which drafts were accepted and rejected."""
    before = drafts(served)
    answers = served.answer(*asks)
    accepted, rejected = (now - then for now, then in zip(drafts(served), before, strict=True))
    assert accepted, "no draft was accepted"
    assert rejected, "no draft was rejected"
    return answers


def ask(scenario: Scenario, method: str, ratio: float | None) -> Ask:
    return replace(scenario.prompt.ask(method, ratio, NEW_TOKENS), top=3)


def same(found: Got, wanted: Got) -> None:
    alike(found, wanted, TOLERANCE)
    if wanted.report is not None:
        for name in ("recomputed", "kv_sources", "effective_method", "local_tokens"):
            assert found.report[name] == wanted.report[name], name


@pytest.mark.parametrize(
    ("method", "ratio"), [("cacheblend", 0.15), ("query", 0.2), ("full-reuse", None), ("prefix", None), ("full", None)]
)
def test_answers_are_those_without_drafts(plain, drafting, method, ratio):
    scenarios = [computed_alone(), one_missing(1), computed_in_context(), one_missing(3)]
    asks = [ask(scenario, method, ratio) for scenario in scenarios]
    for served in (plain, drafting):
        for scenario in scenarios:
            scenario.precompute(served)
    beside = replace(Given([tokens(70)]).plain(NEW_TOKENS), top=3)
    wanted = plain.answer(*asks, beside)
    for found, one in zip(answered_with_both(drafting, *asks, beside), wanted, strict=True):
        same(found, one)
    assert drafting.blocks_are_free()


def test_what_is_stored_has_no_rejected_drafts(drafting, checkpoint):
    """A chunk that ends with its prompt is stored while drafts are computed right behind it."""
    reference, scenario = Reference(checkpoint("llama", **REPETITIVE)), computed_alone()
    answered_with_both(drafting, *(replace(alone(one).ask("prefix", None, NEW_TOKENS), top=3) for one in scenario.seen))
    got = drafting.answer(scenario.prompt.ask("cacheblend", 0.15))[0]
    woven = reference.weave(scenario.pieces(reference), "cacheblend", 0.15)
    assert (got.log_probs[0] - woven.log_probs).abs().max().item() <= TOLERANCE
    assert got.report["recomputed"] == woven.recomputed
    assert drafting.worker("chunkweave_check") == [True]


@pytest.mark.parametrize("method", ["cacheblend", "prefix"])
def test_the_next_question_finds_the_blocks_of_accepted_tokens(plain, drafting, method):
    scenario = computed_alone()
    for served in (plain, drafting):
        scenario.precompute(served)
    (answered,), (found,) = (served.answer(ask(scenario, method, 0.15)) for served in (plain, drafting))
    same(found, answered)
    more = Given(scenario.prompt.chunks, (*scenario.prompt.question, *answered.tokens, *tokens(7)))
    for after in (more.ask(method, 0.15, NEW_TOKENS), more.plain(NEW_TOKENS)):
        (wanted,), (found,) = (served.answer(replace(after, top=3)) for served in (plain, drafting))
        same(found, wanted)


def test_a_request_that_is_aborted_while_drafting_leaves_no_blocks(drafting):
    scenario = computed_alone()
    scenario.precompute(drafting)
    name = drafting.send(replace(scenario.prompt.ask("cacheblend", 0.15, 200), top=None))
    for _ in range(30):
        drafting.step()
    drafting.abort(name)
    assert drafting.blocks_are_free()
