"""Who gets a request: the policies alone, and how far load may lean under a skewed one."""

import random

import pytest

from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.scheduling.routing import ROUTING, Candidate, make_routing


def names(policy, *requests, tokens=100):
    return [policy.choose(tokens, [Candidate(*one) for one in request]).name for request in requests]


def test_affinity_takes_who_has_most_of_the_prompt():
    assert names(make_routing("affinity"), [("a", 0, 0), ("b", 0, 60), ("c", 0, 20)]) == ["b"]


def test_affinity_leaves_out_who_has_too_much_to_do():
    policy = make_routing("affinity", 1.25)
    assert names(policy, [("a", 0, 0), ("b", 125, 90)], tokens=100) == ["b"]
    assert names(policy, [("a", 0, 0), ("b", 200, 90)], tokens=100) == ["a"]


def test_affinity_gives_what_hardly_anybody_has_to_who_holds_least():
    policy = make_routing("affinity")
    full, empty = ("a", 0, 24, 5000), ("b", 0, 0, 100)
    assert names(policy, [full, empty], [empty, full]) == ["b", "b"]
    assert names(policy, [("a", 0, 25, 5000), empty]) == ["a"]


def test_affinity_of_equals_takes_the_least_loaded_and_then_each_in_turn():
    policy = make_routing("affinity")
    assert names(policy, [("a", 90, 50), ("b", 10, 50)]) == ["b"]
    assert set(names(policy, *[[("a", 0, 0), ("b", 0, 0)]] * 2)) == {"a", "b"}


def test_soonest_counts_what_is_waited_for_against_what_is_found():
    policy = make_routing("soonest")
    assert names(policy, [("a", 0, 0), ("b", 50, 60)], [("a", 0, 0), ("b", 70, 60)]) == ["b", "a"]


def test_others_do_not_look_at_the_cache():
    loads = [("a", 5, 0), ("b", 3, 0), ("c", 9, 99)]
    assert names(make_routing("least-loaded"), loads) == ["b"]
    assert names(make_routing("round-robin"), *[loads] * 4) == ["a", "b", "c", "a"]


@pytest.mark.parametrize("imbalance", [1.0, 1.25, 2.0])
def test_load_never_leans_further_than_the_bound_and_one_request(imbalance):
    policy, rng = make_routing("affinity", imbalance), random.Random(0)
    loads = dict.fromkeys("abc", 0)
    for _ in range(2000):
        tokens = rng.randint(1, 400)
        chosen = policy.choose(tokens, [Candidate(name, load, 999 * (name == "a")) for name, load in loads.items()])
        loads[chosen.name] += tokens
        assert loads[chosen.name] <= imbalance * sum(loads.values()) / 3 + tokens
        done = rng.choice("abc")
        loads[done] = max(0, loads[done] - rng.randint(0, 400))


def test_what_does_not_exist_is_refused():
    with pytest.raises(UnknownMethodError, match="affinity, soonest, least-loaded, round-robin"):
        make_routing("sticky")
    with pytest.raises(UsageError, match="at least 1"):
        make_routing("affinity", 0.5)
    assert all(make_routing(name).name == name for name in ROUTING)
