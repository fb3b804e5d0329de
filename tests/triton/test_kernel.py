"""The kernel against attention written out: any positions, heads, blocks and splits, several requests in one launch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from chunkweave.models.huggingface import _halves_turned
from chunkweave.models.triton_attention import (
    MAX_PARTS,
    PART_SIZES,
    Blocks,
    FlatQueries,
    KeyPlaces,
    attend,
    choose_blocks,
    every_launch,
    tile_table,
    turn_halves,
    write_rows,
)
from tests.triton.oracle import make_case, written_out

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.03, torch.float16: 4e-3}
POSITIONS = st.sets(st.integers(0, 50), min_size=1, max_size=9).map(sorted)


def launch(cases, blocks, *, parts=0, rope=None, keys=None, window=None):
    keys = keys or [case.keys for case in cases]
    places = torch.tensor(
        [
            [
                key.data_ptr(),
                case.values.data_ptr(),
                0 if case.hidden is None else case.hidden.data_ptr(),
                case.parts.data_ptr(),
            ]
            for key, case in zip(keys, cases, strict=True)
        ]
    )
    queries = FlatQueries(
        torch.cat([case.queries for case in cases]),
        torch.tensor([position for case in cases for position in case.positions]),
        tuple(len(case.positions) for case in cases),
        max(len(case.keys) for case in cases),
    )
    return attend(queries, KeyPlaces(places, keys[0].shape[1], parts), blocks=blocks, rope=rope, window=window)


def compare(found, cases, parts, tolerance, window=None) -> None:
    expected = [written_out(case, max(parts, 1), window) for case in cases]

    def near(ours, name):
        theirs = torch.cat([getattr(one, name) for one in expected])
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs).abs().max() < tolerance, name

    near(found.states, "states")
    near(found.log_sum_exp, "log_sum_exp")
    if parts:
        near(found.by_part, "by_part")
        near(found.own, "own")


@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(
    requests=st.lists(POSITIONS, min_size=1, max_size=3),
    heads=st.sampled_from([(4, 2), (3, 3), (7, 1)]),
    hidden=st.sets(st.integers(0, 40), max_size=6),
    parts=st.sampled_from([0, 3, 17]),
    splits=st.sampled_from([1, 3]),
    window=st.one_of(st.none(), st.integers(1, 55)),
    seed=st.integers(0, 99),
)
def test_any_positions_of_several_requests(requests, heads, hidden, parts, splits, window, seed):
    generator = torch.Generator().manual_seed(seed)
    cases = [
        make_case(generator, positions, *heads, 16, hidden=hidden if index else (), parts=parts or 3)
        for index, positions in enumerate(requests)
    ]
    compare(launch(cases, Blocks(16, 16, splits), parts=parts, window=window), cases, parts, 2e-6, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_types_and_head_dimensions(dtype, dim):
    generator = torch.Generator().manual_seed(dim)
    cases = [
        make_case(generator, [0, 3, 30], 4, 2, dim, dtype=dtype),
        make_case(generator, [17], 4, 2, dim, dtype=dtype),
    ]
    found = launch(cases, Blocks(16, 32, 1), parts=3)
    assert found.states.dtype == dtype
    expected = [written_out(case, 3) for case in cases]
    assert (found.states.double() - torch.cat([one.states for one in expected])).abs().max() < TOLERANCE[dtype]
    assert (found.by_part.double() - torch.cat([one.by_part for one in expected])).abs().max() < 1e-5


@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("splits", [1, 2])
def test_keys_before_rope_are_rotated_as_they_are_read(dim, splits):
    """Against the same launch over keys that the model's own RoPE code rotated."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(3)
    cases = [make_case(generator, [2, 9, 33], 4, 2, dim), make_case(generator, [20, 21], 4, 2, dim)]
    angles = torch.arange(40)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = (function(angles).repeat(1, 2) for function in (torch.cos, torch.sin))
    rotated = [
        apply_rotary_pos_emb(case.keys, case.keys[:, :0], cos[: len(case.keys)], sin[: len(case.keys)], unsqueeze_dim=1)
        for case in cases
    ]
    blocks = Blocks(16, 16, splits)
    ours = launch(cases, blocks, rope=(cos, sin))
    theirs = launch(cases, blocks, keys=[keys.contiguous() for keys, _ in rotated])
    torch.testing.assert_close(ours.states, theirs.states, atol=2e-6, rtol=0)
    torch.testing.assert_close(ours.log_sum_exp, theirs.log_sum_exp, atol=4e-6, rtol=0)


def test_nothing_behind_the_last_position_is_read():
    """Keys and values there are NaN, as fresh memory may be; any look at them would spread."""
    case = make_case(torch.Generator().manual_seed(0), [4, 30], 4, 2, 16)
    behind = torch.full((29, 2, 16), torch.nan)
    longer = replace(case, keys=torch.cat((case.keys, behind)), values=torch.cat((case.values, behind)))
    compare(launch([longer], Blocks(16, 16, 2)), [case], 0, 2e-6)


