"""What of the layer loop makes the host wait for the device. On a GPU each of these would drain its queue.

Attention is a stand-in that, like the Triton kernel, needs nothing from the host but sizes.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chunkweave.fusion.loop import PassRun
from chunkweave.models.attention import FlatResult
from chunkweave.planning.method import make_method
from tests.integration.weaving import make_bench, make_prompt
from tests.toys import toy_model

aten = torch.ops.aten
ASKING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class RoundTrips(TorchDispatchMode):
    """Counts what asks the device: scalars, sizes that depend on data, indexing by flags, and copies to the host."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.found: list[str] = []
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        flags = function in INDEXING and any(one is not None and one.dtype == torch.bool for one in args[1])
        if function in ASKING or flags:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))

    def _counting(self, name, original):
        def counted(tensor, *args, **kwargs):
            self.found.append(name)
            return original(tensor, *args, **kwargs)

        return counted


class DeviceOnly:
    """Attention that knows positions as tensors alone."""

    def attend(self, queries, owners):
        states, row = [], 0
        for owner in owners:
            n = len(owner.queries)
            q, row = queries[row : row + n], row + n
            group = q.shape[1] // owner.keys.shape[1]
            k, v = (one.repeat_interleave(group, 1).transpose(0, 1) for one in (owner.keys, owner.values))
            scores = q.transpose(0, 1) @ k.transpose(1, 2) / q.shape[-1] ** 0.5
            unseen = torch.arange(k.shape[1]) > owner.queries.positions[:, None]
            if owner.queries.hidden is not None:
                unseen = unseen | owner.queries.hidden[: k.shape[1]]
            out = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v
            states.append(out.transpose(0, 1).flatten(1))
        return FlatResult(torch.cat(states), [None] * len(owners))


@pytest.fixture
def weave(monkeypatch, one_thread):
    """Weaves three stored chunks by a method; what asked the device within the layer loop, and log-probabilities."""

    def woven(method: str, *, capture: bool = False):
        bench = make_bench(toy_model())
        prompt = bench.precompute(make_prompt([40, 30, 50], system=8, seed=3))
        expected = bench.log_probs(prompt, method)
        bench.runner.attention = DeviceOnly()
        next_layer, found = PassRun.next_layer, []

        def counted(run: PassRun) -> None:
            with pytest.MonkeyPatch.context() as patch, RoundTrips(patch) as trips:
                next_layer(run)
            found.extend(trips.found)

        monkeypatch.setattr(PassRun, "next_layer", counted)
        if capture:
            prefilled = bench.prefill(prompt, method)
        else:
            prefilled = bench.runner.prefill(prompt, make_method(method), capture=False)
        torch.testing.assert_close(torch.log_softmax(prefilled.logits, -1), expected, atol=2e-4, rtol=0)
        return found

    return woven


@pytest.mark.parametrize("method", ["full", "prefix", "full-reuse", "cacheblend", "epic", "query"])
def test_the_layer_loop_never_asks_the_device(weave, method):
    assert weave(method) == []


def test_what_is_kept_for_the_store_is_asked_for_once_after_the_check_layer(weave):
    assert weave("cacheblend", capture=True) == ["tolist"]


def test_the_counter_sees_what_it_is_to_see(monkeypatch):
    with pytest.MonkeyPatch.context() as patch, RoundTrips(patch) as trips:
        flags = torch.tensor([True, False])
        flags.tolist(), torch.arange(2)[flags], int(torch.ones(())), torch.nonzero(flags)
    assert len(trips.found) >= 4
