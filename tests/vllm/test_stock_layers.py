"""What goes through vLLM's layers in one call, and what the backend's builders of metadata get and when."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV
from chunkweave.planning.plan import KeepTop, KVSource, PartPlan, Pass, Plan, Watch
from chunkweave.prompt.parts import PartKind, PromptPart
from chunkweave.types import ChunkId, Scattered, SegmentId, Span
from chunkweave.vllm import stock_layers
from chunkweave.vllm.paged_kv import RequestBlocks
from chunkweave.vllm.stock_layers import MOST_RUNS, StockLayers, _Runs
from chunkweave.vllm.weave import WeaveJob
from tests.vllm.prompts import computed_alone
from tests.vllm.serving import IN_PROCESS, serving


def test_a_call_has_no_more_rows_and_runs_than_there_may_be(monkeypatch):
    monkeypatch.setattr(stock_layers, "MOST_RUNS", 3)
    layers = object.__new__(StockLayers)
    layers._most_rows = 8
    where = torch.tensor([1, 2, 4, 6, 8, 9, 11, 20, 21, 22, 23, 30])
    pieces = list(layers._pieces_by_runs(where))
    assert [row for piece in pieces for row in range(12)[piece]] == list(range(12))
    assert [len(_Runs.of(where[piece]).lengths) for piece in pieces] == [3, 3, 2]
    assert max(piece.stop - piece.start for piece in pieces) <= 8


def test_runs_are_requests_whose_caches_end_with_them():
    runs = _Runs.of(torch.tensor([3, 4, 9, 12, 13, 14]))
    assert runs.starts.tolist() == [0, 2, 3, 6]
    assert runs.lengths.tolist() == [5, 10, 15]


def test_builders_see_no_cuda_graphs_and_room_for_every_run():
    """Else FlashAttention 3 writes into a buffer of one place a request, which captured graphs read."""
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
    )
    eager = stock_layers._without_graphs(config)
    assert eager.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert eager.scheduler_config.max_num_seqs == MOST_RUNS
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert config.scheduler_config.max_num_seqs == 16


@pytest.fixture(scope="module")
def served(checkpoint):
    """A server in this process, so that its layers are within reach."""
    with serving(checkpoint("llama"), **IN_PROCESS) as one:
        yield one


@dataclass
class Builds:
    """The builders of all builds, in order; `build` is the backend's own."""

    build: Callable
    builders: list = field(default_factory=list)


@pytest.fixture
def overwritten(monkeypatch):
    """From now on a builder overwrites what it returned before, as FlashInfer's does with its plan."""
    builds, returned = Builds(CPUAttentionMetadataBuilder.build), {}

    def planned(self, *args, **kwargs):
        new = builds.build(self, *args, **kwargs)
        builds.builders.append(self)
        one = returned.setdefault(id(self), new)
        vars(one).update(vars(new))
        return one

    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", planned)
    return builds


TOKENS = 60
PASSES = (
    Pass((Span(0, 1),), (Span(1, TOKENS),), rules=(KeepTop(1, 12),)),
    Pass((Span(0, 1), Span(50, TOKENS)), (Scattered(2, (0, 5, 9, 20)),), watch=Watch(Span(50, TOKENS), (0, 2))),
)
"""Through vLLM's whole layers, and through our loop, where vLLM's kernel attends."""


def woven(layers, *, paused: bool) -> list[torch.Tensor]:
    """The KV after two weaves, which alternate layer by layer if `paused`."""
    count = -(-TOKENS // layers.paged.block_size)
    blocks = [RequestBlocks([range(1 + n * count, 1 + (n + 1) * count)], layers.paged) for n in range(2)]
    slots = [one.of(0).slots(torch.arange(TOKENS)) for one in blocks]
    ids = [3 + (torch.arange(TOKENS) * step % 251) for step in (7919, 104729)]
    stored = torch.randn((4, 2, TOKENS - 1, *layers.paged.shape), generator=torch.Generator().manual_seed(0))
    start, chunk = PromptPart(PartKind.START, (3,)), Span(1, TOKENS)
    with layers.paged.preserved(torch.cat(slots)), layers.adapters.using(0), torch.inference_mode():
        jobs = []
        for own, tokens, pass_ in zip(blocks, ids, PASSES, strict=True):
            part = PromptPart(PartKind.CHUNK, tuple(tokens[1:].tolist()), ChunkId("a"))
            parts = (
                PartPlan(start, Span(0, 1), KVSource.COMPUTED),
                PartPlan(part, chunk, KVSource.REUSED, SegmentId("a")),
            )
            placed = [Placement(chunk, SegmentKV(stored))]
            plan = Plan("cacheblend", parts, (pass_,))
            jobs.append(WeaveJob(layers, own, plan, placed, tokens.tolist(), first=0, stop=TOKENS))
        while not all(job.done for job in jobs):
            for job in jobs:
                job.run(1 if paused else inf)
        return [layers.paged.read(layer, where) for where in slots for layer in range(layers.num_layers)]


@pytest.mark.parametrize("paused", [False, True], ids=["after-another", "alternating"])
@pytest.mark.parametrize("runs", [MOST_RUNS, 3], ids=["one-piece", "several-pieces"])
def test_metadata_is_not_used_after_its_builder_has_built_again(served, monkeypatch, overwritten, runs, paused):
    layers = get_kv_transfer_group()._worker._layers
    with monkeypatch.context() as usual:
        usual.setattr(CPUAttentionMetadataBuilder, "build", overwritten.build)
        wanted = woven(layers, paused=False)
    monkeypatch.setattr(stock_layers, "MOST_RUNS", runs)
    got = woven(layers, paused=paused)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_an_answer_is_the_same_if_metadata_is_overwritten(served, reference, monkeypatch, overwritten):
    """In one call and in several."""
    scenario = computed_alone()
    scenario.precompute(served)
    ask = scenario.prompt.ask("cacheblend", 0.15)
    answers = []
    for runs in (MOST_RUNS, 3):
        monkeypatch.setattr(stock_layers, "MOST_RUNS", runs)
        answers.append(served.answer(ask)[0])
        assert served.blocks_are_free()  # forgets vLLM's own prefix cache
    one, other = answers
    assert one.report["recomputed"] == other.report["recomputed"] != []
    assert torch.equal(one.log_probs, other.log_probs)
    woven = reference.weave(scenario.pieces(reference), "cacheblend", 0.15)
    assert len(woven.recomputed) > 9
    assert (one.log_probs[0] - woven.log_probs).abs().max().item() <= 5e-4
    assert one.report["recomputed"] == woven.recomputed


def test_one_piece_is_built_once_for_all_layers(served, overwritten):
    layers = get_kv_transfer_group()._worker._layers
    woven(layers, paused=False)
    after_another = len(overwritten.builders)
    woven(layers, paused=True)
    assert after_another < layers.num_layers < len(overwritten.builders) - after_another
