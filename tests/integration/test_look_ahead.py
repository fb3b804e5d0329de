"""What waiting requests need is read ahead from slow levels: for the next few, within a budget, until they end."""

import threading

import pytest

from chunkweave import Engine
from chunkweave.errors import UsageError
from chunkweave.kv.segment import SegmentLost
from chunkweave.scheduling.budget import BatchingConfig
from tests.integration.test_batching_core import (
    STORED,
    Driver,
    alone,
    asked,
    engine_over_a_slow_level,
    settled_engine,
)


class Below:
    """An engine whose chunks lie on a slow level, and what is read from there."""

    def __init__(self, loaded) -> None:
        self.reads: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken: set[str] = set()
        self.engine = engine_over_a_slow_level(loaded, lambda name, source: Recorded(self, name, source))

    @property
    def segments(self) -> set[str]:
        return {segment for segment, _ in self.reads}


class Recorded:
    """Notes every layer that is read, once the gate is open."""

    def __init__(self, below: Below, name: str, source) -> None:
        self._below, self._name, self._source = below, name, source
        self.tokens, self.nbytes, self.keys_at = source.tokens, source.nbytes, source.keys_at

    def layer(self, index: int, scratch=None):
        self._below.gate.wait(10)
        if self._name in self._below.broken:
            raise SegmentLost(self._name, "broken")
        self._below.reads.append((self._name, index))
        return self._source.layer(index, scratch)


@pytest.fixture
def below(model):
    below = Below(model)
    yield below
    below.engine.store.check()
    below.engine.store.close()


@pytest.fixture(scope="module")
def reference() -> Engine:
    return settled_engine(system=False)


def busy(below: Below, **limits) -> Driver:
    """A driver whose only place is taken for a while."""
    driver = Driver(below.engine, max_running=1, **limits)
    driver.submit(asked([], 30), "full")
    driver.core.step()
    assert not below.reads
    return driver


def loader_threads() -> int:
    return sum(thread.name == "chunkweave-loader" for thread in threading.enumerate())


def test_what_waits_is_read_once_and_before_its_turn(below, reference):
    driver = busy(below)
    request = asked([1, 2], 6)
    driver.submit(request, "cacheblend")
    while driver.core.stats.finished == 0:
        driver.core.step()
    assert driver.core.stats.running == 0
    assert len(below.segments) == 2, "read while it waited"
    driver.run()
    answer = driver.answers()[1]
    assert sorted(below.reads) == sorted((segment, layer) for segment in below.segments for layer in range(4))
    assert answer.token_ids == alone(reference, request, "cacheblend").token_ids
    assert {chunk.tier for chunk in answer.report.chunks[1:]} == {"slow"}
    assert loader_threads() == 0


def test_no_more_is_held_than_the_budget_allows(below):
    size = next(iter(below.engine.store.records())).nbytes
    driver = busy(below, prefetch_requests=4, prefetch_bytes=int(1.5 * size))
    for chunks in ([0, 1], [2], [3]):
        driver.submit(asked(chunks, 3), "cacheblend")
    most = 0
    for _ in range(10):
        driver.core.step()
        most = max(most, driver.core.stats.prefetched_bytes)
    assert 0 < most <= 1.5 * size
    driver.run()
    assert len(driver.answers()) == 4
    assert driver.core.stats.prefetched_bytes == 0


def test_only_the_next_requests_are_read_ahead_for(below):
    driver = busy(below, prefetch_requests=1)
    driver.submit(asked([0], 3), "cacheblend")
    driver.submit(asked([1], 3), "cacheblend")
    driver.core.step()
    driver.core.step()
    assert driver.core.stats.prefetched_bytes == next(
        record.nbytes
        for record in below.engine.store.records()
        if record.chunk_id == below.engine.builder.chunk_part(STORED[1]).id
    )
    driver.run()


@pytest.mark.parametrize("limits", [{"prefetch_requests": 0}, {"prefetch_bytes": 0}])
def test_it_can_be_switched_off(below, limits):
    driver = busy(below, **limits)
    driver.submit(asked([0], 3), "cacheblend")
    for _ in range(5):
        driver.core.step()
    assert not below.reads
    driver.run()
    assert below.reads
    for name in limits:
        with pytest.raises(UsageError):
            BatchingConfig(**{name: -1})


def test_an_aborted_request_is_read_for_no_longer(below):
    below.gate.clear()
    driver = busy(below)
    number = driver.submit(asked([0, 1, 2], 3), "cacheblend")
    driver.core.step()
    assert driver.core.stats.prefetched_bytes > 0
    assert loader_threads() == 1
    threading.Timer(0.05, below.gate.set).start()
    driver.core.abort(number)
    assert (driver.core.stats.prefetched_bytes, loader_threads()) == (0, 0)
    assert len(below.reads) < 3 * 4
    segments = [record.id for record in below.engine.store.records()]
    assert not any(level.store.is_claimed(one) for level in below.engine.store.levels for one in segments)
    driver.run()


def test_a_segment_that_breaks_while_it_is_read_ahead_is_computed(below, reference):
    broken = next(
        record.id
        for record in below.engine.store.records()
        if record.chunk_id == below.engine.builder.chunk_part(STORED[1]).id
    )
    below.broken.add(broken)
    driver = busy(below)
    request = asked([0, 1], 5)
    driver.submit(request, "full-reuse")
    driver.run()
    sources = [chunk.kv_source for chunk in driver.answers()[1].report.chunks]
    assert sources[1:] == ["reused", "computed"]


def test_a_look_that_fails_is_no_harm(below, monkeypatch):
    monkeypatch.setattr(type(below.engine.runner), "prefetch", lambda *_, **__: 1 / 0)
    driver = busy(below)
    driver.submit(asked([0], 3), "cacheblend")
    driver.run()
    assert len(driver.answers()) == 2
