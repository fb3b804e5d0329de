"""The chunks that were sent to a replica: what counts as stored, what leaves first, and what a queue over it sees."""

import random

import pytest

from chunkweave.errors import UsageError
from chunkweave.scheduling.queue import CacheAwareQueue, StoredTokens, waiting_path
from chunkweave.scheduling.routing import SentPaths

SIZES = {"s": 10, "a": 100, "b": 200, "c": 50}


def sizes(path):
    return [SIZES[chunk] for chunk in path]


def noted(*paths, weaves=False, budget=10_000):
    sent = SentPaths(budget)
    for path in paths:
        sent.note(path, sizes(path), weaves=weaves)
    return sent


def stored(sent, path, *, weaves):
    return StoredTokens(sent).stored_tokens(waiting_path(path, weaves=weaves))


def test_an_exact_request_finds_its_prefix_and_a_woven_one_every_chunk():
    sent = noted("sab")
    assert stored(sent, "sba", weaves=False) == 10
    assert stored(sent, "sba", weaves=True) == 310
    assert stored(sent, "sabc", weaves=False) == 310


def test_what_a_woven_prompt_reuses_becomes_no_exact_path():
    sent = noted("sab")
    sent.note("sbc", sizes("sbc"), weaves=True)
    assert stored(sent, "sbc", weaves=False) == 10
    assert stored(sent, "c", weaves=True) == 50
    sent.check()


def test_the_least_recently_used_leaves_first():
    sent = noted("sa", "sb", budget=320)
    sent.note("sa", sizes("sa"), weaves=False)
    sent.note("sc", sizes("sc"), weaves=False)
    assert [stored(sent, f"s{chunk}", weaves=False) for chunk in "abc"] == [110, 10, 60]
    assert sent.tokens <= 320
    sent.check()


def test_a_replica_that_begins_anew_holds_nothing():
    sent = noted("sab")
    sent.clear()
    assert sent.tokens == sent.segments == stored(sent, "sab", weaves=True) == 0
    sent.check()


@pytest.mark.parametrize("weaves", [False, True])
def test_a_queue_over_it_follows_what_comes_and_goes(weaves):
    sent = SentPaths(10_000)
    queue = CacheAwareQueue(StoredTokens(sent))
    queue.submit("first", waiting_path("sc", weaves=weaves), 100)
    queue.submit("second", waiting_path("sa", weaves=weaves), 120)
    assert queue.ready().request == "first"
    sent.note("sa", sizes("sa"), weaves=weaves)
    assert queue.ready().request == "second"
    sent.clear()
    assert queue.ready().request == "first"


def test_counts_stay_right_whatever_happens():
    rng, sent = random.Random(1), SentPaths(600)
    for _ in range(3000):
        path = ["s", *rng.sample("abc", rng.randint(0, 3))]
        sent.note(path, sizes(path), weaves=rng.random() < 0.5)
        if rng.random() < 0.01:
            sent.clear()
        sent.check()
        assert sent.tokens <= 600


def test_sent_chunks_need_room():
    with pytest.raises(UsageError, match="room"):
        SentPaths(0)
