"""The quality benchmark on a toy: the same answers as the engine, nothing stored."""

import pytest

from chunkweave import Chunk, Engine
from chunkweave.calibration.prompts import Warmth
from chunkweave.calibration.questions import Example
from chunkweave.config import CaptureConfig, ContextSource, ReuseConfig
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.testing import toy_model
from chunkweave_lab.quality import QualityConfig, measure_quality
from chunkweave_lab.summaries import summarize_quality

EXAMPLES = [
    Example(
        f"Where is {name}?",
        tuple(Chunk(f"{one} lives at number {i}.", one) for i, one in enumerate(("Ada", "Bo", "Cy"))),
        ("number 1",),
        "single" if name == "Ada" else "common",
    )
    for name in ("Ada", "Bo", "Cy")
]

ALONE = CaptureConfig(contexts=ContextSource.BUNDLED, neutral_tokens=0)


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
        fresh = Engine(toy_model(), reuse=ReuseConfig(capture=ALONE))
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
    config = QualityConfig(methods=("prefix",), warm=Warmth.parse("queries:2"), max_new_tokens=2)
    samples = list(measure_quality(engine, EXAMPLES, config))
    assert {sample.question for sample in samples} == {0}
    prefix = next(sample for sample in samples if sample.contender == "prefix")
    assert prefix.report.prefix_exact_tokens > 20


@pytest.mark.parametrize("warm", [Warmth(), Warmth.parse("queries:1")], ids=str)
def test_what_is_warmed_has_the_profiles_that_some_contenders_read(warm):
    engine = Engine(toy_model())
    list(measure_quality(engine, EXAMPLES, QualityConfig(methods=("cachecraft",), warm=warm, max_new_tokens=1)))
    assert all(record.attention is not None for record in engine.store.records())


def test_bad_configurations_are_refused_before_anything_runs():
    with pytest.raises(UnknownMethodError, match="magic"):
        QualityConfig(methods=("magic",)).contenders()
    with pytest.raises(UsageError, match="between 0 and 1"):
        QualityConfig(ratios=(1.5,)).contenders()
