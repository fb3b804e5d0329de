"""Comparisons on toy models: what they measure and learn, that they delay nobody and keep no removed text."""

import asyncio
import random

import pytest
import torch

from chunkweave import BatchingConfig, Chunk, Engine, Request, SamplingParams, StoreConfig
from chunkweave.config import Choice, ReuseConfig
from chunkweave.engine import comparisons
from chunkweave.engine.comparisons import Comparisons, compare, kl_divergence
from chunkweave.engine.runner import Runner
from chunkweave.planning.calibration import Quality
from chunkweave.planning.evidence import LEARNED, Compared
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.types import CacheUse
from tests.integration.test_batching_core import run_async, until
from tests.toys import toy_model

TEXTS = [
    f"{name} is the harbour where ferry number {number} leaves at {number + 5} every morning, past the old light "
    f"of {name}, and where the pilots of district {number * 7} keep a log of each ship that they board."
    for number, name in enumerate(["Skerrow", "Aldby", "Munkholm", "Torvik", "Selmond", "Brae"])
]
METHOD = "query:whole:late:ratio=0.15"


def engine_that_learns(**options) -> Engine:
    return Engine(toy_model("llama"), reuse=ReuseConfig(choice=Choice.FIXED), compare=True, **options)


def ask(number: int, tokens: int = 20, **fields) -> Request:
    """The same documents, every time in another order."""
    texts = random.Random(number).sample(TEXTS, 4)
    question = f"When does the ferry of day {number} leave?"
    return Request(question, [Chunk(text) for text in texts], sampling=SamplingParams(tokens), **fields)


def answered(engine: Engine, number: int, *, cache: CacheUse = CacheUse.USE, **options):
    return engine.generate_batch([ask(number, cache=cache)], **options)[0]


def test_divergence_is_that_of_a_sum_by_hand():
    p, q = [[0.5, 0.25, 0.25]], [[0.25, 0.25, 0.5]]
    by_hand = sum(a * torch.tensor(a / b).log() for a, b in zip(p[0], q[0], strict=True))
    logits = [torch.tensor(one).log() + shift for one, shift in ((p, 3.0), (q, -1.0))]
    assert float(kl_divergence(*logits)) == pytest.approx(float(by_hand), rel=1e-6)
    assert compare(logits[0], logits[0]) == Compared(1.0, pytest.approx(0.0, abs=1e-12))
    assert compare(logits[0], torch.full_like(logits[0], torch.nan)).kl == 1.0


def test_an_exact_answer_is_compared_with_what_weaving_would_have_been():
    """By hand: a second engine with the same store as before the answer, forced along the answer's tokens."""
    engine = engine_that_learns()
    for number in range(3):
        answered(engine, number)
    engine.comparisons.drop_all()
    before = {record.id for record in engine.store.records()}
    answer = answered(engine, 3)
    assert (answer.report.method, answer.report.why) == ("prefix", "learning 0 of about 300")
    taken = []
    engine.comparisons.evidence.take = lambda results, tenant: taken.append(results)
    engine.run_comparisons()
    assert {record.id for record in engine.store.records()} > before, "the answer stored what it computed"

    other = engine_that_learns()
    for number in range(3):
        answered(other, number)
    prepared = other.preparer.prepare(ask(3), MethodRequest(METHOD))
    expected = forced(other, MethodRequest("full"), answer.token_ids[:16])
    by_hand = compare(expected, forced(other, MethodRequest(METHOD), answer.token_ids[:16]))
    assert prepared.weaves
    assert set(taken[0]) == set(LEARNED)
    assert taken[0][METHOD].agreement == by_hand.agreement
    assert taken[0][METHOD].kl == pytest.approx(by_hand.kl, rel=1e-3)
    assert by_hand.kl > 1e-4, "weaving differs from full prefill on a model with large weights"


def forced(engine: Engine, method: MethodRequest, ids) -> torch.Tensor:
    """Logits along an answer's tokens, decoded one by one."""
    prepared = engine.preparer.prepare(ask(3), method)
    prefilled = engine.runner.prefill(prepared.prompt, prepared.reuse_method, new_tokens=len(ids))
    rows = [prefilled.logits]
    for place, token in enumerate(ids[:-1]):
        rows.append(engine.runner.decode([prefilled.cache], [token], [len(prepared.prompt) + place])[0])
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("options", "cache"),
    [({"method": "prefix"}, "use"), ({"method": "cacheblend"}, "use"), ({"quality": "exact"}, "use"), ({}, "off")],
)
def test_what_was_asked_for_by_name_or_without_a_cache_is_not_compared(options, cache):
    engine = engine_that_learns()
    answered(engine, 0)
    engine.comparisons.drop_all()
    answered(engine, 1, cache=CacheUse(cache), **options)
    assert not engine.comparisons


