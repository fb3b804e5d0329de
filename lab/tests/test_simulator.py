"""The simulator by hand, its bounds by brute force, its policies by an independent implementation."""

from itertools import product
from math import gcd
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.errors import UsageError
from chunkweave.planning.cost import CostModel
from chunkweave.store.eviction import GDSFPolicy, LFUPolicy, LRUPolicy
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId
from chunkweave_lab.ragcache import POLICIES, policy_rows, reordering_row, sustainable_rows
from chunkweave_lab.simulator.simulation import SimulationConfig, Tier, bounds_of, simulate
from chunkweave_lab.simulator.trace import Arrival, Part, build_trace, poisson_times
from chunkweave_lab.simulator.tree_cache import TreeCache, TreeTier
from chunkweave_lab.simulator.workloads import Corpus, draw_requests

SECOND_A_TOKEN = CostModel((0,), (1, 1000), ((1.0, 1000.0),), 1, {"host": 2.0})


def _arrivals(*requests, tokens=None, gap_s=0.0):
    """`sab` is system part s, then a and b; every part has one token unless told otherwise."""
    sizes = tokens or {}
    return [
        Arrival(gap_s * number, tuple(Part(key, sizes.get(key, 1)) for key in path), 1, has_system=True)
        for number, path in enumerate(requests)
    ]


def _run(arrivals, *tiers, policy="lru", window=0):
    trace = build_trace("t", arrivals, 1)
    tiers = tuple(Tier(name, budget) for name, budget in zip(("device", "host"), tiers, strict=False))
    return simulate(trace, SimulationConfig(policy, tiers, window), SECOND_A_TOKEN)


def test_hits_tokens_and_times_by_hand():
    result = _run(_arrivals("sab", "sab", "sac", gap_s=1.0), 100)
    assert (result.documents, result.hits) == (6, 3)
    assert (result.prompt_tokens, result.cached_tokens) == (12, 5)
    # 4 tokens from 0 on, 1 token from 4 on, 2 tokens from 5 on; arrivals at 0, 1, 2.
    assert result.ttft_s == (4.0, 4.0, 5.0)
    assert result.busy_s == 7.0
    assert result.mean_service_s == pytest.approx(7 / 3)
    assert result.hit_rate == 0.5
    assert [result.ttft_percentile_s(percent) for percent in (1, 50, 99)] == [4.0, 4.0, 5.0]


def test_idle_time_is_nobodys_time_to_first_token():
    assert _run(_arrivals("sa", "sa", gap_s=100.0), 100).ttft_s == (3.0, 1.0)


def test_reading_from_the_slower_tier_costs_its_bandwidth():
    result = _run(_arrivals("sa", "b", "sa", gap_s=100.0, tokens={"b": 2}), 2, 10)
    # s and a went to the host to make room for b; 2 bytes at 2 bytes a second and the question's token.
    assert result.ttft_s == (3.0, 3.0, 2.0)
    assert result.counts.swapped_out == 3, "and b when they came back"


def test_the_example_of_the_paper_for_reordering():
    """Odd and even requests want documents that do not fit together: two hits of three by turns (RAGCache §5.2)."""
    asked = ["a", "b"] * 3
    arrivals = [Arrival(0.0, (Part(name, 1),), 0) for name in asked]
    assert _run(arrivals, 1).hits == 0
    reordered = _run(arrivals, 1, window=32)
    assert reordered.hits == 4
    assert reordered.most_passed_over == 2


def test_a_window_bounds_how_often_a_request_is_passed_over():
    arrivals = draw_requests(Corpus(30, 1.2, 2), [0.0] * 300, seed=3)
    for window in (0, 1, 5, 32):
        trace = build_trace("t", arrivals, 1)
        config = SimulationConfig("pgdsf", (Tier("memory", 40_000),), window)
        assert simulate(trace, config, SECOND_A_TOKEN).most_passed_over <= window


def test_no_tier_is_refused():
    with pytest.raises(UsageError, match="needs a tier"):
        SimulationConfig("lru", ())


def test_progress_goes_up_to_the_end():
    told = []
    trace = build_trace("t", _arrivals("sa", "sb", "sa"), 1)
    simulate(
        trace, SimulationConfig("lru", (Tier("m", 9),)), SECOND_A_TOKEN, lambda done, total: told.append((done, total))
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


# --- bounds -----------------------------------------------------------------------------------------------------------

few_paths = st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=6)


def _best_by_brute_force(requests, sizes, budget):
    """Most documents hit, and most tokens of documents hit, by any choice of what objects to hold between requests."""
    nodes = sorted({path[: i + 1] for path in requests for i in range(len(path))})
    subsets = [
        frozenset(node for node, held in zip(nodes, chosen, strict=True) if held)
        for chosen in product((False, True), repeat=len(nodes))
    ]
    fitting = [held for held in subsets if sum(sizes[node[-1]] for node in held) <= budget]
    most_hits, most_tokens = {frozenset(): 0}, {frozenset(): 0}
    for path in requests:
        asked = {path[: i + 1] for i in range(len(path))}
        hits_after, tokens_after = {}, {}
        for held in most_hits:
            hits = most_hits[held] + len(asked & held)
            tokens = most_tokens[held] + sum(sizes[node[-1]] for node in asked & held)
            for kept in fitting:
                if kept <= held | asked:
                    hits_after[kept] = max(hits_after.get(kept, 0), hits)
                    tokens_after[kept] = max(tokens_after.get(kept, 0), tokens)
        most_hits, most_tokens = hits_after, tokens_after
    return max(most_hits.values()), max(most_tokens.values())


