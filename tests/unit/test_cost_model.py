"""Interpolated costs, the loading controller's choices, and lookups without what is not worth loading."""

import json
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.config import ReuseConfig
from chunkweave.errors import DocumentError, UnknownMethodError
from chunkweave.planning.adaptive_methods import LoadAwareMethod
from chunkweave.planning.cost import (
    CostModel,
    Loading,
    PrefillCosts,
    measured_quickly,
    preload_depth,
    ratio_that_hides,
    too_slow,
)
from chunkweave.planning.method import make_method, without
from chunkweave.planning.plan import Pass, Plan
from chunkweave.prompt.parts import PartKind, PromptPart, chunk_id
from chunkweave.store.index import PartLookup, PromptLookup
from chunkweave.store.records import AttentionProfile, SegmentRecord
from chunkweave.types import ChunkId, Geometry, Span
from chunkweave_lab.baselines import BENCH_METHODS

GEOMETRY = Geometry(8, 6, 4, 2, 3, 10, 50, 4096)

COST = CostModel(
    cached_tokens=(0, 1000),
    new_tokens=(100, 1000),
    prefill_s=((1.0, 10.0), (2.0, 30.0)),
    kv_bytes_per_token=1000,
    tier_bytes_per_s={"disk": 1e5, "slow": 1e3},
)


@pytest.mark.parametrize(
    ("new", "cached", "seconds"),
    [
        (100, 0, 1.0),
        (1000, 1000, 30.0),
        (550, 0, 5.5),
        (100, 500, 1.5),
        (550, 500, (5.5 + 16.0) / 2),
        (2000, 0, 20.0),
        (550, 9999, 16.0),
        (1, 0, 1.0),
        (0, 0, 0.0),
    ],
)
def test_prefill_is_bilinear_and_proportional_beyond_the_grid(new, cached, seconds):
    assert COST.prefill(new, cached) == pytest.approx(seconds)


def test_loading_is_bytes_over_throughput_and_memory_is_free():
    assert COST.load(50, "disk") == pytest.approx(0.5)
    assert COST.load(50, "host") == 0.0


def test_a_cost_model_survives_its_file(tmp_path):
    COST.save(tmp_path / "cost.json")
    assert CostModel.read(tmp_path / "cost.json") == COST


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 9}', None])
def test_what_is_no_cost_model_says_how_to_make_one(tmp_path, content):
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DocumentError, match="the next start measures anew"):
        CostModel.read(path)


def test_a_table_that_does_not_fit_its_axes_is_refused(tmp_path):
    COST.save(tmp_path / "cost.json")
    data = json.loads((tmp_path / "cost.json").read_text())
    data["prefill_s"] = [[1.0]]
    (tmp_path / "cost.json").write_text(json.dumps(data))
    with pytest.raises(DocumentError, match="does not fit"):
        CostModel.read(tmp_path / "cost.json")


def choose_ratio(cost, tokens, tier, *, least_ratio):
    return ratio_that_hides(cost.prefill(tokens), cost.load(tokens, tier), least_ratio=least_ratio)


def test_the_ratio_fills_the_time_that_loading_takes():
    fast, slow = (choose_ratio(COST, 1000, tier, least_ratio=0.15) for tier in ("host", "disk"))
    assert (fast.ratio, fast.load_s) == (0.15, 0.0)
    assert slow.ratio == pytest.approx(1.0)
    assert choose_ratio(COST, 1000, "slow", least_ratio=0.15).ratio == 1.0
    half = choose_ratio(CostModel((0,), (1000,), ((20.0,),), 1000, {"disk": 1e5}), 1000, "disk", least_ratio=0.15)
    assert (half.ratio, half.ttft_s) == (0.5, 10.0)


@given(least=st.floats(0.01, 1), speed=st.floats(1e3, 1e9))
def test_recomputation_never_takes_longer_than_loading_but_for_the_least_ratio(least, speed):
    cost = CostModel((0,), (1000,), ((10.0,),), 1000, {"disk": speed})
    choice = choose_ratio(cost, 1000, "disk", least_ratio=least)
    assert least <= choice.ratio <= 1
    assert choice.ratio == least or choice.recompute_s <= choice.load_s * (1 + 1e-9)


@given(layers=st.integers(1, 80), prefill=st.floats(0.01, 10), load=st.floats(0.01, 10))
def test_with_that_many_layers_in_no_later_layer_is_waited_for(layers, prefill, load):
    depth = preload_depth(layers, prefill, load)
    assert 1 <= depth <= layers
    for layer in range(depth, layers):  # its load ends, its compute may begin (both in units from when `depth` are in)
        assert (layer + 1 - depth) * load / layers <= layer * prefill / layers + load / layers + 1e-9


