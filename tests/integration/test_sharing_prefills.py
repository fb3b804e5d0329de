"""Requests that need what another one's prefill computes wait for it: each part is computed once, and none hangs."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave import Answer, Engine, Request, SamplingParams
from chunkweave.engine.runner import Runner
from chunkweave.errors import ChunkweaveError, DeadlineError, RequestAbortedError, RequestFailedError
from tests.integration.test_batching_core import CHUNKS, Driver, alone, asked
from tests.toys import toy_model


def computed(answers: list[Answer]) -> Counter[tuple[str, ...]]:
    """How often each chunk was computed, by the path that it ends."""
    counts: Counter[tuple[str, ...]] = Counter()
    for answer in answers:
        path: tuple[str, ...] = ()
        for chunk in answer.report.chunks:
            path = (*path, chunk.id)
            counts[path] += chunk.kv_source == "computed"
    return counts


def six(chunks: list[int], *, tokens: int = 3) -> list[Request]:
    return [
        Request(f"When is it {n}?", [CHUNKS[i] for i in chunks], sampling=SamplingParams(max_new_tokens=tokens))
        for n in range(6)
    ]


@pytest.mark.parametrize("method", ["prefix", "cacheblend", "cachecraft", "query"])
@pytest.mark.parametrize("step_tokens", [16, 512])
def test_six_at_once_compute_what_one_after_the_other_compute(method, step_tokens):
    one_by_one, at_once = (
        Driver(Engine(toy_model("llama"))),
        Driver(Engine(toy_model("llama")), step_tokens=step_tokens),
    )
    for request in six([0, 1, 2]):
        one_by_one.submit(request, method)
        one_by_one.run()
        at_once.submit(request, method)
    at_once.run()
    assert at_once.core.stats.prefilled_tokens == one_by_one.core.stats.prefilled_tokens
    assert at_once.core.stats.shared == 5
    for found, expected in zip(at_once.answers(), one_by_one.answers(), strict=True):
        assert found.token_ids == expected.token_ids


def test_a_part_can_be_reused_before_the_prefill_that_computes_it_has_ended():
    """The second request shares the first chunk alone, and is answered while the others are still computed."""
    driver = Driver(Engine(toy_model("llama")), step_tokens=16)
    long, short = driver.submit(asked([0, 1, 2, 3, 4], 1)), driver.submit(asked([0], 1))
    while driver.inboxes[short].last is None:
        driver.core.step()
        driver.core.check()
    assert driver.inboxes[long].last is None
    assert [chunk.kv_source for chunk in driver.inboxes[short].last.report.chunks] == ["prefix-exact"] * 2
    driver.run()


def test_a_chunk_in_another_place_is_waited_for_by_methods_that_weave():
    driver = Driver(Engine(toy_model("llama")), step_tokens=512)
    driver.submit(asked([0, 4, 3], 1))
    driver.submit(asked([3, 1, 4], 1), "cacheblend")
    driver.run()
    sources = [chunk.kv_source for chunk in driver.answers()[1].report.chunks]
    assert sources == ["prefix-exact", "reused", "computed", "reused"]


@pytest.mark.parametrize(("first", "shared"), [("prefix", 0), ("cachecraft", 1)])
def test_a_method_that_reads_profiles_waits_only_for_requests_that_store_them(first, shared):
    driver = Driver(Engine(toy_model("llama")), step_tokens=16)
    driver.submit(asked([0, 1], 1), first)
    driver.submit(asked([0, 1], 1), "cachecraft")
    driver.run()
    assert driver.core.stats.shared == shared


def test_where_computing_is_sooner_nothing_waits():
    """The owner weaves, so that its new chunk is stored at its very end: far more work than to compute that chunk."""
    engine = Engine(toy_model("llama"))
    engine.precompute(CHUNKS[:3])
    engine.generate("When?", max_new_tokens=1)
    driver = Driver(engine, step_tokens=16)
    driver.submit(asked([2, 1, 0, 4], 1), "full")
    driver.core.step()
    driver.submit(Request("When?", [CHUNKS[4]], sampling=SamplingParams(max_new_tokens=1)), "cacheblend")
    driver.run()
    assert driver.core.stats.shared == 0


@pytest.mark.parametrize("ends", ["abort", "deadline", "failure"])
def test_if_the_owner_ends_one_that_waits_takes_over_and_the_others_wait_for_it(ends, monkeypatch):
    driver = Driver(Engine(toy_model("llama")), step_tokens=16)
    first, *others = [
        driver.submit(request, deadline_s=5.0 if not n else None) for n, request in enumerate(six([0, 1]))
    ]
    driver.core.step()
    driver.core.step()
    assert driver.core.stats.sharing == 5
    if ends == "abort":
        driver.core.abort(first)
    elif ends == "deadline":
        driver.now = 6.0
    else:
        owner, real = driver.states[first], Runner.step

        def step(self, decoding, prefilling, **options):
            if any(job is owner.job for job, _ in prefilling):
                raise RuntimeError("this one always fails")
            return real(self, decoding, prefilling, **options)

        monkeypatch.setattr(Runner, "step", step)
    driver.run()
    assert isinstance(driver.inboxes[first].last, ChunkweaveError)
    answers = [driver.inboxes[one].last for one in others]
    assert all(count <= 1 for count in computed(answers).values())
    assert [answer.token_ids for answer in answers] == [
        alone(Engine(toy_model("llama")), request, "prefix").token_ids for request in six([0, 1])[1:]
    ]


def test_a_request_that_waits_for_parts_can_be_aborted_and_is_late_like_any_other():
    driver = Driver(Engine(toy_model("llama")), step_tokens=16, queue_timeout_s=5.0)
    first, aborted, late = (driver.submit(request) for request in six([0, 1])[:3])
    driver.core.step()
    assert driver.core.stats.sharing == 2
    driver.core.abort(aborted)
    driver.core.check()
    driver.now = 6.0
    driver.run()
    assert isinstance(driver.inboxes[aborted].last, RequestAbortedError)
    assert isinstance(driver.inboxes[late].last, DeadlineError)
    assert isinstance(driver.inboxes[first].last, Answer)


def test_what_is_asked_for_does_not_wait_for_a_speculation_and_a_speculation_waits_for_it():
    driver = Driver(Engine(toy_model("llama")), step_tokens=16)
    speculation = driver.submit(asked([0, 1], 1), speculative=True)
    driver.core.step()
    asking = driver.submit(asked([0, 1], 1))
    second = driver.submit(asked([0, 1], 1), speculative=True)
    driver.core.step()
    assert [driver.states[one].owner for one in (speculation, asking)] == [None, None]
    assert driver.states[second].owner is not None
    driver.core.confirm(second)
    driver.core.step()
    assert driver.states[second].owner is driver.states[asking]
    driver.core.confirm(speculation)
    driver.run()
    assert len({driver.inboxes[one].last.token_ids for one in (speculation, asking, second)}) == 1


def test_parts_that_the_store_does_not_take_are_waited_for_once(monkeypatch):
    """Nothing is ever stored: the requests that waited compute beside each other then, and do not queue up."""
    engine = Engine(toy_model("llama"))
    engine.runner.store_new = lambda prefilled: 0
    engine.runner.store_computed = lambda job: sum(0 for _ in job.computed())
    driver = Driver(engine, step_tokens=64, max_running=8)
    for request in six([0, 1]):
        driver.submit(request)
    while driver.core.stats.finished == 0:
        driver.core.step()
        driver.core.check()
    driver.core.step()
    assert driver.core.stats.running == 5
    driver.run()


methods = st.sampled_from(["prefix", "full"])
numbers = st.integers(0, 7)
acts = st.one_of(
    st.tuples(st.just("ask"), st.lists(st.integers(0, 4), max_size=4, unique=True), methods),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["abort", "fail", "deadline"]), numbers),
)


class Troubled(Driver):
    """A driver of requests that are aborted, fail once, or run late, as told."""

    def __init__(self, **limits) -> None:
        super().__init__(Engine(toy_model("llama")), **limits)
        self.asks: list[tuple[Request, str]] = []
        self._failing: set[int] = set()
        self._real = self.engine.runner.step
        self.engine.runner.step = self._step

    def act(self, act: str, *values) -> None:
        if act == "ask":
            self.asks.append((asked(values[0], 3), values[1]))
            self.submit(*self.asks[-1])
        elif act == "step":
            for _ in range(values[0]):
                self.core.step()
                self.core.check()
        elif self.asks and self.inboxes[number := values[0] % len(self.asks)].last is None:
            self.trouble(act, number)

    def trouble(self, act: str, number: int) -> None:
        if act == "abort":
            self.core.abort(number)
        elif act == "fail":
            self._failing.add(number)
        else:
            self.states[number].deadline_s = -1.0

    def _step(self, decoding, prefilling, **options):
        jobs = [job for job, _ in prefilling]
        fails = {number for number in self._failing if self.states[number].job in jobs}
        self._failing -= fails
        if fails:
            raise RuntimeError("a kernel failed")
        return self._real(decoding, prefilling, **options)


@settings(max_examples=60, deadline=None)
@given(st.lists(acts, min_size=4, max_size=24), st.integers(8, 96), st.integers(20, 80), st.integers(1, 5))
def test_whatever_comes_and_goes_every_answer_is_that_of_a_lone_request(sequence, step_tokens, blocks, places):
    """Random arrivals, aborts, failures, deadlines and preemptions: all end, and share what they can.

    A path is computed once more only for a request that lost its KV or failed. An exact prefix is always sooner waited
    for than computed.
    """
    lone = Engine(toy_model("llama"))
    driver = Troubled(step_tokens=step_tokens, kv_tokens=8 * blocks, block_tokens=8, max_running=places)
    for act in sequence:
        driver.act(*act)
    driver.run()
    answers = []
    for (request, method), inbox in zip(driver.asks, driver.inboxes, strict=True):
        assert isinstance(inbox.last, Answer | RequestAbortedError | DeadlineError | RequestFailedError)
        if isinstance(inbox.last, Answer):
            assert inbox.last.token_ids == alone(lone, request, method).token_ids
            answers += [inbox.last] if method == "prefix" else []
    again = driver.core.stats.preempted + driver.core.stats.tried_again
    assert all(count <= 1 + again for count in computed(answers).values())
