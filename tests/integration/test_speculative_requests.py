"""Speculations in the step loop: they delay nobody, leak nothing, and once confirmed they are requests like others."""

import asyncio
import random
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave import BatchingConfig, Engine
from chunkweave.engine.runner import Runner
from chunkweave.errors import DeadlineError, QueueFullError, RequestAbortedError, UnknownRequestError, UsageError
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method_choice import MethodRequest
from tests.integration.test_async_engine import end_of
from tests.integration.test_batching_core import (
    METHODS,
    Driver,
    alone,
    asked,
    run_async,
    settled_engine,
    stored_engine,
    until,
)
from tests.toys import toy_model


@pytest.fixture(scope="module")
def engine() -> Engine:
    return settled_engine()


requests = st.tuples(
    st.lists(st.integers(0, 4), min_size=0, max_size=3, unique=True), st.integers(1, 7), st.sampled_from(METHODS)
)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 12), requests), min_size=1, max_size=4),
    guesses=st.lists(st.tuples(st.integers(0, 12), requests), min_size=1, max_size=4),
    max_running=st.integers(1, 3),
    blocks=st.integers(24, 48),
    step_tokens=st.integers(16, 120),
)
def test_no_speculation_delays_a_request_by_a_step(engine, arrivals, guesses, max_running, blocks, step_tokens):
    """With little memory, few places, small steps: no piece of a request comes in a later step than without.

    It may come in an earlier one: speculations that wait for each other's parts teach the core a pace, too.

    Each core has answered before: its first step beside answers is of answers alone, to learn how long that takes, and
    a speculation may teach it that.
    """
    limits = {"max_running": max_running, "step_tokens": step_tokens, "kv_tokens": 8 * blocks, "block_tokens": 8}

    def steps_of_pieces(with_guesses: bool) -> list[list[int]]:
        driver = Driver(engine, **limits)
        driver.submit(asked([], 4))
        driver.run()
        wanted, pieces = [], []
        for step in range(400):
            for at, (chunks, tokens, method) in guesses if with_guesses else ():
                if at == step:
                    driver.submit(asked(chunks, tokens), method, speculative=True)
            for at, (chunks, tokens, method) in arrivals:
                if at == step:
                    wanted.append(driver.submit(asked(chunks, tokens), method))
                    pieces.append([])
            before = [len(driver.inboxes[number].events) for number in wanted]
            driver.core.step()
            driver.core.check()
            for own, number, seen in zip(pieces, wanted, before, strict=True):
                own += [step] * (len(driver.inboxes[number].events) - seen)
            if step > 12 and not driver.core.busy:
                break
        driver.run()
        return pieces

    for own, without in zip(steps_of_pieces(True), steps_of_pieces(False), strict=True):
        assert len(own) == len(without)
        assert all(step <= later for step, later in zip(own, without, strict=True))


def test_a_speculation_gives_way_and_is_the_same_answer_afterwards(engine):
    guess, other = asked([2, 0, 1], 12), asked([3, 1], 20)
    driver = Driver(engine, max_running=1, step_tokens=64, kv_tokens=512, block_tokens=8)
    number = driver.submit(guess, speculative=True)
    while not driver.inboxes[number].events:
        driver.core.step()
    driver.submit(other)
    driver.core.step()
    assert (driver.core.stats.speculations_preempted, driver.core.stats.speculating) == (1, 1)
    assert driver.core.stats.speculations_running == 0
    driver.core.confirm(number)
    driver.core.confirm(number)
    assert driver.core.stats.speculating == 0
    driver.run()
    for request, answer in zip((guess, other), driver.answers(), strict=True):
        assert answer.token_ids == alone(engine, request, "prefix").token_ids


