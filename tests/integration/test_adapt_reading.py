"""The forward that adapters are trained with is what the engine computes over stored chunks."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from chunkweave.calibration.fidelity import decode_greedily, log_probabilities, woven_prefill
from chunkweave.calibration.prompts import Warmth
from chunkweave.config import CaptureConfig, ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave.testing import toy_model
from chunkweave_lab.adapt.reading import PassageReader, Passages, Reading

TOLERANCE = 1e-4
CHUNKS = [f"{name} lives at number {i}, behind the old mill on the road to Aldwick." for i, name in enumerate("ABCD")]
QUESTIONS = ["Where is A?", "Who lives behind the old mill, and at which number?"]
ANSWER = (5, 77, 1234, 9)


def _engine(family: str = "llama", **changes: object) -> Engine:
    reuse = ReuseConfig(capture=CaptureConfig(neutral_tokens=200))
    return Engine(toy_model(family, **changes), method="full", reuse=reuse)  # type: ignore[arg-type]


def _passages(engine: Engine, chunks: Sequence[str] = CHUNKS) -> Passages:
    opening = engine.builder.opening()
    neutral = engine.preparer.preamble(opening)[len(opening) :]
    return Passages(opening, neutral, engine.builder.chunk_parts(chunks))


def _reader(engine: Engine) -> PassageReader:
    model = engine.loaded.model
    return PassageReader(HuggingFaceModel(model.model), model.device)


def _by_engine(engine: Engine, passages: Passages, question: str, reading: Reading) -> torch.Tensor:
    parts = (*passages.opening, *passages.chunks, engine.builder.question_part(question))
    prompt = Prompt(parts)
    method = "full" if reading is Reading.FULL else "full-reuse"
    if reading is not Reading.FULL:
        Warmth.parse(reading).prepare(engine, prompt)
    prefilled = woven_prefill(engine.runner, make_method(method), new_tokens=len(ANSWER) + 1)(prompt)
    assert prefilled is not None
    if reading is not Reading.FULL:
        assert prefilled.prompt.parts[-1].kind is PartKind.QUESTION
    return log_probabilities(engine.loaded.model, prefilled, ANSWER)[0]


@pytest.mark.parametrize("reading", list(Reading))
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_reads_as_the_engine_does(family: str, reading: Reading) -> None:
    changes = {"sliding_window": 24} if family == "gemma3_text" else {}
    engine = _engine(family, **changes)
    passages = _passages(engine)
    questions = [engine.builder.question_part(one).token_ids for one in QUESTIONS]
    with torch.no_grad():
        found = _reader(engine).logits(
            passages, [(*one, *ANSWER[:-1]) for one in questions], reading, last=[len(ANSWER)] * len(questions)
        )
    for question, logits in zip(QUESTIONS, found, strict=True):
        expected = _by_engine(_engine(family, **changes), passages, question, reading)
        torch.testing.assert_close(torch.log_softmax(logits.double(), -1), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("together", [1, 40, 1000])
def test_a_question_sees_no_other_whichever_look_together(
    family: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkweave_lab.adapt.reading._ROWS_TOGETHER", together)
    engine = _engine(family, **({"sliding_window": 24} if family == "gemma3_text" else {}))
    passages, reader = _passages(engine), _reader(engine)
    questions = [engine.builder.question_part(one).token_ids for one in (*QUESTIONS, "Which road?", "Is B there?")]
    last = [len(one) for one in questions]
    with torch.no_grad():
        found = reader.logits(passages, questions, Reading.ALONE, last=last)
        alone = [reader.logits(passages, [one], Reading.ALONE, last=[len(one)])[0] for one in questions]
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


def test_readings_differ() -> None:
    engine = _engine()
    passages, question = _passages(engine), engine.builder.question_part(QUESTIONS[0]).token_ids
    reader = _reader(engine)
    with torch.no_grad():
        found = [reader.logits(passages, [question], reading, last=[1])[0] for reading in Reading]
    for one, other in pairwise(found):
        assert (one - other).abs().max() > 100 * TOLERANCE


def test_answers_as_full_prefill_does() -> None:
    engine = _engine()
    passages = _passages(engine)
    questions = [engine.builder.question_part(one).token_ids for one in QUESTIONS]
    stop_ids = engine.loaded.tokenizer.stop_ids
    answers = _reader(engine).answer(passages, questions, stop_ids=stop_ids, max_new_tokens=9)
    for question, (tokens, expected) in zip(QUESTIONS, answers, strict=True):
        prompt = Prompt((*passages.opening, *passages.chunks, engine.builder.question_part(question)))
        prefilled = woven_prefill(engine.runner, make_method("full"), new_tokens=10)(prompt)
        assert prefilled is not None
        assert decode_greedily(engine, [prefilled], 9)[0].token_ids == tuple(tokens)
        again = log_probabilities(engine.loaded.model, prefilled, tokens)[0]
        torch.testing.assert_close(expected.double(), again, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("reading", list(Reading))
def test_every_weight_gets_a_gradient(reading: Reading) -> None:
    engine = _engine()
    passages, question = _passages(engine), engine.builder.question_part(QUESTIONS[0]).token_ids
    model = engine.loaded.model.model
    _reader(engine).logits(passages, [question], reading, last=[1])[0].logsumexp(-1).sum().backward()
    projections = [weight for name, weight in model.named_parameters() if "proj" in name]
    assert len(projections) == 7 * 4
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in projections)
