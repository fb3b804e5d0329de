"""Policies by name, and LRU."""

import pytest

from chunkweave.errors import UnknownMethodError
from chunkweave.plugins import POLICIES
from chunkweave.store.eviction import FIFOPolicy, GDSFPolicy, LFUPolicy, LRUPolicy, make_policy
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId


def _record(name: str, *, tokens: int = 1, nbytes: int = 1) -> SegmentRecord:
    return SegmentRecord.of(ChunkId(name), (), tuple(range(tokens)), exact=True, nbytes=nbytes)


def test_every_known_policy_can_be_made_and_starts_empty() -> None:
    assert set(POLICIES.names) >= {"lru", "lfu", "fifo", "gdsf", "pgdsf", "reuse-frequency"}
    for name in POLICIES.names:
        assert list(make_policy(name).ids()) == []


@pytest.mark.parametrize("name", ["mru", "", "eviction", "../lru", "LRU"])
def test_an_unknown_policy_is_refused_naming_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownMethodError, match=r"there are: .*lru"):
        make_policy(name)


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = LRUPolicy()
    a, b, c = (_record(name) for name in "abc")
    for record in (a, b, c):
        policy.on_insert(record)
    policy.on_hit(a)
    assert policy.victim(lambda _: True) == b.id
    policy.on_remove(b.id)
    assert policy.victim(lambda _: True) == c.id
    assert set(policy.ids()) == {a.id, c.id}


@pytest.mark.parametrize("name", POLICIES.names)
def test_a_policy_passes_over_what_may_not_go_and_changes_nothing_by_choosing(name: str) -> None:
    policy = make_policy(name)
    a, b = _record("a"), _record("b")
    policy.on_insert(a)
    policy.on_insert(b)
    assert policy.victim(lambda segment: segment != a.id) == b.id
    assert policy.victim(lambda _: False) is None
    assert policy.victim(lambda _: True) == a.id


def test_fifo_does_not_care_for_uses() -> None:
    policy = FIFOPolicy()
    a, b = _record("a"), _record("b")
    policy.on_insert(a)
    policy.on_insert(b)
    policy.on_hit(a)
    assert policy.victim(lambda _: True) == a.id


def test_lfu_evicts_what_was_used_least_and_of_those_the_least_recent() -> None:
    policy = LFUPolicy()
    a, b, c = (_record(name) for name in "abc")
    for record in (a, b, c, a, a, b):
        (policy.on_hit if record.id in policy.ids() else policy.on_insert)(record)
    assert policy.victim(lambda _: True) == c.id
    policy.on_hit(c)
    assert policy.victim(lambda _: True) == b.id, "as often as c, but longer ago"
    policy.on_remove(b.id)
    policy.on_insert(b)
    assert policy.victim(lambda _: True) == b.id, "what comes back starts anew"


def test_gdsf_weighs_cost_and_frequency_against_size() -> None:
    policy = GDSFPolicy()
    dear, large, plain = (
        _record("d", tokens=6, nbytes=2),
        _record("l", tokens=6, nbytes=12),
        _record("p", tokens=2, nbytes=2),
    )
    for record in (dear, large, plain):
        policy.on_insert(record)
    assert policy.victim(lambda _: True) == large.id, "0.5 against 1 and 3"
    policy.on_hit(large)
    policy.on_hit(large)
    assert policy.victim(lambda _: True) == plain.id


def test_gdsf_ages_by_evictions_and_not_by_removals() -> None:
    policy = GDSFPolicy(cost=lambda record: 1.0)
    old, popular, new = (_record(name) for name in "opn")
    for record in (old, popular):
        policy.on_insert(record)
    for record in (old, popular, popular, popular):
        policy.on_hit(record)
    policy.on_remove(popular.id)
    policy.on_insert(new)
    assert policy.victim(lambda _: True) == new.id, "1 against 2: the removal left the clock at 0"
    policy.on_remove(new.id)
    policy.on_insert(new)
    policy.on_hit(new)
    assert policy.victim(lambda _: True) == old.id, "2 against 3: the eviction put the clock at 1"


def test_removing_an_unknown_segment_is_ignored() -> None:
    policy = LRUPolicy()
    policy.on_remove(_record("a").id)
    assert list(policy.ids()) == []