def test_nothing_to_load_needs_no_depth():
    assert preload_depth(8, 1.0, 0.0) == 1


def make_lookup() -> PromptLookup:
    parts = []
    for i in range(3):
        ids = tuple(range(100 * i, 100 * i + 100))
        record = SegmentRecord.of(chunk_id("f", "", ids), (), ids, exact=True, nbytes=1)
        part = PromptPart(PartKind.CHUNK, ids, record.chunk_id)
        parts.append(PartLookup(part, Span(100 * i, 100 * i + 100), record, (record,)))
    question = PromptPart(PartKind.QUESTION, (1,))
    return PromptLookup((*parts, PartLookup(question, Span(300, 301))))


def test_what_is_left_out_ends_the_exact_prefix():
    lookup = make_lookup()
    pruned = without(lookup, {lookup.parts[1].exact.id})
    assert [entry.exact is not None for entry in pruned.parts] == [True, False, False, False]
    assert [len(entry.variants) for entry in pruned.parts] == [1, 0, 1, 0]
    assert without(lookup, ()) is lookup


def test_segments_that_load_slower_than_they_compute_are_left_out():
    lookup = make_lookup()
    ids = [entry.exact.id for entry in lookup.parts[:3]]
    where = dict(zip(ids, ("host", "disk", "slow"), strict=True))
    assert Loading(COST, where.get).pays(ids[1], Span(100, 200))
    assert too_slow(lookup, Loading(COST, where.get)) == {ids[2]}


def test_the_controller_raises_a_methods_ratio_to_what_hides_its_loading():
    lookup = make_lookup()
    lookup = PromptLookup(tuple(replace(entry, exact=None) for entry in lookup.parts))
    geometry = GEOMETRY
    cost = CostModel((0,), (300,), ((3.0,),), 1000, {"disk": 3e5})
    at = {None: 0.15, "host": 0.15, "disk": 1.0 / 3.0}
    for tier, ratio in at.items():
        method = LoadAwareMethod("cacheblend", ReuseConfig(0.15), Loading(cost, lambda _segment, tier=tier: tier))
        plan = method.plan(lookup, geometry)
        (rule,) = plan.passes[0].rules
        assert plan.raised_to == (pytest.approx(ratio) if tier == "disk" else None)
        assert rule.count == ceil(ratio * 300 - 1e-9)
        choice = method.choose(method.plan(lookup, geometry), geometry)
        assert choice.load_s == pytest.approx(1.0 if tier == "disk" else 0.0)
    plain = LoadAwareMethod("full-reuse", ReuseConfig(0.15), Loading(cost, lambda _segment: "disk"))
    assert plan_of("full-reuse", lookup, geometry) == plain.plan(lookup, geometry)
    with pytest.raises(UnknownMethodError):
        LoadAwareMethod("magic", ReuseConfig(), Loading(cost, lambda _segment: None))


def fixed_lookup() -> PromptLookup:
    """Three chunks of 100 tokens: the first needs nothing before it, the others looked at what is gone."""
    lookup = make_lookup()
    parts = [replace(lookup.parts[0], exact=None)]
    for entry, mass in zip(lookup.parts[1:3], (0.1, 5.0), strict=True):
        record, gone = entry.variants[0], ChunkId("gone")
        profile = AttentionProfile((gone,), (100,), (mass,), 1.0, 0.0, (mass / 100,) * 100)
        variant = SegmentRecord.of(record.chunk_id, (gone,), record.token_ids, exact=False, nbytes=1, attention=profile)
        parts.append(replace(entry, exact=None, variants=(variant,)))
    return PromptLookup((*parts, lookup.parts[3]))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 2 / 3])
def test_alpha_reaches_a_share_of_the_tokens(share):
    lookup, method = fixed_lookup(), make_method("cachecraft", ReuseConfig(alpha=0.3))
    alpha = method.budget.reaching(method.plan(lookup, GEOMETRY), share)
    plan = make_method("cachecraft", ReuseConfig(alpha=alpha)).plan(lookup, GEOMETRY)
    least = [min(1.0, alpha * part.score.impact) * 100 for part in plan.parts[:3]]
    assert sum(least) == pytest.approx(share * 300)
    for part, tokens in zip(plan.parts, least, strict=False):
        assert tokens - 1e-9 <= part.score.tokens < tokens + 1 + 1e-9


