"""Loading behind two passes: what the controller expects, and which ratio it sets."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.config import QueryConfig, ReuseConfig, WatchedLayers
from chunkweave.planning.adaptive_methods import LoadAwareMethod
from chunkweave.planning.cost import CostModel, Loading, staged_s
from chunkweave.planning.method import make_method
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry
from tests.unit.test_cost_model import make_lookup


@settings(deadline=None)
@given(
    layers=st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6),
    depth=st.integers(0, 6),
    head_start=st.floats(0, 5),
)
def test_two_stages_are_one_clock_that_waits_for_each_layer_once(layers, depth, head_start):
    load, ask, weave = zip(*layers, strict=True)
    clock = 0.0
    for asked in (True, False):
        for layer in range(min(depth, len(layers)) if asked else len(layers)):
            clock = max(clock, sum(load[: layer + 1]) - head_start) + (ask if asked else weave)[layer]
    assert staged_s(load, [ask[:depth], weave], head_start) == pytest.approx(clock)


@pytest.mark.parametrize(
    ("layers", "ratio", "head_s"),
    [(WatchedLayers.ALL, 0.05, 1.0), (WatchedLayers.FIRST_THIRD, 0.625 / 3.0, 0.375)],
)
def test_only_what_loads_after_the_question_was_asked_hides_behind_recomputation(layers, ratio, head_s):
    lookup = make_lookup()
    lookup = PromptLookup(tuple(replace(entry, exact=None) for entry in lookup.parts))
    geometry = Geometry(8, 6, 4, 2, 3, 10, 50, 4096)
    cost = CostModel((0,), (1, 300), ((0.01, 3.0),), 1000, {"disk": 3e5})
    method = LoadAwareMethod(
        "query", ReuseConfig(0.05, query=QueryConfig(layers=layers)), Loading(cost, lambda _segment: "disk")
    )
    made = method.plan(lookup, geometry)
    assert made.passes[1].start.count == ceil(ratio * 300 - 1e-9)
    choice = method.choose(made, geometry)
    assert (choice.head_s, choice.load_s) == (pytest.approx(head_s), pytest.approx(1.0))
    assert choice.ratio == pytest.approx((1.0 - head_s) / 3.0)
    assert choice.ttft_s == pytest.approx(max(1.0, head_s + choice.ratio * 3.0))


def test_a_queue_reads_ahead_for_what_waits_for_layers():
    lookup = PromptLookup(tuple(replace(entry, exact=None) for entry in make_lookup().parts))
    geometry = Geometry(8, 6, 4, 2, 3, 10, 50, 4096)

    def behind(layers) -> float:
        config = ReuseConfig(0.1, query=QueryConfig(layers=layers))
        return make_method("query", config).plan(lookup, geometry).tokens_behind_loading(8)

    question = make_method("query").plan(lookup, geometry).passes[0].required_tokens
    assert behind(WatchedLayers.ALL) == question
    assert behind(WatchedLayers.FIRST_THIRD) == pytest.approx(question * 3 / 8 + question + 30)