def test_memory_that_a_request_needs_is_taken_from_speculations_alone(engine):
    grows, guess = asked([0], 60), asked([1, 2], 60)
    prompts = [len(engine.preparer.prepare(one, MethodRequest("prefix")).prompt) for one in (grows, guess)]
    driver = Driver(engine, max_running=2, kv_tokens=sum(prompts) + 16, block_tokens=4)
    driver.submit(guess, speculative=True)
    driver.core.step()
    driver.submit(grows)
    while driver.core.stats.finished == 0:
        driver.core.step()
        driver.core.check()
    assert driver.inboxes[1].last.token_ids == alone(engine, grows, "prefix").token_ids
    assert driver.core.stats.preempted == driver.core.stats.speculations_preempted >= 1
    driver.core.abort(0)
    assert driver.core.stats.blocks_reserved == 0


def test_a_step_of_speculations_is_as_short_as_it_was_asked_to_be(engine):
    driver = Driver(engine, max_running=2, step_tokens=200, speculation_tokens=10)
    number = driver.submit(asked([4, 3, 2], 3), "full", speculative=True)
    driver.core.step()
    assert driver.core.stats.prefilled_tokens == 10
    assert driver.core.stats.pending == 1
    driver.core.confirm(number)
    driver.core.step()
    assert driver.core.stats.prefilled_tokens > 50
    driver.run()
    assert driver.core.stats.pending == 0
    assert BatchingConfig(step_tokens=400).tokens_of_speculations == 400
    assert BatchingConfig(step_tokens=400, speculation_tokens=500).tokens_of_speculations == 400
    assert BatchingConfig(step_tokens=400, speculation_tokens=50).tokens_of_speculations == 50
    with pytest.raises(UsageError):
        BatchingConfig(speculation_tokens=4, max_running=8)


def test_a_confirmed_speculation_takes_its_place_in_the_queue_then(engine):
    driver = Driver(engine, max_running=1, window=0)
    driver.submit(asked([0], 30))
    driver.core.step()
    guess = driver.submit(asked([1], 2), speculative=True)
    before = driver.submit(asked([2], 2))
    driver.core.confirm(guess)
    after = driver.submit(asked([3], 2))
    ended = []
    driver.run(lambda: ended.extend(n for n, box in enumerate(driver.inboxes) if box.last and n not in ended))
    assert ended == [0, before, guess, after]


def test_one_that_runs_when_it_is_confirmed_keeps_nobody_from_memory(engine):
    """A request waits that is too large to fit beside what runs; the speculation that did is behind it from then on."""
    large = asked([4, 3, 2, 1, 0], 2)
    length = len(engine.preparer.prepare(large, MethodRequest("prefix")).prompt)
    driver = Driver(engine, max_running=3, window=0, kv_tokens=length + 12, block_tokens=4)
    driver.submit(asked([], 8))
    guess = driver.submit(asked([], 60), speculative=True)
    driver.core.step()
    assert driver.core.stats.running == 2
    waits = driver.submit(large)
    driver.core.confirm(guess)
    ended = []
    driver.run(lambda: ended.extend(n for n, box in enumerate(driver.inboxes) if box.last and n not in ended))
    assert ended == [0, waits, guess]


def test_time_in_the_queue_counts_from_the_confirmation(engine):
    driver = Driver(engine, max_running=1, queue_timeout_s=5.0)
    driver.submit(asked([0], 100))
    guess = driver.submit(asked([1], 3), speculative=True)
    driver.core.step()
    driver.now = 6.0
    driver.core.step()
    assert driver.inboxes[guess].last is None
    driver.core.confirm(guess)
    driver.now = 10.0
    driver.core.step()
    assert driver.inboxes[guess].last is None
    driver.now = 12.0
    driver.core.step()
    assert isinstance(driver.inboxes[guess].last, DeadlineError)


def test_a_failed_speculation_takes_nobody_along(engine, monkeypatch):
    real = Runner.step
    driver = Driver(engine, step_tokens=512)
    guess = driver.submit(asked([2, 3], 9), speculative=True)

    def step(self, decoding, prefilling, **how):
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(Runner, "step", step)
    driver.core.step()
    monkeypatch.setattr(Runner, "step", real)
    request = driver.submit(asked([0, 1], 9))
    driver.run()
    assert driver.core.stats.tried_again == 1
    for number, chunks in ((guess, [2, 3]), (request, [0, 1])):
        assert driver.inboxes[number].last.token_ids == alone(engine, asked(chunks, 9), "prefix").token_ids


