"""Policies by name, and what they evict."""

import re

import pytest

from chunkweave.errors import UnknownMethodError
from chunkweave.plugins import POLICIES
from chunkweave.store.eviction import EvictionPolicy, FIFOPolicy, GDSFPolicy, LFUPolicy, LRUPolicy, make_policy
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId


def _record(name: str, tokens: int = 1, nbytes: int = 1) -> SegmentRecord:
    return SegmentRecord.of(ChunkId(name), (), tuple(range(tokens)), exact=True, nbytes=nbytes)


def test_every_known_policy_can_be_made_and_starts_empty() -> None:
    assert set(POLICIES.names) >= {"lru", "lfu", "fifo", "gdsf", "pgdsf", "reuse-frequency"}
    for name in POLICIES.names:
        assert list(make_policy(name).ids()) == []


@pytest.mark.parametrize("name", ["mru", "", "eviction", "../lru", "LRU"])
def test_an_unknown_policy_is_refused_naming_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownMethodError, match=r"there are: .*lru"):
        make_policy(name)


@pytest.mark.parametrize("name", POLICIES.names)
def test_a_policy_passes_over_what_may_not_go_and_changes_nothing_by_choosing(name: str) -> None:
    policy = make_policy(name)
    a, b = _record("a"), _record("b")
    policy.on_insert(a)
    policy.on_insert(b)
    assert policy.victim(lambda segment: segment != a.id) == b.id
    assert policy.victim(lambda _: False) is None
    assert policy.victim(lambda _: True) == a.id


SIZED = {"d": (6, 2), "l": (6, 12), "p": (2, 2)}
"""Tokens and bytes of some segments; others have one of each."""


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (LRUPolicy(), "+a +b +c a ?b -b ?c"),
        (FIFOPolicy(), "+a +b a ?a"),
        (LFUPolicy(), "+a +b +c a a b ?c c ?b -b +b ?b"),
        (GDSFPolicy(), "+d +l +p ?l l l ?p"),
        (GDSFPolicy(cost=lambda record: 1.0), "+o +q o q q q -q +n ?n -n +n n ?o"),
    ],
    ids=[
        "LRU: longest ago",
        "FIFO: whatever its uses",
        "LFU: least used, of equals the least recent, anew when it comes back",
        "GDSF: 0.5 against 1 and 3, then cost and frequency against size",
        "GDSF: a removal leaves the clock at 0, an eviction puts it at 1",
    ],
)
def test_what_a_policy_evicts(policy: EvictionPolicy, steps: str) -> None:
    """Steps: `+a` comes, `a` is used, `-a` goes, `?a` is the victim."""
    for sign, name in re.findall(r"([+?-]?)(\w)", steps):
        record = _record(name, *SIZED.get(name, (1, 1)))
        if sign == "?":
            assert policy.victim(lambda _: True) == record.id
        elif sign == "-":
            policy.on_remove(record.id)
        else:
            (policy.on_insert if sign else policy.on_hit)(record)


def test_removing_an_unknown_segment_is_ignored() -> None:
    policy = LRUPolicy()
    policy.on_remove(_record("a").id)
    assert list(policy.ids()) == []
