"""What is found, what is stored and what is reported, for any pattern of hits and misses."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.conversation.answer import Durations
from chunkweave.engine.decode import make_report
from chunkweave.planning.method import make_method
from chunkweave.planning.outcome import full_prefill_flops, prefill_flops
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import Prompt
from tests.integration.weaving import Bench, alone, make_bench, make_prompt
from tests.toys import toy_model

SIZES = (17, 23, 9, 31)
METHODS = ["full", "prefix", "full-reuse", "cacheblend", "epic", "random"]


@pytest.fixture(scope="module")
def model():
    return toy_model("qwen3")


@pytest.fixture
def bench(model) -> Bench:
    return make_bench(model)


def sources(prefilled) -> str:
    """One letter a stored part: Exact, Reused, Computed."""
    letters = {KVSource.EXACT: "E", KVSource.REUSED: "R", KVSource.COMPUTED: "C"}
    return "".join(letters[part.kv_source] for part in prefilled.plan.parts if part.part.id is not None)


def test_nothing_stored_everything_computed(bench):
    assert sources(bench.prefill(make_prompt(SIZES, system=6), "cacheblend")) == "CCCCC"


def test_a_repeated_request_is_an_exact_prefix(bench):
    prompt = make_prompt(SIZES, system=6)
    bench.prefill(prompt, "cacheblend", keep=True)
    assert sources(bench.prefill(prompt, "prefix")) == "EEEEE"


def test_another_order_is_prefix_then_reuse(bench):
    bench.prefill(make_prompt(SIZES, system=6), "full", keep=True)
    shuffled = make_prompt(SIZES, system=6, order=(0, 2, 1, 3))
    assert sources(bench.prefill(shuffled, "prefix")) == "EECCC"
    assert sources(bench.prefill(shuffled, "full-reuse")) == "EERRR"


def test_hits_after_a_miss_are_used_and_the_miss_is_stored_inexact(bench):
    prompt = bench.precompute(make_prompt(SIZES), without=[1])
    woven = bench.prefill(prompt, "cacheblend", keep=True)
    assert sources(woven) == "ECRR"
    again = bench.prefill(prompt, "prefix")
    assert sources(again) == "EECC"  # its predecessors were exact, so the stored miss is too

    other = make_prompt(SIZES, order=(3, 2, 1, 0))
    bench.runner.store.remove_where(lambda record: record.chunk_id == prompt.parts[2].id)
    woven = bench.prefill(other, "cacheblend", keep=True)
    assert sources(woven) == "ERCR"
    stored = [r for r in bench.runner.store.records() if r.chunk_id == prompt.parts[2].id]
    assert [record.exact for record in stored] == [False]
    assert sources(bench.prefill(other, "prefix")) == "ECCC"


def test_alone_variants_come_last_whatever_was_used_last(bench):
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    bench.prefill(prompt, "full", keep=True)
    woven = bench.prefill(make_prompt(SIZES, system=6, order=(2, 1, 0, 3)), "full-reuse")
    by_id = {record.id: record for record in bench.runner.store.records()}
    assert not any(by_id[p.segment].alone for p in woven.plan.parts if p.kv_source is KVSource.REUSED)


def test_a_repeated_chunk_in_one_prompt(bench):
    prompt = make_prompt((17, 23))
    first, second = prompt.parts[1:3]
    twice = Prompt((prompt.parts[0], first, second, first, prompt.parts[-1]))
    bench.precompute(twice)
    assert sources(bench.prefill(twice, "cacheblend")) == "ERR"
    woven = bench.log_probs(twice, "cacheblend", ratio=1.0)
    assert (woven - bench.own_log_probs(twice)).abs().max() < 1e-4


def test_no_chunks_is_plain_generation(bench):
    prompt = make_prompt(())
    for method in METHODS:
        assert (bench.log_probs(prompt, method) - bench.own_log_probs(prompt)).abs().max() < 1e-4


def test_a_segment_that_the_tier_lost_is_computed_again(bench):
    prompt = bench.precompute(make_prompt(SIZES))
    store = bench.runner.store
    lost = next(r for r in store.records() if r.chunk_id == prompt.parts[3].id)
    bench.tier.delete(lost.id)
    woven = bench.runner.prefill(prompt, make_method("full-reuse"))
    assert sources(woven) == "ERCR"
    assert store.stats.lost == 1
    store.check()


def test_no_budget_means_no_reuse_and_right_answers(model):
    bench = make_bench(model, budget_bytes=0)
    prompt = make_prompt(SIZES)
    bench.prefill(prompt, "full", keep=True)
    assert sources(bench.prefill(prompt, "cacheblend")) == "CCCC"
    assert bench.runner.store.used_bytes == 0


def test_an_interrupted_prefill_leaves_nothing_pinned_and_the_store_whole(bench, monkeypatch):
    prompt = bench.precompute(make_prompt(SIZES))
    before = {r.id for r in bench.runner.store.records()}

    def interrupted(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(bench.loaded.model), "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.runner.prefill(prompt, make_method("cacheblend"))
    store = bench.runner.store
    store.check()
    assert {r.id for r in store.records()} == before
    for segment in before:
        store.remove(segment)
    assert store.used_bytes == 0


def test_stored_segments_are_never_written_to(bench):
    prompt = bench.precompute(make_prompt(SIZES, system=6))
    store = bench.runner.store
    before = {r.id: store.get(r.id).kv.clone() for r in store.records()}
    for method in METHODS:
        bench.decode(bench.prefill(prompt, method, ratio=0.5, keep=True), 4)
    assert all(bool((store.get(segment).kv == kv).all()) for segment, kv in before.items())


@settings(max_examples=40, deadline=None)
@given(
    stored=st.sets(st.integers(0, 3)),
    in_context=st.booleans(),
    order=st.permutations(range(4)),
    system=st.sampled_from([0, 6]),
    method=st.sampled_from(METHODS),
    ratio=st.sampled_from([0.0, 0.07, 0.5, 1.0]),
)
def test_the_report_accounts_for_every_token(model, stored, in_context, order, system, method, ratio):
    bench = make_bench(model)
    if in_context:
        bench.prefill(make_prompt(SIZES, system=system), "full", keep=True)
    prompt = make_prompt(SIZES, system=system, order=order)
    chunks = [part for part in prompt.parts if part.kind == "chunk"]
    for i in stored:
        bench.prefill(alone(chunks[i]), "full", keep=True)
    woven = bench.prefill(prompt, method, ratio=ratio)
    report = make_report(woven, bench.loaded.model.geometry, Durations(1.0, 0.0, 0.0), 1)
    parts = (report.prefix_exact_tokens, report.reused_tokens, report.recomputed_tokens, report.computed_tokens)
    assert sum(parts) == report.prompt_tokens == len(prompt)
    assert 0.0 <= report.recompute_fraction <= 1.0
    assert sum(chunk.recomputed_tokens for chunk in report.chunks) == report.recomputed_tokens
    without_capture = [replace(work, captured_scores=0) for work in woven.work]
    geometry = bench.loaded.model.geometry
    assert prefill_flops(geometry, without_capture) <= full_prefill_flops(geometry, len(prompt))
    if ratio == 1.0 and method in ("cacheblend", "epic", "random"):
        assert report.reused_tokens == 0
    if method in ("full", "prefix") or (ratio == 1.0 and method != "full-reuse"):
        assert (woven.logits.log_softmax(-1) - bench.own_log_probs(prompt)).abs().max() < 1e-4
