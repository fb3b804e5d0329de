"""The load generator: arrivals, times that count from them, failures, percentiles, bisection."""

import asyncio
import math
import sys
from pathlib import Path

import pytest

from chunkweave.errors import QueueFullError, UsageError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from load_generator import (  # noqa: E402
    LoadedRequest,
    LoadResult,
    Objective,
    poisson_arrivals,
    run_load,
    sustainable_rate,
)


async def answer(*waits_s: float, tokens: int = 1):
    for wait_s in waits_s:
        await asyncio.sleep(wait_s)
        yield tokens


def test_arrivals_are_those_of_a_poisson_process():
    times = poisson_arrivals(20_000, 4.0, seed=1)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times)
    assert times == poisson_arrivals(20_000, 4.0, seed=1)
    assert times != poisson_arrivals(20_000, 4.0, seed=2)
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.02)
    with pytest.raises(UsageError):
        poisson_arrivals(1, 0.0, seed=0)


def test_nobody_waits_for_an_earlier_answer_and_times_count_from_arrival():
    asked = []

    def ask(number: int):
        asked.append(number)
        return answer(0.3, 0.1, 0.1)

    seen = []
    result = asyncio.run(run_load(ask, [0.0, 0.02, 0.04], done=lambda ended, of: seen.append((ended, of))))
    assert asked == [0, 1, 2]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert result.duration_s < 1.0, "one after the other would take 1.5 s"
    for request in result.requests:
        assert 0.3 <= request.ttft_s < request.total_s
        assert request.total_s >= 0.5
        assert request.tpot_s == pytest.approx((request.total_s - request.ttft_s) / 2)
    assert result.error_rate == 0.0


def test_a_generator_that_falls_behind_hides_nothing():
    """The event loop is held up for 0.2 s when the second request is due."""
    import time

    async def ask(number: int):
        if number == 0:
            time.sleep(0.2)
        yield 1

    result = asyncio.run(run_load(ask, [0.0, 0.01]))
    assert result.requests[1].ttft_s >= 0.18


def test_failures_are_counted_and_others_end_the_run():
    closed = []

    async def ask(number: int):
        try:
            if number == 1:
                raise QueueFullError("full")
            yield 1
            if number == 2:
                await asyncio.sleep(10)
        finally:
            closed.append(number)

    async def empty(number: int):
        return
        yield

    result = asyncio.run(run_load(ask, [0.0, 0.0, 0.0], timeout_s=0.2))
    assert sorted(closed) == [0, 1, 2]
    assert [request.error for request in result.requests] == [None, "QueueFullError: full", "no answer within 0.2 s"]
    assert result.error_rate == pytest.approx(2 / 3)
    assert len(result.answered) == 1
    none = asyncio.run(run_load(empty, [0.0]))
    assert none.error_rate == 1.0
    assert none.ttft_mean_s == math.inf
    assert none.as_dict()["ttft_p50_s"] is None

    async def bug(number: int):
        raise ZeroDivisionError
        yield

    with pytest.raises(ExceptionGroup):
        asyncio.run(run_load(bug, [0.0]))
    for wrong in ([], [1.0, 0.5], [-1.0]):
        with pytest.raises(UsageError):
            asyncio.run(run_load(ask, wrong))


def test_statistics_by_hand():
    requests = [LoadedRequest(0.0, float(n), 2.0 * n, 11) for n in range(1, 11)]
    result = LoadResult((*requests, LoadedRequest(0.0, 99.0, 99.0, 1, "lost")), 20.0)
    assert result.ttft_mean_s == 5.5
    assert [result.ttft_s(percent) for percent in (0, 50, 90, 100)] == pytest.approx([1.0, 5.5, 9.1, 10.0])
    assert result.tpot_s(50) == pytest.approx(0.55)
    assert (result.requests_per_s, result.tokens_per_s) == (0.5, 5.5)
    told = result.as_dict()
    assert told["requests"] == 11
    assert told["tpot_p90_s"] == pytest.approx(0.91)


def a_run(rate: float, capacity: float, requests: int = 100, errors: int = 0) -> LoadResult:
    """Requests due at even times, of which `capacity` a second are answered, each in a second when nothing waits."""
    due = [(number + 1) / rate for number in range(requests)]
    done = [max(time + 1.0, 1.0 + (number + 1) / capacity) for number, time in enumerate(due)]
    pairs = zip(due, done, strict=True)
    answered = [LoadedRequest(time, end - time, end - time, 1) for time, end in pairs]
    failed = [LoadedRequest(due[-1], None, 1.0, 0, "full")] * errors
    return LoadResult((*answered, *failed), max(done))


