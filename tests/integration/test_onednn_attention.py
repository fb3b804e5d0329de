"""Attention through oneDNN against softmax(q k^T) v in float64, and against PyTorch's kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.config import AttentionKernel
from chunkweave.errors import UsageError
from chunkweave.models import onednn_attention
from chunkweave.models.attention import OwnQueries, ScatteredQueries, SdpaAttention
from chunkweave.models.kernels.choice import make_attention
from chunkweave.models.onednn_attention import OneDnnAttention
from chunkweave.types import PLAIN_SCORES, Geometry
from tests.integration.attention_oracle import RULES, of_heads, weights_written_out

CPU = torch.device("cpu")
GEOMETRY = Geometry(1, 64, 6, 2, 16, 64, 10, 64)
WHY_NOT = onednn_attention.unsupported_reason(GEOMETRY, dtype=torch.bfloat16, device=CPU)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"oneDNN has no bfloat16 products here: {WHY_NOT}")


def drawn(positions, keys, *, heads=6, kv_heads=2, dim=16, spread=1.0):
    generator = torch.Generator().manual_seed(len(positions))
    shapes = ((len(positions), heads), (keys, kv_heads), (keys, kv_heads))
    q, k, v = (torch.randn(*shape, dim, generator=generator) for shape in shapes)
    return (q * spread).bfloat16(), k.bfloat16(), v.bfloat16()


def written_out(q, k, v, positions, window=None, hidden=None) -> torch.Tensor:
    v = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
    out = weights_written_out(q, k, positions, window, hidden=hidden) @ v
    return out.transpose(0, 1).reshape(len(positions), -1)


def attended(q, k, v, positions, *, window=None, hidden=None, rule=PLAIN_SCORES, kernel=None) -> torch.Tensor:
    queries = ScatteredQueries(torch.tensor(positions), torch.bfloat16, hidden=hidden, window=window)
    result = (kernel or OneDnnAttention()).attend(q, [OwnQueries(queries, k, v, scores=rule)])
    assert result.states.dtype == torch.bfloat16
    return result.states


@pytest.fixture(autouse=True)
def for_any_number_of_queries(monkeypatch):
    monkeypatch.setattr(onednn_attention, "_FEW_QUERIES", 0)


@pytest.fixture
def no_way_back(monkeypatch):
    """PyTorch's kernel is not to be asked."""

    def attend(*_, **__):
        raise AssertionError("oneDNN should have attended")

    monkeypatch.setattr(ScatteredQueries, "attend", attend)


@settings(max_examples=60, deadline=None)
@given(
    st.sets(st.integers(0, 300), min_size=1),
    st.sampled_from([(6, 2, 16), (4, 4, 8), (8, 1, 16), (14, 2, 64)]),
    st.one_of(st.none(), st.integers(1, 300)),
)
def test_any_positions_within_any_window(positions, heads, window):
    ordered = sorted(positions)
    sizes = {"heads": heads[0], "kv_heads": heads[1], "dim": heads[2]}
    q, k, v = drawn(ordered, ordered[-1] + 1, **sizes)
    found = attended(q, k, v, ordered, window=window)
    assert (found.double() - written_out(q, k, v, ordered, window)).abs().max() < 0.02


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 200), min_size=1), st.sets(st.integers(0, 200)))
def test_hidden_keys_are_not_seen(positions, hidden):
    ordered = sorted(positions)
    keys = ordered[-1] + 1
    flags = torch.zeros(keys + 3, dtype=torch.bool)
    flags[sorted(key for key in hidden if key < keys and key not in positions)] = True
    q, k, v = drawn(ordered, keys)
    found = attended(q, k, v, ordered, hidden=flags)
    assert (found.double() - written_out(q, k, v, ordered, hidden=flags[:keys])).abs().max() < 0.02


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("dim", [16, 64, 96, 128])
@pytest.mark.usefixtures("no_way_back")
def test_the_error_is_that_of_pytorchs_kernel(dim, spread, monkeypatch):
    """From flat attention to that of few keys; without the second product it would be 1.4 times as much.

    A head of 16 or 64 has a scale that bfloat16 takes exactly, the others have not.
    """
    positions = list(range(0, 900, 3))
    q, k, v = drawn(positions, 900, dim=dim, spread=spread)
    exact = written_out(q, k, v, positions)
    ours = attended(q, k, v, positions)
    monkeypatch.undo()
    theirs = attended(q, k, v, positions, kernel=SdpaAttention())
    error, theirs_error = ((found.double() - exact).square().mean().sqrt() for found in (ours, theirs))
    assert error < 1.1 * theirs_error