def test_nothing_is_compared_where_weaving_saves_nothing():
    engine = engine_that_learns()
    answered(engine, 0)
    engine.run_comparisons()
    assert (engine.comparisons.compared, engine.comparisons.dropped) == (0, 1), "its chunks were new"
    engine.generate("When?", max_new_tokens=2)
    engine.run_comparisons()
    assert (engine.comparisons.compared, engine.comparisons.dropped) == (0, 2), "it has no chunks"


def test_comparing_tells_and_asks_the_store_nothing():
    engine = engine_that_learns()
    for number in range(4):
        answered(engine, number)
    before = engine.store.stats
    engine.run_comparisons()
    assert engine.comparisons.compared > 0
    assert engine.store.stats == before


def decide(engine: Engine, agreement: float, count: int = 400, **others: float) -> None:
    """What many comparisons would have said of `METHOD`."""
    for _ in range(count):
        engine.comparisons.evidence.take({METHOD: Compared(agreement, others.get("kl", 0.01))})


def test_what_was_learned_serves_and_is_taken_back_when_answers_drift():
    engine = engine_that_learns()
    for number in range(3):
        answered(engine, number)
    decide(engine, 0.99)
    report = answered(engine, 4).report
    assert (report.method, report.why) == ("query", "learned")
    assert report.reused_tokens > 0
    assert answered(engine, 5, quality="exact").report.why == "exact"
    decide(engine, 0.9)
    assert answered(engine, 6, quality="balanced").report.method == "prefix"
    assert engine.comparisons.evidence.taken_back >= 1


def test_one_in_many_woven_answers_is_compared(monkeypatch):
    monkeypatch.setattr(comparisons, "WOVEN_EVERY", 3)
    engine = engine_that_learns()
    for number in range(3):
        answered(engine, number)
    engine.comparisons.drop_all()
    decide(engine, 0.99)
    for number in range(10, 16):
        assert answered(engine, number).report.why == "learned"
    assert len(engine.comparisons._pending) == 2
    engine.run_comparisons()
    assert engine.comparisons.compared == 2


def test_evidence_survives_a_restart(tmp_path):
    def opened() -> Engine:
        return engine_that_learns(store=StoreConfig(cache_dir=tmp_path))

    with opened() as engine:
        for number in range(4):
            answered(engine, number)
        engine.run_comparisons()
        means = engine.comparisons.evidence.means()
        assert means[METHOD][0] > 0
    with opened() as engine:
        assert engine.comparisons.evidence.means() == means
        [file] = tmp_path.glob("*/evidence.json")
        for damage in ("", "{", "[]", '{"cases": [{}], "tenants": {}, "taken_back": 0}'):
            file.write_text(damage)
            with opened() as other:
                assert other.comparisons.evidence.means()[METHOD][0] == 0


def test_removal_drops_what_waits():
    engine = engine_that_learns()
    answered(engine, 0)
    assert engine.comparisons
    engine.forget([Chunk(TEXTS[0])])
    assert not engine.comparisons


