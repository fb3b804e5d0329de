"""Layers with a sliding window: KV that no token looks at any more is not brought in, and nothing changes by that."""

import pytest
import torch

from chunkweave.conversation.answer import Durations
from chunkweave.engine.decode import make_report
from chunkweave.engine.runner import Runner
from chunkweave.planning.method import make_method
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from tests.integration.weaving import Bench, make_bench, make_prompt
from tests.toys import Link, ThrottledTier, toy_model

WINDOW = 16
SIZES = (40, 33, 40, 21)
PROMPT = make_prompt(SIZES, question=5)


class CountingLink(Link):
    def __init__(self) -> None:
        super().__init__(1e15)
        self.moved = 0

    def transfer(self, nbytes: int) -> None:
        self.moved += nbytes


@pytest.fixture(params=["gemma3_text", "mistral"])
def benches(request) -> tuple[Bench, Bench, CountingLink]:
    """All chunks in memory; and all behind a link, below a memory that is empty."""
    near = make_bench(toy_model(request.param, sliding_window=WINDOW))
    near.precompute(PROMPT)
    link = CountingLink()
    below = SegmentStore(ThrottledTier(link), budget_bytes=1 << 30)
    for record in near.runner.store.records():
        assert below.insert(record, near.tier.get(record.id))
    memory = SegmentStore(HostTier(), budget_bytes=1 << 30)
    store = TieredStore([Level("host", memory), Level("disk", below)])
    return near, Bench(near.loaded, Runner(near.loaded.model, store), near.tier), link


def whole_bytes(bench: Bench) -> int:
    return sum(record.nbytes for record in bench.runner.store.records())


@pytest.mark.parametrize("method", ["full-reuse", "prefix", "epic", "cacheblend", "query"])
def test_answers_are_those_with_everything_brought_in(benches, method):
    near, far, _ = benches
    full = near.runner.prefill(PROMPT, make_method(method), new_tokens=16, unseen=True)
    for bench in (near, far):
        prefilled = bench.runner.prefill(PROMPT, make_method(method), new_tokens=16)
        torch.testing.assert_close(prefilled.logits, full.logits, atol=1e-5, rtol=0)
        assert bench.decode(prefilled, 12) == near.decode(
            near.runner.prefill(PROMPT, make_method(method), new_tokens=16, unseen=True), 12
        )


def test_of_windowed_layers_only_what_is_near_the_question_is_loaded(benches):
    _, far, link = benches
    geometry = far.loaded.model.geometry
    windowed = sum(window is not None for window in geometry.windows)
    prefilled = far.runner.prefill(PROMPT, make_method("full-reuse"))
    brought = sum(SIZES) * (geometry.num_layers - windowed) + SIZES[-1] * windowed
    assert link.moved * sum(SIZES) * geometry.num_layers == whole_bytes(far) * brought
    report = make_report(prefilled, geometry, Durations(0.0, 0.0, 0.0), 0)
    assert report.loaded_fraction == pytest.approx(link.moved / whole_bytes(far))


def test_where_any_token_may_be_recomputed_everything_is_loaded(benches):
    _, far, link = benches
    far.runner.prefill(PROMPT, make_method("cacheblend"))
    assert link.moved == whole_bytes(far)


def test_only_what_came_in_whole_is_kept_in_memory(benches):
    _, far, _ = benches
    far.runner.store_new(far.runner.prefill(PROMPT, make_method("full-reuse")))
    held = [far.runner.store.tier_of(segment) for segment in far.prefill(PROMPT, "full-reuse").plan.segments()]
    assert held == ["disk", "disk", "disk", "host"]


def test_what_was_read_ahead_for_a_plan_that_looks_at_less_is_read_again(benches):
    near, far, link = benches
    with far.runner.prefetch(PROMPT, make_method("full-reuse")) as ahead:
        prefilled = far.runner.prefill(PROMPT, make_method("cacheblend"), prefetched=ahead)
    expected = near.runner.prefill(PROMPT, make_method("cacheblend"))
    torch.testing.assert_close(prefilled.logits, expected.logits, atol=1e-5, rtol=0)
    assert link.moved >= whole_bytes(far)
