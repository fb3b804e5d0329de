"""Woven requests leave no trace in anybody else's answer, and the plug-in none in requests without chunks."""

import pytest
import torch

from tests.vllm.conftest import SLICED
from tests.vllm.prompts import Given, Scenario, alone, computed_alone, computed_in_context, tokens
from tests.vllm.serving import Ask, Got, serving

NEW_TOKENS = 8
BLOCK_SIZE = 32


@pytest.fixture(scope="module")
def bare(checkpoint):
    """The same vLLM without the connector and without the plug-in."""
    with serving(checkpoint("llama"), plugged=False, environment={"VLLM_PLUGINS": ""}, **SLICED) as served:
        yield served


def same(one: Got, other: Got) -> None:
    """To the last bit."""
    assert one.tokens == other.tokens
    assert torch.equal(one.log_probs, other.log_probs)


def close(one: Got, other: Got) -> None:
    """Where requests were batched differently, rounding is another."""
    assert one.tokens == other.tokens
    assert (one.log_probs - other.log_probs).abs().max().item() <= 1e-4


def test_plain_requests_are_answered_as_without_the_plug_in(sliced, bare):
    prompts = [Given([tokens(count)]) for count in (5, 63, 64, 130, 200)]
    prompts += [Given([prompts[3].chunks[0], tokens(20)]), prompts[4]]  # a prefix again, and a whole prompt again
    for prompt in prompts:
        same(sliced.answer(prompt.plain(NEW_TOKENS))[0], bare.answer(prompt.plain(NEW_TOKENS))[0])


@pytest.mark.parametrize("make", [computed_alone, computed_in_context])
@pytest.mark.parametrize("method", ["full-reuse", "cacheblend"])
def test_exact_requests_before_between_and_after_woven_ones(sliced, bare, make, method):
    """vLLM's prefix cache holds blocks of the very same tokens from woven requests."""
    scenario: Scenario = make()
    prompt = scenario.prompt
    scenario.precompute(sliced)
    first_woven = sliced.answer(prompt.ask(method, 0.15, NEW_TOKENS))[0]
    before = sliced.answer(prompt.plain(NEW_TOKENS))[0]
    woven = sliced.answer(prompt.ask(method, 0.15, NEW_TOKENS))[0]
    between = sliced.answer(prompt.plain(NEW_TOKENS))[0]
    sliced.answer(prompt.ask("full-reuse", None, NEW_TOKENS))
    after = sliced.answer(Ask([*prompt.ids, *before.tokens], None, NEW_TOKENS))[0]
    same(before, bare.answer(prompt.plain(NEW_TOKENS))[0])
    same(between, bare.answer(prompt.plain(NEW_TOKENS))[0])
    same(after, bare.answer(Ask([*prompt.ids, *before.tokens], None, NEW_TOKENS))[0])
    assert (first_woven.log_probs[0] - before.log_probs[0]).abs().max() > 0.01
    assert (woven.log_probs[0] - before.log_probs[0]).abs().max() > 0.01


def test_exact_requests_at_once_with_woven_ones(sliced, bare):
    scenario = computed_alone()
    scenario.precompute(sliced)
    other = Given([tokens(100)])
    plain = [scenario.prompt.plain(NEW_TOKENS), other.plain(NEW_TOKENS)]
    woven = scenario.prompt.ask("cacheblend", 0.15, NEW_TOKENS)
    found = sliced.answer(woven, plain[0], woven, plain[1], woven)
    for one, wanted in zip((found[1], found[3]), bare.answer(*plain), strict=True):
        close(one, wanted)


@pytest.mark.parametrize("method", ["cacheblend", "full-reuse"])
def test_the_prefix_method_is_exact_after_woven_ones(sliced, bare, method):
    """What woven requests computed is stored as approximate, and never taken for an exact prefix."""
    scenario = computed_alone()
    missing = tokens(33)
    chunks = [*scenario.prompt.chunks, missing]
    prompt = Given(chunks)
    scenario.precompute(sliced)
    sliced.answer(prompt.ask(method, 0.15, NEW_TOKENS))
    close(sliced.answer(prompt.ask("prefix", None, NEW_TOKENS))[0], bare.answer(prompt.plain(NEW_TOKENS))[0])


def test_the_prefix_method_is_exact_behind_other_start_tokens(sliced, bare):
    """The same chunk after BOS, after another token, and after none: three chunks."""
    chunk, question = tokens(60), tokens(7)
    sliced.answer(alone(chunk).ask())
    for start in ([5], []):
        ids = [*start, *chunk, *question]
        params = {"chunks": [[len(start), len(start) + len(chunk)]], "start_tokens": len(start)}
        got = sliced.one(ids, params, NEW_TOKENS)
        close(got, bare.one(ids, None, NEW_TOKENS))
        assert got.report.get("prefix_exact_tokens", 0) == 0


def test_exact_blocks_are_everybodys_and_woven_ones_nobodys(sliced, bare):
    """What a plain request left in the cache is an exact one's, and is stored; a woven one shares the instruction."""
    system, chunks = tokens(40), [tokens(count) for count in (43, 35, 50)]
    prompt, other = Given(chunks, system=system), Given([chunks[2], chunks[0]], system=system)
    sliced.answer(prompt.plain())
    exact = sliced.answer(prompt.ask("prefix", None, NEW_TOKENS))[0]
    close(exact, bare.answer(prompt.plain(NEW_TOKENS))[0])
    assert exact.report["computed_tokens"] == len(prompt.ids) % BLOCK_SIZE
    woven = sliced.answer(other.ask("full-reuse", None, NEW_TOKENS))[0]
    assert (woven.report["local_tokens"], woven.report["reused_tokens"]) == (BLOCK_SIZE, 50 + 43)
    for ask in (other.plain(NEW_TOKENS), other.ask("prefix", None, NEW_TOKENS), other.plain(NEW_TOKENS)):
        close(sliced.answer(ask)[0], bare.answer(other.plain(NEW_TOKENS))[0])
    again = sliced.answer(other.ask("full-reuse", None, NEW_TOKENS))[0]
    close(again, bare.answer(other.plain(NEW_TOKENS))[0])  # all of it is stored in this very order now


@pytest.mark.parametrize("changed", ["order", "question"])
def test_requests_over_the_same_chunks_share_the_blocks_before_what_differs(sliced, reference, changed):
    """Chunks end within a block, so that another question leaves all but their last few tokens in vLLM's own cache."""
    scenario = computed_alone()
    scenario.precompute(sliced)
    prompt = scenario.prompt
    sliced.answer(prompt.ask("cacheblend", 0.15))
    swapped = [*prompt.chunks[:2], prompt.chunks[3], prompt.chunks[2]]
    given = Given(swapped, prompt.question) if changed == "order" else Given(prompt.chunks)
    got = sliced.answer(given.ask("cacheblend", 0.15))[0]
    woven = reference.weave(Scenario(given, scenario.seen, scenario.exact).pieces(reference), "cacheblend", 0.15)
    assert (got.log_probs[0] - woven.log_probs).abs().max().item() <= 5e-4
    if changed == "order":
        assert got.report["recomputed"] == woven.recomputed
    else:
        assert got.report["local_tokens"] > 0