@settings(max_examples=60, deadline=None)
@given(few_paths, st.integers(1, 5), st.sampled_from([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 3, "b": 1}]))
def test_the_bounds_are_never_below_the_best_that_any_choice_reaches(requests, budget, sizes):
    arrivals = [Arrival(i, tuple(Part(key, sizes[key]) for key in path)) for i, path in enumerate(requests)]
    trace = build_trace("t", arrivals, 1)
    bounds = bounds_of(trace, budget)
    hits, tokens = _best_by_brute_force(requests, sizes, budget)
    documents = sum(map(len, requests))
    prompt_tokens = sum(sizes[key] for path in requests for key in path)
    assert bounds.hit_rate >= hits / documents - 1e-9
    assert bounds.token_hit_rate >= tokens / prompt_tokens - 1e-9
    if bounds.exact:
        assert bounds.hit_rate == pytest.approx(hits / documents)
    if sizes["b"] == 1 == sizes["a"]:
        assert bounds.token_hit_rate == pytest.approx(tokens / prompt_tokens)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(POLICIES), st.integers(0, 32))
def test_no_policy_in_any_order_exceeds_the_token_bound_in_order_of_arrival(seed, policy, budget):
    arrivals = draw_requests(Corpus(20, 1.0, 2, mean_tokens=4), poisson_times(60, 1.0, 0), seed)
    trace = build_trace("t", arrivals, 1)
    bounds = bounds_of(trace, 96 + budget)
    result = simulate(trace, SimulationConfig(policy, (Tier("m", 96 + budget),)), SECOND_A_TOKEN)
    assert result.hit_rate <= bounds.hit_rate + 1e-9
    assert result.token_hit_rate <= bounds.token_hit_rate + 1e-9


def test_part_of_a_node_counts_in_the_token_bound():
    arrivals = [Arrival(i, (Part(key, 4),)) for i, key in enumerate("abab")]
    bounds = bounds_of(build_trace("t", arrivals, 1), 6)
    # All of one and half of the other can stay: 6 of the 8 tokens asked for again.
    assert bounds.token_hit_rate == pytest.approx(6 / 16)
    assert bounds.hit_rate == pytest.approx(1 / 4)
    assert bounds.exact


# --- an independent implementation ------------------------------------------------------------------------------------


def _object_trace(seed, objects=300, references=6000):
    rng = Random(seed)
    pool = [
        SegmentRecord.of(ChunkId(f"o{i}"), (), (0,), exact=True, nbytes=rng.randrange(1_000, 100_000))
        for i in range(objects)
    ]
    return [pool[min(int(rng.paretovariate(0.7)) - 1, objects - 1)] for _ in range(references)]


def _object_hits(policy, references, budget):
    """Whether each reference hits in a libcachesim cache that makes room before it inserts.

    Its GDSF otherwise inserts the object first and may evict that object itself, which our store cannot do.
    """
    import libcachesim

    unit = gcd(*(record.nbytes for record in references))  # its sketches depend on the size, and overflow
    room = budget // unit
    cache, request = getattr(libcachesim, policy)(cache_size=room, hashpower=18), libcachesim.Request()
    request.valid = True
    numbers, hits = {}, []
    for record in references:
        request.obj_id = numbers.setdefault(record.id, len(numbers) + 1)
        request.obj_size = record.nbytes // unit
        hits.append(cache.find(request, True) is not None)
        if not hits[-1] and request.obj_size <= room:
            while cache.get_occupied_byte() + request.obj_size > room:
                cache.evict(request)
            cache.insert(request)
    return hits


@pytest.mark.parametrize("budget", [200_000, 1_000_000, 5_000_000])
@pytest.mark.parametrize(
    ("name", "policy"),
    [("LRU", LRUPolicy), ("LFU", LFUPolicy), ("GDSF", lambda: GDSFPolicy(cost=lambda _: 1e6))],
)
def test_every_hit_and_miss_is_that_of_libcachesim(name, policy, budget):
    pytest.importorskip("libcachesim", reason="libcachesim is not installed: pip install -e 'lab[reference]'")
    references = _object_trace(seed=budget)
    cache = TreeCache([TreeTier("memory", budget, policy())])
    ours = [cache.use([record]).hits == 1 for record in references]
    assert ours == _object_hits(name, references, budget)
    assert 0 < sum(ours) < len(ours)


# --- the experiments, small -------------------------------------------------------------------------------------------


def test_the_experiments_say_what_their_tables_need():
    arrivals = draw_requests(Corpus(60, 1.0, 2, mean_tokens=20), poisson_times(300, 1.0, 0), seed=0)
    trace = build_trace("t", arrivals, 1)
    for row in policy_rows(trace, [500, 5000], SECOND_A_TOKEN):
        assert set(row["hit_rate"]) == set(POLICIES)
        assert all(rate <= row["bound"]["hit_rate"] for rate in row["hit_rate"].values())
    row = reordering_row(arrivals, 600, SECOND_A_TOKEN)
    assert 0 < row["most_passed_over"] <= 32
    rates = {row["method"]: row["rate_per_s"] for row in sustainable_rows(arrivals, 600, SECOND_A_TOKEN)}
    assert 0 < rates["no cache"] < rates["pgdsf"]
