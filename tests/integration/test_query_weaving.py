"""The method `query`: what it recomputes is what the question reads, and all of it is full prefill."""

from math import ceil

import pytest
import torch

from chunkweave.eval.deviation import question_attention
from chunkweave.planning.plan import Fate
from chunkweave.testing.toys import TOY_FAMILIES, toy_model
from tests.integration.weaving import alone, make_bench, make_prompt

SIZES = (17, 23, 9, 31)


@pytest.fixture(params=sorted(TOY_FAMILIES))
def bench(request):
    return make_bench(toy_model(request.param))


def recomputed(prefilled) -> list[int]:
    return [position for span in prefilled.recomputed for position in span.positions()]


@pytest.mark.parametrize("missing", [(), (1,), (0, 3)])
def test_ratio_one_equals_full(bench, missing):
    prompt = make_prompt(SIZES, system=6)
    for i, part in enumerate(prompt.parts[2:-1]):
        if i not in missing:
            bench.prefill(alone(part), "full", keep=True)
    difference = bench.log_probs(prompt, "query", ratio=1.0) - bench.own_log_probs(prompt)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("question", [1, 5, 150])
@pytest.mark.parametrize("missing", [False, True])
def test_it_recomputes_what_an_explicit_softmax_says_the_question_reads(bench, question, missing):
    prompt = make_prompt(SIZES, system=6, question=question)
    bench.precompute(make_prompt(SIZES[:3], system=6) if missing else prompt)
    reused = bench.prefill(prompt, "full-reuse")
    model = bench.loaded.model
    attention = sum(layer.mean(0).sum(0) for layer in question_attention(reused, model)[:-1])
    candidates = [position for span in reused.plan.spans(Fate.REUSED) for position in span.positions()]
    count = ceil(0.1 * len(candidates))
    best = sorted(candidates, key=lambda position: (-float(attention[position]), position))[:count]
    assert recomputed(bench.prefill(prompt, "query", ratio=0.1)) == sorted(best)


def test_ratio_zero_is_full_reuse(bench):
    prompt = make_prompt(SIZES)
    bench.precompute(prompt)
    assert torch.equal(bench.log_probs(prompt, "query", ratio=0.0), bench.log_probs(prompt, "full-reuse"))


def test_its_work_is_a_question_and_the_chosen_tokens(bench):
    """No dense layer: the recomputed share of work is the ratio itself."""
    prompt = make_prompt(SIZES)
    bench.precompute(prompt)
    prefilled = bench.prefill(prompt, "query", ratio=0.1)
    layers = bench.loaded.model.geometry.num_layers
    reused = prefilled.plan.tokens(Fate.REUSED)
    assert prefilled.recompute_work == layers * ceil(0.1 * reused)
    question = len(prompt) - reused - prefilled.plan.tokens(Fate.EXACT)
    assert {work.kept_tokens for work in prefilled.work[:layers]} == {question}


@pytest.mark.parametrize("sizes", [(), (12,)])
def test_few_chunks_are_no_special_case(bench, sizes):
    prompt = make_prompt(sizes, system=6)
    bench.precompute(prompt)
    difference = bench.log_probs(prompt, "query", ratio=1.0) - bench.own_log_probs(prompt)
    assert difference.abs().max() < 1e-4


def test_an_exact_prefix_is_no_candidate(bench):
    prompt = make_prompt(SIZES, system=6)
    bench.prefill(type(prompt)((*prompt.parts[:4], prompt.parts[-1])), "full", keep=True)
    for part in prompt.parts[4:-1]:
        bench.prefill(alone(part), "full", keep=True)
    prefilled = bench.prefill(prompt, "query", ratio=0.5)
    exact = {position for span in prefilled.plan.spans(Fate.EXACT) for position in span.positions()}
    assert exact
    assert not exact & set(recomputed(prefilled))
