"""Attention of queries at any positions over the KV caches of their requests.

Query i at position p sees the keys at positions <= p, on layers with a sliding window only the last so many. Where the
queries end in a run of consecutive positions that begins near the start, the run takes the causal path. Other queries
are sorted by position and cut into blocks; a block reads keys only up to its last position, so that little beyond the
visible half is computed. The query heads that share a key head become rows of one query block: on CPUs that is up to a
fifth faster than SDPA's own grouped-query path, whose blocks of few scattered queries are too small for its matrix
kernels. Rejected: plain matmul and softmax, which rounds the scores to bfloat16; on CPUs `onednn_attention` is faster
without that.

SDPA knows neither capped scores nor sinks. Where a model has them, scores and softmax are written out in float32.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch reader knows)

from chunkweave.types import PLAIN_SCORES, ScoreRule

_CPU_BLOCK_QUERIES = 32
"""Few, so that little beyond the visible keys is computed: a sixth faster than 128 for a hundred scattered queries."""

_DEVICE_BLOCK_QUERIES = 128
"""More on an accelerator, where each block is a launch."""

_MAX_MASK_BYTES = 128 << 20
_MAX_BEFORE = 0.25
"""A run of queries goes through the causal path if the positions before it are at most this share of its length."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlock:
    """Queries `[start, stop)` see keys in `[key_start, key_stop)`, as `mask` says (additive, `[queries, keys]`)."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    mask: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.stop - self.start


class ScatteredQueries:
    """How a set of query positions is attended; made once and used for every layer that has the same set."""

    def __init__(
        self,
        positions: torch.Tensor,
        dtype: torch.dtype,
        block_queries: int | None = None,
        *,
        hidden: torch.Tensor | None = None,
        where: Sequence[int] | None = None,
        window: int | None = None,
    ) -> None:
        """`positions` is `[queries]`, ascending, on the device of the queries.

        `hidden` flags the positions whose keys no query sees, `[positions]` on the same device; their values must
        still be finite. `where` are the positions as the host knows them; None if it would have to ask the device,
        which happens at the first `attend`, and never if another kernel attends. A query sees the `window` keys up to
        its own (None: all).
        """
        self.positions = positions
        self.hidden = hidden
        self.window = window
        self.causal = where is not None and hidden is None and window is None and _causal_from(where) == 0
        self._where = where
        self._dtype = dtype
        self._block_queries = block_queries
        self._ways: tuple[list[QueryBlock], tuple[int, int] | None] | None = None

    def __len__(self) -> int:
        return self.positions.shape[0]

    @property
    def where(self) -> Sequence[int]:
        """The positions for the host; asks the device if nobody has told."""
        if self._where is None:
            where: list[int] = self.positions.tolist()
            self._where = where
        return self._where

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: ScoreRule = PLAIN_SCORES,
        *,
        written_out: bool = False,
    ) -> torch.Tensor:
        """Exact causal attention by position; `written_out` in float32 in any case, at every call or at none.

        `queries` is `[queries, heads, head_dim]` after RoPE; `keys` and `values` are `[positions, kv_heads, head_dim]`
        from position 0 on. Either all layers have plain `scores` or none. Returns `[queries, heads * head_dim]`.
        """
        blocks, run = self._ways = self._ways or self._cut(runs=scores.plain and not written_out)
        out = [
            attend_masked(
                queries[b.start : b.stop],
                keys[b.key_start : b.key_stop],
                values[b.key_start : b.key_stop],
                self._mask(b) if b.mask is None else b.mask,
                scores,
                written_out=written_out,
            )
            for b in blocks
        ]
        if run is not None:
            first, before = run
            out.append(_causal(queries[first:], keys, values, before))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _cut(self, *, runs: bool = True) -> tuple[list[QueryBlock], tuple[int, int] | None]:
        """The blocks of queries, and the causal run behind them: its first query and the positions before it."""
        where = self.where
        window = self.window if where and self.window is not None and where[-1] >= self.window else None
        runs = runs and self.hidden is None and window is None
        first = _causal_from(where) if runs else len(where)
        self.causal = first == 0
        run = (first, where[first]) if first < len(where) else None
        size = self._block_queries
        if size is None:
            size = _CPU_BLOCK_QUERIES if self.positions.device.type == "cpu" else _DEVICE_BLOCK_QUERIES
        edges = [*range(0, first, size), first]
        begins = [0 if window is None else max(0, where[a] + 1 - window) for a in edges[:-1]]
        spans = zip(pairwise(edges), begins, strict=True)
        blocks = [QueryBlock(a, b, begin, where[b - 1] + 1) for (a, b), begin in spans if b > a]
        mask_bytes = sum(len(b) * (b.key_stop - b.key_start) for b in blocks) * torch.finfo(self._dtype).bits // 8
        if mask_bytes <= _MAX_MASK_BYTES:
            blocks = [replace(b, mask=self._mask(b)) for b in blocks]
        return blocks, run

    def _mask(self, block: QueryBlock) -> torch.Tensor | None:
        """0 where a key is visible and -inf where not; None for a single query that sees all keys before it."""
        if len(block) == 1 and self.hidden is None:
            return None
        positions = self.positions[block.start : block.stop]
        keys = torch.arange(block.key_start, block.key_stop, device=positions.device)
        hidden = ~seen_keys(keys, positions[:, None], self.window)
        if self.hidden is not None:
            hidden |= self.hidden[block.key_start : block.key_stop]
        return torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


def seen_keys(keys: torch.Tensor, positions: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Which of the `keys`, by position, queries at `positions` see, bool; the two broadcast."""
    causal = keys <= positions
    return causal if window is None else causal & (keys > positions - window)


