"""Deviations of KV and attention from full prefill, on toys and against brute force."""

from itertools import pairwise
from math import ceil

import pytest
import torch
from scipy.stats import spearmanr

from chunkweave.errors import UsageError
from chunkweave.planning.plan import KVSource
from chunkweave.testing import toy_model
from chunkweave_lab.deviation import (
    QUANTILES,
    TOP,
    Choice,
    PromptDeviation,
    chosen_tokens,
    deviation_from,
    mean_deviation,
    question_attention,
    reuse_deviation,
    summarize_deviations,
)
from tests.integration.weaving import make_bench, make_prompt

PROMPT = make_prompt((17, 23, 9, 31), system=6)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def measured(request):
    """A bench, full prefill and full reuse of one prompt whose chunks were computed alone."""
    bench = make_bench(toy_model(request.param))
    bench.precompute(PROMPT)
    return bench, bench.prefill(PROMPT, "full"), bench.prefill(PROMPT, "full-reuse")


def _reused(prefilled):
    return [p for span in prefilled.plan.spans(KVSource.REUSED) for p in span.positions()]


def _kv(prefilled, layer, position):
    keys, values = prefilled.cache.view(layer, len(PROMPT))
    return torch.cat((keys[position].flatten(), values[position].flatten()))


def _by_brute_force(full, reused, layers):
    return [
        [float((_kv(full, layer, p) - _kv(reused, layer, p)).norm()) for p in _reused(reused)]
        for layer in range(layers)
    ]


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {}), ("gemma3_text", {"sliding_window": 8}), ("gemma2", {"sliding_window": 8}), ("gpt_oss", {})],
)
def test_the_questions_attention_is_the_models_own(family, changes):
    loaded = toy_model(family, **changes)
    bench = make_bench(loaded)
    prompt = make_prompt((17, 9), question=5)
    loaded.model.model.set_attn_implementation("eager")
    own = loaded.model.model(torch.tensor([prompt.token_ids]), output_attentions=True).attentions
    for ours, theirs in zip(question_attention(bench.prefill(prompt, "full"), loaded.model), own, strict=True):
        assert (ours - theirs[0, :, -5:]).abs().max() < 1e-5


def test_deviation_is_nothing_for_full_and_falls_as_more_is_recomputed():
    bench = make_bench(toy_model("llama"))
    bench.precompute(PROMPT)
    full = bench.prefill(PROMPT, "full")
    same, some, none = (
        deviation_from(full, bench.prefill(PROMPT, "cacheblend", ratio=ratio), bench.loaded.model)
        for ratio in (1.0, 0.5, 0.0)
    )
    assert max(same.kv + same.attention) < 1e-3
    assert none.kv[0] < 1e-5
    assert all(less < more for less, more in zip(some.kv[2:], none.kv[2:], strict=True))
    assert sum(some.attention) < sum(none.attention)
    assert all(-1 <= r <= 1 for r in none.rank_correlation if r is not None)
    mean = mean_deviation([some, none])
    assert mean["kv"][2] == pytest.approx((some.kv[2] + none.kv[2]) / 2)


def test_deviation_between_different_prompts_is_refused():
    bench = make_bench(toy_model("llama"))
    one, other = (bench.prefill(make_prompt((9,), seed=seed), "full") for seed in (0, 1))
    with pytest.raises(UsageError, match="the same prompt"):
        deviation_from(one, other, bench.loaded.model)


