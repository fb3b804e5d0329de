"""Plans without tensors: sources, passes, ratios, FLOPs, and what a plan may not say."""

from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.config import DeviationFactor, QueryConfig, ReuseConfig
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.planning.method import make_method, needs_profiles, reads_question
from chunkweave.planning.methods.cacheblend import filter_ratios
from chunkweave.planning.outcome import LayerWork, full_prefill_flops, layer_flops
from chunkweave.planning.plan import KeepTop, KVSource, PartPlan, Pass, Plan, RecomputeScore, StopUnfocused
from chunkweave.plugins import METHODS
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.store.index import PartLookup, PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import Geometry, Scattered, SegmentId, Span, joined, spans_of
from chunkweave_lab.baselines import BENCH_METHODS, bench_method

GEOMETRY = Geometry(
    num_layers=8,
    hidden_size=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=3,
    intermediate_size=10,
    vocab_size=50,
    max_positions=4096,
)


def make_lookup(sizes, stored=(), exact=0) -> PromptLookup:
    """START, chunks of `sizes` (those in `stored` with an alone variant, the first `exact` exact), QUESTION of 4."""
    parts = [PromptPart(PartKind.START, (1,))]
    for i, size in enumerate(sizes):
        ids = tuple(range(10 + i, 10 + i + size))
        parts.append(PromptPart(PartKind.CHUNK, ids, chunk_id("f", "", ids)))
    parts.append(PromptPart(PartKind.QUESTION, (7, 7, 7, 7)))
    prompt = Prompt(tuple(parts))
    entries = []
    for i, (part, span) in enumerate(zip(prompt.parts, prompt.spans(), strict=True), -1):
        record = part.id and SegmentRecord.of(part.id, (), part.token_ids, exact=True, nbytes=1)
        variants = (record,) if record and i in stored else ()
        entries.append(PartLookup(part, span, record if record and i < exact else None, variants))
    return PromptLookup(tuple(entries))


def plan(method, lookup, **config) -> Plan:
    """The plan of a method by its name, a baseline or ablation such as `cachecraft:no-cci` among them."""
    name, *settings = method.split(":")
    made = bench_method(name, settings, ReuseConfig(**config)).plan(lookup, GEOMETRY)
    made.validate(GEOMETRY.num_layers)
    return made


@pytest.mark.parametrize("method", BENCH_METHODS.names)
def test_the_text_of_a_plan_is_the_same_in_every_process(method):
    """Tensor-parallel ranks compare it: no address of an object may be in it."""
    text = repr(plan(method, make_lookup((30, 40, 50, 20), stored={0, 1, 2, 3}), recompute_ratio=0.5, alpha=0.5))
    assert " at 0x" not in text


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), max_size=6),
    data=st.data(),
    method=st.sampled_from(sorted(BENCH_METHODS.names)),
    ratio=st.floats(0, 1),
)
def test_every_plan_covers_its_prompt(sizes, data, method, ratio):
    exact = data.draw(st.integers(0, len(sizes)))
    stored = data.draw(st.sets(st.integers(0, max(len(sizes) - 1, 0)))) | set(range(exact))
    lookup = make_lookup(sizes, stored, exact)
    made = plan(method, lookup, recompute_ratio=ratio)
    assert [part.span for part in made.parts] == [entry.span for entry in lookup.parts]
    assert sum(made.tokens(kv_source) for kv_source in KVSource) == lookup.prompt_tokens
    required = [{p for span in pass_.required for p in span.positions()} for pass_ in made.passes]
    assert {p for span in made.spans(KVSource.COMPUTED) for p in span.positions()} <= required[-1]
    assert not {p for span in made.spans(KVSource.EXACT) for p in span.positions()} & set().union(*required)
    again = plan(method, lookup, recompute_ratio=ratio)
    assert again == made


