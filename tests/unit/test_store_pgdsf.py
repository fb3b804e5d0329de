"""PGDSF against Algorithm 1 by hand, and reuse frequency."""

import pytest

from chunkweave.planning.cost import CostModel
from chunkweave.prompt.parts import PartKind, PromptPart
from chunkweave.store.eviction import PathRequest, PGDSFPolicy, ReuseFrequencyPolicy, make_policy
from chunkweave.store.index import PartLookup, PromptLookup, path_request_of
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId, SegmentId, Span


def _record(name: str, *, tokens: int = 100, exact: bool = True) -> SegmentRecord:
    return SegmentRecord.of(ChunkId(name), (), tuple(range(tokens)), exact=exact, nbytes=tokens)


def _asked(*, stored: tuple[SegmentRecord, ...] = (), missing: tuple[SegmentRecord, ...] = (), new: int = 0):
    return PathRequest(tuple(one.id for one in stored), tuple(one.id for one in missing), sum(map(len, stored)), new)


def _anything(_: SegmentId) -> bool:
    return True


def _ranked(policy: PGDSFPolicy, record: SegmentRecord) -> float:
    return policy._ranking.of(record.id)


COST = CostModel(
    cached_tokens=(0, 1000), new_tokens=(100, 300), prefill_s=((1.0, 9.0), (3.0, 15.0)), kv_bytes_per_token=1
)


def test_priorities_are_those_of_algorithm_1():
    policy = PGDSFPolicy(COST.prefill)
    system, first, second = _record("s"), _record("a"), _record("b")
    # 200 new tokens behind none: T = (1 + 9) / 2 = 5 s, so 0.025 s a token for both that missed.
    policy.on_request(_asked(missing=(system, first), new=200))
    policy.on_insert(system)
    policy.on_insert(first)
    assert _ranked(policy, system) == _ranked(policy, first) == pytest.approx(0.025)
    # 100 new tokens behind 100: T = 1 + 0.1 * (3 - 1) = 1.2 s.
    policy.on_request(_asked(stored=(system,), missing=(second,), new=100))
    policy.on_hit(system)
    policy.on_insert(second)
    assert _ranked(policy, system) == pytest.approx(2 * 0.025)
    assert _ranked(policy, second) == pytest.approx(0.012)
    # The least goes, and the clock is its priority.
    assert policy.victim(_anything) == second.id
    policy.on_remove(second.id)
    assert policy.victim(_anything) == first.id
    policy.on_remove(first.id)
    # It comes back: two requests and two misses; 300 new behind 100: T = 9 + 0.1 * (15 - 9) = 9.6 s.
    policy.on_request(_asked(stored=(system,), missing=(first,), new=300))
    policy.on_insert(first)
    assert _ranked(policy, first) == pytest.approx(0.025 + 2 * (0.025 + 9.6 / 300) / 2)


def test_removals_that_are_no_evictions_leave_the_clock_alone():
    policy = PGDSFPolicy()
    kept, withdrawn, late = (_record(name) for name in "kwl")
    for record in (kept, withdrawn):
        policy.on_request(_asked(missing=(record,), new=100))
        policy.on_insert(record)
    policy.on_remove(withdrawn.id)
    policy.on_request(_asked(missing=(late,), new=100))
    policy.on_insert(late)
    assert _ranked(policy, late) == _ranked(policy, kept)


def test_frequency_counts_the_uses_within_the_window_only():
    policy = PGDSFPolicy(window=3)
    old, new = _record("o"), _record("n")
    for _ in range(3):
        policy.on_request(_asked(missing=(old,), new=100))
    policy.on_insert(old)
    assert _ranked(policy, old) == pytest.approx(3.0)
    for _ in range(2):
        policy.on_request(_asked(missing=(new,), new=100))
    policy.on_insert(new)
    policy.on_request(_asked(stored=(old,), new=100))
    policy.on_hit(old)
    assert _ranked(policy, old) == pytest.approx(1.0), "of the last three uses one was of it"


def test_what_is_neither_stored_nor_used_within_the_window_is_forgotten():
    policy = PGDSFPolicy(window=5)
    for number in range(100):
        policy.on_request(_asked(missing=(_record(str(number)),), new=100))
    assert len(policy._known) == 5


def test_coming_in_is_no_use_and_a_use_beside_the_path_counts_once():
    policy = PGDSFPolicy()
    record, other = _record("a"), _record("b")
    policy.on_request(_asked(missing=(record,), new=100))
    policy.on_insert(record)
    policy.on_remove(record.id)
    policy.on_insert(record)
    assert policy.explain(record.id) == {"priority": 1.0, "frequency": 1, "average_cost_s": 1.0}
    policy.on_request(PathRequest((), (other.id,), 0, 100, reused=(record.id,)))
    policy.on_hit(record)
    assert policy.explain(record.id) == {"priority": 2.0, "frequency": 2, "average_cost_s": 1.0}


