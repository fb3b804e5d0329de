"""A cache never costs an answer: what cannot be stored is logged, and what was captured for storing is let go."""

import asyncio
import gc
import logging
import weakref

import pytest

from chunkweave import AsyncEngine, Chunk, Engine, Request, SamplingParams
from chunkweave.engine.runner import Runner
from chunkweave.errors import RequestFailedError, UsageError
from chunkweave.testing import toy_model

CHUNKS = [
    Chunk("The harbour of Skerrow was founded in 1871.", "history"),
    Chunk("Pilots board ships two miles west of the lighthouse.", "pilots"),
    Chunk("The ferry leaves at seven, at noon and at six.", "ferry"),
]
QUESTIONS = ["When does the ferry leave?", "Where do pilots board?"]
REQUESTS = [Request(question, CHUNKS, sampling=SamplingParams(max_new_tokens=8)) for question in QUESTIONS]


def generated(engine: Engine) -> list[tuple[int, ...]]:
    return [engine.generate(question, CHUNKS, max_new_tokens=8).token_ids for question in QUESTIONS]


def batched(engine: Engine) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in engine.generate_batch(REQUESTS)]


def streamed(engine: Engine) -> list[tuple[int, ...]]:
    last = [list(engine.stream(request))[-1] for request in REQUESTS]
    return [event.answer.token_ids for event in last]


def talked(engine: Engine) -> list[tuple[int, ...]]:
    conversation = engine.conversation()
    sampling = SamplingParams(max_new_tokens=8)
    turns = [conversation.ask(question, CHUNKS, sampling=sampling).token_ids for question in QUESTIONS]
    assert conversation.turns == 2
    return turns


def submitted(engine: Engine) -> list[tuple[int, ...]]:
    async def main() -> list[tuple[int, ...]]:
        async with AsyncEngine(engine) as batching:
            return [(await batching.submit(request).answer()).token_ids for request in REQUESTS]

    return asyncio.run(main())


@pytest.fixture(scope="module")
def model():
    return toy_model("llama")


@pytest.mark.parametrize("answer", [generated, batched, streamed, talked, submitted])
def test_a_store_that_fails_costs_no_answer(model, answer, monkeypatch, caplog):
    expected = answer(Engine(model))
    engine = Engine(model)

    def insert(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(engine.store, "insert", insert)
    with caplog.at_level(logging.ERROR):
        assert answer(engine) == expected
    assert any("not stored" in record.message for record in caplog.records)
    engine.store.check()


@pytest.fixture
def captures(monkeypatch) -> list[weakref.ref]:
    """What was captured in prefills that were stored."""
    seen, real = [], Runner.store_new

    def store_new(self, prefilled):
        seen.extend(weakref.ref(one) for one in (*prefilled.captures, *prefilled.woven))
        return real(self, prefilled)

    monkeypatch.setattr(Runner, "store_new", store_new)
    return seen


@pytest.mark.parametrize("method", ["full", "cacheblend"])
def test_what_was_captured_is_let_go_after_the_first_token(model, method, captures):
    engine = Engine(model)
    stream = engine.stream(Request("When?", CHUNKS, sampling=SamplingParams(max_new_tokens=20)), method=method)
    next(stream)
    gc.collect()
    assert captures
    assert not [one for one in captures if one() is not None]
    assert list(stream)[-1].answer is not None


def test_what_was_woven_for_a_conversation_is_let_go_after_the_first_token(model, captures):
    engine = Engine(model)
    engine.precompute(CHUNKS)
    captures.clear()
    sampling = SamplingParams(max_new_tokens=20)
    stream = engine.conversation().stream("When?", CHUNKS, sampling=sampling, method="cacheblend", recompute_ratio=0.5)
    next(stream)
    gc.collect()
    assert captures
    assert not [one for one in captures if one() is not None]
    assert list(stream)[-1].answer is not None


def test_an_answer_that_fails_twice_names_its_cause_and_the_engine_goes_on(model, monkeypatch):
    engine, real = Engine(model), Runner.step
    monkeypatch.setattr(Runner, "step", lambda *_, **__: 1 / 0)
    with pytest.raises(RequestFailedError) as failed:
        engine.generate(QUESTIONS[0], CHUNKS, max_new_tokens=4)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    monkeypatch.setattr(Runner, "step", real)
    assert engine.generate(QUESTIONS[0], CHUNKS, max_new_tokens=4).token_ids


def test_what_fails_once_is_tried_again(model, monkeypatch):
    expected, failures, real = batched(Engine(model)), [], Runner.step

    def step(self, decoding, prefilling, **options):
        if len(decoding) == 2 and not failures:
            failures.append(1)
            raise RuntimeError("out of memory")
        return real(self, decoding, prefilling, **options)

    monkeypatch.setattr(Runner, "step", step)
    assert batched(Engine(model)) == expected
    assert failures


def test_a_usage_error_is_raised_as_it_is(model, monkeypatch):
    engine = Engine(model)

    def start(*_, **__):
        raise UsageError("this cannot be planned")

    monkeypatch.setattr(Runner, "start", start)
    with pytest.raises(UsageError, match="cannot be planned"):
        engine.generate(QUESTIONS[0], CHUNKS)