def test_each_methods_choice():
    lookup = make_lookup((10, 20, 30), stored={0, 1, 2}, exact=1)
    assert plan("full", lookup).passes == (Pass((Span(0, 65),)),)
    assert plan("prefix", lookup).passes == (Pass((Span(0, 1), Span(11, 65))),)
    assert plan("full-reuse", lookup).passes == (Pass((Span(0, 1), Span(61, 65))),)
    assert plan("epic", lookup, recompute_ratio=0.1).passes == (
        Pass((Span(0, 1), Span(11, 13), Span(31, 34), Span(61, 65))),
    )
    assert plan("cacheblend", lookup, recompute_ratio=0.1).passes == (
        Pass((Span(0, 1), Span(61, 65)), (Span(11, 31), Span(31, 61)), (KeepTop(1, 5),)),
    )


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.15, 0.5, 1.0])
def test_random_draws_each_chunks_share_within_it(ratio):
    drawn = plan("random", make_lookup((10, 20, 31), stored={0, 1, 2}, exact=1), recompute_ratio=ratio)
    again = {p for span in drawn.passes[0].required for p in span.positions()}
    assert [len(again & set(range(*edges))) for edges in ((11, 31), (31, 62))] == [ceil(ratio * 20), ceil(ratio * 31)]


def test_random_draws_by_seed_and_prompt():
    lookup = make_lookup((10, 20, 30), stored={0, 1, 2})
    first, other = (plan("random", lookup, recompute_ratio=0.3, seed=seed) for seed in (0, 1))
    assert first == plan("random", lookup, recompute_ratio=0.3)
    assert first != other


@pytest.mark.parametrize("name", BENCH_METHODS.names)
def test_a_method_is_called_as_it_is_found(name):
    assert make_method(name, plugins=BENCH_METHODS).name == name


@pytest.mark.parametrize(
    ("declared", "config", "names"),
    [
        (needs_profiles, ReuseConfig(), {"cachecraft", "query-whole"}),
        (
            needs_profiles,
            ReuseConfig(query=QueryConfig(factor=DeviationFactor.STORED)),
            {"cachecraft", "query", "query-whole"},
        ),
        (reads_question, ReuseConfig(), {"cachecraft", "query", "query-whole"}),
        (reads_question, ReuseConfig(focus=False), {"query", "query-whole"}),
    ],
)
def test_methods_declare_what_they_need(declared, config, names):
    assert {name for name in METHODS.names if declared(make_method(name, config))} == names


def test_unknown_methods_are_named_with_those_there_are():
    with pytest.raises(UnknownMethodError, match=f"'blend'; there are: {', '.join(METHODS.names)}$"):
        make_method("blend")


@settings(deadline=None)
@given(
    ratio=st.floats(0.001, 1.0),
    layers=st.sets(st.integers(1, 30), min_size=1, max_size=5).map(lambda found: tuple(sorted(found))),
    more=st.integers(1, 20),
)
def test_filter_ratios_fall_and_average_to_the_ratio(ratio, layers, more):
    num_layers = layers[-1] + more
    ratios = filter_ratios(ratio, layers, num_layers)
    assert all(0 < r <= 1 for r in ratios)
    assert list(ratios) == sorted(ratios, reverse=True)
    ends = (*layers[1:], num_layers)
    held = [end - layer for layer, end in zip(layers, ends, strict=True)]
    assert sum(h * r for h, r in zip(held, ratios, strict=True)) / sum(held) == pytest.approx(ratio)


def test_layer_flops_by_hand():
    work = LayerWork(entered_tokens=5, kept_tokens=4, finished_tokens=3, visible_keys=11)
    qkv = 5 * 2 * 6 * (12 + 6 + 6)
    rest = 3 * (2 * 12 * 6 + 2 * 3 * 6 * 10)
    assert layer_flops(GEOMETRY, work) == qkv + rest + 11 * 4 * 12
    looked = replace(work, evidence_keys=7)
    assert layer_flops(GEOMETRY, looked) == layer_flops(GEOMETRY, work) + 7 * (2 * 12 + 2 * 4)
    captured = replace(work, captured_scores=7 * 4)
    assert layer_flops(GEOMETRY, captured) == layer_flops(GEOMETRY, looked), "four heads, seven pairs each"
    whole, last = (layer_flops(GEOMETRY, LayerWork(4, 4, *more)) for more in ((4, 10), (1, 4)))
    assert full_prefill_flops(GEOMETRY, 4) == 7 * whole + last + 2 * 6 * 50


