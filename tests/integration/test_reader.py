"""The bundled reader: found by name, answers its corpus, and has a calibration record that the engine takes."""

from importlib.resources import files
from pathlib import Path
from statistics import fmean

import pytest

from chunkweave.calibration.questions import bundled_corpus
from chunkweave.calibration.summaries import f1
from chunkweave.engine.engine import Engine

READER = Path(str(files("chunkweave") / "assets" / "reader"))


@pytest.fixture(scope="module")
def engine():
    with Engine.load("reader", dtype="float32") as engine:
        yield engine


def test_any_text_encodes(engine):
    tokenizer = engine.loaded.tokenizer
    for text in ("Ein Äther-Ölfaß", "漢字かな", "\U0001f600 \x00\x7f"):
        assert text in tokenizer.decode(tokenizer.encode(text))


def test_it_answers_most_questions_of_its_corpus(engine):
    scores = []
    for question in bundled_corpus().questions:
        answer = engine.generate(question.question, question.chunks, max_new_tokens=12, method="full")
        scores.append(max(f1(answer.text, right) for right in question.answers))
    assert fmean(scores) >= 0.6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_calibration_record_is_what_answers_by_default(dtype):
    question = bundled_corpus().questions[0]
    with Engine.load("reader", dtype=dtype) as engine:
        engine.precompute(question.chunks)
        report = engine.generate(question.question, question.chunks, max_new_tokens=4).report
        assert report.why == "calibrated"
        assert report.reused_tokens > 0
        assert (
            engine.generate(question.question, question.chunks, max_new_tokens=1, quality="exact").report.why == "exact"
        )
