"""What history is to every reuse method: taken as it is, never recomputed, and computed in exact mode."""

from dataclasses import replace

import pytest

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import make_method, with_history
from chunkweave.planning.plan import KVSource, Pass, Plan
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import ChunkId, Span
from chunkweave_lab.baselines import BENCH_METHODS
from tests.unit.test_planning import GEOMETRY, make_lookup

HISTORY = (2, 3)
"""Places of the two middle chunks in START, four chunks, QUESTION."""


def own_of(lookup: PromptLookup, place: int) -> SegmentRecord:
    part = lookup.parts[place].part
    assert part.id is not None
    context = (ChunkId("before"),)
    return SegmentRecord.of(part.id, context, part.token_ids, exact=False, nbytes=1)


@pytest.fixture
def lookup() -> PromptLookup:
    """Every chunk has an alone variant, the first is the exact prefix."""
    return make_lookup((20, 21, 22, 23), stored=(0, 1, 2, 3), exact=1)


def planned(lookup: PromptLookup, method: str, **config) -> Plan:
    plan = make_method(method, ReuseConfig(**{"recompute_ratio": 0.5} | config), BENCH_METHODS).plan(lookup, GEOMETRY)
    plan.validate(GEOMETRY.num_layers)
    return plan


def may_be_active(a_pass: Pass) -> set[int]:
    return {position for span in (*a_pass.required, *a_pass.candidates) for position in span.positions()}


@pytest.mark.parametrize("method", sorted({*BENCH_METHODS.names} - {"full", "prefix"}))
@pytest.mark.parametrize("alpha", [1.0, 100.0])
def test_history_is_reused_as_it_is(lookup, method, alpha):
    own = {place: own_of(lookup, place) for place in HISTORY}
    plan = planned(with_history(lookup, own), method, alpha=alpha)
    spans = [plan.parts[place].span for place in HISTORY]
    assert [plan.parts[place].segment for place in HISTORY] == [own[place].id for place in HISTORY]
    assert {plan.parts[place].kv_source for place in HISTORY} == {KVSource.REUSED}
    untouched = {position for span in spans for position in span.positions()}
    assert not any(untouched & may_be_active(a_pass) for a_pass in plan.passes)
    assert plan.parts[1].kv_source is KVSource.EXACT


@pytest.mark.parametrize("method", ["cacheblend", "query", "epic", "random", "h2o"])
def test_the_budget_is_for_what_is_new(lookup, method):
    """Half of the one new chunk, however much history there is."""
    own = {place: own_of(lookup, place) for place in HISTORY}
    plan = planned(with_history(lookup, own), method)
    new = plan.parts[4].span
    last = plan.passes[-1]
    required = may_be_active(replace(last, candidates=())) & set(new.positions())
    assert len(required) + last.candidates_at(GEOMETRY.num_layers - 1) == -(-len(new) // 2)


@pytest.mark.parametrize("method", ["full", "prefix"])
def test_exact_methods_compute_it(lookup, method):
    own = {place: own_of(lookup, place) for place in HISTORY}
    plan = planned(with_history(lookup, own), method)
    assert {plan.parts[place].kv_source for place in HISTORY} == {KVSource.COMPUTED}


def test_what_is_exact_stays_so_and_other_tokens_are_not_taken(lookup):
    taken = with_history(lookup, {1: own_of(lookup, 1)})
    assert taken == lookup
    other = replace(own_of(lookup, 2), token_ids=(1,) * 21)
    assert with_history(lookup, {2: other}) == lookup


def test_all_of_history_leaves_nothing_to_recompute():
    lookup = make_lookup((5, 6), stored=(0, 1))
    settled = with_history(lookup, {place: own_of(lookup, place) for place in (1, 2)})
    for method in ("cacheblend", "query", "cachecraft"):
        assert planned(settled, method).passes == (Pass((Span(0, 1), Span(12, 16))),)