def part(kv_source, start, stop):
    ids = tuple(range(stop - start))
    record = SegmentRecord.of(chunk_id("f", "", ids), (), ids, exact=True, nbytes=1)
    chunk = PromptPart(PartKind.CHUNK, ids, record.chunk_id)
    return PartPlan(chunk, Span(start, stop), kv_source, record.id if kv_source is not KVSource.COMPUTED else None)


FOCUS = StopUnfocused((Span(0, 5), Span(5, 10)), Span(10, 14))


def focused(*rules):
    return Pass((Span(0, 5), Span(10, 14)), (Scattered(5, (4, 0)),), rules)


def test_rules_of_both_kinds_go_together():
    parts = (part(KVSource.COMPUTED, 0, 5), part(KVSource.REUSED, 5, 10), part(KVSource.COMPUTED, 10, 14))
    mixed = focused(KeepTop(1, 2), FOCUS, KeepTop(2, 1))
    Plan("given", parts, (mixed,)).validate(4)
    assert mixed.keep_top == (KeepTop(1, 2), KeepTop(2, 1))
    assert mixed.stop_unfocused is FOCUS
    assert (mixed.candidate_tokens, mixed.candidates_at(3)) == (2, 1)
    assert focused().stop_unfocused is None
    assert (focused().candidate_tokens, focused().candidates_at(3)) == (2, 2)
    assert Pass((Span(0, 5),)).candidates_at(3) == 0


def test_what_is_computed_is_told_from_what_is_recomputed():
    parts = (
        part(KVSource.COMPUTED, 0, 5),
        part(KVSource.REUSED, 5, 10),
        part(KVSource.REUSED, 10, 14),
        part(KVSource.COMPUTED, 14, 16),
    )
    plan = Plan("given", parts, (Pass((Span(0, 6), Span(8, 12), Span(11, 16))),))
    assert plan.computed_tokens_of(plan.passes[0]) == 5 + 2
    assert plan.reused_among([12, 4, 5, 15]) == [12, 5]


def test_only_reused_parts_are_fixed():
    score = RecomputeScore(cci=0.8, overlap=0.25, cfo=0.6, tokens=3)
    assert score.impact == pytest.approx(0.8 * 0.75)
    assert replace(part(KVSource.REUSED, 0, 5), score=score).score is score
    with pytest.raises(ValueError, match="needs no score"):
        replace(part(KVSource.COMPUTED, 0, 5), score=score)