@pytest.mark.slow
def test_random_speculations_confirmations_and_aborts_leak_no_block(engine):
    generator = random.Random(5)
    driver = Driver(engine, max_running=3, step_tokens=64, kv_tokens=640, block_tokens=8)
    requests, aborted = [], 0
    for _ in range(300):
        deed = generator.random()
        number = max(0, len(requests) - 1 - generator.randrange(6))
        try:
            if deed < 0.4 or not requests:
                chunks = generator.sample(range(5), generator.randint(0, 3))
                requests.append((asked(chunks, generator.randint(1, 5)), generator.choice(METHODS)))
                driver.submit(*requests[-1], speculative=generator.random() < 0.6)
            elif deed < 0.6:
                driver.core.confirm(number)
            elif deed < 0.75:
                driver.core.abort(number)
                aborted += 1
        except UnknownRequestError:
            assert driver.inboxes[number].last is not None
        if generator.random() < 0.7:
            driver.core.step()
        driver.core.check()
    driver.run()
    assert aborted > 20
    for (request, method), inbox in zip(requests, driver.inboxes, strict=True):
        if not isinstance(inbox.last, RequestAbortedError):
            assert inbox.last.token_ids == alone(engine, request, method).token_ids


@pytest.mark.parametrize("ended_by", ["abort", "another request"])
def test_what_a_speculation_computed_whole_is_stored_when_it_ends(ended_by):
    engine = Engine(toy_model("llama"))
    engine.generate("When?", max_new_tokens=1)
    driver = Driver(engine, max_running=1, step_tokens=400, speculation_tokens=25)
    guess = driver.submit(asked([3, 1, 2], 5), speculative=True)
    driver.core.step()
    driver.core.step()
    assert driver.core.stats.pending == 1, "it is in the middle of its prefill"
    if ended_by == "abort":
        driver.core.abort(guess)
    else:
        driver.submit(asked([], 2))
        driver.core.step()
    engine.store.check()
    overlapping = engine.generate_batch([asked([3, 4], 3)], method="prefix")[0]
    assert [chunk.kv_source for chunk in overlapping.report.chunks] == ["prefix-exact", "prefix-exact", "computed"]
    fresh = Engine(engine.loaded).generate_batch([asked([3, 4], 3)], method="full")[0]
    assert overlapping.token_ids == fresh.token_ids


@pytest.mark.parametrize("method", ["full", "cacheblend", "cachecraft", "query"])
def test_a_step_that_was_stopped_between_layers_is_made_again(method):
    """Stopped before every layer once: the answers are the same, and so is what is stored, profiles included."""
    request, expected, engine = asked([4, 0, 2], 6), stored_engine(), stored_engine()
    answer = alone(expected, request, method)
    asked_of, limit = [], 0

    def interrupt() -> bool:
        nonlocal limit
        asked_of.append(1)
        if len(asked_of) <= limit:
            return False
        asked_of.clear()
        limit = (limit + 1) % 5
        return True

    driver = Driver(engine, interrupt=interrupt, step_tokens=512, speculation_tokens=20)
    number = driver.submit(request, method, speculative=True)
    driver.run()
    assert driver.core.stats.interrupted >= 4
    assert driver.inboxes[number].last.token_ids == answer.token_ids
    records = {record.id: record for record in expected.store.records()}
    assert {record.id for record in engine.store.records()} == records.keys()
    for record in engine.store.records():
        ours, theirs = record.attention, records[record.id].attention
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.inter == pytest.approx(theirs.inter, rel=1e-4, abs=1e-6)
        kv, own = expected.store.get(record.id), engine.store.get(record.id)
        assert all(torch.allclose(kv.layer(layer), own.layer(layer), atol=1e-4) for layer in range(4))


