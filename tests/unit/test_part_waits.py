"""Which requests wait for parts that others compute, with a clock that the test moves."""

from dataclasses import dataclass
from typing import Any

import pytest

from chunkweave.scheduling.in_progress import Wanted
from chunkweave.store.prefix_trie import KnowledgeTree
from chunkweave.types import ChunkId
from chunkweave.vllm.waiting import LEAST_SAVED_TOKENS, Computation, Pace, PartToStore, PartWaits

MOST_S = 10.0
X, Y, Z = map(ChunkId, "xyz")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock) -> PartWaits:
    return PartWaits(Pace(prefill_tokens=1000, weave_tokens=100), most_s=MOST_S, clock=clock)


class NothingStored:
    """An empty store."""

    tree = KnowledgeTree[ChunkId](["host"])

    def chunk_tokens(self, chunk: ChunkId) -> int:
        return 0


def computes(stops: dict[ChunkId, int], **more: Any) -> Computation:
    """A request that computes these chunks up to these positions, one behind the other."""
    chunks = list(stops)
    parts = [PartToStore(one, tuple(chunks[:at]), stops[one], exact=True) for at, one in enumerate(chunks)]
    return Computation(parts, **more)


def asks(
    waits: PartWaits,
    *parts: ChunkId,
    name: str = "waiter",
    tokens: int = 500,
    woven: bool = False,
    path: bool = False,
    profiles: bool = False,
) -> bool:
    """Whether a request waits, of whose parts nothing has to be computed if they are stored (on a `path`: exactly)."""
    wanted = Wanted(parts, [tokens] * len(parts), tokens * len(parts) + 10, None if path else 1.0)
    return waits.is_still_waiting(name) or waits.waits(
        name, wanted, NothingStored(), woven=parts if woven else (), profiles=profiles
    )


def test_a_part_that_is_computed_is_waited_for_until_it_is_stored(waits):
    waits.begin("owner", computes({X: 500, Y: 900}))
    assert asks(waits, X)
    waits.progress("owner", 500)
    assert asks(waits, X), "its KV is there, and not stored"
    waits.stored("owner", [X])
    assert not asks(waits, X)
    assert asks(waits, Y)


def test_what_nobody_computes_is_not_waited_for(waits):
    waits.begin("owner", computes({X: 500}))
    assert not asks(waits, Y)
    assert not asks(waits)


def test_of_a_path_what_comes_behind_a_part_that_nobody_computes_is_of_no_use(waits):
    waits.begin("owner", computes({Y: 500}))
    assert asks(waits, X, Y)
    assert not asks(waits, X, Y, path=True, name="exact")
    assert asks(waits, Y, X, path=True, name="other")


def test_little_is_computed_at_once(waits):
    waits.begin("owner", computes({X: 500}))
    assert not asks(waits, X, tokens=LEAST_SAVED_TOKENS - 1)
    assert asks(waits, X, tokens=LEAST_SAVED_TOKENS)


def test_an_owner_never_waits(waits):
    waits.begin("first", computes({X: 500}))
    waits.begin("second", computes({Y: 500}))
    assert not asks(waits, Y, name="first")
    assert not asks(waits, X, name="second")


@pytest.mark.parametrize("how", ["end", "withhold"])
def test_when_the_owner_is_gone_a_waiter_computes_and_the_others_wait_for_it(waits, how):
    waits.begin("owner", computes({X: 500}))
    assert asks(waits, X)
    getattr(waits, how)("owner")
    assert not asks(waits, X)
    waits.begin("waiter", computes({X: 500}))
    assert asks(waits, X, name="another")
    waits.end("waiter")
    assert not asks(waits, X, name="another")


def test_of_two_owners_the_other_one_is_left(waits):
    waits.begin("first", computes({X: 500}))
    waits.begin("second", computes({X: 500}))
    waits.end("first")
    assert asks(waits, X)
    waits.end("second")
    assert not asks(waits, X)


def test_one_that_needs_profiles_waits_for_an_owner_that_stores_them(waits):
    waits.begin("plain", computes({X: 500}))
    assert not asks(waits, X, profiles=True)
    waits.begin("captured", computes({X: 500}, profiles=True))
    assert asks(waits, X, profiles=True)


def test_a_weave_that_ends_stores_what_it_wove_and_vllm_computes_the_rest(waits):
    waits.begin("owner", computes({X: 400, Y: 900}, weave_tokens=300, woven_to=500))
    assert asks(waits, X, woven=True)
    waits.woven("owner")
    assert not asks(waits, X, woven=True)
    assert asks(waits, Y)


