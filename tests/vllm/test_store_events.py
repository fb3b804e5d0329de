"""Lookups in shared tiers for requests that wait: an answer never reaches the scheduler before what it brought."""

from threading import Event

import pytest

from chunkweave.store.index import StoreChanges, StoreFollower
from chunkweave.types import ChunkId
from chunkweave.vllm.orders import LookupOrder, StepResults
from chunkweave.vllm.store_events import RemoteLookups, StoreEvents
from tests.server.conftest import wait_until
from tests.unit.tier_fakes import Clock, prompt_of

FOUND = ChunkId("found")


def sent(events: StoreEvents) -> StepResults:
    results = StepResults()
    events.add_to(results)
    return results


def test_a_lookup_that_ends_while_changes_are_taken_is_sent_with_the_next():
    answers: set[str] = set()
    follower = StoreFollower(lambda _: True)

    def answered() -> set[str]:
        taken = set(answers)
        answers.clear()
        return taken

    def taken(limit: int) -> StoreChanges:
        changes = follower.take(limit)
        if not follower_touched:  # the probe ends right behind the changes
            follower_touched.append(FOUND)
            follower.touched(FOUND)
            answers.add("a")
        return changes

    follower_touched: list[ChunkId] = []
    events = StoreEvents(taken, answered)
    first, second = sent(events), sent(events)
    assert not first
    assert second.copies == {FOUND: 1}
    assert second.answered == {"a": 1}
    assert not sent(events)


def test_the_end_of_a_lookup_waits_for_changes_that_do_not_fit_into_a_step():
    follower = StoreFollower(lambda _: True)
    chunks = [ChunkId(name) for name in "abcde"]
    for chunk in chunks:
        follower.touched(chunk)
    answers = [{"request"}]
    events = StoreEvents(follower.take, lambda: answers.pop() if answers else set(), most=2)
    steps = [sent(events) for _ in range(3)]
    assert [sorted(step.copies) for step in steps] == [chunks[:2], chunks[2:4], chunks[4:]]
    assert [step.answered for step in steps] == [{}, {}, {"request": 1}]


PROMPT = prompt_of("AB")
TIMEOUT_S = 0.5


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_request_is_answered_once_its_prompt_was_looked_up(clock):
    probed = []
    lookups = RemoteLookups(probed.append, TIMEOUT_S, clock)
    lookups.begin([LookupOrder("a", PROMPT)])
    wait_until(lambda: lookups.answered() == {"a"})
    assert probed == [PROMPT]
    assert lookups.answered() == set()
    lookups.close()


def test_one_that_fails_is_answered_too(clock):
    def fail(_: object) -> None:
        raise OSError("no answer")

    lookups = RemoteLookups(fail, TIMEOUT_S, clock)
    lookups.begin([LookupOrder("a", PROMPT)])
    wait_until(lambda: lookups.answered() == {"a"})
    lookups.close()


def test_no_request_waits_longer_than_the_timeout(clock):
    gate = Event()
    lookups = RemoteLookups(lambda _: gate.wait(10), TIMEOUT_S, clock)
    lookups.begin([LookupOrder(name, PROMPT) for name in "abcdefg"])
    assert lookups.answered() == set()
    clock.now_s += TIMEOUT_S * 1.1
    assert lookups.answered() == set("abcdefg")
    gate.set()
    lookups.close()
