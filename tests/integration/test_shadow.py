"""Shadow checks on toy models: what they measure, that they switch off what strays, and that they harm nobody."""

import asyncio
import math
import threading

import pytest
import torch

from chunkweave import BatchingConfig, Engine, Request, SamplingParams
from chunkweave.engine.runner import Runner
from chunkweave.engine.shadow import ShadowCheck, Woven, kl_divergence
from chunkweave.errors import ChunkweaveError
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.scheduling.shadow import ShadowConfig
from tests.integration.test_batching_core import CHUNKS, STORED, run_async, settled_engine, until

QUESTIONS = [f"When does the ferry of day {day} leave?" for day in range(12)]


def engine_with(shadow: ShadowConfig | None) -> Engine:
    return settled_engine(shadow=shadow)


def ask(question: str, chunks=STORED, tokens: int = 6, **sampling) -> Request:
    return Request(question, chunks, sampling=SamplingParams(max_new_tokens=tokens, **sampling))


def test_divergence_is_that_of_a_sum_by_hand():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    by_hand = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    logits = [torch.tensor(one).log() + shift for one, shift in ((p, 3.0), (q, -1.0))]
    assert kl_divergence(*logits) == pytest.approx(by_hand, rel=1e-6)
    assert kl_divergence(logits[0], logits[0]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("method", ["full", "prefix"])
@pytest.mark.parametrize("slice_tokens", [7, 10_000])
def test_exact_methods_do_not_diverge(method, slice_tokens):
    engine = engine_with(None)
    answer = engine.generate(QUESTIONS[0], CHUNKS, max_new_tokens=8, method=method)
    prepared = engine.preparer.prepare(ask(QUESTIONS[0], CHUNKS), MethodRequest(method))
    logits = engine.runner.prefill(prepared.prompt, prepared.reuse_method).logits
    check = ShadowCheck(engine.runner, Woven(prepared.prompt, logits, answer.token_ids))
    while (found := check.step(slice_tokens)) is None:
        pass
    check.close()
    assert found.kl == pytest.approx(0.0, abs=1e-4)
    assert found.agrees
    assert (found.same_tokens, found.compared_tokens) == (8, 8)


def test_a_check_is_full_prefill_beside_the_woven_answer():
    """The figures are those of two engines compared by hand, and the check asks and tells the store nothing."""
    engine = engine_with(ShadowConfig(every=1, compared_tokens=5))
    woven = [engine.generate_batch([ask(question, tokens=8)], method="full-reuse")[0] for question in QUESTIONS[:3]]
    before = engine.store.stats
    engine.check_shadows()
    assert engine.store.stats == before
    stats = engine.shadow.stats
    full = [engine.generate_batch([ask(question, tokens=8)], method="full")[0] for question in QUESTIONS[:3]]
    same = [common(one.token_ids[:5], two.token_ids[:5]) for one, two in zip(woven, full, strict=True)]
    assert stats.same_tokens == sum(same)
    assert stats.compared_tokens == sum(len(one.token_ids[:5]) for one in woven)
    assert stats.agreed == sum(one.token_ids[0] == two.token_ids[0] for one, two in zip(woven, full, strict=True))
    assert stats.mean_kl == pytest.approx(mean_kl(engine, QUESTIONS[:3]), rel=1e-4)
    assert stats.mean_kl > 0.01, "full reuse strays on a model with large weights"


def common(one, two) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def mean_kl(engine: Engine, questions) -> float:
    def log_probs(question, method):
        prepared = engine.preparer.prepare(ask(question), MethodRequest(method))
        return torch.log_softmax(engine.runner.prefill(prepared.prompt, prepared.reuse_method).logits.double(), -1)

    found = []
    for question in questions:
        p, q = log_probs(question, "full"), log_probs(question, "full-reuse")
        found.append(float((p.exp() * (p - q)).sum()))
    return sum(found) / len(found)


def test_exact_answers_are_not_counted_and_sampled_ones_compare_no_tokens():
    engine = engine_with(ShadowConfig(every=1))
    engine.generate("When?", STORED, method="prefix", max_new_tokens=2)
    engine.generate("When?", STORED, method="full", max_new_tokens=2)
    assert engine.shadow.stats.woven == 0
    engine.generate("When?", STORED, method="cacheblend", max_new_tokens=3, temperature=1.0, seed=1)
    engine.check_shadows()
    assert (engine.shadow.stats.checked, engine.shadow.stats.compared_tokens) == (1, 0)


def test_streams_are_checked_too():
    engine = engine_with(ShadowConfig(every=1))
    for _ in engine.stream(ask("When?"), method="cacheblend"):
        pass
    engine.check_shadows()
    assert engine.shadow.stats.checked == 1


def test_corrupted_segments_show_and_are_switched_off():
    """Values of stored chunks are spoiled in memory, where no checksum stands guard."""
    engine = engine_with(ShadowConfig(every=1, window=3, max_divergence=1.0))

    def ask_all():
        for question in QUESTIONS[:3]:
            engine.generate(question, STORED, method="cacheblend:ratio=0.6", max_new_tokens=1)
            engine.check_shadows()

    ask_all()
    assert engine.shadow.weaving
    sound = engine.shadow.stats.window_kl
    with torch.inference_mode():
        for record in engine.store.records():
            engine.store.get(record.id).layer(2)[1].mul_(-20.0)
    ask_all()
    assert not engine.shadow.weaving
    assert engine.shadow.stats.window_kl > 3 * sound
    assert engine.generate("When?", STORED, method="cacheblend", max_new_tokens=1).report.method == "prefix"


def test_many_at_once_are_checked_when_the_engine_is_idle():
    engine = engine_with(ShadowConfig(every=2, slice_tokens=16, most_pending=6))

    async def work(batching):
        streams = [batching.submit(ask(question), method="full-reuse") for question in QUESTIONS]
        answers = await asyncio.gather(*(stream.answer() for stream in streams))
        await until(lambda: engine.shadow.stats.checked == 6)
        batching._core.check()
        return answers

    answers = run_async(work, engine)
    stats = engine.shadow.stats
    assert (stats.woven, stats.sampled, stats.dropped, stats.failed) == (12, 6, 0, 0)
    assert stats.mean_kl > 0.0
    plain = engine_with(None)
    expected = [plain.generate_batch([ask(question)], method="full-reuse")[0] for question in QUESTIONS]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


@pytest.fixture
def steps(monkeypatch) -> list[tuple[int, list[bool]]]:
    """Of every step: how many decoded, and of each prefill whether it is a check's."""
    seen, real = [], Runner.step

    def step(self, decoding, prefilling, **_):
        prefilling = list(prefilling)
        seen.append((len(decoding), [not job._options.capture for job, _ in prefilling]))
        return real(self, decoding, prefilling)

    monkeypatch.setattr(Runner, "step", step)
    return seen


def test_no_check_goes_on_while_requests_are_under_way(steps):
    """As long as a long answer is decoded no slice of a check is computed; what finds no room to wait is dropped."""
    engine = engine_with(ShadowConfig(every=1, most_pending=2))

    async def work(batching):
        long = batching.submit(ask("How long?", tokens=100), method="prefix")
        for question in QUESTIONS[:5]:
            await batching.submit(ask(question, tokens=2), method="cacheblend").answer()
        answer = await long.answer()
        await until(lambda: engine.shadow.stats.checked == 2)
        return answer

    answer = run_async(work, engine)
    first = next(number for number, (_, checks) in enumerate(steps) if True in checks)
    assert sum(decoding for decoding, _ in steps[:first]) >= len(answer.token_ids) - 1 > 50
    assert (engine.shadow.stats.sampled, engine.shadow.stats.dropped) == (5, 3)


def test_beside_lets_a_check_go_on_while_few_are_under_way(steps):
    engine = engine_with(ShadowConfig(every=1, beside=1, slice_tokens=8))

    async def work(batching):
        long = batching.submit(ask("How long?", tokens=100), method="prefix")
        await batching.submit(ask(QUESTIONS[0], tokens=2), method="cacheblend").answer()
        await until(lambda: engine.shadow.stats.checked == 1)
        ended_before = batching.stats.running == 1
        await long.answer()
        return ended_before

    assert run_async(work, engine)


def test_a_request_takes_the_memory_of_a_check_that_is_under_way(monkeypatch):
    """The check stands still in mid-prefill when requests come that need all blocks: it ends, and they do not wait."""
    engine = engine_with(ShadowConfig(every=1, slice_tokens=8))
    begun, real = threading.Event(), ShadowCheck.step

    def step(self, slice_tokens):
        found = real(self, slice_tokens)
        begun.set()
        return found

    monkeypatch.setattr(ShadowCheck, "step", step)
    tokens = len(engine.preparer.prepare(ask(QUESTIONS[0]), MethodRequest("full")).prompt)
    limits = BatchingConfig(kv_tokens=2 * (tokens + 16), block_tokens=1)

    async def work(batching):
        await batching.submit(ask(QUESTIONS[0]), method="cacheblend").answer()
        await asyncio.to_thread(begun.wait, 10)
        streams = [batching.submit(ask(question), method="prefix") for question in QUESTIONS[1:3]]
        answers = await asyncio.gather(*(stream.answer() for stream in streams))
        assert batching.stats.preempted == 0
        batching._core.check()
        return answers

    answers = run_async(work, engine, limits)
    stats = engine.shadow.stats
    assert all(answer.token_ids for answer in answers)
    assert stats.checked + stats.dropped == 1


def test_a_check_that_fails_changes_nothing(monkeypatch, caplog):
    engine = engine_with(ShadowConfig(every=1, window=1, max_divergence=0.001))

    def broken(self, slice_tokens):
        raise RuntimeError("no memory")

    monkeypatch.setattr(ShadowCheck, "step", broken)

    async def work(batching):
        answers = [await batching.submit(ask(question), method="cacheblend").answer() for question in QUESTIONS[:3]]
        await until(lambda: engine.shadow.stats.failed == 3)
        return answers

    answers = run_async(work, engine)
    assert [answer.report.method for answer in answers] == ["cacheblend"] * 3
    assert engine.shadow.weaving
    assert "shadow check failed" in caplog.text


def test_closing_drops_what_is_left():
    engine = engine_with(ShadowConfig(every=1))

    async def work(batching):
        blocker = batching.submit(ask("How long?", tokens=400), method="prefix")
        await batching.submit(ask(QUESTIONS[0]), method="cacheblend").answer()
        return blocker

    blocker = run_async(work, engine)
    assert blocker is not None
    stats = engine.shadow.stats
    assert (stats.sampled, stats.dropped) == (1, 1)


def test_switched_off_weaving_concerns_requests_that_name_a_method():
    engine = engine_with(ShadowConfig(every=1))
    engine.shadow.switch_off("an operator said so")

    async def work(batching):
        return await batching.submit(ask("When?"), method="cacheblend").answer()

    report = run_async(work, engine).report
    assert (report.method, report.why, report.reused_tokens) == ("prefix", "switched off", 0)
    with pytest.raises(ChunkweaveError):
        engine.generate("When?", STORED, method="unheard-of")