def test_what_a_reuse_saves_is_one_over_its_cfo():
    """Cache-Craft §3.3 by hand: CFO .8 (1 - .25) = .6; 1/|C| where nothing is missing; none without a score."""
    scores = (RecomputeScore(0.8, 0.25, 0.6, 3), RecomputeScore(0.7, 1.0, 0.0, 0), None)
    parts = [replace(part(KVSource.REUSED, 5 * n, 5 * n + 5), score=one) for n, one in enumerate(scores)]
    parts = [replace(one, segment=SegmentId(name)) for one, name in zip(parts, "abc", strict=True)]
    exact = replace(part(KVSource.EXACT, 15, 22), segment=SegmentId("d"))
    again = replace(parts[0], span=Span(22, 27))
    plan = Plan("given", (*parts, exact, again), (Pass((Span(26, 27),)),))
    assert plan.saved() == pytest.approx({"a": 2 / 0.6, "b": 5.0, "c": 1.0, "d": 7.0})


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ((), "last token"),
        ((Pass((Span(0, 5),)),), "last token"),
        ((Pass((Span(10, 14),), (Span(0, 3),)),), "only tokens of reused"),
        ((Pass((Span(10, 14),)),), "must be required"),
        ((Pass((Span(0, 5), Span(10, 14)), (Span(5, 10),), (KeepTop(2, 3), KeepTop(1, 2))),), "up in layers"),
        ((Pass((Span(0, 5), Span(10, 14)), (Span(5, 10),), (KeepTop(1, 3), KeepTop(2, 4))),), "down in counts"),
        ((Pass((Span(0, 5), Span(10, 14)), (Span(5, 10),), (KeepTop(1, 6),)),), "down in counts"),
        ((Pass((Span(0, 5), Span(10, 14)), (Scattered(5, (0, 5)),)),), "only tokens of reused"),
        ((Pass((Span(0, 5), Span(10, 14)), (Scattered(5, (2, -1)),)),), "only tokens of reused"),
        ((Pass((Span(0, 5), Span(10, 14)), (Span(4, 6),)),), "only tokens of reused"),
        ((focused(FOCUS, FOCUS),), "only one rule may stop"),
        ((focused(replace(FOCUS, window=0)),), "needs a window"),
        ((focused(replace(FOCUS, chunks=(Span(5, 10), Span(0, 5)))),), "in order before the question"),
        ((focused(replace(FOCUS, chunks=(Span(0, 6), Span(5, 10)))),), "in order before the question"),
        ((focused(replace(FOCUS, chunks=(Span(5, 12),))),), "in order before the question"),
        ((focused(replace(FOCUS, question=Span(14, 14))),), "must be required"),
        ((focused(StopUnfocused((), Span(9, 12))),), "must be required"),
    ],
)
def test_contradictory_plans_are_caught(passes, message):
    parts = (part(KVSource.COMPUTED, 0, 5), part(KVSource.REUSED, 5, 10), part(KVSource.COMPUTED, 10, 14))
    with pytest.raises(ValueError, match=message):
        Plan("given", parts, passes).validate(4)


def test_a_check_layer_that_the_model_lacks_is_the_users_error():
    lookup = make_lookup((10,), stored={0})
    with pytest.raises(UsageError, match="a rule checks layer 9, but the model has 8"):
        plan("cacheblend", lookup, check_layers=(9,))


@settings(deadline=None)
@given(st.lists(st.integers(0, 60)))
def test_spans_cover_exactly_the_positions(positions):
    spans = spans_of(positions)
    assert [p for span in spans for p in span.positions()] == sorted(set(positions))
    assert all(a.stop < b.start for a, b in pairwise(spans))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6))))
def test_joined_spans_cover_the_same(spans):
    given_spans = [Span(start, start + length) for start, length in spans]
    assert joined(given_spans) == spans_of(p for span in given_spans for p in span.positions())


@settings(deadline=None)
@given(st.integers(0, 9), st.sets(st.integers(0, 30), min_size=1).map(tuple))
def test_scattered_positions(start, offsets):
    scattered = Scattered(start, offsets)
    assert Scattered(start, offsets, 50).hull() == Span(start, start + 50)
    assert sorted(scattered.positions()) == sorted(start + offset for offset in offsets)
    assert len(scattered) == len(offsets)
    assert scattered.hull() == Span(min(scattered.positions()), max(scattered.positions()) + 1)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    data=st.data(),
    method=st.sampled_from(sorted(BENCH_METHODS.names)),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 90)), min_size=8, max_size=8).map(tuple),
)
def test_a_layer_is_unseen_only_if_no_window_of_what_is_computed_there_or_behind_reaches_the_part(
    sizes, data, method, windows
):
    stored = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    made = plan(method, make_lookup(sizes, stored, exact=data.draw(st.integers(0, len(sizes)))))
    several = [span for pass_ in made.passes for span in (*pass_.required, *pass_.candidates)]
    queries = {made.prompt_tokens, *(position for span in several for position in span.positions())}
    for part in made.parts:
        keys = part.span.positions()
        reached = [
            any(key <= query and (window is None or query - key < window) for key in keys for query in queries)
            for window in windows
        ]
        unseen = made.unseen_layers(part, windows)
        assert not any(reached[layer] for layer in unseen)
        if part.segment is not None and not any(isinstance(span, Scattered) for span in several):
            assert unseen == {layer for layer, seen in enumerate(reached) if not seen}
    assert made.loaded_fraction(()) == 1.0
    assert 0.0 <= made.loaded_fraction(windows) <= 1.0