def test_what_needs_nothing_is_not_recomputed_however_great_alpha_is():
    lookup, method = fixed_lookup(), make_method("cachecraft")
    plan = method.plan(lookup, GEOMETRY)
    assert method.budget.reaching(plan, 1.0) == pytest.approx(1.0 / plan.parts[1].score.impact)
    alone = PromptLookup((lookup.parts[0], lookup.parts[3]))
    assert method.budget.reaching(method.plan(alone, GEOMETRY), 1.0) == 0.0


def test_the_controller_sets_a_floor_for_alpha_as_for_a_ratio():
    lookup = fixed_lookup()
    cost = CostModel((0,), (300,), ((3.0,),), 1000, {"disk": 2e5})  # 1.5 s to load what takes 3 s to compute

    def planned(alpha: float, tier: str) -> Plan:
        return LoadAwareMethod("cachecraft", ReuseConfig(alpha=alpha), Loading(cost, lambda _: tier)).plan(
            lookup, GEOMETRY
        )

    assert planned(0.5, "host") == make_method("cachecraft", ReuseConfig(alpha=0.5)).plan(lookup, GEOMETRY)
    raised = planned(0.5, "disk")
    assert raised.raised_to > 0.5
    assert 150 <= raised.passes[0].candidate_tokens <= 152, "half of the tokens, each chunk rounded up"
    enough = planned(4.0, "disk")
    assert (enough.raised_to, enough.passes[0].candidate_tokens) == (None, 200)


@pytest.mark.parametrize("name", sorted(BENCH_METHODS.names))
def test_every_budget_starts_at_nothing(name):
    """At value 0 a method with a budget recomputes nothing of what it reuses; others have none to raise."""
    budget = make_method(name, plugins=BENCH_METHODS).budget
    if budget is None:
        return
    plan = make_method(name, replace(ReuseConfig(), **{budget.parameter: 0.0}), BENCH_METHODS).plan(
        fixed_lookup(), GEOMETRY
    )
    assert [pass_.required for pass_ in plan.passes] == [(Span(300, 301),)]
    assert not any(pass_.candidate_tokens for pass_ in plan.passes)


def plan_of(name, lookup, geometry):
    return make_method(name, ReuseConfig(0.15)).plan(lookup, geometry)


def test_a_quick_profile_measures_what_its_time_allows_and_a_whole_table():
    """By hand: each prefill takes 1 ms a token, twice (once uncounted)."""

    def profile(most_tokens, most_s):
        now = [0.0]

        def time_prefill(cached, new):
            now[0] += 2 * new / 1000
            return new / 1000 + cached / 1e6

        cost = measured_quickly(
            time_prefill, most_tokens=most_tokens, most_s=most_s, clock=lambda: now[0], kv_bytes_per_token=1
        )
        return cost, now[0]

    whole, took_s = profile(10_000, 100.0)
    assert (whole.cached_tokens, whole.new_tokens) == ((0, 1024), (16, 64, 256, 1024))
    assert whole.prefill_s[1] == pytest.approx((0.017024, 0.065024, 0.257024, 1.025024))
    assert took_s == pytest.approx(2 * 2 * 1.36)
    short, took_s = profile(10_000, 0.7)
    assert (short.cached_tokens, short.new_tokens) == ((0,), (16, 64, 256)), "alone takes 0.672 s"
    assert took_s < 0.7
    assert profile(10_000, 0.0)[0].new_tokens == (16,)
    assert profile(7, 9.0)[0].new_tokens == (7,)
    assert profile(100, 9.0)[0].cached_tokens == (0,), "64 behind 64 do not fit"


# --- the cheaper of weaving and an exact prefix


def woven_and_exact(tokens: int, recomputed: int, passes: int, stored: int = 0) -> tuple[Plan, Plan, PromptLookup]:
    """Three chunks of `tokens` tokens before a question: woven in `passes` passes, and after `stored` exact ones."""
    parts = []
    for number in range(3):
        ids = tuple(range(tokens * number, tokens * (number + 1)))
        record = SegmentRecord.of(chunk_id("f", "", ids), (), ids, exact=True, nbytes=1)
        part = PromptPart(PartKind.CHUNK, ids, record.chunk_id)
        span = Span(ids[0], ids[-1] + 1)
        parts.append(PartLookup(part, span, record if number < stored else None, (record,)))
    lookup = PromptLookup((*parts, PartLookup(PromptPart(PartKind.QUESTION, (1,)), Span(3 * tokens, 3 * tokens + 1))))
    woven = make_method("epic", ReuseConfig(recomputed / tokens)).plan(lookup, GEOMETRY)
    question = Pass((lookup.parts[-1].span,))
    woven = replace(woven, passes=(*[question] * (passes - 1), *woven.passes))
    return woven, make_method("prefix").plan(lookup, GEOMETRY), lookup


