"""The tree cache against the stores with payloads: the same requests leave the same nodes on the same tiers."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.plugins import POLICIES
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.eviction import make_policy
from chunkweave.store.index import RequestUse
from chunkweave.store.level import Level
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId
from chunkweave_lab.simulator.tree_cache import TreeCache, TreeTier


@dataclass(frozen=True, slots=True)
class Payload:
    nbytes: int


SIZES = {"s": 2, "a": 3, "b": 5, "c": 4, "d": 7}
QUESTION_TOKENS = 2
requests = st.lists(st.text("abcd", min_size=1, max_size=3).map(lambda chunks: "s" + chunks), max_size=25)
prefill = st.sampled_from([lambda new, cached: new, lambda new, cached: new * (1 + cached) + 3])


def _records(path: str) -> list[SegmentRecord]:
    return [
        SegmentRecord.of(
            ChunkId(key), tuple(map(ChunkId, path[:i])), tuple([0] * SIZES[key]), exact=True, nbytes=SIZES[key]
        )
        for i, key in enumerate(path)
    ]


def _prompt(path: str) -> Prompt:
    kinds = [PartKind.SYSTEM] + [PartKind.CHUNK] * (len(path) - 1)
    parts = [PromptPart(kind, (0,) * SIZES[key], ChunkId(key)) for kind, key in zip(kinds, path, strict=True)]
    return Prompt((*parts, PromptPart(PartKind.QUESTION, (1,) * QUESTION_TOKENS)))


def _serve(store: TieredStore[Payload], path: str) -> int:
    """What an engine does: look up, pin and use what is there, promote what lay below, store what is new."""
    records = _records(path)
    found = store.lookup(_prompt(path))
    hits = [part.exact.id for part in found.parts if part.exact is not None]
    store.note_request(RequestUse.of(found, hits))
    with store.lease(hits):
        for segment in hits:
            payload = store.get(segment)
            assert payload is not None
            store.promote(segment, payload)
        for record in records[len(hits) :]:
            store.insert(record, Payload(record.nbytes))
    return len(hits)


@pytest.mark.parametrize("policy", POLICIES.names)
@settings(max_examples=60, deadline=None)
@given(paths=requests, device=st.integers(5, 25), host=st.integers(0, 40), cost=prefill)
def test_it_keeps_what_a_tiered_store_keeps(policy, paths, device, host, cost):
    budgets = {"device": device, "host": host} if host else {"device": device}

    def fresh():
        return make_policy(policy, prefill_s=cost)

    store: TieredStore[Payload] = TieredStore(
        [Level(name, SegmentStore(HostTier(), budget_bytes=budget, policy=fresh())) for name, budget in budgets.items()]
    )
    cache = TreeCache([TreeTier(name, budget, fresh()) for name, budget in budgets.items()])
    for path in paths:
        used = cache.use(_records(path), QUESTION_TOKENS)
        assert used.hits == _serve(store, path)
        for level in store.levels:
            assert cache.records(level.name) == {record.id for record in level.store.records()}
            assert cache.used_bytes(level.name) == level.store.used_bytes <= budgets[level.name]
        assert sorted(cache.tree.paths("device")) == sorted(store.tree.paths("device"))
        cache.check()
        store.check()
        store.tree.check()
    store.close()


@settings(max_examples=60, deadline=None)
@given(paths=requests, device=st.integers(5, 30), host=st.integers(5, 60))
def test_every_token_of_a_request_was_read_from_one_tier_or_is_new(paths, device, host):
    cache = TreeCache([TreeTier("device", device, make_policy("pgdsf")), TreeTier("host", host, make_policy("pgdsf"))])
    for path in paths:
        used = cache.use(_records(path), QUESTION_TOKENS)
        assert sum(used.tokens_by_tier.values()) == used.cached_tokens == sum(SIZES[key] for key in path[: used.hits])
        assert used.cached_tokens + used.new_tokens == sum(SIZES[key] for key in path) + QUESTION_TOKENS


def test_a_host_copy_is_freed_from_the_device_without_another_copy():
    cache = TreeCache([TreeTier("device", 5, make_policy("lru")), TreeTier("host", 50, make_policy("lru"))])
    for path in ("s", "sa", "b", "s", "sa", "b"):
        cache.use(_records(path))
    once = cache.counts
    assert once.swapped_out == 3
    for path in ("s", "sa", "b"):
        cache.use(_records(path))
    assert cache.counts.swapped_out == 3
    assert cache.counts.freed > once.freed
    assert cache.counts.promotions > once.promotions


def test_leaves_go_before_their_parents_whatever_the_policy_thinks_of_them():
    for policy in POLICIES.names:
        cache = TreeCache([TreeTier("device", 13, make_policy(policy))])
        cache.use(_records("sab"))
        cache.use(_records("c"))
        assert ["".join(path) for path in sorted(cache.tree.paths("device"))] == ["c", "s", "sa"], policy


def test_replicas_of_the_hottest_upper_nodes_outlive_the_device():
    cache = TreeCache([TreeTier("device", 50, make_policy("lru")), TreeTier("host", 50, make_policy("lru"))])
    for path in ("sab", "sab", "sc", "d"):
        cache.use(_records(path))
    assert cache.records("host") == set()
    assert cache.replicate(3) == 3
    assert cache.replicate(3) == 0
    assert sorted("".join(path) for path in cache.tree.paths("host")) == ["s", "sa", "sab"]
    assert cache.counts.replicas == 3
    cache.check()
    assert TreeCache([TreeTier("device", 50, make_policy("lru"))]).replicate(3) == 0


def test_a_path_without_room_is_computed_and_rejected():
    cache = TreeCache([TreeTier("device", 4, make_policy("lru"))])
    assert cache.use(_records("sab")).hits == 0
    assert cache.use(_records("sab")).hits == 0
    assert cache.counts.rejected > 0
    cache.check()


@settings(max_examples=100, deadline=None)
@given(paths=requests, device=st.integers(5, 25), more=st.integers(0, 4))
def test_a_node_is_swapped_out_once_until_it_is_nowhere_any_more(paths, device, more):
    """RAGCache §5.1, also where the host is larger by no more than what two requests pin and add."""
    host = device + 2 * (SIZES["s"] + 3 * max(SIZES.values())) + more
    cache = TreeCache([TreeTier("device", device, make_policy("pgdsf")), TreeTier("host", host, make_policy("pgdsf"))])
    copied, swap_out = set(), cache._swap_out

    def watched(tier, victim, pins):
        if tier == 1 and victim.id not in cache.records("device"):
            copied.discard(victim.id)  # it is nowhere any more: if it comes, it comes in anew
        elif tier == 0 and victim.id not in cache.records("host"):
            assert victim.id not in copied, victim.path
            copied.add(victim.id)
        swap_out(tier, victim, pins)

    cache._swap_out = watched
    for path in paths:
        cache.use(_records(path))
