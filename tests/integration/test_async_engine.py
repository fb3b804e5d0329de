"""The asynchronous engine: streams, deadlines, aborts, back-pressure, and its end."""

import asyncio
import threading
import time

import pytest

from chunkweave import AsyncEngine, BatchingConfig, Engine, Request, ReuseConfig, SamplingParams
from chunkweave.config import CaptureConfig
from chunkweave.engine.runner import Runner
from chunkweave.errors import (
    ChunkweaveError,
    DeadlineError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    RequestFailedError,
    UnknownRequestError,
    UsageError,
)
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from tests.integration.test_batching_core import CHUNKS, STORED
from tests.toys import Link, ThrottledTier, toy_model

REUSE = ReuseConfig(recompute_ratio=0.3, capture=CaptureConfig(neutral_tokens=0))


@pytest.fixture
def engine() -> Engine:
    engine = Engine(toy_model("llama"), reuse=REUSE)
    engine.precompute(STORED)
    return engine


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """No step ends before the gate is open."""
    gate, real = threading.Event(), Runner.step

    def step(self, decoding, prefilling, **how):
        gate.wait(10)
        return real(self, decoding, prefilling, **how)

    monkeypatch.setattr(Runner, "step", step)
    return gate


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

    async def main():
        async with AsyncEngine(engine) as batching:
            streams = [batching.submit(request, method="cacheblend") for request in requests]
            assert len({stream.id for stream in streams}) == 4
            return await asyncio.gather(*map(collect, streams))

    for events, single in zip(asyncio.run(main()), expected, strict=True):
        assert [event.answer is None for event in events] == [True] * (len(events) - 1) + [False]
        answer = events[-1].answer
        assert "".join(event.text for event in events) == answer.text == single.text
        assert answer.token_ids == single.token_ids
        assert answer.report.method == "cacheblend"
        assert answer.report.ttft_s >= answer.report.queue_s >= 0
    engine.store.check()


async def collect(stream):
    return [event async for event in stream]


def test_stop_texts_sampling_and_quality_are_the_engines(engine):
    plain = engine.generate("When?", CHUNKS[:2], max_new_tokens=20)
    stop = plain.text[4:7]
    requests = [ask(tokens=20, question="When?", stop=(stop,)), ask(tokens=9, temperature=1.0, seed=3)]
    expected = engine.generate_batch(requests, quality="exact")

    async def main():
        async with AsyncEngine(engine) as batching:
            return [await batching.submit(request, quality="exact").answer() for request in requests]

    for answer, single in zip(asyncio.run(main()), expected, strict=True):
        assert (answer.text, answer.token_ids, answer.finish_reason) == (
            single.text,
            single.token_ids,
            single.finish_reason,
        )
        assert answer.report.why == "exact"


def test_what_one_request_computed_the_next_reuses(engine):
    async def main():
        async with AsyncEngine(engine) as batching:
            first = await batching.submit(ask(CHUNKS)).answer()
            return first, await batching.submit(ask(CHUNKS)).answer()

    first, second = asyncio.run(main())
    assert second.token_ids == first.token_ids
    assert second.report.prefix_exact_tokens > first.report.prefix_exact_tokens


def test_a_full_queue_pushes_back_and_takes_more_later(engine, gate):
    async def main():
        async with AsyncEngine(engine, BatchingConfig(max_waiting=3, max_running=1)) as batching:
            streams = [batching.submit(ask())]
            while batching.stats.running < 1:
                await asyncio.sleep(0.001)
            streams += [batching.submit(ask()) for _ in range(3)]
            assert batching.stats.waiting == 3
            with pytest.raises(QueueFullError, match="max_waiting"):
                batching.submit(ask())
            gate.set()
            answers = await asyncio.gather(*(stream.answer() for stream in streams))
            assert len(answers) == 4
            await batching.submit(ask()).answer()
            assert (batching.stats.finished, batching.stats.waiting, batching.stats.blocks_reserved) == (5, 0, 0)

    asyncio.run(main())


def test_a_deadline_ends_the_stream_with_an_error(engine, gate):
    async def main():
        async with AsyncEngine(engine) as batching:
            stream = batching.submit(ask(), deadline_s=0.05)
            await asyncio.sleep(0.1)
            gate.set()
            assert isinstance(await end_of(stream), DeadlineError)
            with pytest.raises(UsageError, match="deadline_s"):
                batching.submit(ask(), deadline_s=0)
            assert batching.stats.timed_out == 1

    asyncio.run(main())


def test_an_abort_ends_one_request_and_only_that(engine):
    async def main():
        async with AsyncEngine(engine) as batching:
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
            while batching.stats.running:
                await asyncio.sleep(0.001)
            assert batching.stats.aborted == 2
            assert batching.stats.blocks_reserved == 0
            return errors, answer

    errors, answer = asyncio.run(main())
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


