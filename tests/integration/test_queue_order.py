"""Who is next in the engine's queue: who has the least to compute beside what is stored, whatever it is stored for."""

import pytest

from chunkweave import Engine
from tests.integration.test_batching_core import STORED, Driver, asked, stored_engine


@pytest.fixture
def engine() -> Engine:
    return stored_engine()


def served(driver: Driver, requests: list[tuple[list[int], str]], meanwhile=lambda: None) -> list[int]:
    """The order in which requests that wait together are answered."""
    driver.submit(asked([], 12), "full")
    driver.core.step()
    waiting = [driver.submit(asked(chunks, 1), method) for chunks, method in requests]
    meanwhile()
    order: list[int] = []
    while driver.core.busy:
        driver.core.step()
        order += [n for n in range(len(waiting)) if driver.inboxes[waiting[n]].last is not None and n not in order]
    driver.answers()
    return order


def test_what_can_be_woven_counts_as_what_is_an_exact_prefix_does(engine):
    """Three stored chunks behind a chunk that is not, against a short prompt of which nothing is stored."""
    assert served(Driver(engine, max_running=1), [([4], "cacheblend"), ([4, 0, 1, 2], "cacheblend")]) == [1, 0]


def test_what_the_method_does_not_reuse_does_not_count(engine):
    for method in ("prefix", "full"):
        assert served(Driver(engine, max_running=1), [([4], method), ([4, 0, 1, 2], method)]) == [0, 1]


def test_what_is_computed_again_is_computed(engine):
    """The same chunks: of the second less is to be computed."""
    driver = Driver(engine, max_running=1)
    driver.submit(asked([], 12), "full")
    driver.core.step()
    paths = [driver.core._scheduler.requests[driver.submit(asked([0, 1], 1), one)].path for one in METHODS]
    much, little = (driver.core._scheduler.queue._queue.of("")._tree.stored_tokens(path) for path in paths)
    assert much < little
    driver.run()


METHODS = ("cacheblend", "full-reuse")


def test_a_request_is_ranked_anew_when_its_chunks_come_or_go(engine):
    part = engine.builder.chunk_part(STORED[0])

    def forget() -> None:
        engine.store.forget_chunks([engine.builder.chunk_part(chunk).id for chunk in STORED[:3]])

    assert part.id is not None
    driver = Driver(engine, max_running=1)
    assert served(driver, [([4], "cacheblend"), ([4, 0, 1, 2], "cacheblend")], forget) == [0, 1]
