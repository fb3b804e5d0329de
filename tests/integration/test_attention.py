"""Attention of scattered queries against softmax(q k^T) v written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.models import attention
from chunkweave.models.attention import ScatteredQueries
from chunkweave.types import PLAIN_SCORES
from tests.integration.attention_oracle import RULES, of_heads, weights_written_out


def written_out(q, k, v, positions, window=None, rule=PLAIN_SCORES) -> torch.Tensor:
    v = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
    out = weights_written_out(q, k, positions, window, rule) @ v
    return out.transpose(0, 1).reshape(len(positions), -1)


def compare(
    positions, keys, *, heads=6, kv_heads=2, dim=8, dtype=torch.float32, block=16, window=None, rule=PLAIN_SCORES
) -> float:
    generator = torch.Generator().manual_seed(len(positions))
    q = torch.randn(len(positions), heads, dim, generator=generator).to(dtype)
    k, v = (torch.randn(keys, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    queries = ScatteredQueries(torch.tensor(positions), dtype, block_queries=block, window=window)
    found = queries.attend(q, k, v, rule)
    assert found.dtype == dtype
    return (found.double() - written_out(q, k, v, positions, window, rule)).abs().max().item()


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60, deadline=None)
@given(
    st.sets(st.integers(0, 90), min_size=1),
    st.sampled_from([(6, 2), (4, 4), (8, 1)]),
    st.one_of(st.none(), st.integers(1, 100)),
    st.integers(1, 40),
)
def test_any_positions_heads_windows_and_blocks(rule, positions, heads, window, block):
    ordered, scores = sorted(positions), of_heads(RULES[rule], heads[0])
    sizes = {"heads": heads[0], "kv_heads": heads[1], "block": block}
    assert compare(ordered, ordered[-1] + 1, **sizes, window=window, rule=scores) < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_whole_prompts(rule):
    assert compare(list(range(70)), 70, rule=of_heads(RULES[rule], 6)) < 1e-5
    assert compare(list(range(70)), 70, rule=of_heads(RULES[rule], 6), dtype=torch.bfloat16) < 0.03


def test_a_block_reads_no_key_behind_its_window():
    blocks, run = ScatteredQueries(torch.arange(500), torch.float32, block_queries=32, window=64)._cut()
    assert run is None
    assert max(block.key_stop - block.key_start for block in blocks) == 32 + 64 - 1


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 40])
def test_runs_of_positions_whichever_path_they_take(start):
    assert compare(list(range(start, start + 40)), start + 40) < 1e-5


@pytest.mark.parametrize(
    ("positions", "keys", "block"),
    [([0, 2, *range(7, 60)], 60, 1), ([0, *range(7, 60)], 60, 16), ([3, 7, 8], 9, 16)],
    ids=["a causal run", "as where BOS is computed again behind a stored instruction", "few queries"],
)
def test_scattered_queries_before_a_causal_run(positions, keys, block):
    assert compare(positions, keys, block=block) < 1e-5


@pytest.mark.parametrize(
    ("where", "first"),
    [(range(9), 0), ([0, *range(3, 20)], 1), ([0, 4, 5, 6], 4), ([5], 1), ([0], 1), ([0, 2, 4], 3), (range(2, 10), 0)],
)
def test_where_the_causal_run_begins(where, first):
    assert attention._causal_from(list(where)) == first


def test_masks_too_large_to_keep_are_made_again(monkeypatch):
    monkeypatch.setattr(attention, "_MAX_MASK_BYTES", 0)
    assert compare([2, 5, 30, 31, 60], 61) < 1e-5


def test_bfloat16_within_its_rounding():
    assert compare(list(range(0, 90, 3)), 88, dtype=torch.bfloat16) < 0.03


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.integers(0, 60), min_size=1),
    st.sets(st.integers(0, 60)),
    st.sampled_from([None, 1, 7]),
)
def test_hidden_keys_are_as_if_they_were_not_there(positions, hidden, block):
    """The oracle leaves the hidden rows out; a query always sees at least its own key."""
    ordered = sorted(positions)
    keys = ordered[-1] + 1
    left_out = sorted(key for key in hidden if key < keys and key not in positions)
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(len(ordered), 6, 8, generator=generator)
    k, v = (torch.randn(keys, 2, 8, generator=generator) for _ in range(2))
    flags = torch.zeros(keys + 3, dtype=torch.bool)
    flags[left_out] = True
    ours = ScatteredQueries(torch.tensor(ordered), torch.float32, block, hidden=flags).attend(q, k, v)
    kept = [key for key in range(keys) if key not in left_out]
    places = [kept.index(position) for position in ordered]
    assert (ours.double() - written_out(q, k[kept], v[kept], places)).abs().max() < 1e-5
