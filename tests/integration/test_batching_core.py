"""The step loop: many requests give what each gives alone, blocks are bounded and none leaks, nobody is forgotten."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave import Answer, AsyncEngine, Chunk, Engine, Request, ReuseConfig, SamplingParams, StreamEvent
from chunkweave.engine.core import BatchingCore
from chunkweave.engine.request_state import RequestState
from chunkweave.engine.runner import Runner
from chunkweave.errors import (
    DeadlineError,
    PromptTooLongError,
    RequestAbortedError,
    RequestFailedError,
    UnknownRequestError,
    UsageError,
)
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.loading import LoadedModel
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from tests.toys import Link, ThrottledTier, toy_model

CHUNKS = [
    Chunk("The harbour of Skerrow was founded in 1871.", "history"),
    Chunk("Pilots board ships two miles west of the lighthouse.", "pilots"),
    Chunk("The ferry leaves at seven, at noon and at six.", "ferry"),
    Chunk("Nobody fishes behind the old wall any more, since the water there is too shallow.", "fish"),
    Chunk("The keeper of the light writes down every ship that passes.", "keeper"),
]
STORED = CHUNKS[:4]
METHODS = ("cacheblend", "cachecraft", "query", "prefix", "full")


def settled_engine(
    stored: Sequence[Chunk] = STORED, *, ratio: float = 0.3, system: bool = True, **options: Any
) -> Engine:
    """The system part, if wanted, and chunks are stored, and nothing is added: that decides what methods reuse.
    Each chunk has one variant.
    """
    engine = Engine(toy_model("llama"), reuse=ReuseConfig(recompute_ratio=ratio), **options)
    engine.precompute(stored)
    if system:
        engine.generate("When?", max_new_tokens=1)
    engine.runner.store_new = lambda prefilled: 0
    engine.runner.store_computed = lambda job: 0
    return engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return settled_engine()


def stored_engine() -> Engine:
    """Four of five chunks are stored, and so is what else is computed."""
    engine = Engine(toy_model("llama"), reuse=ReuseConfig(recompute_ratio=0.3))
    engine.precompute(STORED)
    return engine


def engine_over_a_slow_level(
    loaded: LoadedModel,
    seen_as: Callable[[str, SegmentSource], SegmentSource],
    link: Link | None = None,
    **options: Any,
) -> Engine:
    """An engine whose chunks lie below a memory that is empty; a segment is read there as `seen_as` makes it."""
    host = SegmentStore(HostTier(), budget_bytes=1 << 30)
    tier = ThrottledTier(link or Link(1e12))
    slow = SegmentStore(tier, budget_bytes=1 << 30)
    store = TieredStore([Level("host", host), Level("slow", slow, background=True)])
    engine = Engine(loaded, store=store, **{"reuse": ReuseConfig(recompute_ratio=0.3), **options})
    engine.precompute(STORED)
    store.flush(5)
    host.clear()
    real = tier.get
    tier.get = lambda segment: (source := real(segment)) and seen_as(segment, source)
    return engine


def run_async(
    work: Callable[[AsyncEngine], Awaitable[Any]], engine: Engine, limits: BatchingConfig | None = None
) -> Any:
    """What `work` returns, given an asynchronous engine that is closed behind it."""

    async def main() -> Any:
        async with AsyncEngine(engine, limits) as batching:
            return await work(batching)

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends, "it never came"
        await asyncio.sleep(0.001)


class Inbox:
    """What one request was delivered."""

    def __init__(self) -> None:
        self.events: list[StreamEvent | Exception] = []

    def __call__(self, event: StreamEvent | Exception) -> None:
        self.events.append(event)

    @property
    def last(self) -> Answer | Exception | None:
        event = self.events[-1] if self.events else None
        return event.answer if isinstance(event, StreamEvent) else event


class Driver:
    """A core, with a clock that stands still unless it is set, and what its requests were delivered."""

    def __init__(self, engine: Engine, *, interrupt: Callable[[], bool] | None = None, **limits) -> None:
        self.now = 0.0
        self.engine = engine
        self.core = BatchingCore(engine.parts, BatchingConfig(**limits), clock=lambda: self.now, interrupt=interrupt)
        self.inboxes: list[Inbox] = []
        self.states: list[RequestState] = []

    def submit(
        self, request: Request, method: str = "prefix", deadline_s: float | None = None, *, speculative: bool = False
    ) -> int:
        prepared = self.core.fitting(self.engine.preparer.prepare(request, MethodRequest(method)))
        number = len(self.inboxes)
        self.inboxes.append(Inbox())
        inbox = self.inboxes[-1]
        self.states.append(RequestState(number, prepared, inbox, self.now, deadline_s, speculative=speculative))
        self.core.submit(self.states[-1])
        return number

    def precompute(self, chunk: Chunk) -> int:
        (prepared,) = map(self.core.fitting, self.engine.preparer.prepare_beforehand(chunk))
        self.inboxes.append(Inbox())
        self.core.submit(RequestState(len(self.inboxes) - 1, prepared, self.inboxes[-1], self.now, background=True))
        return len(self.inboxes) - 1

    def run(self, each: Callable[[], None] = lambda: None, *, most: int = 3000) -> None:
        for _ in range(most):
            if not self.core.busy:
                break
            self.core.step()
            self.core.check()
            each()
        assert not self.core.busy
        assert self.core.stats.blocks_reserved == 0

    def answers(self) -> list[Answer]:
        assert all(isinstance(inbox.last, Answer) for inbox in self.inboxes), [box.last for box in self.inboxes]
        return [inbox.last for inbox in self.inboxes]


def asked(chunks: list[int], tokens: int, **sampling) -> Request:
    return Request(
        f"When does number {len(chunks)} leave?",
        [CHUNKS[i] for i in chunks],
        sampling=SamplingParams(max_new_tokens=tokens, **sampling),
    )


def alone(engine: Engine, request: Request, method: str) -> Answer:
    return engine.generate_batch([request], method=method)[0]


requests = st.tuples(
    st.lists(st.integers(0, 4), min_size=0, max_size=4, unique=True), st.integers(1, 9), st.sampled_from(METHODS)
)


@settings(max_examples=30, deadline=None)
@given(
    mix=st.lists(st.tuples(requests, st.integers(0, 4)), min_size=2, max_size=6),
    step_tokens=st.integers(5, 200),
    blocks=st.integers(24, 60),
)
def test_a_batch_gives_token_for_token_what_single_requests_give(engine, mix, step_tokens, blocks):
    """Arriving at different steps, in slices of any size, with so little memory that some are preempted."""
    driver = Driver(engine, max_running=4, step_tokens=step_tokens, kv_tokens=8 * blocks, block_tokens=8)
    for (chunks, tokens, method), steps in mix:
        driver.submit(asked(chunks, tokens), method)
        for _ in range(steps):
            driver.core.step()
    driver.run()
    for ((chunks, tokens, method), _), answer, inbox in zip(mix, driver.answers(), driver.inboxes, strict=True):
        single = alone(engine, asked(chunks, tokens), method)
        assert answer.token_ids == single.token_ids
        assert answer.finish_reason == single.finish_reason
        assert answer.report.recomputed_tokens == single.report.recomputed_tokens
        assert "".join(event.text for event in inbox.events) == answer.text == single.text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_preempted_request_goes_on_with_the_same_tokens(engine, method, temperature):
    sampling = {"temperature": temperature, "seed": 7}
    requests = [asked([2, 0, 1], 40, **sampling), asked([3, 1], 40, **sampling), asked([4, 0], 40, **sampling)]
    prompts = [len(engine.preparer.prepare(request, MethodRequest(method)).prompt) for request in requests]
    driver = Driver(engine, max_running=3, step_tokens=64, kv_tokens=sum(prompts) + 40, block_tokens=4)
    for request in requests:
        driver.submit(request, method)
    driver.run()
    assert driver.core.stats.preempted >= 1
    for request, answer in zip(requests, driver.answers(), strict=True):
        single = alone(engine, request, method)
        assert answer.token_ids == single.token_ids
        assert answer.report.prompt_tokens == single.report.prompt_tokens


@pytest.mark.parametrize("method", ["cacheblend", "cachecraft", "query"])
def test_a_preempted_request_is_woven_as_before_though_more_is_stored_by_then(method):
    """Of its three chunks one is computed and stored; a new plan would reuse it."""
    first, second = asked([], 60), asked([2, 4, 0], 60)

    engine = stored_engine()
    prompts = [len(engine.preparer.prepare(request, MethodRequest(method)).prompt) for request in (first, second)]
    driver = Driver(engine, max_running=2, kv_tokens=sum(prompts) + 60, block_tokens=4)
    for request in (first, second):
        driver.submit(request, method)
    driver.run()
    assert driver.core.stats.preempted >= 1
    assert driver.answers()[1].token_ids == alone(stored_engine(), second, method).token_ids


def test_a_thousand_random_submissions_and_aborts_leak_no_block(engine):
    generator = random.Random(11)
    driver = Driver(engine, max_running=4, step_tokens=96, kv_tokens=960, block_tokens=8)
    aborted = 0
    for _ in range(1000):
        if generator.random() < 0.5:
            chunks = generator.sample(range(5), generator.randint(0, 3))
            driver.submit(asked(chunks, generator.randint(1, 6)), generator.choice(METHODS))
        else:
            number = max(0, len(driver.inboxes) - generator.randrange(8))
            try:
                driver.core.abort(number)
                aborted += 1
            except UnknownRequestError:
                assert number == len(driver.inboxes) or driver.inboxes[number].last is not None
        if generator.random() < 0.7:
            driver.core.step()
        driver.core.check()
    driver.run()
    driver.core.pool.check()
    assert aborted > 100
    for inbox in driver.inboxes:
        assert isinstance(inbox.last, Answer | RequestAbortedError)
    engine.store.check()
    assert driver.core.stats.finished + aborted == len(driver.inboxes)


def test_nobody_starves_behind_a_stream_of_newer_and_better_cached_requests(engine):
    """The first is long, not cached, and fits only when half of the others are gone."""
    driver = Driver(engine, max_running=3, step_tokens=64, kv_tokens=512, block_tokens=8, window=4)
    driver.submit(asked([1], 12))
    first = driver.submit(asked([4, 3, 2, 1, 0], 4), "full")
    served_before = 0
    for _ in range(40):
        driver.submit(asked([0, 1], 3))
    while driver.inboxes[first].last is None:
        driver.core.step()
    served_before = sum(box.last is not None for box in driver.inboxes[first + 1 :])
    assert served_before <= 4 + 3
    driver.run()


def test_a_failed_batch_is_tried_once_more_each_request_for_itself(engine, monkeypatch):
    real, failures = Runner.step, []

    def step(self, decoding, prefilling, **_):
        if len(decoding) >= 2 and not failures:
            failures.append(len(decoding))
            raise RuntimeError("a kernel failed")
        return real(self, decoding, prefilling)

    monkeypatch.setattr(Runner, "step", step)
    driver = Driver(engine, step_tokens=512)
    requests = [asked([2, 0], 9), asked([1, 3], 9), asked([], 9)]
    for request in requests:
        driver.submit(request, "cacheblend")
    driver.run()
    assert failures == [3]
    assert driver.core.stats.tried_again == 3
    for request, answer in zip(requests, driver.answers(), strict=True):
        assert answer.token_ids == alone(engine, request, "cacheblend").token_ids


def test_who_fails_twice_takes_nobody_along(engine, monkeypatch):
    real = Runner.step
    driver = Driver(engine, step_tokens=512)
    good = driver.submit(asked([0, 1], 9))
    poison = driver.submit(asked([2, 3], 9))
    length = len(engine.preparer.prepare(asked([2, 3], 9), MethodRequest("prefix")).prompt)

    def step(self, decoding, prefilling, **_):
        if any(length + 3 <= one.position <= length + 9 for one in decoding):
            raise RuntimeError("this one always fails")
        return real(self, decoding, prefilling)

    monkeypatch.setattr(Runner, "step", step)
    driver.run()
    assert isinstance(driver.inboxes[poison].last, RequestFailedError)
    assert isinstance(driver.inboxes[poison].last.__cause__, RuntimeError)
    assert "this one always fails" in str(driver.inboxes[poison].last)
    monkeypatch.undo()
    assert driver.inboxes[good].last.token_ids == alone(engine, asked([0, 1], 9), "prefix").token_ids
    assert driver.core.stats.failed == 1


def test_deadlines_end_waiting_and_running_requests(engine):
    driver = Driver(engine, max_running=1, queue_timeout_s=5.0)
    running = driver.submit(asked([0], 100), deadline_s=9.0)
    waiting = driver.submit(asked([1], 100))
    driver.core.step()
    driver.now = 6.0
    driver.core.step()
    assert isinstance(driver.inboxes[waiting].last, DeadlineError)
    assert driver.inboxes[running].last is None
    driver.now = 9.5
    driver.run()
    assert isinstance(driver.inboxes[running].last, DeadlineError)
    assert driver.core.stats.timed_out == 2


def test_a_request_larger_than_the_memory_is_refused_and_one_alone_always_ends(engine):
    driver = Driver(engine, kv_tokens=96, block_tokens=8)
    with pytest.raises(PromptTooLongError, match="kv_tokens"):
        driver.submit(asked([0, 1, 2, 3, 4], 5))
    driver.submit(asked([], 400))
    driver.run()
    [answer] = driver.answers()
    assert answer.report.prompt_tokens + len(answer.token_ids) <= 96


def test_a_wrong_plan_is_the_requests_own_fault(engine):
    """The toy has 4 layers, which is not checked here: no second try would help."""
    other = Engine(engine.loaded, store=engine.store, reuse=ReuseConfig(check_layers=(9,)))
    other.preparer.chooser = replace(other.preparer.chooser, num_layers=None)
    driver = Driver(other)
    number = driver.submit(asked([2, 0], 5), "cacheblend")
    driver.run()
    assert isinstance(driver.inboxes[number].last, UsageError)
    assert driver.core.stats.tried_again == 0


LARGE = Chunk("The keeper of the light writes down every ship that passes the northern cape in a storm. " * 12, "log")


def test_a_stream_gets_a_token_in_every_step_while_large_chunks_are_computed_in_the_background():
    engine = Engine(toy_model("llama"))
    driver = Driver(engine, max_running=2, step_tokens=32)
    stream = driver.submit(asked([0], 60))
    while not driver.inboxes[stream].events:
        driver.core.step()
    system = engine.builder.opening()[-1]  # the stream's request has stored it
    (beforehand,) = engine.preparer.prepare_beforehand(LARGE)
    tokens = len(beforehand.prompt) - len(system)
    assert tokens > 6 * 32
    ahead, steps = driver.precompute(LARGE), 0
    while driver.inboxes[ahead].last is None:
        before = driver.core.stats
        driver.core.step()
        driver.core.check()
        steps += 1
        assert driver.core.stats.decoded_tokens == before.decoded_tokens + 1
        assert driver.core.stats.prefilled_tokens - before.prefilled_tokens <= 31, "in slices, as any prefill"
    assert steps <= 2 + -(-tokens // 31), "it takes what the stream leaves but for a careful start, and to measure"
    assert not list(engine.preparer.prepare_beforehand(LARGE)), "it is stored"
    driver.run()
    assert driver.answers()[0].token_ids == alone(Engine(toy_model("llama")), asked([0], 60), "prefix").token_ids


def test_whoever_asks_goes_before_what_is_computed_in_the_background():
    engine = Engine(toy_model("llama"))
    driver = Driver(engine, max_running=1, step_tokens=32, queue_timeout_s=5.0)
    background = [driver.precompute(LARGE), driver.precompute(CHUNKS[0])]
    driver.core.step()
    assert driver.core.stats.prefilled_tokens == 32
    asking = [driver.submit(asked([1], 3)), driver.submit(asked([2], 3))]
    for number in asking:
        while driver.inboxes[number].last is None:
            driver.core.step()
            driver.core.check()
        assert not any(driver.inboxes[one].events for one in background)
    assert driver.core.stats.preempted == 1
    driver.now = 100.0
    driver.run()
    assert all(isinstance(driver.inboxes[one].last, Answer) for one in background), "it waits as long as it must"


def test_other_prefills_go_before_what_runs_in_the_background_already():
    engine = Engine(toy_model("llama"))
    driver = Driver(engine, max_running=4, step_tokens=32)
    background = driver.precompute(LARGE)
    driver.core.step()
    driver.core.step()
    asking = driver.submit(asked([1, 2, 3], 1))
    tokens = len(engine.preparer.prepare(asked([1, 2, 3], 1), MethodRequest("prefix")).prompt)
    steps = 0
    while driver.inboxes[asking].last is None:
        driver.core.step()
        steps += 1
    assert steps <= -(-tokens // 32)  # the system part may be stored by then
    assert driver.core.stats.running == 1
    driver.run()
    assert isinstance(driver.inboxes[background].last, Answer)


def test_a_step_in_the_background_alone_is_stopped_when_somebody_asks():
    engine = Engine(toy_model("llama"))
    urgent = [False]
    driver = Driver(engine, interrupt=lambda: urgent[0], max_running=2, step_tokens=64)
    driver.precompute(LARGE)
    urgent[0] = True
    driver.core.step()
    assert (driver.core.stats.interrupted, driver.core.stats.prefilled_tokens) == (1, 0)
    urgent[0] = False
    driver.run()
    stored = Engine(toy_model("llama"))
    stored.precompute([LARGE])
    segments = {record.id for record in stored.store.records()}
    assert segments == {record.id for record in engine.store.records()}
    for segment in segments:
        torch.testing.assert_close(engine.store.get(segment).kv, stored.store.get(segment).kv)