LENIENT = Objective(ttft_s=1e9, answer_s=0.01)


@pytest.mark.parametrize(("capacity", "high"), [(3.3, 8.0), (3.3, 1.0), (0.01, 1.0)])
def test_bisection_closes_in_on_the_greatest_rate(capacity, high):
    async def run(rate: float) -> LoadResult:
        return a_run(rate, capacity, requests=3000)

    objective = Objective(5.0, 1.0)
    found = asyncio.run(sustainable_rate(run, objective, low_per_s=0.0, high_per_s=high, trials=12))
    assert found.bounded
    assert found.rate_per_s == pytest.approx(capacity, rel=0.02, abs=0.01)
    assert len(found.trials) == 12


def test_a_rate_with_errors_is_not_sustainable_and_a_bound_may_not_be_found():
    async def failing(rate: float) -> LoadResult:
        return a_run(rate, 1e9, errors=1)

    async def fast(rate: float) -> LoadResult:
        return a_run(rate, 1e9, requests=1000)

    assert asyncio.run(sustainable_rate(failing, LENIENT, low_per_s=0.0, high_per_s=1.0)).rate_per_s == 0.0
    found = asyncio.run(sustainable_rate(fast, LENIENT, low_per_s=0.0, high_per_s=1.0, trials=3))
    assert (found.rate_per_s, found.bounded) == (4.0, False)
    with pytest.raises(UsageError):
        asyncio.run(sustainable_rate(fast, LENIENT, low_per_s=2.0, high_per_s=1.0))


def test_a_burst_shows_no_rate_however_soon_its_few_requests_are_answered():
    """Twenty requests within 0.57 s at 2.5 a second: the last one is answered after 8 s, 9.7 times as late as sent."""
    burst = a_run(35.0, 2.5, requests=20)
    assert burst.ttft_mean_s < 5.0, "the mean TTFT alone would let it pass"
    assert burst.offered_per_s == pytest.approx(35.0)
    assert not Objective(5.0, 1.0).is_met(burst.as_dict())
    assert not Objective(5.0, 0.1).is_met(burst.as_dict()), "long enough, but 2.2 of 35 a second are served"


def test_a_rate_is_sustained_if_most_of_it_is_served_for_long_enough():
    served = a_run(2.0, 2.0).as_dict()
    assert served["requests_per_s"] / served["offered_per_s"] == pytest.approx(50 / 51), "100 in 51 s, offered in 50 s"
    assert Objective(5.0, 51 / 20).is_met(served)
    assert not Objective(5.0, 51 / 19.9).is_met(served), "shorter than twenty answers"
    assert not Objective(0.9, 1.0).is_met(served), "the first tokens come after 1 s"
    assert Objective(5.0, 1.0).is_met({**served, "requests_per_s": 0.951 * 2})
    assert not Objective(5.0, 1.0).is_met({**served, "requests_per_s": 0.949 * 2})
    at_once = a_run(2.0, 2.0).as_dict() | {"offered_per_s": None}
    assert not Objective(5.0, 1.0).is_met(at_once)


def test_runs_are_made_long_enough_for_the_rule():
    """Thirty answers long on average, so that a chance run of early arrivals is still twenty."""
    objective = Objective(5.0, 0.4)
    assert objective.requests(10.0, least=20) == 120
    assert objective.requests(0.5, least=20) == 20
    spans = [poisson_arrivals(120, 10.0, seed)[-1] for seed in range(200)]
    assert sum(span >= 20 * 0.4 for span in spans) > 195


def test_what_is_sustained_lies_between_two_rates_that_were_tried():
    objective = Objective(50.0, 1.0)
    runs = [a_run(rate, 3.0, requests=400).as_dict() for rate in (6.0, 1.0, 3.5, 2.5)]
    assert objective.sustained(runs) == (pytest.approx(2.5), pytest.approx(3.5))
    assert objective.sustained(runs[1:2]) == (pytest.approx(1.0), None)
    assert objective.sustained(runs[:1]) == (0.0, pytest.approx(6.0))