@pytest.mark.parametrize("splits", [1, 3])
def test_no_key_behind_the_windows_of_a_tile_is_read(splits):
    """Of the first 32 keys, two blocks, none is in the window of a query; they are NaN."""
    case = make_case(torch.Generator().manual_seed(2), [50, 53, 60], 4, 2, 16)
    found = case.keys.clone(), case.values.clone()
    for states in found:
        states[:32] = torch.nan
    poisoned = replace(case, keys=found[0], values=found[1])
    compare(launch([poisoned], Blocks(16, 16, splits), parts=3, window=18), [case], 3, 2e-6, 18)


def test_large_scores_do_not_overflow():
    case = make_case(torch.Generator().manual_seed(1), list(range(0, 60, 7)), 4, 2, 16)
    case.queries.mul_(20)
    case.keys.mul_(20)
    found = launch([case], Blocks(16, 16, 2), parts=3)
    assert found.states.isfinite().all()
    compare(found, [case], 3, 2e-3)


def test_blocks_follow_the_number_of_queries_and_the_processors():
    few = choose_blocks([1, 1], 8192, 32, 8, dtype=torch.bfloat16, processors=132)
    assert (few.rows, few.splits) == (16, 16)
    many = choose_blocks([4096], 8192, 32, 8, dtype=torch.bfloat16, processors=132)
    assert (many.rows, many.splits) == (128, 1)
    assert choose_blocks([1], 100, 32, 8, dtype=torch.bfloat16, processors=132).splits == 1
    assert choose_blocks([1], 100, 64, 1, dtype=torch.bfloat16, processors=132).rows == 64  # one query's heads


@settings(max_examples=300, deadline=None)
@given(
    counts=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    stop=st.integers(1, 1 << 17),
    shape=st.sampled_from([(32, 8), (28, 4), (64, 8), (8, 1), (8, 8), (71, 1)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    processors=st.integers(1, 200),
    parts=st.integers(0, MAX_PARTS),
)
def test_no_launch_has_sizes_that_are_not_compiled_at_start(counts, stop, shape, dtype, processors, parts):
    blocks = choose_blocks(counts, stop, *shape, dtype=dtype, processors=processors, parts=parts)
    compiled = every_launch(*shape, dtype)
    room = min(size for size in (0, *PART_SIZES) if parts <= size)

    def kernel(blocks, parts):
        float32 = dtype is torch.float32 or blocks.splits > 1 or parts > 0
        return replace(blocks, splits=1), parts, float32

    assert len(compiled) <= 16
    assert kernel(blocks, room) in {kernel(*launch) for launch in compiled}


def test_a_request_that_decodes_meets_few_numbers_of_splits():
    """Each is a recorded decode step, for every number of requests."""
    found = {
        choose_blocks([1] * requests, stop, 32, 8, dtype=torch.bfloat16, processors=132).splits
        for requests in (1, 3, 20, 64)
        for stop in range(64, 1 << 14, 64)
    }
    assert len(found) <= 4


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 16))
def test_tiles_cover_every_row_once_and_no_tile_has_two_owners(counts, size):
    rows = [(owner, row) for owner, first, stop in tile_table(counts, size) for row in range(first, stop)]
    owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
    assert rows == list(zip(owners, range(sum(counts)), strict=True))


def test_rows_are_written_to_the_cache_that_each_belongs_to():
    generator = torch.Generator().manual_seed(5)
    caches = [torch.zeros(2, 12, 3, 16) for _ in range(2)]
    keys, values = (torch.randn(2, 3, 16, generator=generator) for _ in range(2))
    places = torch.tensor([[cache[0].data_ptr(), cache[1].data_ptr(), 0, 0] for cache in caches])
    write_rows(keys, values, torch.tensor([7, 11]), places)
    for cache, position, key, value in zip(caches, (7, 11), keys, values, strict=True):
        assert torch.equal(cache[0, position], key)
        assert torch.equal(cache[1, position], value)
        assert cache.count_nonzero() == 2 * 3 * 16


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (8, 96), (19, 64)])
def test_rope_is_that_of_pytorch(heads, dim, dtype):
    """Of states that are a slice of wider rows, as queries of one product are."""
    generator = torch.Generator().manual_seed(heads)
    shapes = (5, heads + 2, dim), (9, dim), (9, dim)
    wide, cos, sin = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    # The interpreter cuts float32 off where it makes it bfloat16; tests/gpu has the same numbers, bit for bit.
    tolerance = 0.0 if dtype is not torch.bfloat16 else 0.3
    positions = torch.tensor([8, 0, 3, 3, 7])
    found = turn_halves(wide[:, :heads], positions, cos, sin)
    expected = _halves_turned(wide[:, :heads], cos[positions, None], sin[positions, None])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    assert turn_halves(wide[:0, :heads], positions[:0], cos, sin).shape == (0, heads, dim)
    turned = expected.transpose(0, 1)[:3]  # heads that are not contiguous
    found = turn_halves(turned, positions[:3], cos, sin)
    expected = _halves_turned(turned, cos[positions[:3], None], sin[positions[:3], None])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
