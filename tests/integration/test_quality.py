"""The quality benchmark on a toy: the same answers as the engine, nothing stored, deviations against brute force."""

import pytest
import torch

from chunkweave import Chunk, Engine
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.eval.datasets import Example
from chunkweave.eval.quality import QualityConfig, deviation_from, mean_deviation, measure_quality, question_attention
from chunkweave.eval.summaries import summarize_quality
from chunkweave.eval.ttft import Warmth
from chunkweave.testing import toy_model
from tests.integration.weaving import make_bench, make_prompt

EXAMPLES = [
    Example(
        f"Where is {name}?",
        tuple(Chunk(f"{one} lives at number {i}.", one) for i, one in enumerate(("Ada", "Bo", "Cy"))),
        ("number 1",),
        "single" if name == "Ada" else "common",
    )
    for name in ("Ada", "Bo", "Cy")
]


def test_contenders_answer_like_the_engine_and_store_nothing():
    engine = Engine(toy_model())
    config = QualityConfig(methods=("cacheblend",), ratios=(0.2, 1.0), max_new_tokens=6)
    samples = list(measure_quality(engine, EXAMPLES, config))
    assert len(samples) == 3 * 4
    assert {s.contender for s in samples} == {"full", "full-reuse", "cacheblend@0.2", "cacheblend@1"}
    assert all(record.alone for record in engine.store.records())
    for sample in samples:
        method, _, ratio = sample.contender.partition("@")
        example = EXAMPLES[sample.question]
        fresh = Engine(toy_model())
        fresh.precompute(example.chunks)
        answer = fresh.generate(
            example.question,
            example.chunks,
            method=method,
            recompute_ratio=float(ratio) if ratio else None,
            max_new_tokens=6,
        )
        assert sample.text == answer.text.strip()
    rows = {row.method: row for row in summarize_quality(samples)}
    assert rows["cacheblend@1"].f1 == rows["full"].f1
    assert rows["cacheblend@1"].recompute_fraction == 1.0


def test_earlier_queries_warm_the_store_in_context():
    engine = Engine(toy_model())
    config = QualityConfig(methods=("prefix",), warm=Warmth(2), max_new_tokens=2)
    samples = list(measure_quality(engine, EXAMPLES, config))
    assert {sample.question for sample in samples} == {0}
    prefix = next(sample for sample in samples if sample.contender == "prefix")
    assert prefix.report.prefix_exact_tokens > 20


@pytest.mark.parametrize("warm", [Warmth(), Warmth(1)], ids=str)
def test_what_is_warmed_has_the_profiles_that_some_contenders_read(warm):
    engine = Engine(toy_model())
    list(measure_quality(engine, EXAMPLES, QualityConfig(methods=("cachecraft",), warm=warm, max_new_tokens=1)))
    assert all(record.attention is not None for record in engine.store.records())


def test_bad_configurations_are_refused_before_anything_runs():
    with pytest.raises(UnknownMethodError, match="magic"):
        QualityConfig(methods=("magic",)).contenders()
    with pytest.raises(UsageError, match="between 0 and 1"):
        QualityConfig(ratios=(1.5,)).contenders()


def test_the_questions_attention_is_the_models_own():
    loaded = toy_model("qwen3")
    bench = make_bench(loaded)
    prompt = make_prompt((17, 9), question=5)
    loaded.model.model.set_attn_implementation("eager")
    own = loaded.model.model(torch.tensor([prompt.token_ids]), output_attentions=True).attentions
    for ours, theirs in zip(question_attention(bench.prefill(prompt, "full"), loaded.model), own, strict=True):
        assert (ours - theirs[0, :, -5:]).abs().max() < 1e-5


def test_deviation_is_nothing_for_full_and_falls_as_more_is_recomputed():
    bench = make_bench(toy_model("llama"))
    prompt = make_prompt((17, 23, 9, 31), system=6)
    bench.precompute(prompt)
    full = bench.prefill(prompt, "full")
    same, some, none = (
        deviation_from(full, bench.prefill(prompt, "cacheblend", ratio=ratio), bench.loaded.model)
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
    with pytest.raises(UsageError, match="one prompt"):
        deviation_from(one, other, bench.loaded.model)