class HangingLayer:
    """The second layer that is computed hangs until it is let go; notes the layers, and how many tokens are in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[tuple[int, int]] = []
        self._reached, self._gate = threading.Event(), threading.Event()
        real = HuggingFaceModel.qkv

        def qkv(model, layer, hidden):
            self.layers.append((layer, len(hidden)))
            if len(self.layers) == 2:
                self._reached.set()
                self._gate.wait(10)
            return real(model, layer, hidden)

        monkeypatch.setattr(HuggingFaceModel, "qkv", qkv)

    async def reached(self) -> None:
        await asyncio.to_thread(self._reached.wait, 10)

    def let_go(self) -> None:
        self._gate.set()


@pytest.fixture
def hanging(monkeypatch) -> HangingLayer:
    return HangingLayer(monkeypatch)


def test_a_request_that_arrives_stops_the_step_of_a_speculation(model, hanging, monkeypatch):
    """The speculation hangs in a layer until the request has been submitted, and is in no later one before it."""
    engine = Engine(model)

    async def work(batching):
        guess = batching.submit(asked([0, 1], 3), method="full", speculative=True)
        await hanging.reached()
        request = batching.submit(asked([2], 3), method="full")
        hanging.let_go()
        await request.answer()
        assert batching.stats.interrupted == 1
        batching.confirm(guess.id)
        return await guess.answer()

    answer = run_async(work, engine, BatchingConfig(speculation_tokens=21))
    layers = hanging.layers
    assert [layer for layer, _ in layers[:4]] == [0, 1, 0, 1]
    assert layers[1][1] == 21 < layers[2][1]
    monkeypatch.undo()
    assert answer.token_ids == alone(engine, asked([0, 1], 3), "full").token_ids


def test_a_tenant_that_asks_seldom_stops_the_step_of_another(model, hanging, monkeypatch):
    """The others' step hangs in a layer until the request has been submitted; its tenant's next one waits its turn."""
    engine = Engine(model)

    async def work(batching):
        others = [batching.submit(asked([n, n + 1], 3), method="full", tenant="acme") for n in range(2)]
        await hanging.reached()
        request = batching.submit(asked([2], 3), method="full", tenant="beta")
        hanging.let_go()
        first = await request.answer()
        assert batching.stats.interrupted == 1
        batching.check()
        return [first, *[await one.answer() for one in others]]

    answers = run_async(work, engine, BatchingConfig(step_tokens=21))
    assert [layer for layer, _ in hanging.layers[:4]] == [0, 1, 0, 1]
    monkeypatch.undo()
    for answer, chunks in zip(answers, ([2], [0, 1], [1, 2]), strict=True):
        assert answer.token_ids == alone(engine, asked(chunks, 3), "full").token_ids


def test_speculations_take_no_place_in_a_queue_from_requests(engine, gate):
    async def work(batching):
        runs = batching.submit(asked([0], 2))
        await until(lambda: batching.stats.running == 1)
        guesses = [batching.submit(asked([1], 2), speculative=True) for _ in range(2)]
        with pytest.raises(QueueFullError):
            batching.submit(asked([1], 2), speculative=True)
        waiting = [batching.submit(asked([n], 2)) for n in (2, 3)]
        assert (batching.stats.pending, batching.stats.speculating) == (5, 2)
        with pytest.raises(QueueFullError, match="max_waiting"):
            batching.submit(asked([1], 2))
        with pytest.raises(QueueFullError):
            batching.confirm(guesses[0].id)
        gate.set()
        for stream in (runs, *waiting):
            await stream.answer()
        batching.confirm(guesses[0].id)
        await guesses[0].answer()
        assert guesses[0].begun
        with pytest.raises(UnknownRequestError):
            batching.confirm(guesses[0].id)
        with suppress(UnknownRequestError):  # nothing else waits, so it may have been computed to its end by now
            batching.abort(guesses[1].id)
        error = await end_of(guesses[1])
        assert error is None or (isinstance(error, RequestAbortedError) and guesses[1].failed)
        assert (batching.stats.pending, batching.stats.speculating, batching.stats.blocks_reserved) == (0, 0, 0)

    run_async(work, engine, BatchingConfig(max_waiting=2, max_running=1))
