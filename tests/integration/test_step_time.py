"""Others' prefills hold a request that decodes for `step_time` at most, and the end of a layer; answers stay the same.

The clock is the test's: a layer takes as long as it has rows.
"""

from itertools import pairwise

import pytest

from chunkweave import Chunk, Engine, Request, SamplingParams
from chunkweave.engine.request_state import RequestState
from chunkweave.fusion.loop import PassRun
from chunkweave.planning.method_choice import MethodRequest
from tests.integration.test_batching_core import Driver, settled_engine

LAYER_S, ROW_S = 0.0005, 0.0001
STEP_TIME_S = 0.02
LONG = [
    Chunk(" ".join(f"In year {100 * part + year} the pier was {year} feet long." for year in range(9)), f"pier {part}")
    for part in range(3)
]
SHORT = Chunk("The harbour of Skerrow was founded in 1871.", "history")
ANSWER_TOKENS = 80


class SlowLayers:
    """A clock that the layers move, and the longest layer so far."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest_s = 0.0
        next_layer = PassRun.next_layer

        def slow(run: PassRun) -> None:
            took_s = LAYER_S + ROW_S * len(run.hidden)
            next_layer(run)
            driver.now += took_s
            self.longest_s = max(self.longest_s, took_s)

        monkeypatch.setattr(PassRun, "next_layer", slow)


def long_request() -> Request:
    return Request("How long was the pier?", [LONG[2], LONG[0], LONG[1]], sampling=SamplingParams(max_new_tokens=3))


def decoding() -> Request:
    return Request("When was it founded?", [SHORT], sampling=SamplingParams(max_new_tokens=ANSWER_TOKENS))


def beside_an_answer(engine: Engine, monkeypatch) -> tuple[Driver, SlowLayers, list[float]]:
    """A driver with a request that decodes, the layers' clock, and the times of the request's events, as they come."""
    driver = Driver(engine, max_running=3, step_tokens=512, step_time_s=STEP_TIME_S)
    clock = SlowLayers(driver, monkeypatch)
    number = driver.submit(decoding(), "prefix")
    state: RequestState = driver.core._scheduler.requests[number]
    times, deliver = [], state.deliver
    state.deliver = lambda event: (times.append(driver.now), deliver(event))
    while len(times) < 5:
        driver.core.step()
    return driver, clock, times


def own_s(engine: Engine) -> float:
    """What the next token of one answer takes."""
    return engine.loaded.model.geometry.num_layers * (LAYER_S + ROW_S)


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("kind", ["prefix", "full", "cacheblend", "query", "background"])
def test_an_answer_is_held_for_step_time_and_a_layer_at_most(kind, monkeypatch):
    engine = settled_engine([] if kind in ("background", "prefix") else LONG, ratio=0.5)
    driver, clock, times = beside_an_answer(engine, monkeypatch)
    if kind == "background":
        other = driver.precompute(Chunk(" ".join(chunk.text for chunk in LONG)))
    else:
        other = driver.submit(long_request(), kind)
    beside = 0
    while driver.inboxes[other].last is None and len(times) < ANSWER_TOKENS:
        before = driver.core.stats
        driver.core.step()
        driver.core.check()
        beside += driver.core.stats.prefilled_tokens > before.prefilled_tokens
    assert beside > 2, "it takes several steps"
    driver.run()
    assert max(gaps(times)) <= STEP_TIME_S + clock.longest_s + own_s(engine)
    monkeypatch.undo()
    answers = driver.answers()
    assert answers[0].token_ids == engine.generate_batch([decoding()], method="prefix")[0].token_ids
    if kind != "background":
        assert answers[1].token_ids == engine.generate_batch([long_request()], method=kind)[0].token_ids


def test_a_pass_that_takes_longer_than_planned_is_left_between_two_layers_and_continues(monkeypatch):
    """The machine is suddenly ten times slower: the step that was planned before gives the answer its token."""
    engine = settled_engine([], ratio=0.5)
    driver, clock, times = beside_an_answer(engine, monkeypatch)
    other = driver.submit(long_request(), "full")
    for _ in range(6):
        driver.core.step()
    monkeypatch.setattr("tests.integration.test_step_time.ROW_S", 10 * ROW_S)
    job = driver.core._scheduler.requests[other].job
    driver.core.step()
    assert job.open_pass is not None
    assert 0 < job.open_pass.run.layer < engine.loaded.model.geometry.num_layers
    driver.run()
    assert max(gaps(times)) <= STEP_TIME_S + clock.longest_s + own_s(engine)
    monkeypatch.undo()
    assert driver.answers()[other].token_ids == engine.generate_batch([long_request()], method="full")[0].token_ids


def test_a_prefill_alone_takes_whole_steps(monkeypatch):
    driver = Driver(settled_engine([], ratio=0.5), max_running=3, step_tokens=256, step_time_s=STEP_TIME_S)
    SlowLayers(driver, monkeypatch)
    other = driver.submit(long_request(), "full")
    driver.core.step()
    assert driver.core.stats.prefilled_tokens == 256
    driver.run()
    assert driver.inboxes[other].last is not None


def test_a_quiet_tenants_answer_takes_twice_as_long_beside_loud_prefills_and_answers(monkeypatch):
    engine = settled_engine([], ratio=0.5)
    driver = Driver(engine, max_running=6, step_tokens=64)
    SlowLayers(driver, monkeypatch)

    def enter(number: int, request: Request, tenant: str, times: list[float]) -> None:
        prepared = driver.core.fitting(engine.preparer.prepare(request, MethodRequest("full")))
        driver.core.submit(
            RequestState(number, prepared, lambda _: times.append(driver.now), driver.now, tenant=tenant)
        )

    alone: list[float] = []
    enter(0, decoding(), "quiet", alone)
    while driver.core.busy:
        driver.core.step()
    for number in range(1, 5):
        enter(number, decoding(), "loud", [])
    for number in range(5, 30):
        enter(number, long_request(), "loud", [])
    for _ in range(60):
        driver.core.step()
    beside: list[float] = []
    enter(30, decoding(), "quiet", beside)
    while len(beside) < ANSWER_TOKENS:
        driver.core.step()
    ratio = (beside[-1] - beside[0]) / (alone[ANSWER_TOKENS - 1] - alone[0])
    assert 1.5 < ratio < 2.3
