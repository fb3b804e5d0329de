"""The asynchronous engine: streams, deadlines, aborts, back-pressure, and its end."""

import asyncio
import threading
import time

import pytest

from chunkweave import AsyncEngine, BatchingConfig, Engine, Request, ReuseConfig, SamplingParams
from chunkweave.config import CaptureConfig
from chunkweave.errors import (
    ChunkweaveError,
    PromptTooLongError,
    RequestAbortedError,
    UnknownRequestError,
    UsageError,
)
from tests.integration.test_batching_core import CHUNKS, STORED, engine_over_a_slow_level, run_async, until
from tests.toys import Link, toy_model

REUSE = ReuseConfig(recompute_ratio=0.3, capture=CaptureConfig(neutral_tokens=0))


@pytest.fixture
def engine() -> Engine:
    engine = Engine(toy_model("llama"), reuse=REUSE)
    engine.precompute(STORED)
    return engine


def ask(chunks=CHUNKS[:2], tokens: int = 6, question: str = "When does the ferry leave?", **sampling) -> Request:
    return Request(question, chunks, sampling=SamplingParams(max_new_tokens=tokens, **sampling))


async def end_of(stream) -> Exception | None:
    try:
        await stream.answer()
    except ChunkweaveError as error:
        return error
    return None


def test_streams_of_several_requests_give_their_whole_answers(engine):
    requests = [ask(CHUNKS[:n], 8, method) for n, method in enumerate(("Who?", "When?", "Where?", "Why?"))]
    expected = [engine.generate_batch([request], method="cacheblend")[0] for request in requests]

    async def work(batching):
        streams = [batching.submit(request, method="cacheblend") for request in requests]
        assert len({stream.id for stream in streams}) == 4
        return await asyncio.gather(*map(collect, streams))

    for events, single in zip(run_async(work, engine), expected, strict=True):
        assert [event.answer is None for event in events] == [True] * (len(events) - 1) + [False]
        answer = events[-1].answer
        assert "".join(event.text for event in events) == answer.text == single.text
        assert answer.token_ids == single.token_ids
        assert answer.report.method == "cacheblend"
        assert answer.report.ttft_s >= answer.report.queue_s >= 0
    engine.store.check()


async def collect(stream):
    return [event async for event in stream]


def test_an_abort_ends_one_request_and_only_that(engine):
    async def work(batching):
        stays, goes = batching.submit(ask(tokens=30)), batching.submit(ask(tokens=400))
        await anext(goes)
        batching.abort(goes.id)
        errors = [await end_of(goes)]
        answer = await stays.answer()
        with pytest.raises(UnknownRequestError):
            batching.abort(goes.id)
        with pytest.raises(UnknownRequestError):
            batching.abort(12345)
        async with batching.submit(ask(tokens=400)) as left:
            await anext(left)
        await left.aclose()
        await until(lambda: batching.stats.running == 0)
        assert batching.stats.aborted == 2
        assert batching.stats.blocks_reserved == 0
        return errors, answer

    errors, answer = run_async(work, engine)
    assert isinstance(errors[0], RequestAbortedError)
    assert len(answer.token_ids) <= 30


def test_closing_ends_what_is_under_way_and_takes_no_more(engine, gate):
    async def main():
        batching = AsyncEngine(engine, BatchingConfig(max_running=1))
        streams = [batching.submit(ask()) for _ in range(3)]
        gate.set()
        batching.close()
        batching.close()
        ended = [await end_of(stream) for stream in streams]
        assert all(error is None or isinstance(error, RequestAbortedError) for error in ended)
        assert ended[-1] is not None
        with pytest.raises(RequestAbortedError, match="closed"):
            batching.submit(ask())

    asyncio.run(main())
    assert engine.generate("When?", CHUNKS[:2], max_new_tokens=2).token_ids