def _causal_from(where: Sequence[int]) -> int:
    """The first query of the run at the end that is worth the causal path; how many queries there are if none is."""
    if not where:
        return 0
    last = len(where) - 1
    first = bisect_left(range(last), where[last] - last, key=lambda row: where[row] - row)
    length = last + 1 - first
    return first if length > 1 and where[first] <= _MAX_BEFORE * length else last + 1


def _causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, before: int) -> torch.Tensor:
    """A run of positions up to the last key, through SDPA's causal path; `before` empty queries stand in for the rest.

    Heads are made contiguous, which pays for itself where every key is read many times.
    """
    padded = F.pad(queries, (0, 0, 0, 0, before, 0)) if before else queries
    q, k, v = (states.transpose(0, 1).contiguous().unsqueeze(0) for states in (padded, keys, values))
    grouped = queries.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out[0].transpose(0, 1)[before:].reshape(queries.shape[0], -1)


def attend_masked(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scores: ScoreRule = PLAIN_SCORES,
    *,
    written_out: bool = False,
) -> torch.Tensor:
    """Attention of `queries` `[queries, heads, head_dim]`, `[queries, heads * head_dim]`.

    `keys` and `values` are `[keys, kv_heads, head_dim]`; `mask` is added to the scores, `[queries, keys]`.
    """
    if written_out or not scores.plain:
        return _written_out(queries, keys, values, mask, scores)
    n, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = queries.view(n, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, n * group, dim)
    k, v = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    rows = None if mask is None else mask.repeat_interleave(group, dim=0) if group > 1 else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows)
    return out.view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads * dim)


def _written_out(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: ScoreRule
) -> torch.Tensor:
    """The same in float32, scores by query head: `[heads, queries, keys]`."""
    n, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = queries.float().view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * n, dim)
    scores = capped(q @ keys.float().permute(1, 2, 0) * dim**-0.5, rule).view(heads, n, -1)
    weights = attention_weights(scores if mask is None else scores + mask, rule)
    out = weights.view(kv_heads, group * n, -1) @ values.float().transpose(0, 1)
    return out.view(heads, n, dim).transpose(0, 1).reshape(n, heads * dim).to(values.dtype)


def capped(scores: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Scaled scores, soft-capped where the rule says so."""
    return scores if rule.cap is None else torch.tanh(scores / rule.cap) * rule.cap


def attention_weights(scores: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Softmax of capped and masked scores `[heads, queries, keys]` over the keys and the heads' sinks."""
    if not rule.sinks:
        return torch.softmax(scores, -1)
    sinks = scores.new_tensor(rule.sinks)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]


@dataclass(frozen=True, slots=True, eq=False)
class KeyParts:
    """The part that each key belongs to: int32 `[at least as many as keys]`, -1 for none, and how many parts there are.

    A request that has one wants to know its queries' mass by part.
    """

    table: torch.Tensor
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class OwnQueries:
    """One request's share of the batch: where its queries stand, and the keys and values that they look at.

    `keys` (after RoPE) and `values` are `[positions, kv_heads, head_dim]`, from position 0 on to the last query's.
    `scores` is the same for all requests of a batch.
    """

    queries: ScatteredQueries
    keys: torch.Tensor
    values: torch.Tensor
    parts: KeyParts | None = None
    scores: ScoreRule = PLAIN_SCORES


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a kernel summed of one request's weights on the way, in float32.

    `by_part` `[queries, heads, parts]` leaves a query's own key out, whose weight is `own` `[queries, heads]`;
    `log_sum_exp` `[queries, heads]` is that of the scaled scores.
    """

    by_part: torch.Tensor
    own: torch.Tensor
    log_sum_exp: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FlatResult:
    """`states` `[rows, heads * head_dim]`, and for each request what was measured, if it was asked for and can be."""

    states: torch.Tensor
    measured: Sequence[Measured | None]


class FlatAttention(Protocol):
    """Exact attention, causal by position, for all rows of a flat batch."""

    def attend(self, queries: torch.Tensor, owners: Sequence[OwnQueries]) -> FlatResult:
        """`queries` `[rows, heads, head_dim]` after RoPE, those of each owner behind those of the one before."""


class SdpaAttention:
    """One request after the other through PyTorch's own kernels. Works everywhere; measures nothing on the way."""

    def attend(self, queries: torch.Tensor, owners: Sequence[OwnQueries]) -> FlatResult:
        """Attend each owner's queries by its `ScatteredQueries`."""
        states, row = [], 0
        for owner in owners:
            mine = queries[row : row + len(owner.queries)]
            row += len(owner.queries)
            states.append(owner.queries.attend(mine, owner.keys, owner.values, owner.scores))
        return FlatResult(states[0] if len(states) == 1 else torch.cat(states), [None] * len(owners))


class Ranks:
    """Tensor-parallel ranks: each computes its share of a layer's heads, and what all heads decide is combined.

    Every rank calls the same methods in the same order and gets the same. This is the one rank of an undivided model.
    """

    def own_heads(self, num_heads: int) -> range:
        """The query heads that this rank computes, of all `num_heads`."""
        return range(num_heads)

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks of a tensor of one shape."""
        return states

    def maximum(self, states: torch.Tensor) -> torch.Tensor:
        """Greatest of the ranks' tensors, element by element."""
        return states

    def norm(self, norms: torch.Tensor) -> torch.Tensor:
        """The L2 norm over all heads from the norms over each rank's own."""
        return norms


ALONE = Ranks()
"""What a model computes that runs in one piece."""
