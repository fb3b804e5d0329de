"""How far a weave goes in one step: by layers that are in memory, and by work."""

from types import SimpleNamespace

import pytest
import torch

from chunkweave.vllm.stock_layers import StockLayers
from chunkweave.vllm.weave import WeaveJob


class FakePass:
    """Has so many active tokens at each layer."""

    def __init__(self, active: list[int]) -> None:
        self.active = active
        self.layer = 0

    @property
    def done(self) -> bool:
        return self.layer == len(self.active)

    @property
    def active_tokens(self) -> int:
        return self.active[self.layer]

    def next_layer(self) -> None:
        self.layer += 1


def job_of(*active: list[int], tokens: int = 640) -> WeaveJob:
    """A job whose passes compute nothing."""
    job = WeaveJob.__new__(WeaveJob)
    job._first, job._stop = 0, tokens
    job._plan = SimpleNamespace(passes=active)
    job._passes = {}
    job._next_pass = lambda: job._passes.update({len(job._passes): FakePass(active[len(job._passes)])})
    job._next_pass()
    return job


def test_without_limits_all_passes_are_run_and_their_tokens_counted():
    job = job_of([30, 40], [640, 100])
    assert job.run() == 810
    assert job.done


def test_a_layer_is_begun_as_long_as_there_is_work_left():
    job = job_of([640, 640, 100, 100])
    assert job.run(work=1) == 640
    assert (job.layer, job.done) == (1, False)
    assert job.run(work=700) == 740
    assert job.layer == 3
    assert job.run(work=700) == 100
    assert job.done


def test_layers_that_are_not_in_memory_wait():
    job = job_of([640, 640, 100, 100])
    assert job.run(layers=3) == 1380
    assert job.layer == 3


@pytest.mark.parametrize(("tokens", "each"), [(640, 20), (16, 1)])
def test_a_layer_that_computes_nothing_counts_for_what_it_places(tokens, each):
    assert job_of([0, 0, 0], tokens=tokens).run() == 3 * each


def test_a_layer_that_is_left_no_tokens_leaves_vllms_modules_alone():
    """What a question in vLLM's own cache chose may all lie before the rest that is woven."""
    nothing = torch.empty(0, 12, dtype=torch.bfloat16)
    sizes = SimpleNamespace(num_heads=6, num_kv_heads=3, head_dim=4)
    queries, keys, values = StockLayers.qkv(SimpleNamespace(own_geometry=sizes), 1, nothing)
    assert (queries.shape, keys.shape, values.shape) == ((0, 6, 4), (0, 3, 4), (0, 3, 4))
    assert keys.dtype == torch.bfloat16