def test_a_bug_in_the_loop_itself_leaves_no_stream_waiting(engine, monkeypatch):
    monkeypatch.setattr("chunkweave.engine.core.BatchingCore._groups", lambda self: 1 / 0)

    async def main():
        batching = AsyncEngine(engine)
        assert isinstance(await end_of(batching.submit(ask())), RequestAbortedError)
        batching.close()

    asyncio.run(main())


def test_wrong_requests_are_refused_at_once(engine):
    async def work(batching):
        with pytest.raises(PromptTooLongError):
            batching.submit(ask(CHUNKS))
        with pytest.raises(UsageError):
            batching.submit(ask(question=" "))
        with pytest.raises(UsageError):
            batching.submit(ask(), method="no-such-method")
        with pytest.raises(UsageError, match="deadline_s"):
            batching.submit(ask(), deadline_s=0)
        assert batching.stats.waiting == 0

    run_async(work, engine, BatchingConfig(kv_tokens=64))


def test_a_slow_tier_keeps_only_its_own_request_waiting(engine, tmp_path):
    """Segments come from a throttled level while others decode; the woven answer is that of memory."""
    expected = engine.generate_batch([ask(STORED[1:3])], method="cacheblend")[0]
    link = Link(1e12)
    below = engine_over_a_slow_level(engine.loaded, lambda _, source: source, link, reuse=REUSE)
    link.bytes_per_s = 4e5

    async def work(batching):
        slow_one = batching.submit(ask(STORED[1:3]), method="cacheblend")
        quick = batching.submit(ask((), tokens=3), method="full")
        started = time.perf_counter()
        await quick.answer()
        quick_s = time.perf_counter() - started
        return await slow_one.answer(), quick_s, time.perf_counter() - started

    answer, quick_s, slow_s = run_async(work, below)
    assert answer.token_ids == expected.token_ids
    assert answer.report.reused_tokens == expected.report.reused_tokens
    assert {chunk.tier for chunk in answer.report.chunks if chunk.variant} == {"slow"}
    assert quick_s < slow_s
    below.store.check()
    below.store.close()


def test_a_prompt_may_be_submitted_from_another_thread(engine):
    async def work(batching):
        loop = asyncio.get_running_loop()
        stream = await asyncio.to_thread(batching.submit, ask(), loop=loop)
        return (await stream.answer()).text

    assert run_async(work, engine) == engine.generate_batch([ask()])[0].text


def test_a_thread_without_a_loop_has_to_name_one(engine):
    batching = AsyncEngine(engine)
    with pytest.raises(RuntimeError, match="event loop"):
        batching.submit(ask())
    batching.close()


def test_work_between_steps_has_the_engine_for_itself(engine):
    async def work(batching):
        stream = batching.submit(ask(tokens=30))
        work = batching.between_steps(lambda: (threading.current_thread().name, engine.precompute(["A new chunk."])))
        assert await asyncio.wrap_future(work) == ("chunkweave-steps", 1)
        assert (await stream.answer()).finish_reason == "length"
        await asyncio.to_thread(batching.check)

    run_async(work, engine)


def test_work_between_steps_may_fail_and_may_come_too_late(engine, gate):
    async def main():
        batching = AsyncEngine(engine)
        failing = batching.between_steps(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(failing)
        stream = batching.submit(ask())
        await asyncio.sleep(0.05)
        never = batching.between_steps(lambda: 1)
        closing = asyncio.create_task(asyncio.to_thread(batching.close))
        await asyncio.sleep(0.05)
        gate.set()
        await closing
        assert batching.closed
        assert never.cancelled()
        assert isinstance(await end_of(stream), RequestAbortedError)
        with pytest.raises(RequestAbortedError):
            batching.between_steps(lambda: 1)

    asyncio.run(main())


def test_prompts_may_be_bounded(engine):
    async def work(batching):
        with pytest.raises(PromptTooLongError, match="at most 20"):
            batching.submit(ask())

    run_async(work, engine, BatchingConfig(max_prompt_tokens=20))
    with pytest.raises(UsageError, match="max_prompt_tokens"):
        BatchingConfig(max_prompt_tokens=0)
