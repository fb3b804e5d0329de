"""Which replica gets a request: the same for the same chunks in any order, within a bound of load."""

import random

import pytest

from chunkweave.errors import UnknownMethodError
from chunkweave.scheduling.routing import ROUTING, Candidate, Router

NAMES = ("a", "b", "c", "d")
IDLE = [Candidate(name, 0) for name in NAMES]


def chunk_ids(rng: random.Random, count: int) -> list[str]:
    return [f"{rng.getrandbits(128):032x}" for _ in range(count)]


def test_chunks_decide_in_any_order_and_each_replica_gets_some():
    router, rng, counts = Router("affinity"), random.Random(0), dict.fromkeys(NAMES, 0)
    for _ in range(400):
        chunks = chunk_ids(rng, 5)
        chosen = router.choose(100, chunks, IDLE).name
        counts[chosen] += 1
        for _ in range(3):
            rng.shuffle(chunks)
            candidates = rng.sample(IDLE, len(IDLE))
            assert router.choose(100, chunks, candidates).name == chosen
    assert min(counts.values()) > 60


def test_prompts_that_share_most_chunks_mostly_share_a_replica():
    router, rng = Router(), random.Random(1)
    same = 0
    for _ in range(400):
        chunks = chunk_ids(rng, 6)
        other = [*chunks[1:], *chunk_ids(rng, 1)]
        same += router.choose(100, chunks, IDLE) == router.choose(100, other, IDLE)
    assert same > 0.7 * 400, "at least the share of common chunks, 5 of 7"


def test_a_replica_that_goes_moves_only_its_own_prompts():
    router, rng = Router(), random.Random(2)
    for _ in range(200):
        chunks = chunk_ids(rng, 4)
        before = router.choose(100, chunks, IDLE)
        left = [one for one in IDLE if one.name != "b"]
        if before.name != "b":
            assert router.choose(100, chunks, left) == before


def test_without_chunks_the_least_loaded_gets_it_and_equals_in_turn():
    assert Router().choose(100, (), [Candidate("a", 5), Candidate("b", 0)]).name == "b"
    router = Router()
    assert {router.choose(100, (), IDLE).name for _ in NAMES} == set(NAMES)


def test_load_never_exceeds_the_bound_by_more_than_one_request():
    router, rng = Router(), random.Random(0)
    popular, loads = chunk_ids(rng, 1), dict.fromkeys(NAMES, 0)
    for _ in range(300):
        tokens = rng.randrange(1, 4000)
        chosen = router.choose(tokens, popular, [Candidate(*one) for one in loads.items()])
        loads[chosen.name] += tokens
        assert loads[chosen.name] <= 1.25 * sum(loads.values()) / len(loads) + tokens


def test_round_robin_takes_each_in_turn_and_other_names_are_refused():
    router = Router("round-robin")
    assert [router.choose(9, ("x",), IDLE).name for _ in range(5)] == ["a", "b", "c", "d", "a"]
    with pytest.raises(UnknownMethodError, match="affinity, round-robin"):
        Router("sticky")
    assert set(ROUTING) == {"affinity", "round-robin"}
