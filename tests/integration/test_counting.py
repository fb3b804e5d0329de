"""What eviction policies are told of requests: each counts once, and only what was asked for (RAGCache §5.1)."""

import asyncio

import pytest

from chunkweave import AsyncEngine, Engine, Request, ReuseConfig, SamplingParams
from chunkweave.store.eviction import PGDSFPolicy
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from tests.integration.test_batching_core import CHUNKS, Driver, asked


class Counted:
    """An engine over a host and a slow level, and how often its host's policy has counted what it knows."""

    def __init__(self, loaded) -> None:
        self.policy = PGDSFPolicy()
        host = SegmentStore(HostTier(), budget_bytes=1 << 30, policy=self.policy)
        slow = SegmentStore(HostTier(), budget_bytes=1 << 30)
        self.store = TieredStore([Level("host", host), Level("slow", slow, background=True)])
        self.engine = Engine(loaded, store=self.store, reuse=ReuseConfig(recompute_ratio=0.3))

    @property
    def frequencies(self) -> set[int]:
        """Of all that is stored."""
        return {self.policy._known[segment].frequency for segment in self.policy.ids()}


@pytest.fixture
def counted(model):
    counted = Counted(model)
    yield counted
    counted.store.check()
    counted.store.close()


def test_a_request_that_is_read_ahead_for_counts_once(counted):
    for expected in (1, 2, 3):
        driver = Driver(counted.engine, max_running=1)
        driver.submit(asked([], 20), "full")
        driver.core.step()
        driver.submit(asked([0], 2))
        driver.run()
        counted.store.flush(5)
        counted.store.levels[0].store.clear()  # so that the next one is read from below, and ahead
        chunk = next(one for one in counted.store.records() if one.context)
        assert counted.policy._known[chunk.id].frequency == expected


def test_a_request_that_is_preempted_counts_once(counted):
    driver = Driver(counted.engine, max_running=2, kv_tokens=160, block_tokens=8)
    driver.submit(asked([0], 30))
    driver.submit(asked([1], 30))
    driver.run()
    assert driver.core.stats.preempted > 0
    assert {counted.policy._known[one.id].frequency for one in counted.store.records() if one.context} == {1}


def test_what_is_warmed_is_not_counted(counted):
    counted.engine.precompute(CHUNKS[:1])
    driver = Driver(counted.engine)
    driver.precompute(CHUNKS[1])
    driver.run()
    assert counted.frequencies == {0} or not any(one.frequency for one in counted.policy._known.values())


def test_a_speculation_counts_once_it_is_confirmed_and_then_once(counted):
    driver = Driver(counted.engine)
    number = driver.submit(asked([0], 8), speculative=True)
    while not driver.inboxes[number].events:
        driver.core.step()
    assert not any(one.frequency for one in counted.policy._known.values()), "nobody has asked for it"
    driver.core.confirm(number)
    driver.run()
    assert counted.frequencies == {1}
    dropped = driver.submit(asked([0], 8), speculative=True)
    driver.core.step()
    driver.core.abort(dropped)
    driver.run()
    assert counted.frequencies == {1}


def test_a_speculation_that_has_ended_counts_when_it_is_confirmed(counted):
    request = Request("When?", CHUNKS[:1], sampling=SamplingParams(max_new_tokens=2))

    def counts() -> tuple[bool, int]:
        """Whether the policy has counted anything, and of how many chunks the table of orders has: CRAFT's counts."""
        return any(one.frequency for one in counted.policy._known.values()), len(
            counted.engine.preparer.arranger.table()
        )

    async def ask() -> list[tuple[bool, int]]:
        async with AsyncEngine(counted.engine) as batching:
            stream = batching.submit(request, speculative=True)
            await stream.answer()
            before = counts()
            stream.confirm()
            stream.confirm()
            await asyncio.wrap_future(batching.between_steps(lambda: None))
            return [before, counts()]

    assert asyncio.run(ask()) == [(False, 0), (True, 1)]
    assert counted.frequencies == {1}
