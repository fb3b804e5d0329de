"""The layer loop and decoding on the Triton kernel, against the same on PyTorch's."""

import pytest
import torch

from chunkweave.config import AttentionKernel, CaptureConfig, ComputeConfig
from chunkweave.engine.runner import Runner
from chunkweave.errors import UsageError
from chunkweave.fusion.graphed_decode import GraphedDecode
from chunkweave.models import triton_attention
from chunkweave.models.attention import AttentionMeter, SdpaAttention
from chunkweave.models.kernels.choice import make_attention
from chunkweave.models.triton_attention import Attended, TritonAttention
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.types import Geometry
from tests.integration.weaving import Bench, alone, make_bench, make_prompt
from tests.toys import toy_model

CPU = torch.device("cpu")


def two_benches(capture: CaptureConfig | None = None, family: str = "llama", **changes) -> tuple[Bench, Bench]:
    """The same model over stores of their own: PyTorch's attention, and ours."""
    loaded = toy_model(family, **{"num_hidden_layers": 3, **changes})
    sdpa, ours = make_bench(loaded), make_bench(loaded)
    store = TieredStore([Level("host", SegmentStore(HostTier(), budget_bytes=1 << 30))])
    compute = ComputeConfig(attention=AttentionKernel.TRITON)
    ours.runner = Runner(loaded.model, store, compute=compute, capture=capture)
    sdpa.runner = Runner(loaded.model, sdpa.runner.store, capture=capture)
    assert isinstance(ours.runner.attention, TritonAttention)
    return sdpa, ours


WINDOWED = {"family": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 8}


@pytest.mark.parametrize("method", ["full", "cacheblend", "query"])
@pytest.mark.parametrize("model", [{}, WINDOWED], ids=["llama", "windows"])
def test_weaving_gives_the_same_logits(method, model):
    sdpa, ours = two_benches(**model)
    prompt = make_prompt([12, 9], system=4, question=3)
    for bench in (sdpa, ours):
        bench.prefill(alone(prompt.parts[2]), "full", keep=True)
        bench.prefill(alone(prompt.parts[3]), "full", keep=True)
    expected, found = (bench.log_probs(prompt, method) for bench in (sdpa, ours))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_profiles_are_those_that_are_read_off_the_weights(monkeypatch):
    sdpa, ours = two_benches(CaptureConfig(profile=True, layers=None, heads=2))
    prompt = make_prompt([10, 7], system=4, question=3)
    sdpa.prefill(prompt, "full", keep=True)
    monkeypatch.delattr(AttentionMeter, "read")  # ours sums on the way
    ours.prefill(prompt, "full", keep=True)
    expected = {record.id: record.attention for record in sdpa.runner.store.records()}
    found = {record.id: record.attention for record in ours.runner.store.records()}
    assert expected.keys() == found.keys()
    for segment, profile in expected.items():
        assert found[segment].inter == pytest.approx(profile.inter, abs=1e-4)
        assert found[segment].intra == pytest.approx(profile.intra, abs=1e-4)
        assert found[segment].sink == pytest.approx(profile.sink, abs=1e-4)


@pytest.mark.parametrize("model", [{}, WINDOWED], ids=["llama", "windows"])
def test_recorded_decode_steps_give_the_logits_of_the_loop(model):
    """Two requests, caches that grow in between, and one that takes the place of another."""
    sdpa, _ = two_benches(**model)
    model = sdpa.loaded.model
    recorded = []

    def record(step):
        recorded.append(step)
        return step

    graphed = GraphedDecode(model, dtype=model.dtype, device=CPU, record=record)
    prompts = [make_prompt([10], question=3, seed=seed) for seed in range(3)]

    def prefilled():
        return [sdpa.prefill(prompt, "full") for prompt in prompts]

    theirs, ours = prefilled(), prefilled()
    for pair, tokens in (((0, 1), (5, 6)), ((0, 1), (7, 8)), ((2, 1), (9, 10))):
        at = [len(prompts[index]) + (tokens[0] - 5) // 2 * (index != 2) for index in pair]
        expected = sdpa.runner.decode([theirs[index].cache for index in pair], tokens, at)
        found = graphed.decode([ours[index].cache for index in pair], tokens, at)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
        ours[1].cache.grow(ours[1].cache.capacity + 40)
    assert len(recorded) == 1


def test_a_step_that_cannot_be_recorded_leaves_decoding_to_the_loop(caplog):
    model = toy_model().model

    def record(step):
        raise RuntimeError("capture failed")

    graphed = GraphedDecode(model, dtype=model.dtype, device=CPU, record=record)
    bench = make_bench(toy_model())
    prefilled = bench.prefill(make_prompt([10]), "full")
    assert graphed.decode([prefilled.cache], [5], [len(prefilled.prompt)]) is None
    assert "run without them" in caplog.text
    assert graphed.decode([prefilled.cache], [5], [len(prefilled.prompt)]) is None


@pytest.mark.parametrize(("parts", "error"), [(0, 0.5), (64, 0.5), (256, float("nan"))])
def test_one_wrong_kernel_of_all_is_found_at_start(monkeypatch, parts, error):
    """Where the sums of weights, or the states, are wrong only with so many parts."""
    attend, small = triton_attention.attend, Geometry(1, 64, 2, 1, 16, 64, 10, 64)

    def wrong(queries, places, **options) -> Attended:
        found = attend(queries, places, **options)
        if places.parts == parts:
            (found.by_part if parts else found.states).add_(error)
        return found

    monkeypatch.setattr(triton_attention, "attend", wrong)
    with pytest.raises(UsageError, match="its result is off by"):
        make_attention(AttentionKernel.TRITON, small, dtype=torch.float32, device=CPU)


def test_what_the_kernel_does_not_know_is_refused_by_name_and_left_alone_when_automatic():
    wide = Geometry(1, 64, 2, 1, 24, 64, 10, 64)
    with pytest.raises(UsageError, match="heads of 24 dimensions"):
        make_attention(AttentionKernel.TRITON, wide, dtype=torch.float32, device=CPU)
    assert isinstance(make_attention(AttentionKernel.AUTO, wide, dtype=torch.float32, device=CPU), SdpaAttention)
    with pytest.raises(UsageError, match="float64"):
        make_attention(AttentionKernel.TRITON, Geometry(1, 64, 2, 1, 16, 64, 10, 64), dtype=torch.float64, device=CPU)
    with pytest.raises(UsageError, match="sinks"):
        make_attention(AttentionKernel.TRITON, toy_model("gpt_oss").model.geometry, dtype=torch.float32, device=CPU)
