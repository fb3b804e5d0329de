"""The mirror of a replica's store: what counts as cached, what leaves first, and what a queue over it sees."""

import random

import pytest

from chunkweave.errors import UsageError
from chunkweave.planning.plan import KVSource
from chunkweave.scheduling.queue import CacheAwareQueue, waiting_path
from chunkweave.scheduling.routing import ReplicaContents

SIZES = {"s": 10, "a": 100, "b": 200, "c": 50}


def sizes(path):
    return [SIZES[chunk] for chunk in path]


def noted(*paths, weaves=False, budget=10_000):
    contents = ReplicaContents(budget)
    for path in paths:
        contents.note(path, sizes(path), weaves=weaves)
    return contents


def cached(contents, path, *, weaves):
    return contents.cached_tokens(path, sizes(path), weaves=weaves)


def test_an_exact_request_finds_its_prefix_and_a_woven_one_every_chunk():
    contents = noted("sab")
    assert cached(contents, "sba", weaves=False) == 10
    assert cached(contents, "sba", weaves=True) == 310
    assert cached(contents, "sabc", weaves=False) == 310


def test_what_a_woven_prompt_reuses_becomes_no_exact_path():
    contents = noted("sab")
    contents.note("sbc", sizes("sbc"), weaves=True)
    assert cached(contents, "sbc", weaves=False) == 10
    assert cached(contents, "c", weaves=True) == 50
    contents.check()


def test_the_least_recently_used_leaves_first():
    contents = noted("sa", "sb", budget=320)
    contents.note("sa", sizes("sa"), weaves=False)
    contents.note("sc", sizes("sc"), weaves=False)
    assert [cached(contents, f"s{chunk}", weaves=False) for chunk in "abc"] == [110, 10, 60]
    assert contents.tokens <= 320
    contents.check()


def test_a_replica_that_begins_anew_holds_nothing():
    contents = noted("sab")
    contents.clear()
    assert contents.tokens == contents.segments == cached(contents, "sab", weaves=True) == 0
    contents.check()


def test_what_a_replica_found_corrects_what_it_was_assumed_to_hold():
    contents = noted("sab")
    exact, computed, reused = KVSource.EXACT, KVSource.COMPUTED, KVSource.REUSED
    contents.correct("sab", sizes("sab"), [exact, exact, computed], weaves=False)
    assert cached(contents, "sab", weaves=False) == 110
    contents.correct("sab", sizes("sab"), [None, computed, None], weaves=True)
    assert cached(contents, "sab", weaves=True) == 10, "nothing of it is there, in no context"
    contents.correct("scb", sizes("scb"), [exact, exact, reused], weaves=True)
    assert cached(contents, "scb", weaves=False) == 60
    assert cached(contents, "sbc", weaves=True) == 260
    contents.check()


def test_a_store_with_less_room_holds_what_was_used_last():
    contents = noted("sa", "sb", "sc")  # by use: a, b, s, c
    contents.resize(200)
    assert [cached(contents, f"s{chunk}", weaves=False) for chunk in "abc"] == [10, 10, 60]
    assert contents.tokens <= contents.budget_tokens == 200
    contents.check()


@pytest.mark.parametrize("weaves", [False, True])
def test_a_queue_over_it_follows_what_comes_and_goes(weaves):
    contents = ReplicaContents(10_000)
    queue = CacheAwareQueue(contents)
    queue.submit("first", waiting_path("sc", weaves=weaves), 100)
    queue.submit("second", waiting_path("sa", weaves=weaves), 120)
    assert queue.ready().request == "first"
    contents.note("sa", sizes("sa"), weaves=weaves)
    assert queue.ready().request == "second"
    contents.clear()
    assert queue.ready().request == "first"


def test_counts_stay_right_whatever_happens():
    rng, contents = random.Random(1), ReplicaContents(600)
    for _ in range(3000):
        path = ["s", *rng.sample("abc", rng.randint(0, 3))]
        contents.note(path, sizes(path), weaves=rng.random() < 0.5)
        if rng.random() < 0.01:
            contents.clear()
        contents.check()
        assert contents.tokens <= 600


def test_a_mirror_needs_room():
    with pytest.raises(UsageError, match="room"):
        ReplicaContents(0)
