"""Policies by name, and LRU."""

import pytest

from chunkweave.errors import UnknownMethodError
from chunkweave.store.eviction import known_policies, make_policy
from chunkweave.store.policies.lru import LRUPolicy
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId


def _record(name: str) -> SegmentRecord:
    return SegmentRecord.of(ChunkId(name), (), (1,), exact=True, nbytes=1)


def test_every_known_policy_can_be_made_and_starts_empty() -> None:
    assert "lru" in known_policies()
    for name in known_policies():
        assert list(make_policy(name).ids()) == []


@pytest.mark.parametrize("name", ["mru", "", "eviction", "../lru", "LRU"])
def test_an_unknown_policy_is_refused_naming_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownMethodError, match=r"known: .*lru"):
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


def test_lru_passes_over_what_may_not_go_and_changes_nothing_by_choosing() -> None:
    policy = LRUPolicy()
    a, b = _record("a"), _record("b")
    policy.on_insert(a)
    policy.on_insert(b)
    assert policy.victim(lambda segment: segment != a.id) == b.id
    assert policy.victim(lambda _: False) is None
    assert policy.victim(lambda _: True) == a.id


def test_removing_an_unknown_segment_is_ignored() -> None:
    policy = LRUPolicy()
    policy.on_remove(_record("a").id)
    assert list(policy.ids()) == []