SHAPES = st.integers(1, 400).flatmap(
    lambda tokens: st.tuples(st.just(tokens), st.integers(0, tokens), st.integers(1, 4), st.integers(0, 2))
)


@given(shape=SHAPES, rates=st.lists(st.tuples(st.booleans(), st.floats(1e-6, 1e-2)), max_size=20))
def test_of_two_ways_the_one_expected_to_be_cheaper_is_taken(shape, rates):
    costs = PrefillCosts(GEOMETRY)
    woven, exact, lookup = woven_and_exact(*shape)
    for weaves, rate in rates:
        costs.ran(woven if weaves else exact, rate)
    chosen = costs.cheaper(woven, exact, lookup, stores=False)
    expected = chosen.expected
    assert chosen.gave_way == (expected.exact <= expected.woven)
    assert expected.measured == bool(rates)
    assert chosen.method == ("prefix" if chosen.gave_way else "epic")


@given(shape=SHAPES, times=st.integers(1, 40))
def test_a_path_that_comes_back_costs_at_most_twice_the_best(shape, times):
    """Ski rental: storing the path pays once; until then each request weaves."""
    costs = PrefillCosts(GEOMETRY)
    woven, exact, lookup = woven_and_exact(*shape)
    spent = 0.0
    for number in range(times):
        chosen = costs.cheaper(woven, exact, lookup, stores=True)
        costs.ran(chosen, None)
        expected = chosen.expected
        if chosen.gave_way:
            spent += expected.exact + (times - 1 - number) * expected.stored
            break
        spent += expected.woven
    best = min(times * expected.woven, expected.exact + (times - 1) * expected.stored)
    assert spent <= 2 * best + expected.woven


def test_what_is_not_stored_is_never_paid_for():
    costs = PrefillCosts(GEOMETRY)
    woven, exact, lookup = woven_and_exact(100, 30, 1)
    for stores in (*[False] * 20, True):
        chosen = costs.cheaper(woven, exact, lookup, stores=stores)
        costs.ran(chosen, None)
        assert chosen.gave_way == stores


def test_a_method_that_measured_slower_is_tried_again_once_in_a_hundred_requests():
    costs = PrefillCosts(GEOMETRY)
    woven, exact, lookup = woven_and_exact(100, 10, 1)
    for _ in range(3):
        costs.ran(exact, 1.0)
    for _ in range(9):
        costs.ran(woven, 100.0)
    taken = [not costs.cheaper(woven, exact, lookup, stores=True).gave_way for _ in range(400)]
    assert sum(taken) == 4
    for _ in range(9):
        costs.ran(woven, 0.1)
    assert not costs.cheaper(woven, exact, lookup, stores=True).gave_way


@given(slow=st.floats(1.0, 1e6), full_prefills=st.integers(0, 9))
def test_exact_prefills_say_nothing_of_weaving_by_whatever_method(slow, full_prefills):
    """A method that found nothing to reuse has computed as `prefix` does."""
    woven, exact, lookup = woven_and_exact(100, 10, 1)
    costs = PrefillCosts(GEOMETRY)
    for _ in range(3):
        costs.ran(exact, 1.0)
    for _ in range(full_prefills):
        costs.ran(replace(exact, method="epic"), slow)
    before = PrefillCosts(GEOMETRY).cheaper(woven, exact, lookup, stores=True).expected
    expected = costs.cheaper(woven, exact, lookup, stores=True).expected
    assert expected.woven / expected.exact == pytest.approx(before.woven / before.exact)


@given(slow=st.floats(1.0, 1e6), weaves=st.integers(0, 9))
def test_a_slow_first_prefill_decides_nothing(slow, weaves):
    woven, exact, lookup = woven_and_exact(100, 10, 1)
    costs = PrefillCosts(GEOMETRY)
    before = costs.cheaper(woven, exact, lookup, stores=True).expected
    costs.ran(exact, slow)
    for _ in range(weaves):
        costs.ran(woven, 0.1)
    expected = costs.cheaper(woven, exact, lookup, stores=True).expected
    assert expected.woven / expected.exact == pytest.approx(before.woven / before.exact)
