"""Prefills whose segments are still being read, beside others: they go on by layers, and no step waits for one."""

import threading

import pytest
import torch

from chunkweave import Engine
from chunkweave.engine.core import _plan_again
from chunkweave.kv.segment import SegmentLost
from chunkweave.planning.cost import CostModel
from tests.integration.test_batching_core import Driver, alone, asked, engine_over_a_slow_level, settled_engine
from tests.toys import toy_model

LAYERS = 4


class Gated:
    """An engine whose chunks lie on a level that gives of each layer nothing until it is `opened`."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._opened = LAYERS
        self.broken_from = LAYERS
        self.engine = engine_over_a_slow_level(
            toy_model("llama"), lambda name, source: GatedSegment(self, name, source)
        )

    def open(self, layers: int) -> None:
        """From now on the first `layers` layers come."""
        with self._moved:
            self._opened = layers
            self._moved.notify_all()

    def wait_for(self, layer: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: layer < self._opened, 20)


class GatedSegment:
    def __init__(self, gated: Gated, name: str, source) -> None:
        self._gated, self._name, self._source = gated, name, source
        self.tokens, self.nbytes, self.keys_at = source.tokens, source.nbytes, source.keys_at

    def layer(self, index: int, scratch=None):
        self._gated.wait_for(index)
        if index >= self._gated.broken_from:
            raise SegmentLost(self._name, "broken")
        return self._source.layer(index, scratch)


@pytest.fixture
def gated():
    gated = Gated()
    gated.open(0)
    yield gated
    gated.open(LAYERS)
    gated.engine.store.check()
    gated.engine.store.close()


@pytest.fixture(scope="module")
def reference() -> Engine:
    return settled_engine(system=False)


def beside_a_stream(gated: Gated, **limits) -> Driver:
    """A driver with a request that decodes."""
    driver = Driver(gated.engine, prefetch_requests=0, **limits)
    driver.submit(asked([], 60), "full")
    driver.core.step()
    return driver


def layers_run(driver: Driver, number: int) -> int:
    """How far a prefill is; those that are read to memory have as much time as they need."""
    job = driver.core._scheduler.requests[number].job
    return 0 if job is None or job.open_pass is None else job.open_pass.run.layer


def step_until(driver: Driver, reached, most: int = 2000) -> None:
    pause = threading.Event()
    for _ in range(most):
        if reached():
            return
        driver.core.step()
        driver.core.check()
        pause.wait(0.001)
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("method", ["cacheblend", "cachecraft", "query", "full-reuse"])
def test_a_prefill_goes_through_the_layers_that_are_in_while_others_decode(gated, reference, method):
    driver = beside_a_stream(gated)
    request = asked([1, 2], 6)
    number = driver.submit(request, method)
    reached = []
    for opened in range(1, LAYERS):
        gated.open(opened)
        step_until(driver, lambda opened=opened: layers_run(driver, number) == opened)
        decoded = driver.core.stats.decoded_tokens
        for _ in range(3):
            driver.core.step()
        reached.append(layers_run(driver, number))
        assert driver.core.stats.decoded_tokens == decoded + 3, "nobody waits for a layer"
    assert reached == [1, 2, 3]
    gated.open(LAYERS)
    driver.run()
    answer = driver.answers()[number]
    single = alone(reference, request, method)
    assert answer.token_ids == single.token_ids
    assert answer.report.recomputed_tokens == single.report.recomputed_tokens
    assert {chunk.tier for chunk in answer.report.chunks[1:] if chunk.variant} == {"slow"}


def test_prefills_that_load_share_a_steps_tokens_with_all_others(gated):
    gated.open(LAYERS)
    driver = beside_a_stream(gated, max_running=4, step_tokens=16)
    step_until(driver, lambda: driver.core.stats.decoded_tokens > 0)
    gated.open(1)
    for chunks in ([0, 1], [1, 2], [2, 3]):
        driver.submit(asked(chunks, 2), "cacheblend")
    work: list[int] = []
    step_layers = gated.engine.runner.step_layers

    def counted(job, tokens, **more):
        ready = job.tokens_through(1)
        done = step_layers(job, tokens, **more)
        work[-1] += done - ready if done == ready > tokens else done  # a layer may take more than a step has
        return done

    gated.engine.runner.step_layers = counted
    step_until(driver, lambda: work.append(0) or [layers_run(driver, one) for one in (1, 2, 3)] == [1, 1, 1])
    gated.open(LAYERS)
    while driver.core.busy:
        work.append(0)
        driver.core.step()
    assert 0 < max(work) <= 15, "one token is the stream's"


def test_a_newcomer_does_not_wait_until_a_lone_prefill_is_read(gated):
    """Alone it waits for its next layer only."""
    driver = Driver(gated.engine, prefetch_requests=0)
    slow = driver.submit(asked([1, 2], 3), "cacheblend")
    gated.open(1)
    driver.core.step()
    assert layers_run(driver, slow) == 1
    quick = driver.submit(asked([], 3), "full")
    step_until(driver, lambda: driver.inboxes[quick].last is not None)
    assert layers_run(driver, slow) == 1
    gated.open(LAYERS)
    driver.run()
    assert len(driver.answers()) == 2


def test_a_segment_that_breaks_behind_layers_that_were_run_is_computed(gated):
    driver = beside_a_stream(gated)
    number = driver.submit(asked([1, 2], 6), "full-reuse")
    held = {record.id for record in gated.engine.store.records()}
    gated.broken_from = 2
    gated.open(2)
    step_until(driver, lambda: layers_run(driver, number) == 2)
    gated.open(LAYERS)
    driver.run()
    sources = {chunk.kv_source for chunk in driver.answers()[number].report.chunks[1:]}
    assert sources == {"computed"}
    assert len(held - {record.id for record in gated.engine.store.records()}) == 2, "both are dropped"
    full = Engine(toy_model("llama")).generate_batch([asked([1, 2], 6)], method="full")[0]
    assert driver.answers()[number].token_ids == full.token_ids


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_layer_that_does_not_come_is_given_up_though_others_are_to_be_computed(gated, prefetched):
    gated.engine.runner.cost = CostModel((0,), (1,), ((0.002,),), 1)
    driver = Driver(gated.engine, prefetch_requests=int(prefetched), max_running=2)
    stream = driver.submit(asked([], 300), "full")
    if prefetched:
        driver.submit(asked([], 20), "full")  # what comes behind it waits, and is read ahead
    driver.core.step()
    number = driver.submit(asked([1, 2], 6), "full-reuse")
    step_until(driver, lambda: driver.inboxes[number].last is not None)
    assert driver.inboxes[stream].last is None, "something else was to be done all the time"
    assert {chunk.kv_source for chunk in driver.inboxes[number].last.report.chunks[1:]} == {"computed"}


def test_a_level_that_hangs_is_left_alone_and_few_threads_hang_with_it(gated):
    gated.engine.runner.cost = CostModel((0,), (1,), ((0.002,),), 1)
    driver = Driver(gated.engine, prefetch_requests=0, max_running=2)
    numbers = [driver.submit(asked([0, 1, 2, 3], 4), "full-reuse") for _ in range(3)]
    driver.run()
    assert {chunk.kv_source for chunk in driver.inboxes[numbers[0]].last.report.chunks[1:]} == {"computed"}
    hanging = [thread for thread in threading.enumerate() if thread.name == "chunkweave-loader"]
    assert len(hanging) <= 4, "three late layers, and one that was begun meanwhile"


class LateForAMoment:
    """A job of which something is late when it is asked first, and not any more the next time."""

    def __init__(self) -> None:
        self._answers = [None, SegmentLost("a", "late")]
        self.without: list[SegmentLost] = []

    @property
    def lost(self) -> SegmentLost | None:
        return self._answers.pop()

    def plan_without(self, lost: SegmentLost) -> None:
        self.without.append(lost)


def test_what_was_late_may_have_come_in_a_moment_later():
    job = LateForAMoment()
    _plan_again(job)
    assert [lost.segment for lost in job.without] == ["a"]


def test_what_is_lost_before_the_step_is_planned_again_and_disturbs_nobody(gated, monkeypatch):
    driver = beside_a_stream(gated)
    numbers = [driver.submit(asked(chunks, 6), "full-reuse") for chunks in ([0, 1], [2, 3])]
    driver.core.step()
    scheduler = driver.core._scheduler

    def groups_behind_a_loss():
        monkeypatch.undo()
        for number in numbers:
            for segment in scheduler.requests[number].job._sources._from_below():
                segment.fail(SegmentLost(segment.name, "broken"))
        return scheduler.groups()

    monkeypatch.setattr(scheduler, "groups", groups_behind_a_loss)
    driver.core.step()
    assert driver.core.stats.tried_again == 0
    gated.open(LAYERS)
    driver.run()
    assert len(driver.answers()) == 3


def test_an_abort_in_the_middle_of_a_pass_leaves_nothing(gated):
    driver = beside_a_stream(gated)
    number = driver.submit(asked([1, 2], 6), "cacheblend")
    gated.open(2)
    step_until(driver, lambda: layers_run(driver, number) == 2)
    gated.open(LAYERS)
    driver.core.abort(number)
    driver.run()
    segments = [record.id for record in gated.engine.store.records()]
    assert not any(level.store.is_claimed(one) for level in gated.engine.store.levels for one in segments)


@torch.inference_mode()
def test_a_speculation_stops_between_two_layers_and_goes_on(gated, reference):
    urgent = threading.Event()
    driver = Driver(gated.engine, prefetch_requests=0, interrupt=urgent.is_set)
    request = asked([1, 2], 4)
    number = driver.submit(request, "cacheblend", speculative=True)
    gated.open(2)
    step_until(driver, lambda: layers_run(driver, number) == 2)
    gated.open(LAYERS)
    urgent.set()
    for _ in range(3):
        driver.core.step()
    assert layers_run(driver, number) == 2
    urgent.clear()
    driver.run()
    assert driver.answers()[number].token_ids == alone(reference, request, "cacheblend").token_ids
