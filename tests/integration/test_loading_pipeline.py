"""Loading behind computing: order, overlap, prefetch, lateness, and segments that turn out to be broken or gone."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from chunkweave.config import ReuseConfig
from chunkweave.engine.prefill import PrefillJob
from chunkweave.engine.profiling import kv_bytes_per_token
from chunkweave.engine.runner import Runner
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentHeldUp, SegmentLate, SegmentLost
from chunkweave.planning.cost import CostModel
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import KVSource
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.tiers.preload import LayerLoader, LoadOrder
from chunkweave.types import Span
from chunkweave.weaving.segments import PlanSources
from tests.integration.weaving import Bench, make_prompt
from tests.toys import Link, ThrottledTier

SIZES = (17, 23, 9, 31)
COST = CostModel((0, 512), (1, 512), ((0.01, 5.12), (0.01, 5.12)), kv_bytes_per_token=4 * 2 * 2 * 16 * 4)
BLEND = make_method("cacheblend", ReuseConfig(0.2))


class Recording:
    """A source of four layers that notes what is read, waits for its gate, and fails where it is told to."""

    def __init__(self, name, log, *, broken_at=None, gate=None):
        self.name, self.log, self.broken_at, self.gate = name, log, broken_at, gate
        self.kv = torch.randn(4, 2, 3, 1, 2)
        self.tokens, self.nbytes, self.keys_at = 3, self.kv.nbytes, None

    def layer(self, index, scratch=None):
        if self.gate is not None:
            self.gate.wait()
        if index == self.broken_at:
            raise SegmentLost(self.name, "broken")
        self.log.append((self.name, index))
        return self.kv[index]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (LoadOrder.LAYERS, [(s, i) for i in range(4) for s in "ab"]),
        (LoadOrder.SEGMENTS, [(s, i) for s in "ab" for i in range(4)]),
        (LoadOrder.SYNC, [(s, i) for s in "ab" for i in range(4)]),
    ],
)
def test_layers_come_in_order_and_whole(order, expected):
    log = []
    sources = [(name, Recording(name, log)) for name in "ab"]
    loader = LayerLoader(sources, 4, order=order)
    loader.release(1)
    for segment, (_, source) in zip(loader.segments, sources, strict=True):
        assert all(torch.equal(segment.layer(i), source.kv[i]) for i in range(4))
        assert torch.equal(segment.whole().kv, source.kv)
    loader.close()
    assert log == expected


def test_a_prefetch_reads_no_deeper_than_told_until_its_turn():
    log = []
    loader = LayerLoader([("a", Recording("a", log))], 4, depth=2)
    loader.segments[0].wait_for(2)
    time.sleep(0.05)
    assert log == [("a", 0), ("a", 1)]
    loader.release(4)
    assert len(log) == 4
    loader.close()


def test_a_broken_layer_fails_its_segment_and_no_other():
    log = []
    sources = {"a": Recording("a", log, broken_at=2), "b": Recording("b", log)}
    loader = LayerLoader(list(sources.items()), 4)
    loader.release(4)
    with pytest.raises(SegmentLost, match="a: broken"):
        loader.segments[0].layer(3)
    assert torch.equal(loader.segments[0].layer(1), sources["a"].kv[1]), "what was read before is there"
    assert loader.segments[0].whole() is None
    assert loader.segments[1].whole() is not None
    loader.close()


def test_closing_wakes_whoever_waits_and_ends_the_thread():
    gate = threading.Event()
    loader = LayerLoader([("a", Recording("a", [], gate=gate))], 4)
    failures = []

    def wait():
        try:
            loader.segments[0].layer(3)
        except SegmentLost as lost:
            failures.append(lost)

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=loader.close)
    closer.start()
    gate.set()
    waiter.join(5)
    closer.join(5)
    assert failures
    assert not waiter.is_alive()
    assert not closer.is_alive()


def test_a_late_layer_is_given_up():
    gate = threading.Event()
    sources = [("a", Recording("a", [], gate=gate)), ("b", Recording("b", []))]
    loader = LayerLoader(sources, 4, wait_s=0.02)
    assert loader.segments[1].held_up is None
    with pytest.raises(SegmentLate, match=r"layer 0 was not read within 0\.02 s"):
        loader.segments[0].layer(0)
    while loader.segments[0].late is None:
        pass
    assert loader.segments[1].late is None
    assert loader.segments[1].held_up is not None
    closer = threading.Thread(target=loader.close)
    closer.start()
    closer.join(5)
    assert not closer.is_alive(), "nobody waits for what is late, to stop reading it either"
    with pytest.raises(SegmentLost, match="cancelled"):
        loader.segments[0].layer(3)
    gate.set()


def test_what_is_behind_a_late_layer_is_not_waited_for_but_the_late_one_is_named_first():
    gate = threading.Event()
    sources = [("a", Recording("a", [], gate=gate)), ("b", Recording("b", []))]
    loader = LayerLoader(sources, 4, wait_s=0.02)
    late, behind = loader.segments
    while late.late is None:
        pass
    plan = PlanSources.__new__(PlanSources)
    plan.placements = [Placement(Span(0, 4), behind)]
    assert isinstance(plan.failure, SegmentHeldUp)
    plan.placements = [Placement(Span(0, 4), behind), Placement(Span(4, 8), late)]
    assert plan.failure.segment == "a"
    gate.set()
    loader.close()


@pytest.mark.parametrize(
    ("lost", "told"),
    [(SegmentLost("a", "x"), ["drop_damaged"]), (SegmentLate("a", "x"), ["was_late"]), (SegmentHeldUp("a", "x"), [])],
)
def test_a_level_is_blamed_only_for_its_own_late_layers(lost, told):
    heard = []
    store = SimpleNamespace(
        drop_damaged=lambda _: heard.append("drop_damaged"), was_late=lambda _: heard.append("was_late")
    )
    opened = []
    context = SimpleNamespace(store=SimpleNamespace(store=store))
    job = SimpleNamespace(_given_up=set(), _context=context, close=list, _open=lambda: opened.append(1))
    PrefillJob.plan_without(job, lost)
    assert (heard, opened, job._given_up) == (told, [1], {"a"})


def slow_runner(model, link, **options):
    """A runner whose warm store lies behind `link`, with the prompt that it is warm for."""
    tier = ThrottledTier(link)
    store = TieredStore(
        [
            Level("host", SegmentStore(HostTier(), budget_bytes=0)),
            Level("slow", SegmentStore(tier, budget_bytes=1 << 30)),
        ]
    )
    runner = Runner(model.model, store, **options)
    prompt = Bench(model, runner, tier).precompute(make_prompt(SIZES, system=6))
    return runner, prompt, tier


def memory_logits(model, prompt):
    runner, _, _ = slow_runner(model, Link(1e15))
    return runner.prefill(prompt, BLEND).logits


@pytest.mark.parametrize("order", list(LoadOrder))
def test_every_order_of_loading_gives_the_same_answer(model, order):
    runner, prompt, _ = slow_runner(model, Link(5e6), load_order=order)
    woven = runner.prefill(prompt, BLEND)
    assert torch.equal(woven.logits, memory_logits(model, prompt))
    assert woven.plan.tokens(KVSource.REUSED) == sum(SIZES)


@pytest.mark.timed
def test_a_prefetched_request_does_not_wait(model):
    link = Link(4e5)
    runner, prompt, _ = slow_runner(model, link)
    started = time.perf_counter()
    cold = runner.prefill(prompt, BLEND, capture=False)
    cold_s = time.perf_counter() - started
    with runner.prefetch(prompt, BLEND) as ahead:
        time.sleep(cold_s + 0.1)
        started = time.perf_counter()
        warm = runner.prefill(prompt, BLEND, capture=False, prefetched=ahead)
        warm_s = time.perf_counter() - started
    assert torch.equal(warm.logits, cold.logits)
    assert warm_s < cold_s / 2
    runner.store.check()


def test_a_late_segment_is_computed_but_kept(model):
    cost = CostModel((0,), (1,), ((0.01,),), 1)
    runner, prompt, tier = slow_runner(model, Link(1e15), cost=cost)
    tier._link.bytes_per_s = 1e4
    woven = runner.prefill(prompt, make_method("full-reuse"))
    assert woven.plan.tokens(KVSource.COMPUTED) > 12
    assert len(list(tier.records())) == len(SIZES)


def test_a_segment_that_loads_slower_than_it_computes_is_not_planned_with(model):
    per_token = kv_bytes_per_token(model.model.geometry, model.model.dtype)
    cost = CostModel((0,), (1, 100), ((0.001, 0.1),), per_token, {"slow": per_token / 1.0})
    runner, prompt, _ = slow_runner(model, Link(1e15), cost=cost)
    assert runner.prefill(prompt, BLEND).plan.tokens(KVSource.REUSED) == 0
    runner.cost = CostModel((0,), (1, 100), ((0.001, 0.1),), per_token, {"slow": per_token * 1e6})
    assert runner.prefill(prompt, BLEND).plan.tokens(KVSource.REUSED) > 0


def test_what_was_loaded_is_promoted_after_the_first_token(model):
    tier = ThrottledTier(Link(1e15))
    host = SegmentStore(HostTier(), budget_bytes=1 << 30)
    store = TieredStore([Level("host", host), Level("slow", SegmentStore(tier, budget_bytes=1 << 30), background=True)])
    runner = Runner(model.model, store)
    prompt = Bench(model, runner, tier).precompute(make_prompt(SIZES, system=6))
    store.flush(5)
    host.clear()
    woven = runner.prefill(prompt, BLEND)
    assert {store.tier_of(segment) for segment in woven.plan.segments()} == {"slow"}
    runner.store_new(woven)
    assert {store.tier_of(segment) for segment in woven.plan.segments()} == {"host"}
    # The instruction is stored by now, so other rows are computed together: equal up to rounding.
    assert torch.allclose(runner.prefill(prompt, BLEND).logits, woven.logits, atol=1e-5)
    store.close()
