"""A cache never costs an answer: what cannot be stored is logged, and what was captured for storing is let go.

Nor does a request pay for what no method that is configured or asked for reads.
"""

import gc
import logging
import weakref
from dataclasses import dataclass

import pytest

from chunkweave import Chunk, Engine, Request, SamplingParams
from chunkweave.config import CaptureConfig, ReuseConfig, StoreConfig
from chunkweave.engine.runner import Runner
from chunkweave.errors import RequestFailedError, UsageError
from chunkweave.fusion.capture import AttentionCapture, PartCapture
from tests.integration.test_batching_core import CHUNKS as ALL_CHUNKS
from tests.integration.test_batching_core import run_async
from tests.toys import toy_model

CHUNKS = ALL_CHUNKS[:3]
QUESTIONS = ["When does the ferry leave?", "Where do pilots board?"]
REQUESTS = [Request(question, CHUNKS, sampling=SamplingParams(max_new_tokens=8)) for question in QUESTIONS]


def generated(engine: Engine) -> list[tuple[int, ...]]:
    return [engine.generate(question, CHUNKS, max_new_tokens=8).token_ids for question in QUESTIONS]


def batched(engine: Engine) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in engine.generate_batch(REQUESTS)]


def streamed(engine: Engine) -> list[tuple[int, ...]]:
    last = [list(engine.stream(request))[-1] for request in REQUESTS]
    return [event.answer.token_ids for event in last]


def submitted(engine: Engine) -> list[tuple[int, ...]]:
    async def work(batching) -> list[tuple[int, ...]]:
        return [(await batching.submit(request).answer()).token_ids for request in REQUESTS]

    return run_async(work, engine)


@pytest.mark.parametrize("answer", [generated, batched, streamed, submitted])
def test_a_store_that_fails_costs_no_answer(model, answer, monkeypatch, caplog):
    expected = answer(Engine(model))
    engine = Engine(model)

    def insert(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(engine.store, "insert", insert)
    with caplog.at_level(logging.ERROR):
        assert answer(engine) == expected
    assert any("could not be stored" in record.message for record in caplog.records)
    engine.store.check()


@pytest.fixture
def captures(monkeypatch) -> list[weakref.ref]:
    """What was captured in prefills that were stored."""
    seen, real = [], Runner.store_new

    def store_new(self, prefilled):
        seen.extend(weakref.ref(one) for one in prefilled.captures)
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


def test_an_answer_that_fails_twice_names_its_cause_and_the_engine_goes_on(model, monkeypatch):
    engine, real = Engine(model), Runner.step
    monkeypatch.setattr(Runner, "step", lambda *_, **__: 1 / 0)
    with pytest.raises(RequestFailedError) as failed:
        engine.generate(QUESTIONS[0], CHUNKS, max_new_tokens=4)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    monkeypatch.setattr(Runner, "step", real)
    assert engine.generate(QUESTIONS[0], CHUNKS, max_new_tokens=4).token_ids


def test_a_usage_error_is_raised_as_it_is(model, monkeypatch):
    engine = Engine(model)

    def start(*_, **__):
        raise UsageError("this cannot be planned")

    monkeypatch.setattr(Runner, "start", start)
    with pytest.raises(UsageError, match="cannot be planned"):
        engine.generate(QUESTIONS[0], CHUNKS)


@dataclass
class Work:
    """How often something was read off a prefill: layers of KV of parts, layers of attention."""

    kv: int = 0
    attention: int = 0


@pytest.fixture
def work(monkeypatch) -> Work:
    seen = Work()
    take, read = PartCapture.take, AttentionCapture.read

    def counted_take(self, *args):
        seen.kv += 1
        return take(self, *args)

    def counted_read(self, *args):
        seen.attention += 1
        return read(self, *args)

    monkeypatch.setattr(PartCapture, "take", counted_take)
    monkeypatch.setattr(AttentionCapture, "read", counted_read)
    return seen


def profiles(engine: Engine) -> int:
    return sum(record.attention is not None for record in engine.store.records())


@pytest.mark.parametrize("answer", [generated, batched, streamed, submitted])
def test_full_alone_keeps_nothing(model, answer, work):
    engine = Engine(model, method="full")
    answer(engine)
    assert (work, list(engine.store.records())) == (Work(), [])


@pytest.mark.parametrize("answer", [generated, batched, streamed, submitted])
@pytest.mark.parametrize("method", ["prefix", "cacheblend", "query", "epic"])
def test_no_attention_is_read_for_methods_that_score_nothing_by_it(model, method, answer, work):
    engine = Engine(model, method=method)
    engine.precompute(CHUNKS[:1])
    answer(engine)
    assert work.attention == profiles(engine) == 0
    assert work.kv
    assert list(engine.store.records())


def test_a_prefix_keeps_exact_segments_alone(model):
    engine = Engine(model, method="prefix")
    generated(engine)
    generated(engine)
    assert all(record.exact for record in engine.store.records())


def test_what_a_method_scores_by_is_kept_for_it_from_the_first_request_on(model, work):
    engine = Engine(model, method="cachecraft")
    engine.precompute(CHUNKS[:1])
    assert profiles(engine) == len(list(engine.store.records()))
    generated(engine)
    assert work.attention
    assert profiles(engine) == len(list(engine.store.records()))


def test_a_request_pays_for_its_own_method_and_for_no_other(model, work):
    engine = Engine(model)
    engine.generate(QUESTIONS[0], CHUNKS[:1], max_new_tokens=1)
    assert work.attention == 0
    engine.generate(QUESTIONS[0], CHUNKS[1:], max_new_tokens=1, method="cachecraft:alpha=0")
    assert work.attention
    assert profiles(engine)
    before = work.attention
    engine.generate(QUESTIONS[0], [Chunk("Nobody knows the tide tables.")], max_new_tokens=1)
    assert work.attention == before


def test_a_method_that_scores_takes_chunks_without_a_profile(model):
    engine = Engine(model)
    engine.generate(QUESTIONS[0], CHUNKS, max_new_tokens=1)
    answer = engine.generate(QUESTIONS[0], CHUNKS[::-1], max_new_tokens=4, method="cachecraft:alpha=0.5")
    assert answer.report.reused_tokens
    engine.store.check()


@pytest.mark.parametrize(("method", "profile"), [("prefix", True), ("full", True), ("cachecraft", False)])
def test_what_is_configured_wins(model, method, profile, work):
    engine = Engine(model, method=method, reuse=ReuseConfig(capture=CaptureConfig(profile=profile)))
    generated(engine)
    assert bool(work.attention) is profile
    assert list(engine.store.records())


def test_precompute_counts_what_goes_to_disk_alone(tmp_path):
    with Engine(toy_model(), store=StoreConfig(host_budget_bytes=1000, cache_dir=tmp_path)) as engine:
        chunks = [Chunk(f"The quay has {number} lamps.") for number in range(2)]
        assert engine.precompute(chunks) == 2
        assert engine.store.flush(10)
        assert engine.precompute(chunks) == 0


def test_neutral_passages_that_cannot_be_read_are_told_when_an_engine_is_made(tmp_path):
    reuse = ReuseConfig(capture=CaptureConfig(neutral_file=tmp_path / "none.txt"))
    with pytest.raises(UsageError, match="neutral passages"):
        Engine(toy_model(), reuse=reuse)
