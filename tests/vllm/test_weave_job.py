"""How far a weave goes in one step, by layers that are in memory and by work; what it does before its first layer; and
which kernel a pass takes.
"""

from types import SimpleNamespace

import pytest
import torch

from chunkweave.planning.plan import KeepTop, KVSource, PartPlan, Pass, Plan, TopBy, Watch
from chunkweave.prompt.parts import PartKind, PromptPart
from chunkweave.types import Geometry, Scattered, Span
from chunkweave.vllm import weave
from chunkweave.vllm.stock_layers import StockLayers
from chunkweave.vllm.weave import WeaveJob, keys_read, too_scattered
from tests.vllm.test_paged_cache import FakePaged


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


def test_a_layer_is_begun_as_long_as_there_is_work_left_and_it_is_in_memory():
    job = job_of([640, 640, 100, 100])
    for limits, tokens in (({"work": 1}, 640), ({"work": 700}, 740), ({"work": 700}, 100)):
        assert not job.done
        assert job.run(**limits) == tokens
    assert job.done
    assert job_of([640, 640, 100, 100]).run(layers=3) == 1380


@pytest.mark.parametrize(("tokens", "each"), [(640, 20), (16, 1)])
def test_a_layer_that_computes_nothing_counts_for_what_it_places(tokens, each):
    assert job_of([0, 0, 0], tokens=tokens).run() == 3 * each


RAGGED = Scattered(0, tuple(range(0, 4096, 7)))
EVEN = Span(0, 4096)


def test_keys_are_read_once_for_each_tile_of_a_run():
    assert keys_read([Span(0, 100)]) == 100
    assert keys_read([Span(0, 300)]) == 128 + 256 + 300
    assert keys_read([Span(500, 501), Span(900, 1100)]) == 501 + (1028 + 1100)
    assert keys_read([EVEN]) == 128 * sum(range(1, 33))


@pytest.mark.parametrize(
    ("pass_", "scattered"),
    [
        (Pass((EVEN,)), False),
        (Pass(tuple(Span(n, n + 40) for n in range(0, 4096, 400))), False),  # the beginnings of chunks, as `epic` does
        (Pass((Span(4090, 4096),), (RAGGED,)), True),
        (Pass((Span(4090, 4096),), (Scattered(0, RAGGED.offsets[::20]),)), False),
        (Pass((Span(4090, 4096),), (Span(0, 4000),), rules=(KeepTop(1, 600),)), True),
        (Pass((Span(4090, 4096),), (Span(0, 4000),), rules=(KeepTop(1, 600), KeepTop(2, 30))), False),
        (Pass((Span(4090, 4096),), (Span(0, 4000),), rules=(KeepTop(1, 0),)), False),
        (Pass((Span(4090, 4096),), (Span(0, 4000),), start=TopBy(600)), True),
        (Pass((Span(4090, 4096),), (Span(0, 4000),), start=TopBy(30)), False),
    ],
    ids=["prefill", "epic", "scattered", "few", "cacheblend", "narrowed", "nothing-kept", "query", "query-few"],
)
def test_scattered_is_what_reads_several_times_the_keys_of_a_prefill(pass_, scattered):
    """15 % of 4,096 tokens are; a twentieth of these, long runs, and the whole prompt are not."""
    assert too_scattered(pass_, EVEN) is scattered


def test_the_rest_of_a_prompt_is_compared_with_its_own_prefill():
    """vLLM has the first part: prefilling the rest reads less."""
    pass_ = Pass((), (Scattered(3000, tuple(range(0, 1000, 20))),))
    assert not too_scattered(pass_, EVEN)
    assert too_scattered(pass_, Span(3000, 4096))


