"""A prefill in slices: the same KV, logits, new segments, profiles and report as in one go, whatever the slices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.config import CaptureConfig, QueryConfig, ReuseConfig
from chunkweave.engine.prefill import Prefilled, PrefillJob, PrefillOptions
from chunkweave.engine.runner import Decoding, Runner
from chunkweave.kv.request_cache import RequestCache
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import KeepTop, Pass, can_be_cut, cut
from chunkweave.store.tier_store import SegmentStore
from chunkweave.types import Span
from chunkweave.weaving.segments import segments_of
from chunkweave_lab.baselines import bench_method
from tests.integration.weaving import Bench, make_bench, make_prompt
from tests.toys import toy_model

SIZES = (17, 23, 9, 31)
METHODS = {
    "full": {},
    "prefix": {},
    "full-reuse": {},
    "cacheblend": {},
    "epic": {},
    "random": {},
    "cachecraft": {},
    "query": {"query": QueryConfig()},
}


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Three of four chunks are stored."""
    bench = make_bench(toy_model("qwen3"))
    bench.runner.capture = CaptureConfig(profile=True, layers=None, heads=None)
    bench.precompute(make_prompt(SIZES, system=6), without=[3])
    return bench


def by_position(runner: Runner, job: PrefillJob, tokens: int) -> None:
    runner.step([], [(job, tokens)])


def sliced(bench: Bench, prompt, method, tokens: list[int], step=by_position, **options) -> Prefilled:
    slices = iter(tokens)
    with bench.runner.start(prompt, method, PrefillOptions(new_tokens=16, profiles=True, **options)) as job:
        while job.prefilled is None:
            step(bench.runner, job, next(slices, tokens[-1]))
        return job.prefilled


def rows_of(prefilled: Prefilled, stop: int) -> torch.Tensor:
    return torch.stack([torch.stack(prefilled.cache.view(layer, stop)) for layer in range(4)])


@pytest.mark.parametrize("step", [by_position, Runner.step_layers], ids=["by position", "by layer"])
@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=6, deadline=None)
@given(tokens=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_slices_give_what_one_pass_gives(bench, name, step, tokens):
    method = bench_method(name, (), ReuseConfig(0.3, **METHODS[name]))
    prompt = make_prompt(SIZES, system=6, order=(2, 0, 3, 1))
    whole = bench.runner.prefill(prompt, method, new_tokens=16)
    parts = sliced(bench, prompt, method, tokens, step)
    assert (parts.logits - whole.logits).abs().max() < 1e-3
    assert (rows_of(parts, len(prompt)) - rows_of(whole, len(prompt))).abs().max() < 1e-4
    assert parts.recomputed == whole.recomputed
    assert parts.recompute_work == whole.recompute_work
    assert sum(work.visible_keys for work in parts.work) == sum(work.visible_keys for work in whole.work)
    one, other = (
        [*segments_of(p.prompt, p.plan, p.captures, p.attention, store=bench.runner.store)] for p in (whole, parts)
    )
    assert [record.id for record, _ in one] == [record.id for record, _ in other]
    for (record, kv), (same, same_kv) in zip(one, other, strict=True):
        assert (kv.layer(3) - same_kv.layer(3)).abs().max() < 1e-4
        assert record.attention.inter == pytest.approx(same.attention.inter, abs=1e-3)
    bench.runner.store.check()


@pytest.mark.parametrize("name", ["cacheblend", "cachecraft", "query", "full"])
def test_what_was_generated_is_computed_as_decoding_would_have(bench, name):
    method = make_method(name, ReuseConfig(0.3))
    prompt = make_prompt(SIZES, system=6, order=(2, 0, 3, 1))
    first = bench.runner.prefill(prompt, method, new_tokens=16)
    tokens = bench.decode(first, 9)
    again = sliced(bench, prompt, method, [20], generated=tuple(tokens[:8]), plan=first.plan)
    assert not again.captures
    assert int(again.logits.argmax()) == tokens[8]
    assert (rows_of(again, len(prompt) + 8) - rows_of(first, len(prompt) + 8)).abs().max() < 1e-4


def test_a_plan_whose_segment_left_is_made_again(monkeypatch):
    bench = make_bench(toy_model("llama"))
    prompt = bench.precompute(make_prompt(SIZES))
    method = make_method("cacheblend", ReuseConfig(0.3))
    plan = bench.runner.prefill(prompt, method).plan
    for level in bench.runner.store.levels:
        assert isinstance(level.store, SegmentStore)
        level.store.clear()
    with bench.runner.start(prompt, method, PrefillOptions(plan=plan)) as job:
        assert job.lost is not None
        job.plan_without(job.lost)
        while job.lost is not None:
            job.plan_without(job.lost)
        assert not job.plan.segments()


def test_requests_of_every_kind_share_one_step(bench):
    """Decoding, a slice, a pass with rules and one that ends early, in one flat batch."""
    prompts = [make_prompt(SIZES, system=6, order=order) for order in [(0, 1, 2, 3), (3, 1, 0, 2), (2, 1), (1, 0, 2)]]
    methods = [make_method(name, ReuseConfig(0.3)) for name in ("full", "cacheblend", "query", "prefix")]
    alone_ = [bench.runner.prefill(p, m, new_tokens=4) for p, m in zip(prompts, methods, strict=True)]
    decoding = bench.runner.prefill(prompts[0], methods[0], new_tokens=4)
    expected = bench.decode(alone_[0], 2)
    jobs = [bench.runner.start(p, m, PrefillOptions(4)) for p, m in zip(prompts, methods, strict=True)]
    one = Decoding(decoding.cache, (expected[0],), len(prompts[0]))
    while waiting := [job for job in jobs if job.prefilled is None]:
        logits = bench.runner.step([one], [(job, 30) for job in waiting])
        assert int(logits[0].argmax()) == expected[1]
    for job, single in zip(jobs, alone_, strict=True):
        assert (job.prefilled.logits - single.logits).abs().max() < 1e-3
    bench.runner.store.check()


def test_only_passes_without_rules_are_cut():
    pass_ = Pass((Span(4, 9), Span(0, 2), Span(8, 10)))
    head, tail = cut(pass_, 5)
    assert head.required == (Span(0, 2), Span(4, 7))
    assert tail.required == (Span(7, 10),)
    assert cut(tail, 3) == (tail, None)
    assert can_be_cut(pass_)
    assert not can_be_cut(Pass((Span(0, 4),), candidates=(Span(4, 6),), rules=(KeepTop(1, 1),)))
    assert not can_be_cut(Pass((Span(0, 4),), depth=2))
    assert not can_be_cut(Pass((Span(0, 4),), hidden=(Span(5, 6),)))


def test_a_cache_that_grows_keeps_what_it_has(bench):
    geometry = bench.loaded.model.geometry
    cache = RequestCache(geometry, 4, dtype=torch.float32, device=torch.device("cpu"))
    keys, values = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    cache.write(1, torch.arange(3), keys, values)
    cache.write(2, torch.arange(3), values, keys)
    cache.grow(8)
    cache.write(1, torch.tensor([7]), keys[:1], values[:1])
    for layer in (0, 3):
        cache.write(layer, torch.arange(8), *torch.zeros(2, 8, 2, 16))
    assert torch.equal(cache.view(1, 3)[0], keys)
    assert torch.equal(torch.stack(cache.view(2, 3)), torch.stack((values, keys)))
    assert torch.equal(cache.view(1, 8)[1][7], values[0])
    cache.grow(5)
    assert cache.capacity == 8
    cache.free()
    assert cache.capacity == 0
