"""Lookups in shared tiers for requests that wait."""

from threading import Event

import pytest

from chunkweave.vllm.orders import LookupOrder
from chunkweave.vllm.store_events import RemoteLookups
from tests.server.conftest import wait_until
from tests.unit.tier_fakes import Clock, prompt_of

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
