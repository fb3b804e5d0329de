"""The plans of `query`: passes, budgets, factors, and what is always chosen."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.config import Combine, DeviationFactor, QueryConfig, ReuseConfig, WatchedLayers
from chunkweave.errors import UsageError
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import KVSource, Pass, Plan, TopBy
from chunkweave.store.index import PromptLookup
from chunkweave.types import Span
from tests.unit.test_cachecraft import lookup_of, record_of
from tests.unit.test_planning import GEOMETRY, make_lookup
from tests.unit.test_planning import plan as plan_by


def plan(lookup: PromptLookup, ratio: float = 0.25, *, check_layers: tuple[int, ...] = (1,), **query) -> Plan:
    """The plan of `query` with these settings."""
    config = {"recompute_ratio": ratio, "check_layers": check_layers, "query": QueryConfig(**query)}
    return plan_by("query", lookup, **config)


def positions(spans) -> list[int]:
    return [position for span in spans for position in span.positions()]


STORED = make_lookup((10, 20), stored=(0, 1))
QUESTION = Span(31, 35)


def test_it_watches_first_and_starts_from_that():
    watching, weaving = plan(STORED, layers=WatchedLayers.ALL, tail=None).passes
    assert watching.watch.question == weaving.required[-1] == QUESTION
    assert watching.watch.layers == tuple(range(8))
    assert not watching.candidates
    assert weaving.start == TopBy(8)
    assert (weaving.starting_tokens, weaving.candidates_at(GEOMETRY.num_layers - 1), weaving.candidate_tokens) == (
        8,
        8,
        30,
    )


@pytest.mark.parametrize(
    ("layers", "watched"),
    [
        (WatchedLayers.ALL, tuple(range(8))),
        (WatchedLayers.LATE, (4, 5, 6, 7)),
        (WatchedLayers.FIRST_THIRD, (0, 1, 2)),
    ],
)
def test_the_question_runs_no_further_than_it_is_watched(layers, watched):
    watching, weaving = plan(STORED, layers=layers).passes
    assert watching.watch.layers == watched
    assert watching.depth == watched[-1] + 1
    assert weaving.depth is None


@pytest.mark.parametrize(("tail", "start"), [(None, 31), (1, 34), (3, 32), (99, 31)])
def test_the_end_of_the_question_can_stand_for_it(tail, start):
    assert plan(STORED, tail=tail).passes[0].watch.question == Span(start, 35)


def test_how_attention_is_combined_is_in_the_plan():
    watch = plan(STORED).passes[0].watch
    assert (watch.over_heads, watch.over_tokens, watch.over_layers) == (Combine.MAX, Combine.SUM, Combine.SUM)


def test_missing_chunks_are_hidden_first_and_computed_then():
    watching, weaving = plan(make_lookup((10, 20, 5), stored=(0, 2))).passes
    assert watching.hidden == (Span(11, 31),)
    assert positions(watching.required) == [0, *range(36, 40)]
    assert positions(weaving.required) == [0, *range(11, 31), *range(36, 40)]
    assert weaving.start.count == ceil(0.25 * 15)


def test_all_tokens_need_no_evidence():
    (only,) = plan(STORED, ratio=1.0).passes
    assert positions(only.required) == list(range(35))


@pytest.mark.parametrize("lookup", [make_lookup(()), make_lookup((5, 6)), make_lookup((5,), stored=(0,), exact=1)])
def test_nothing_to_choose_is_one_pass(lookup):
    (only,) = plan(lookup).passes
    assert not only.candidates


def test_a_prompt_without_a_question_is_one_pass():
    lookup = PromptLookup(make_lookup((5, 6), stored=(0, 1)).parts[:-1])
    made = make_method("query", ReuseConfig()).plan(lookup, GEOMETRY)
    assert made.passes == (Pass((Span(0, 1),)),)


def test_one_chunk_and_the_smallest_budget_recompute_one_token():
    assert plan(make_lookup((5,), stored=(0,)), ratio=0.01).passes[1].starting_tokens == 1


def test_a_start_needs_a_watch_before_it_and_a_weight_for_each():
    made = plan(STORED)
    watching, weaving = made.passes
    wrong = {
        "watched": [weaving],
        "must be required": [replace(watching, watch=replace(watching.watch, question=Span(2, 4))), weaving],
        "one weight": [watching, replace(weaving, start=TopBy(8, weights=(1.0,)))],
        "after the last": [replace(watching, depth=1, watch=replace(watching.watch, layers=(1,))), weaving],
        "last pass": [watching, replace(weaving, depth=3)],
        "hidden": [replace(watching, hidden=(Span(2, 4),)), weaving],
    }
    for message, passes in wrong.items():
        with pytest.raises(ValueError, match=message):
            replace(made, passes=tuple(passes)).validate(8)


def test_stored_attention_on_earlier_chunks_weighs_the_candidates():
    outward = (0.5, 0.25, 0.0, 1.0)
    made = plan(
        lookup_of("BA", record_of("A"), record_of("CB", (1.75,), outward=outward)), factor=DeviationFactor.STORED
    )
    mean = sum(outward) / 4
    assert made.passes[1].start.weights == (*outward, mean, mean, mean, mean)


def test_a_profile_of_another_variant_than_the_one_taken_is_good_enough():
    outward = (0.5, 0.25, 0.0, 1.0)
    lookup = lookup_of("BA", record_of("DB"), record_of("CB", (1.75,), outward=outward), broken=True)
    made = plan(lookup, factor=DeviationFactor.STORED)
    assert made.parts[1].segment == record_of("DB").id
    assert made.passes[1].start.weights == outward


def test_without_any_profile_the_weights_are_equal():
    assert set(plan(STORED, factor=DeviationFactor.STORED).passes[1].start.weights) == {1.0}


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    ratio=st.floats(0.01, 1.0),
    factor=st.sampled_from(DeviationFactor),
    data=st.data(),
)
def test_the_budget_is_spent_and_no_more(sizes, ratio, factor, data):
    stored = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    made = plan(make_lookup(sizes, stored=stored), ratio, factor=factor)
    reused = made.tokens(KVSource.REUSED)
    always = len(made.reused_among(positions(made.passes[-1].required)))
    chosen = sum(pass_.candidates_at(GEOMETRY.num_layers - 1) for pass_ in made.passes if pass_.start is not None)
    assert always + chosen == ceil(ratio * reused)
    assert len(made.passes) <= 2


@pytest.mark.parametrize("query", [{"tail": 0}])
def test_what_makes_no_sense_is_refused(query):
    with pytest.raises(UsageError):
        QueryConfig(**query)