def test_a_use_counts_where_the_segment_is_not_stored_yet():
    """A request reuses, in another context, what a slower tier holds: then it is copied here, which is no use."""
    policy = PGDSFPolicy()
    record, other = _record("a"), _record("b")
    policy.on_request(PathRequest((), (other.id,), 0, 100, reused=(record.id,)))
    policy.on_insert(record)
    assert policy.explain(record.id)["frequency"] == 1
    assert policy.explain(other.id)["frequency"] == 1


def test_a_new_node_has_the_clock_at_its_request_and_not_that_after_its_own_evictions():
    """RAGCache Algorithm 1: UPDATE_NODE comes before EVICT. By hand, in a tier of 300 bytes at one second a token."""
    store = SegmentStore(HostTier[memoryview](), budget_bytes=300, policy=(policy := PGDSFPolicy()))
    one, two, new = _record("1"), _record("2", tokens=200), _record("n", tokens=300)

    def request(record, new_tokens):
        store.note_request(_asked(missing=(record,), new=new_tokens))
        assert store.insert(record, memoryview(bytes(len(record))))

    request(one, 100)
    request(two, 200)
    assert [policy.explain(record.id)["priority"] for record in (one, two)] == [1.0, 1.0]
    request(new, 300)  # both leave for it: the clock is 1 from then on, and was 0 when it was asked for
    assert policy.explain(new.id)["priority"] == 1.0, "0 + 1 s a token * 1 request"
    request(one, 100)  # was asked for at clock 1, before `new` left
    assert policy.explain(one.id)["priority"] == 1.0 + 2.0


def test_a_window_without_uses_is_refused():
    with pytest.raises(ValueError, match="at least one use"):
        PGDSFPolicy(window=0)


def test_a_cost_reaches_policies_that_ask_for_one_and_what_was_computed_ahead_costs_what_computing_it_alone_does():
    record = _record("a", tokens=300)
    policy = make_policy("pgdsf", prefill_s=COST.prefill)
    policy.on_insert(record)
    assert _ranked(policy, record) == pytest.approx(9.0 / 300)
    assert list(make_policy("lru", prefill_s=COST.prefill).ids()) == []


def test_a_lookup_is_told_as_the_path_that_it_asked_for():
    system = SegmentRecord.of(ChunkId("s"), (), (1, 2), exact=True, nbytes=2)
    alone = SegmentRecord.of(ChunkId("a"), (), (3,), exact=True, nbytes=1)
    lookup = PromptLookup(
        (
            PartLookup(PromptPart(PartKind.START, (0,)), Span(0, 1)),
            PartLookup(PromptPart(PartKind.SYSTEM, (1, 2), ChunkId("s")), Span(1, 3), system, (system,)),
            PartLookup(PromptPart(PartKind.CHUNK, (3,), ChunkId("a")), Span(3, 4), None, (alone,)),
            PartLookup(PromptPart(PartKind.QUESTION, (9, 9)), Span(4, 6)),
        )
    )
    missing = segment_id(ChunkId("a"), (ChunkId("s"),))
    assert path_request_of(lookup) == PathRequest((system.id,), (missing,), cached_tokens=2, new_tokens=4)


def test_reuse_frequency_is_the_papers_sum_over_uses():
    """Cache-Craft §3.3: f_r += 1/CFO, by hand for five reuses each with CCI (1 - beta') of .5, .949 and .877."""
    policy = ReuseFrequencyPolicy()
    a, c, d = (_record(name, tokens=37) for name in "acd")
    for record in (a, c, d):
        policy.on_insert(record)
    for _ in range(5):
        policy.on_request(PathRequest((), (), 0, 1, saved={a.id: 1 / 0.5, c.id: 1 / 0.949, d.id: 1 / 0.877}))
        for record in (d, a, c):
            policy.on_hit(record)
    ranks = [policy._ranking.of(record.id) for record in (a, c, d)]
    assert ranks == pytest.approx([10.0, 5.269, 5.701], abs=5e-4)
    order = []
    while (victim := policy.victim(_anything)) is not None:
        order.append(victim)
        policy.on_remove(victim)
    assert order == [c.id, d.id, a.id]
    policy.on_insert(c)
    assert policy._ranking.of(c.id) == pytest.approx(5.269, abs=5e-4), "a copy from a slower tier is worth what it was"


def test_reuse_frequency_of_uses_without_a_plan():
    policy = ReuseFrequencyPolicy()
    long, short, woven = _record("l", tokens=50), _record("s", tokens=5), _record("w", tokens=50, exact=False)
    for record in (long, short, woven):
        policy.on_insert(record)
    assert policy.victim(_anything) == long.id, "nothing was saved with any: the oldest"
    for record in (long, short, woven):
        policy.on_hit(record)
    assert policy.victim(_anything) == woven.id, "no score: it counts as recomputed whole, 1; the others 50 and 5"
    policy.on_remove(woven.id)
    assert policy.victim(_anything) == short.id