@pytest.mark.parametrize(("weave_tokens", "sooner"), [(600, True), (601, False)])
def test_a_prefill_waits_for_a_weave_that_takes_no_longer_than_to_compute(waits, weave_tokens, sooner):
    """500 tokens are prefilled in one step, in which 100 tokens are woven: so many more may be left."""
    waits.begin("owner", computes({X: 500}, weave_tokens=weave_tokens, woven_to=500))
    assert asks(waits, X) is sooner


@pytest.mark.parametrize(("stop", "sooner"), [(5500, True), (5501, False)])
def test_a_weave_waits_for_a_prefill_that_takes_no_longer_than_to_compute(waits, stop, sooner):
    """500 tokens are woven in five steps, in which 5,000 tokens are prefilled: 500 more may be left."""
    waits.begin("owner", computes({X: stop}))
    assert asks(waits, X, woven=True) is sooner


@pytest.mark.parametrize("woven", [False, True])
def test_behind_work_of_its_own_kind_it_waits_however_long_that_is(waits, woven):
    """Its own would be done behind that."""
    stop = 90_000
    computation = computes({X: stop}, weave_tokens=stop, woven_to=stop) if woven else computes({X: stop})
    waits.begin("owner", computation)
    assert asks(waits, X, woven=woven)


def test_weaves_before_the_owners_count_and_those_behind_it_do_not(waits):
    waits.begin("before", computes({}, weave_tokens=200))
    waits.begin("owner", computes({X: 400}, weave_tokens=400, woven_to=400))
    waits.begin("behind", computes({}, weave_tokens=10_000))
    assert asks(waits, X)
    waits.begin("other", computes({Y: 1}, weave_tokens=1, woven_to=1))
    assert not asks(waits, Y, name="another")


def test_a_wait_is_bounded(waits, clock):
    waits.begin("owner", computes({X: 500}))
    assert asks(waits, X)
    clock.now_s = MOST_S
    assert asks(waits, X)
    clock.now_s += 0.1
    assert not asks(waits, X)
    waits.end("owner")
    waits.begin("next", computes({X: 500}))
    assert not asks(waits, X), "for all owners together"
    assert asks(waits, X, name="another")


def test_a_wait_ends_when_the_owner_takes_far_longer_than_expected(waits, clock):
    for _ in range(5):  # a millisecond a token, .1 s a step
        waits.step(100)
        clock.now_s += 0.1
    waits.step(100)
    begun_s = clock.now_s
    waits.begin("owner", computes({X: 500}, weave_tokens=300, woven_to=500))
    assert asks(waits, X)
    clock.now_s = begun_s + 1.9  # four times .3 s and two steps
    assert asks(waits, X)
    clock.now_s = begun_s + 2.1
    assert not asks(waits, X)
    waits.end("owner")
    waits.begin("next", computes({X: 500}, weave_tokens=300, woven_to=500))
    assert asks(waits, X), "another owner gets its time"


def test_steps_that_overlap_are_measured_together(waits, clock):
    """vLLM begins a step before the last one has ended: the time of a prefill may be seen at a step without tokens."""
    for _ in range(4):
        waits.step(100)
        clock.now_s += 0.001
        waits.step(0)
        clock.now_s += 0.199
    waits.step(0)
    begun_s = clock.now_s
    waits.begin("owner", computes({X: 500}))
    assert asks(waits, X)
    clock.now_s = begun_s + 4 * (500 * 0.002 + 0.2) - 0.1
    assert asks(waits, X)
    clock.now_s += 0.2
    assert not asks(waits, X)


def test_one_that_waits_has_nothing_to_decide_until_something_happens(waits, clock):
    assert not waits.is_still_waiting("waiter")
    waits.begin("one", computes({X: 500}))
    waits.begin("two", computes({Y: 500}))
    assert asks(waits, X, Y)
    assert waits.is_still_waiting("waiter")
    waits.progress("one", 400)
    waits.stored("two", [Y])
    assert waits.is_still_waiting("waiter"), "for the other one"
    waits.stored("one", [X])
    assert not waits.is_still_waiting("waiter")


def test_if_one_of_two_owners_is_gone_the_waiter_decides_anew(waits):
    waits.begin("one", computes({X: 500}))
    waits.begin("two", computes({Y: 500}))
    assert asks(waits, X, Y)
    waits.end("one")
    assert not waits.is_still_waiting("waiter")
    assert asks(waits, X, Y), "for the one that is left"
    waits.end("two")
    assert not asks(waits, X, Y)


def test_nothing_is_left_of_requests_that_have_ended(waits):
    for number in range(100):
        waits.begin(f"owner {number}", computes({X: 500, Y: 900}))
        assert asks(waits, X, Y, name=f"waiter {number}")
        waits.end(f"waiter {number}")
        waits.end(f"owner {number}")
        assert (len(waits), f"owner {number}" in waits) == (0, False)
