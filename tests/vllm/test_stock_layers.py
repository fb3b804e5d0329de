"""What goes through vLLM's layers in one call, and what the backend's builders of metadata are told."""

from types import SimpleNamespace

import torch
from vllm.config import CUDAGraphMode

from chunkweave.vllm import stock_layers
from chunkweave.vllm.stock_layers import MOST_RUNS, StockLayers, _Runs
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


def test_in_several_calls_it_is_woven_as_in_one(checkpoint, reference, monkeypatch):
    monkeypatch.setattr(stock_layers, "MOST_RUNS", 3)
    scenario = computed_alone()
    with serving(checkpoint("llama"), **IN_PROCESS) as served:
        scenario.precompute(served)
        got = served.answer(scenario.prompt.ask("cacheblend", 0.15))[0]
    woven = reference.weave(scenario.pieces(reference), "cacheblend", 0.15)
    assert len(woven.recomputed) > 9
    assert (got.log_probs[0] - woven.log_probs).abs().max().item() <= 5e-4
    assert got.report["recomputed"] == woven.recomputed
