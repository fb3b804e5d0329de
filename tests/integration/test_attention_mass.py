"""Attention mass against softmax(q k^T) written out, and the captures over it against sums of the same weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.config import CaptureConfig, Combine
from chunkweave.errors import UsageError
from chunkweave.fusion.capture import AttentionCapture, evenly_spread, woven_profile
from chunkweave.models import attention
from chunkweave.models.attention import AttentionMeter
from chunkweave.planning.plan import KVSource, PartPlan
from chunkweave.prompt.parts import PartKind, PromptPart
from chunkweave.store.records import AttentionProfile
from chunkweave.types import PLAIN_SCORES, ChunkId, Geometry, Span
from tests.integration.attention_oracle import RULES, of_heads, weights_written_out

PARTS = (Span(0, 1), Span(1, 8), Span(8, 30), Span(30, 31), Span(31, 60))


def states(tokens, heads, dim=8, seed=0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(q, k, positions, heads=None, window=None, rule=PLAIN_SCORES) -> torch.Tensor:
    """Attention weights `[queries, keys]`, mean over the heads, in float64."""
    weights = weights_written_out(q, k, positions, window, rule)
    return weights[list(heads) if heads is not None else slice(None)].mean(0)


def check(
    positions,
    *,
    heads=(6, 2),
    chosen=None,
    parts=PARTS,
    keys=60,
    dtype=torch.float32,
    window=None,
    rule=PLAIN_SCORES,
) -> None:
    q, k = states(len(positions), heads[0], seed=1, dtype=dtype), states(keys, heads[1], seed=2, dtype=dtype)
    weights = weights_of(q, k, positions, chosen, window, rule)
    mass = AttentionMeter(torch.tensor(positions), parts, heads=chosen, window=window).read(q, k, rule)
    weights[torch.arange(len(positions)), positions] = 0.0
    by_part = torch.stack([weights[:, span.start : span.stop].sum(1) for span in parts], 1)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), by_part, atol=1e-5, rtol=0)


@settings(max_examples=80, deadline=None)
@given(
    positions=st.sets(st.integers(0, 59), min_size=1),
    heads=st.sampled_from([(6, 2), (4, 4), (8, 1)]),
    chosen=st.one_of(st.none(), st.sets(st.integers(0, 3), min_size=1).map(sorted)),
    block=st.sampled_from([1, 200, 3000, 1 << 20]),
    window=st.one_of(st.none(), st.integers(1, 70)),
    rule=st.sampled_from(sorted(RULES)),
)
def test_any_positions_heads_blocks_windows_and_scores(positions, heads, chosen, block, window, rule):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_CPU_BLOCK_WEIGHTS", block)
        check(sorted(positions), heads=heads, chosen=chosen, window=window, rule=of_heads(RULES[rule], heads[0]))


@pytest.mark.parametrize("parts", [(Span(3, 3), Span(5, 9)), (Span(40, 60),)])
def test_parts_that_are_empty_or_ahead_of_the_queries_or_leave_gaps(parts):
    check([2, 6, 7, 20], parts=parts)


def test_half_precision_states_are_summed_in_float32():
    check(list(range(60)), dtype=torch.bfloat16)


def test_scores_that_overflow_without_care():
    mass = AttentionMeter(torch.arange(60), PARTS).read(states(60, 2, seed=1) * 100, states(60, 2, seed=2) * 100)
    assert mass.isfinite().all()
    assert mass.sum(1).max() <= 1 + 1e-5


# --- what is made of it --------------------------------------------------------------------------------------------

GEOMETRY = Geometry(
    num_layers=5,
    hidden_size=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=8,
    vocab_size=9,
    max_positions=99,
)
KINDS = (PartKind.START, PartKind.SYSTEM, PartKind.CHUNK, PartKind.CHUNK, PartKind.CHUNK)
PLANS = tuple(
    PartPlan(
        PromptPart(kind, tuple(range(len(span))), None if kind is PartKind.START else ChunkId(f"{index:032x}")),
        span,
        KVSource.COMPUTED,
    )
    for index, (kind, span) in enumerate(zip(KINDS, PARTS, strict=True))
)


def capture_of(config: CaptureConfig, positions: list[int], layers=range(4)) -> tuple[AttentionCapture, torch.Tensor]:
    """A capture shown random layers, and the mean weights `[positions, positions]` that it should have summed."""
    capture = AttentionCapture(PLANS, GEOMETRY, config, device=torch.device("cpu"))
    rows = list(range(len(positions)))
    capture.follow(rows, positions)
    weights = torch.zeros(60, 60, dtype=torch.float64)
    heads = evenly_spread(config.heads, 6)
    read = [layer for layer in layers if capture.wants(layer)]
    for layer in read:
        q, k = states(len(positions), 6, seed=10 + layer), states(60, 2, seed=20 + layer)
        capture.read(layer, q, k)
        weights[positions] += weights_of(q, k, positions, heads) / len(read)
    return capture, weights.fill_diagonal_(0.0)


@pytest.mark.parametrize("config", [CaptureConfig(layers=None, heads=None), CaptureConfig(layers=2, heads=3)])
def test_profiles_are_sums_over_parts_of_the_mean_weights(config):
    capture, weights = capture_of(config, list(range(60)))
    profile = capture.profile(PLANS[4], range(29))
    rows = weights[31:]
    assert profile.chunks == (PLANS[2].part.id, PLANS[3].part.id)
    assert profile.lengths == (22, 1)
    assert profile.inter == pytest.approx([rows[:, 8:30].sum().item(), rows[:, 30].sum().item()], abs=1e-5)
    assert profile.intra == pytest.approx(rows[:, 31:].sum().item(), abs=1e-5)
    assert profile.sink == pytest.approx(rows[:, :8].sum().item(), abs=1e-5)
    assert profile.outward == pytest.approx(rows[:, 8:31].sum(1).tolist(), abs=1e-5)
    system = capture.profile(PLANS[1], range(7))
    assert (system.chunks, system.inter, system.outward) == ((), (), (0.0,) * 7)
    assert system.sink == pytest.approx(weights[1:8, 0].sum().item(), abs=1e-5)


def test_layers_and_heads_are_spread_and_the_last_layer_is_never_among_them():
    capture = AttentionCapture(PLANS, GEOMETRY, CaptureConfig(layers=None), device=torch.device("cpu"))
    capture.follow([0], [31])
    assert [layer for layer in range(5) if capture.wants(layer)] == [0, 1, 2, 3]
    few = AttentionCapture(PLANS, GEOMETRY, CaptureConfig(layers=2), device=torch.device("cpu"))
    assert not any(few.wants(layer) for layer in range(5))  # nobody is followed
    few.follow([0], [31])
    assert [layer for layer in range(5) if few.wants(layer)] == [1, 3]
    assert evenly_spread(8, 23) == (1, 4, 7, 10, 12, 15, 18, 21)
    assert evenly_spread(9, 4) == (0, 1, 2, 3)


def test_nothing_captured_is_no_profile():
    capture, _ = capture_of(CaptureConfig(), list(range(60)), layers=())
    assert capture.profile(PLANS[2], range(22)) is None


def test_attention_that_is_not_finite_is_no_profile():
    capture, _ = capture_of(CaptureConfig(), list(range(60)))
    capture.read(0, states(60, 6) * float("nan"), states(60, 2))
    assert capture.profile(PLANS[2], range(22)) is None


def test_tokens_that_were_not_recomputed_keep_their_old_mass():
    """Of it 1/5 was on a chunk that is there again; 4/5, on one that is gone, are on the new chunk now."""
    positions = [*range(31), *range(33, 50)]
    capture, weights = capture_of(CaptureConfig(layers=None, heads=None), positions)
    tokens, recomputed = 29, range(2, 19)
    outward = tuple(0.1 * token for token in range(tokens))
    inter = tuple(share * sum(outward) for share in (0.5, 0.2, 0.3))
    gone = ChunkId("f" * 32)
    old = AttentionProfile((gone, PLANS[2].part.id, gone), (5, 22, 5), inter, 3.0, 1.0, outward)
    woven = capture.profile(PLANS[4], recomputed, old)
    others = [token for token in range(tokens) if token not in recomputed]
    share = len(others) / tokens
    rows = weights[33:50]
    fresh = rows[:, 8:31].sum(1).tolist()
    expected = [fresh[t - 2] if t in recomputed else outward[t] for t in range(tokens)]
    assert woven.outward == pytest.approx(expected, abs=1e-5)
    by_others = sum(outward[t] for t in others)
    assert woven.inter[0] == pytest.approx(rows[:, 8:30].sum().item() + 0.2 * by_others, abs=1e-4)
    assert woven.inter[1] == pytest.approx(rows[:, 30].sum().item() + 0.8 * by_others, abs=1e-4)
    assert sum(woven.inter) == pytest.approx(sum(woven.outward), abs=1e-4)
    assert woven.intra == pytest.approx(rows[:, 31:].sum().item() + share * 3.0, abs=1e-4)
    assert woven.sink == pytest.approx(rows[:, :8].sum().item() + share * 1.0, abs=1e-4)


def test_old_mass_on_chunks_that_are_gone_goes_to_new_ones_as_the_recomputed_tokens_see_them():
    """By hand: token 0 was recomputed, and put .6 on c and .2 on d; token 1 had 4 of the old 5."""
    a, b, c, d = (ChunkId(name * 32) for name in "abcd")
    old = AttentionProfile((a, b), (2, 2), (2.0, 3.0), 1.0, 0.5, (1.0, 4.0))
    new = AttentionProfile((b, c, d), (2, 2, 2), (0.1, 0.6, 0.2), 0.3, 0.1, (0.9, 0.0))
    woven = woven_profile(new, old, {0})
    assert woven.outward == pytest.approx((0.9, 4.0))
    assert woven.inter == pytest.approx((0.1 + 0.8 * 3.0, 0.6 + 0.8 * 2.0 * 0.75, 0.2 + 0.8 * 2.0 * 0.25))
    assert (woven.intra, woven.sink) == pytest.approx((0.3 + 0.5 * 1.0, 0.1 + 0.5 * 0.5))
    gone = woven_profile(AttentionProfile((b,), (2,), (0.1,), 0.3, 0.1, (0.1, 0.0)), old, {0})
    assert gone.inter == pytest.approx((0.1 + 0.8 * 3.0,)), "nothing is new: what was on a is gone"
    assert gone.outward == pytest.approx((0.1, 4.0 * 3 / 5))
    first = woven_profile(AttentionProfile((), (), (), 0.3, 0.1, (0.0, 0.0)), old, {0})
    assert (first.inter, first.outward) == ((), (0.0, 0.0))


def test_tokens_whose_attention_is_not_known_attend_as_the_recomputed_ones_and_rank_behind_them():
    a = ChunkId("a" * 32)
    new = AttentionProfile((a,), (2,), (0.6,), 0.3, 0.2, (0.4, 0.2, 0.0))
    woven = woven_profile(new, None, {0, 1})
    assert woven.inter == pytest.approx((0.9,))
    assert (woven.intra, woven.sink) == pytest.approx((0.45, 0.3))
    assert (woven.outward, woven.by_outward) == ((0.4, 0.2, 0.0), (0, 1, 2))
    alone = AttentionProfile((), (), (), 1.5, 0.9, (0.0, 0.0, 0.0))
    woven = woven_profile(new, alone, {0, 1})
    assert woven.inter == pytest.approx((0.9,))
    assert (woven.intra, woven.sink) == pytest.approx((0.3 + 1.5 / 3, 0.2 + 0.9 / 3))


def test_a_chunk_listed_twice_is_carried_over_once_for_each_place():
    a, b = ChunkId("a" * 32), ChunkId("b" * 32)
    old = AttentionProfile((a, b, a), (2, 2, 2), (1.0, 2.0, 4.0), 0.0, 0.0, (7.0,))
    new = AttentionProfile((a, a, a, b), (2, 2, 2, 2), (0.0,) * 4, 0.0, 0.0, (0.0,))
    woven = woven_profile(new, old, ())
    assert woven.inter == (1.0, 4.0, 0.0, 2.0)
    assert woven.outward == (7.0,)
    assert woven_profile(new, None, ()) == new


def test_a_capture_needs_something_to_average_and_a_fraction():
    for wrong in ({"layers": 0}, {"heads": -1}, {"variant_fraction": -0.1}, {"variant_fraction": 1.5}):
        with pytest.raises(UsageError):
            CaptureConfig(**wrong)


@settings(max_examples=60, deadline=None)
@given(
    positions=st.sets(st.integers(0, 59), min_size=1).map(sorted),
    hidden=st.sets(st.integers(0, 59)),
    over_heads=st.sampled_from(Combine),
    over_queries=st.sampled_from(Combine),
    block=st.sampled_from([1, 200, 1 << 20]),
    rule=st.sampled_from(sorted(RULES)),
)
def test_what_keys_get_is_combined_over_heads_then_over_queries(
    positions, hidden, over_heads, over_queries, block, rule
):
    q, k = states(len(positions), 6, seed=1), states(60, 2, seed=2)
    flags = torch.zeros(60, dtype=torch.bool)
    flags[sorted(hidden - set(positions))] = True
    scores = of_heads(RULES[rule], 6)
    weights = weights_written_out(q, k, positions, rule=scores, hidden=flags)
    expected = weights.amax(0) if over_heads is Combine.MAX else weights.mean(0)
    expected = expected.amax(0) if over_queries is Combine.MAX else expected.sum(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_CPU_BLOCK_WEIGHTS", block)
        meter = AttentionMeter(torch.tensor(positions), (), hidden=flags)
        found = meter.combined(q, k, over_heads=over_heads, over_queries=over_queries, scores=scores)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
