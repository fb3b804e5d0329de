"""Inputs of benchmarks/gpu/limits.py, counted in a running vLLM: runs of active tokens, and launches of a layer.

On a CPU, operations that are no views stand for launches: vLLM's own kernels and PyTorch's are counted alike.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chunkweave.vllm import weave
from chunkweave.vllm.stock_layers import _Runs
from tests.vllm.prompts import computed_alone
from tests.vllm.serving import IN_PROCESS, serving

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import limits

VIEWS = re.compile(
    r"_?(unsafe_)?(view|reshape|_reshape_alias|transpose|t|slice|select|expand|permute|unsqueeze|squeeze|split|chunk|"
    r"split_with_sizes|as_strided|detach|alias|unbind|(new_)?empty\w*|lift_fresh|is_same_size|local_scalar_dense)"
)
"""Names of operations that only make views or memory, or read a number."""


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not VIEWS.fullmatch(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", limits.WAYS, ids=lambda way: way.name)
def test_keys_of_runs_are_those_of_the_requests_that_vllm_gets(way):
    runs = limits.runs_of(way, 4096)
    where = torch.tensor([position for start, stop in runs for position in range(start, stop)])
    assert limits.keys_of_runs(runs) == int(_Runs.of(where).lengths.sum())


def test_a_layer_launches_as_much_as_the_limits_say(checkpoint, monkeypatch):
    counted = defaultdict(list)
    for kind in (weave.StockPass, weave.LoopPass):

        def counting(run, layer, kind=kind, inner=kind._run):
            with Launches() as launches:
                inner(run, layer)
            counted[kind.__name__].append((layer, launches.count))

        monkeypatch.setattr(kind, "_run", counting)
    scenario = computed_alone()
    with serving(checkpoint("llama"), **IN_PROCESS) as served:
        scenario.precompute(served)
        counted.clear()
        for method in ("epic", "query"):
            assert served.answer(scenario.prompt.ask(method, 0.15))[0].report["recomputed_tokens"]
    in_the_middle = {name: max(count for layer, count in found if layer == 2) for name, found in counted.items()}
    assert in_the_middle["StockPass"] == pytest.approx(limits.STOCK_LAUNCHES, rel=0.2)
    assert in_the_middle["LoopPass"] == pytest.approx(limits.LOOP_LAUNCHES, rel=0.2)
