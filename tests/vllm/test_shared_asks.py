"""Asking shared tiers for requests that wait."""

from threading import Event

import pytest

from chunkweave.vllm.messages import Ask
from chunkweave.vllm.store_events import RemoteLookups
from tests.unit.tier_fakes import Clock, prompt_of

PROMPT = prompt_of("AB")
ASK_S = 0.5


@pytest.fixture
def clock() -> Clock:
    return Clock()


def answered(asks: RemoteLookups) -> set[str]:
    for _ in range(2000):
        found = asks.answered()
        if found:
            return found
        Event().wait(0.005)
    raise AssertionError("nothing is answered")


def test_a_request_is_answered_once_its_prompt_was_asked_for(clock):
    asked = []
    asks = RemoteLookups(asked.append, ASK_S, clock)
    asks.begin([Ask("a", PROMPT)])
    assert answered(asks) == {"a"}
    assert asked == [PROMPT]
    assert asks.answered() == set()
    asks.close()


def test_one_that_fails_is_answered_too(clock):
    def fail(_: object) -> None:
        raise OSError("nobody there")

    asks = RemoteLookups(fail, ASK_S, clock)
    asks.begin([Ask("a", PROMPT)])
    assert answered(asks) == {"a"}
    asks.close()


def test_nobody_waits_longer_than_so_long(clock):
    gate = Event()
    asks = RemoteLookups(lambda _: gate.wait(10), ASK_S, clock)
    asks.begin([Ask(name, PROMPT) for name in "abcdefg"])
    assert asks.answered() == set()
    clock.now_s += ASK_S * 1.1
    assert asks.answered() == set("abcdefg")
    gate.set()
    asks.close()