@pytest.mark.usefixtures("no_way_back")
def test_a_whole_prompt_and_several_requests():
    """Buffers are used again by the next request and by the next layer, whatever their sizes."""
    kernel = OneDnnAttention()
    runs = [list(range(700)), [3, 5, 40, 41, 130], list(range(20, 700)), [699]]
    for _ in range(2):
        inputs = [drawn(run, 700) for run in runs]
        owners = [
            OwnQueries(ScatteredQueries(torch.tensor(run), torch.bfloat16), k, v)
            for run, (_, k, v) in zip(runs, inputs, strict=True)
        ]
        states = kernel.attend(torch.cat([q for q, _, _ in inputs]), owners).states
        for found, run, mine in zip(states.split([len(run) for run in runs]), runs, inputs, strict=True):
            assert (found.double() - written_out(*mine, run)).abs().max() < 0.02


@pytest.mark.parametrize("shift", [-45.0, 45.0])
def test_scores_outside_the_window_go_to_pytorchs_kernel(shift):
    """All scores of a head by so much higher or lower: softmax stays what it is."""
    positions = list(range(0, 200, 2))
    q, k, v = drawn(positions, 200)
    q[..., 0], k[..., 0] = 4.0, shift  # divided by sqrt(16)
    kernel = OneDnnAttention()
    queries = ScatteredQueries(torch.tensor(positions), torch.bfloat16)
    assert kernel._attended(q, OwnQueries(queries, k, v)) is None
    theirs = attended(q, k, v, positions, kernel=SdpaAttention())
    assert torch.equal(attended(q, k, v, positions, kernel=kernel), theirs)


@pytest.mark.parametrize(("window", "hidden"), [(None, False), (40, False), (None, True)])
def test_a_few_queries_are_rounded_once(window, hidden, monkeypatch):
    """Decoding is written out in float32."""
    monkeypatch.undo()
    positions = [190, 191, 192, 199]
    flags = torch.zeros(200, dtype=torch.bool)
    flags[20:60] = True
    q, k, v = drawn(positions, 200)
    exact = written_out(q, k, v, positions, window, flags if hidden else None)
    found = attended(q, k, v, positions, window=window, hidden=flags if hidden else None)
    assert (found.double() - exact).abs().max() < 1.01 * (exact.bfloat16().double() - exact).abs().max()


def test_scores_that_are_not_finite_come_out_as_they_would():
    positions = list(range(40))
    q, k, v = drawn(positions, 40)
    k[7] = torch.nan
    theirs = attended(q, k, v, positions, kernel=SdpaAttention())
    assert torch.equal(attended(q, k, v, positions).isnan(), theirs.isnan())


def test_capped_scores_and_sinks_are_pytorchs():
    positions = list(range(0, 90, 3))
    q, k, v = drawn(positions, 90)
    rule = of_heads(RULES["both"], 6)
    theirs = attended(q, k, v, positions, rule=rule, kernel=SdpaAttention())
    assert torch.equal(attended(q, k, v, positions, rule=rule), theirs)


def test_masks_too_large_to_keep_are_made_again(monkeypatch):
    monkeypatch.setattr(onednn_attention, "_MAX_MASK_BYTES", 0)
    test_a_whole_prompt_and_several_requests()


def test_a_long_prompt_needs_few_shapes():
    """The command keeps 192 of oneDNN's kernels; a block needs three."""
    queries = ScatteredQueries(torch.arange(8192), torch.bfloat16)
    blocks = list(onednn_attention._Blocks(queries, 3))
    assert len({(block.stop - block.start, block.key_stop - block.key_start) for block in blocks}) * 3 <= 128


def test_it_is_chosen_where_it_is_faster(monkeypatch):
    def chosen(dtype=torch.bfloat16, geometry=GEOMETRY):
        return type(make_attention(AttentionKernel.AUTO, geometry, dtype=dtype, device=CPU))

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert chosen() is OneDnnAttention
    assert chosen(torch.float32) is SdpaAttention
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert chosen() is SdpaAttention
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(onednn_attention, "_shifted_sigmoid", lambda rows, keys, _: (rows @ keys.T).exp())
    assert chosen() is SdpaAttention
    with pytest.raises(UsageError, match="off by"):
        make_attention(AttentionKernel.ONEDNN, GEOMETRY, dtype=torch.bfloat16, device=CPU)
    with pytest.raises(UsageError, match="float32"):
        make_attention(AttentionKernel.ONEDNN, GEOMETRY, dtype=torch.float32, device=CPU)