@pytest.mark.parametrize(
    ("device", "pass_", "taken"),
    [
        ("cuda", Pass((), (RAGGED,)), "LoopPass"),
        ("cuda", Pass((), (Span(0, 4096),), rules=(KeepTop(1, 600),)), "LoopPass"),
        ("cuda", Pass((EVEN,)), "StockPass"),
        ("cpu", Pass((), (RAGGED,)), "StockPass"),
    ],
    ids=["scattered", "by-a-rule", "dense", "on-a-cpu"],
)
def test_on_a_gpu_our_kernel_attends_for_scattered_tokens(monkeypatch, device, pass_, taken):
    for name in ("StockPass", "LoopPass"):
        monkeypatch.setattr(weave, name, lambda *_given, name=name: name)
    monkeypatch.setattr(weave.ActiveRows, "of_pass", lambda *_given, **_more: None)
    job = WeaveJob.__new__(WeaveJob)
    job._first, job._stop, job.captured = 0, 4096, None
    job._plan = SimpleNamespace(passes=[pass_], prompt_tokens=4096)
    job._passes, job._decided = {}, {}
    layers = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, ranks=None)
    cache, blocks = SimpleNamespace(), SimpleNamespace(whole=True)
    job._input = SimpleNamespace(layers=layers, blocks=blocks, cache=cache, token_ids=None)
    assert job._begin(0, pass_) == taken


def test_a_layer_that_is_left_no_tokens_leaves_vllms_modules_alone():
    """What a question in vLLM's own cache chose may all lie before the rest that is woven."""
    nothing = torch.empty(0, 12, dtype=torch.bfloat16)
    sizes = SimpleNamespace(num_heads=6, num_kv_heads=3, head_dim=4)
    queries, keys, values = StockLayers.qkv(SimpleNamespace(own_geometry=sizes), 1, nothing)
    assert (queries.shape, keys.shape, values.shape) == ((0, 6, 4), (0, 3, 4), (0, 3, 4))
    assert keys.dtype == torch.bfloat16


class CollectiveError(Exception):
    """The ranks would sum now."""


def sums(*_args, **_kwargs):
    raise CollectiveError


def made(pass_: Pass, first: int = 0) -> WeaveJob:
    """A job over layers whose embedding sums over the ranks; its prompt is one question."""
    geometry, paged = Geometry(2, 8, 2, 1, 2, 16, 64, 256), FakePaged()
    layers = SimpleNamespace(
        paged=paged,
        geometry=geometry,
        own_geometry=geometry,
        rotations=None,
        device=paged.device,
        dtype=torch.float32,
        num_layers=2,
        ranks=SimpleNamespace(mean=sums, maximum=sums, norm=sums),
        embed=sums,
        attention=None,
        activate=lambda _positions, _blocks: None,
    )
    table = SimpleNamespace(slots=lambda positions: positions, begins=0)
    blocks = SimpleNamespace(of=lambda _layer: table, whole=True, begins=0)
    part = PromptPart(PartKind.QUESTION, tuple(range(20)))
    plan = Plan("full", (PartPlan(part, Span(0, 20), KVSource.COMPUTED),), (pass_,))
    return WeaveJob(layers, blocks, plan, (), part.token_ids, first=first, stop=20)


@pytest.mark.parametrize("watch", [None, Watch(Span(0, 20), (0, 1))])
def test_no_collective_runs_before_the_ranks_have_agreed_to_begin(watch):
    job = made(Pass((Span(0, 20),), watch=watch))
    with pytest.raises(CollectiveError):
        job.run(layers=1)


def test_jobs_that_begin_elsewhere_or_capture_other_parts_have_other_outlines():
    one, other = made(Pass((Span(0, 20),))), made(Pass((Span(0, 20),)), first=4)
    assert one.outline == made(Pass((Span(0, 20),))).outline != other.outline
    other = made(Pass((Span(0, 20),)))
    other.captured = SimpleNamespace(captures=[SimpleNamespace(part=SimpleNamespace(span=Span(0, 20)))], attention=None)
    assert other.outline != one.outline


def test_the_memory_of_a_job_grows_with_the_tokens_it_computes():
    assert made(Pass((Span(0, 20),))).device_bytes - made(Pass((Span(0, 5),))).device_bytes == 15 * 4 * (4 * 8 + 3 * 8)


def test_what_was_captured_is_exchanged_once_after_the_last_layer():
    job, exchanged = job_of([1, 1, 1]), []
    job.captured = SimpleNamespace(exchange=lambda: exchanged.append(job.layer))
    while not job.done:
        job.run(layers=1)
    assert exchanged == [3]
