"""The load generator: arrivals, times that count from them, failures, percentiles, bisection."""

import asyncio
import math

import pytest
from load_generator import run_load

from chunkweave.errors import QueueFullError, UsageError


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