@torch.inference_mode()
def _attention_by_brute_force(model, prefilled, chosen):
    """All tokens through all layers, one query after the other, over a KV cache in which only the chosen are fresh."""
    ids, question = prefilled.prompt.token_ids, prefilled.prompt.spans()[-1]
    computed = {p for span in prefilled.plan.spans(KVSource.COMPUTED) for p in span.positions()}
    positions = torch.arange(len(ids))
    hidden, found = model.embed(torch.tensor(ids)), []
    for layer in range(model.geometry.num_layers):
        q, k, v = model.qkv(layer, hidden)
        q, k = model.rotate_queries(layer, q, positions), model.rotate_keys(layer, k, positions)
        stored = prefilled.cache.view(layer, len(ids))
        fresh = computed | {p for p, now in zip(_reused(prefilled), chosen[layer].tolist(), strict=True) if now}
        keys, values = (
            torch.stack([new[p] if p in fresh else old[p] for p in range(len(ids))])
            for new, old in ((k, stored[0]), (v, stored[1]))
        )
        group, attended, paid = q.shape[1] // k.shape[1], [], []
        for position in range(len(ids)):
            of_heads = []
            weights = torch.zeros(q.shape[1], len(ids))
            for head in range(q.shape[1]):
                scores = keys[: position + 1, head // group] @ q[position, head] / q.shape[2] ** 0.5
                weights[head, : position + 1] = scores.softmax(0)
                of_heads.append(weights[head] @ values[:, head // group])
            attended.append(torch.cat(of_heads))
            paid.append(weights)
        found.append(torch.stack(paid[question.start :], dim=1))
        hidden = model.finish(layer, hidden, torch.stack(attended))
    return found


def test_attention_after_recomputing_other_tokens_on_each_layer(measured):
    bench, _, reused = measured
    model = bench.loaded.model
    chosen = (
        torch.rand(model.geometry.num_layers, len(_reused(reused)), generator=torch.Generator().manual_seed(3)) < 0.2
    )
    chosen[-1] = False  # so that some tokens are not carried to the end
    ours = question_attention(reused, model, chosen)
    for one, brute in zip(ours, _attention_by_brute_force(model, reused, chosen), strict=True):
        torch.testing.assert_close(one, brute, atol=1e-5, rtol=0)


def test_recomputing_one_set_on_all_layers_is_what_the_engine_does(measured):
    bench, full, reused = measured
    model, layers = bench.loaded.model, bench.loaded.model.geometry.num_layers
    woven = bench.prefill(PROMPT, "random", ratio=0.3)
    recomputed = {p for span in woven.recomputed for p in span.positions()}
    some = torch.tensor([p in recomputed for p in _reused(reused)]).expand(layers, -1)
    assert 0 < some.sum() < some.numel()
    nothing, everything = torch.zeros_like(some), torch.ones_like(some)
    for chosen, same in ((some, woven), (nothing, reused), (everything, full)):
        for ours, engines in zip(
            question_attention(reused, model, chosen), question_attention(same, model), strict=True
        ):
            torch.testing.assert_close(ours, engines, atol=1e-5, rtol=0)


def test_tokens_are_chosen_by_their_deviation_on_each_layer():
    deviation = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 4.0, 2.0, 3.0]])
    assert chosen_tokens(deviation, Choice.HIGHEST, 0.3).tolist() == [[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]]
    few, more = (chosen_tokens(deviation, Choice.RANDOM, ratio, seed=1) for ratio in (0.2, 0.6))
    assert few.sum(1).tolist() == [1, 1]
    assert more.sum(1).tolist() == [3, 3]
    assert bool((more | ~few).all()), "few are among more"
    assert few[0].tolist() == few[1].tolist()


def test_figures_6_to_8_are_those_of_the_tokens(measured):
    bench, full, reused = measured
    model = bench.loaded.model
    found = reuse_deviation(full, reused, model, ratios=(0.0, 0.5, 1.0))
    tokens = _by_brute_force(full, reused, model.geometry.num_layers)
    none = deviation_from(full, reused, model)
    for choice in Choice:
        assert found.attention[choice, 0.0] == pytest.approx(none.attention, abs=1e-6)
        assert max(found.attention[choice, 1.0]) < 1e-4
        assert sum(found.attention[choice, 0.5]) < sum(none.attention)
    for layer, deviations in enumerate(tokens[1:], start=1):
        ordered = sorted(deviations)
        assert found.quantiles[layer][0] == pytest.approx(ordered[0], abs=1e-5)
        assert found.quantiles[layer][-1] == pytest.approx(ordered[-1], abs=1e-5)
        assert found.quantiles[layer][QUANTILES.index(0.5)] == pytest.approx(
            (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2, abs=1e-5
        )
        top = sum(ordered[-ceil(TOP * len(ordered)) :]) / sum(ordered)
        assert found.top_share[layer] == pytest.approx(top, abs=1e-5)
    assert none.rank_correlation == pytest.approx(
        [spearmanr(a, b).statistic for a, b in pairwise(tokens[1:])], abs=1e-3
    )
    assert found.rank_with_first == pytest.approx([spearmanr(tokens[1], b).statistic for b in tokens[2:]], abs=1e-3)


def test_prompts_are_averaged_and_compared_with_full_reuse(measured):
    bench, full, reused = measured
    model = bench.loaded.model
    none = deviation_from(full, reused, model)
    one = reuse_deviation(full, reused, model, ratios=(0.0, 0.5))
    other = reuse_deviation(full, reused, model, ratios=(0.0, 0.5), seed=1)
    found = summarize_deviations([PromptDeviation({"full-reuse": none}, part) for part in (one, other, None)])
    figures = found["figures"]
    assert figures["questions"] == 2
    points = {(point["tokens"], point["ratio"]): point for point in figures["attention"]}
    assert {point["left"] for (_, ratio), point in points.items() if not ratio} == {1.0}
    ours = points["random", 0.5]
    drawn = [part.attention[Choice.RANDOM, 0.5] for part in (one, other)]
    assert ours["by_layer"] == pytest.approx([(a + b) / 2 for a, b in zip(*drawn, strict=True)])
    assert ours["mean_low"] <= ours["mean"] <= ours["mean_high"]
    assert ours["left"] == pytest.approx(ours["mean"] / points["random", 0.0]["mean"])
    assert len(figures["rank_correlation"]["first"]) == model.geometry.num_layers - 2
    assert summarize_deviations([PromptDeviation({"full-reuse": none})]).keys() == {"deviation"}
    assert summarize_deviations([]) == {"deviation": {}}


def test_a_prompt_of_which_nothing_is_reused_has_no_figures():
    bench = make_bench(toy_model("llama"))
    prompt = make_prompt((9,))
    assert (
        reuse_deviation(bench.prefill(prompt, "full"), bench.prefill(prompt, "full-reuse"), bench.loaded.model) is None
    )