def test_what_waits_has_a_bound(monkeypatch):
    engine = engine_that_learns()
    answered(engine, 0)
    tokens = engine.comparisons.pending_tokens
    monkeypatch.setattr(comparisons, "MOST_PENDING_TOKENS", 2 * tokens + tokens // 2)
    for number in range(1, 5):
        answered(engine, number)
    assert engine.comparisons.pending_tokens <= comparisons.MOST_PENDING_TOKENS
    assert engine.comparisons.dropped >= 2


@pytest.fixture
def steps(monkeypatch) -> list[tuple[bool, int, int]]:
    """Of every step: whether it is a comparison's, how many requests were open then, and its prefill tokens."""
    seen, real_step, real_compare = [], Runner.step, Comparisons.step
    comparing = []

    def step(self, decoding, prefilling, **options):
        jobs = list(prefilling)
        cut = [(job, most) for job, most in jobs if job.can_be_cut]  # other passes stop between two layers
        tokens = sum(job.next_tokens if most is None else min(most, job.next_tokens) for job, most in cut)
        seen.append((bool(comparing), tokens))
        return real_step(self, decoding, jobs, **options)

    def compare_step(self, *args):
        comparing.append(True)
        try:
            real_compare(self, *args)
        finally:
            comparing.clear()

    monkeypatch.setattr(Runner, "step", step)
    monkeypatch.setattr(Comparisons, "step", compare_step)
    return seen


def test_no_comparison_goes_on_while_requests_are_under_way(steps, monkeypatch):
    monkeypatch.setattr(comparisons, "SLICE_TOKENS", 5)
    engine = engine_that_learns()

    async def work(batching):
        for number in range(3):
            await batching.submit(ask(number)).answer()
        await until(lambda: not engine.comparisons)
        before = engine.comparisons.compared
        steps.clear()
        long = batching.submit(ask(10, tokens=100))
        for number in range(4, 9):
            await batching.submit(ask(number, tokens=2)).answer()
        answer = await long.answer()
        ended = len(steps)
        await until(lambda: not engine.comparisons)
        return answer, ended, before

    answer, ended, before = run_async(work, engine)
    assert not any(comparing for comparing, _ in steps[: ended - 1])
    assert len(answer.token_ids) > 50
    assert engine.comparisons.compared > before
    assert max(tokens for comparing, tokens in steps if comparing) <= comparisons.SLICE_TOKENS


def test_a_request_waits_for_one_layer_of_a_comparison_at_most(monkeypatch):
    """A request that comes while a comparison's step runs stops it between two layers; the step is repeated later."""
    engine = engine_that_learns()
    for number in range(4):
        answered(engine, number)
    real, stopped = engine.comparisons.step, []
    calls = iter([False, True])

    def step(pool, interrupt):
        def comes() -> bool:
            coming = next(calls, False)
            stopped.append(coming)
            return coming

        real(pool, comes)

    monkeypatch.setattr(engine.comparisons, "step", step)

    async def work(batching):
        answer = await batching.submit(ask(4)).answer()
        await until(lambda: not engine.comparisons)
        batching._core.check()
        return answer

    run_async(work, engine)
    assert True in stopped
    assert engine.comparisons.failed == 0
    assert engine.comparisons.compared > 0


def test_a_request_takes_the_memory_of_a_comparison_that_is_under_way():
    engine = engine_that_learns()
    for number in range(3):
        answered(engine, number)
    tokens = len(engine.preparer.prepare(ask(0), MethodRequest("full")).prompt)
    limits = BatchingConfig(kv_tokens=2 * (tokens + 60), block_tokens=1)

    async def work(batching):
        await until(lambda: engine.comparisons._running is not None or not engine.comparisons)
        streams = [batching.submit(ask(number)) for number in (4, 5)]
        answers = await asyncio.gather(*(stream.answer() for stream in streams))
        await until(lambda: not engine.comparisons)
        assert batching.stats.preempted == 0
        batching._core.check()
        return answers

    answers = run_async(work, engine, limits)
    assert all(answer.token_ids for answer in answers)
    assert engine.comparisons.compared + engine.comparisons.dropped == 5
    assert engine.comparisons.failed == 0


def test_a_comparison_that_fails_changes_nothing(monkeypatch, caplog):
    engine = engine_that_learns()

    def broken(self, answered, plan):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Comparisons, "_logits", broken)
    for number in range(4):
        assert answered(engine, number).token_ids
    engine.run_comparisons()
    assert engine.comparisons.failed > 0
    assert "comparison failed" in caplog.text


def test_a_segment_that_is_gone_ends_a_comparison(monkeypatch):
    engine = engine_that_learns()
    for number in range(4):
        answered(engine, number)
    real = Comparisons._logits

    def logits(self, answered, plan):
        for record in list(engine.store.records()):
            engine.store.remove(record.id)
        return real(self, answered, plan)

    monkeypatch.setattr(Comparisons, "_logits", logits)
    engine.run_comparisons()
    assert (engine.comparisons.compared, engine.comparisons.failed) == (0, 0)


def test_a_record_serves_until_comparisons_speak_against_it():
    with Engine.load("reader", compare=True) as engine:
        choose = engine.preparer.chooser.choose
        prior = choose(MethodRequest())
        assert (prior.why.value, prior.spec) == ("calibrated", engine.calibration.spec(Quality.BALANCED))
        for _ in range(100):
            engine.comparisons.evidence.take({prior.spec: Compared(0.7, 0.01)}, "acme")
        assert choose(MethodRequest(), "acme").why.value == "switched off"
        assert choose(MethodRequest(prior.spec)).why.value == "asked for"


def test_a_tenant_with_other_answers_has_a_veto():
    engine = engine_that_learns()
    decide(engine, 0.99)
    for _ in range(60):
        engine.comparisons.evidence.take({METHOD: Compared(0.75, 0.01)}, "strange")
        decide(engine, 0.99, count=12)
    choose = engine.preparer.chooser.choose
    assert choose(MethodRequest(), "other").why.value == "learned"
    assert choose(MethodRequest(), "strange").why.value == "switched off"