def test_a_failure_is_tried_once_more_and_a_second_one_is_the_answer(engine, monkeypatch):
    real, calls = Runner.step, []

    def step(self, decoding, prefilling, **how):
        calls.append(1)
        if len(calls) in (2, 20, 21, 22):
            raise RuntimeError("a kernel failed")
        return real(self, decoding, prefilling, **how)

    async def main():
        async with AsyncEngine(engine) as batching:
            answer = await batching.submit(ask(tokens=8)).answer()
            calls.extend([1] * (19 - len(calls)))
            error = await end_of(batching.submit(ask()))
            assert batching.stats.tried_again == 2
            return answer, error

    expected = engine.generate_batch([ask(tokens=8)])[0]
    monkeypatch.setattr(Runner, "step", step)
    answer, error = asyncio.run(main())
    assert answer.token_ids == expected.token_ids
    assert isinstance(error, RequestFailedError)
    assert "a kernel failed" in str(error)


def test_a_bug_in_the_loop_itself_leaves_no_stream_waiting(engine, monkeypatch):
    monkeypatch.setattr("chunkweave.engine.core.BatchingCore._groups", lambda self: 1 / 0)

    async def main():
        batching = AsyncEngine(engine)
        assert isinstance(await end_of(batching.submit(ask())), RequestAbortedError)
        batching.close()

    asyncio.run(main())


def test_wrong_requests_are_refused_at_once(engine):
    async def main():
        async with AsyncEngine(engine, BatchingConfig(kv_tokens=64)) as batching:
            with pytest.raises(PromptTooLongError):
                batching.submit(ask(CHUNKS))
            with pytest.raises(UsageError):
                batching.submit(ask(question=" "))
            with pytest.raises(UsageError):
                batching.submit(ask(), method="no-such-method")
            assert batching.stats.waiting == 0

    asyncio.run(main())


def test_a_slow_tier_keeps_only_its_own_request_waiting(engine, tmp_path):
    """Segments come from a throttled level while others decode; the woven answer is that of memory."""
    expected = engine.generate_batch([ask(STORED[1:3])], method="cacheblend")[0]
    link = Link(1e12)
    host = SegmentStore(HostTier(), budget_bytes=1 << 30)
    slow = SegmentStore(ThrottledTier(link), budget_bytes=1 << 30)
    store = TieredStore([Level("host", host), Level("slow", slow, background=True)])
    below = Engine(engine.loaded, store=store, reuse=REUSE)
    below.precompute(STORED)
    store.flush(5)
    host.clear()
    link.bytes_per_s = 4e5

    async def main():
        async with AsyncEngine(below) as batching:
            slow_one = batching.submit(ask(STORED[1:3]), method="cacheblend")
            quick = batching.submit(ask((), tokens=3), method="full")
            started = time.perf_counter()
            await quick.answer()
            quick_s = time.perf_counter() - started
            return await slow_one.answer(), quick_s, time.perf_counter() - started

    answer, quick_s, slow_s = asyncio.run(main())
    assert answer.token_ids == expected.token_ids
    assert answer.report.reused_tokens == expected.report.reused_tokens
    assert {chunk.tier for chunk in answer.report.chunks if chunk.variant} == {"slow"}
    assert quick_s < slow_s
    store.check()
    store.close()


def test_a_prompt_may_be_submitted_from_another_thread(engine):
    async def main():
        async with AsyncEngine(engine) as batching:
            loop = asyncio.get_running_loop()
            stream = await asyncio.to_thread(batching.submit, ask(), loop=loop)
            return (await stream.answer()).text

    assert asyncio.run(main()) == engine.generate_batch([ask()])[0].text


def test_a_thread_without_a_loop_has_to_name_one(engine):
    batching = AsyncEngine(engine)
    with pytest.raises(RuntimeError, match="event loop"):
        batching.submit(ask())
    batching.close()


def test_work_between_steps_has_the_engine_for_itself(engine):
    async def main():
        async with AsyncEngine(engine) as batching:
            stream = batching.submit(ask(tokens=30))
            work = batching.between_steps(
                lambda: (threading.current_thread().name, engine.precompute(["A new chunk."]))
            )
            assert await asyncio.wrap_future(work) == ("chunkweave-steps", 1)
            assert (await stream.answer()).finish_reason == "length"
            await asyncio.to_thread(batching.check)

    asyncio.run(main())


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
    async def main():
        async with AsyncEngine(engine, BatchingConfig(max_prompt_tokens=20)) as batching:
            with pytest.raises(PromptTooLongError, match="at most 20"):
                batching.submit(ask())

    asyncio.run(main())
    with pytest.raises(UsageError, match="max_prompt_tokens"):
        BatchingConfig(max_prompt_tokens=0)
