"""Attention of queries at any positions over the KV caches of their requests.

Query i at position p sees the keys at positions <= p, on sliding-window layers only the last `window` of these. If the
queries end in a run of consecutive positions that begins near the start, the run takes the causal path. Other queries
are sorted by position and cut into blocks; a block reads keys only up to its last position, so that little beyond the
visible half is computed. Query heads that share a key head become rows of one query block: on CPUs this is up to a
fifth faster than SDPA's own grouped-query path, whose blocks of few scattered queries are too small for its matrix
kernels. Rejected: plain matmul and softmax, which rounds scores to bfloat16; on CPUs, `onednn_attention` is faster
without that.

SDPA supports neither capped scores nor sinks. For models that have them, scores and softmax are computed explicitly in
float32.

No kernel returns sums of attention weights, so these are measured separately: the mass of queries on parts of the
prompt, on their own key, and on each key.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch reader knows)

from chunkweave.config import Combine
from chunkweave.types import PLAIN_SCORES, ScoreRule, Span

_CPU_BLOCK_QUERIES = 32
"""Few, so that little beyond the visible keys is computed: a sixth faster than 128 for a hundred scattered queries."""

_DEVICE_BLOCK_QUERIES = 128
"""More on an accelerator, where each block is a launch."""

_MAX_MASK_BYTES = 128 << 20
_MAX_BEFORE = 0.25
"""A run takes the causal path if the positions before it are at most this share of its length."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlock:
    """Queries `[start, stop)` see keys in `[key_start, key_stop)` by `mask` (additive, `[queries, keys]`)."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    mask: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.stop - self.start


class ScatteredQueries:
    """The attention pattern of a set of query positions; made once and used for every layer with the same set."""

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
        """`positions` is `[queries]`, ascending, on the queries' device.

        `hidden` `[positions]` on the same device flags positions whose keys no query sees; their values must still be
        finite. `where` are the positions on the host. If None, the first `attend` reads them from the device; other
        kernels never need them. A query sees the `window` keys up to its own (None: all).
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
        """The positions on the host; read from the device if not given."""
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
        """Exact causal attention by position; with `written_out` always computed explicitly in float32.

        `queries` is `[queries, heads, head_dim]` after RoPE; `keys` and `values` are `[positions, kv_heads, head_dim]`
        from position 0 on. All layers must have plain `scores`, or none; the same holds for `written_out` over all
        calls. Returns `[queries, heads * head_dim]`.
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
            first, first_position = run
            out.append(_causal(queries[first:], keys, values, first_position))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _cut(self, *, runs: bool = True) -> tuple[list[QueryBlock], tuple[int, int] | None]:
        """The blocks of queries, and the causal run after them: its first query, and the positions before it."""
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
        """Mask with 0 for visible keys and -inf for others; None for a single query that sees all keys before it."""
        if len(block) == 1 and self.hidden is None:
            return None
        positions = self.positions[block.start : block.stop]
        keys = torch.arange(block.key_start, block.key_stop, device=positions.device)
        hidden = ~seen_keys(keys, positions[:, None], self.window)
        if self.hidden is not None:
            hidden |= self.hidden[block.key_start : block.key_stop]
        return torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


def seen_keys(keys: torch.Tensor, positions: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Bool: which `keys` (positions) queries at `positions` see; the two broadcast."""
    causal = keys <= positions
    return causal if window is None else causal & (keys > positions - window)


def _causal_from(where: Sequence[int]) -> int:
    """Index of the first query of the final run, if the causal path pays; else the number of queries."""
    if not where:
        return 0
    last = len(where) - 1
    first = bisect_left(range(last), where[last] - last, key=lambda row: where[row] - row)
    length = last + 1 - first
    return first if length > 1 and where[first] <= _MAX_BEFORE * length else last + 1


def _causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cached_tokens: int) -> torch.Tensor:
    """SDPA's causal path for a run of positions up to the last key; `cached_tokens` zero queries pad its start.

    On CPUs heads are made contiguous, which pays off because every key is read many times.
    """
    padded = F.pad(queries, (0, 0, 0, 0, cached_tokens, 0)) if cached_tokens else queries
    q, k, v = (states.transpose(0, 1).unsqueeze(0) for states in (padded, keys, values))
    if queries.device.type == "cpu":
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
    grouped = queries.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out[0].transpose(0, 1)[cached_tokens:].reshape(queries.shape[0], -1)


def attend_masked(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scores: ScoreRule = PLAIN_SCORES,
    *,
    written_out: bool = False,
) -> torch.Tensor:
    """Attention of `queries` `[queries, heads, head_dim]` -> `[queries, heads * head_dim]`.

    `keys` and `values` are `[keys, kv_heads, head_dim]`; `mask` `[queries, keys]` is added to the scores.
    """
    if written_out or not scores.plain:
        return _written_out(queries, keys, values, mask, scores)
    n, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = queries.view(n, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, n * group, dim)
    k = keys.transpose(0, 1).unsqueeze(0)
    v = values.transpose(0, 1).unsqueeze(0)
    rows = None if mask is None else mask.repeat_interleave(group, dim=0) if group > 1 else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows)
    return out.view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads * dim)


def _written_out(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: ScoreRule
) -> torch.Tensor:
    """`attend_masked` computed explicitly in float32, with scores `[heads, queries, keys]`."""
    n, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = queries.float().view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * n, dim)
    scores = capped(q @ keys.float().permute(1, 2, 0) * dim**-0.5, rule).view(heads, n, -1)
    weights = attention_weights(scores if mask is None else scores + mask, rule)
    out = weights.view(kv_heads, group * n, -1) @ values.float().transpose(0, 1)
    return out.view(heads, n, dim).transpose(0, 1).reshape(n, heads * dim).to(values.dtype)


def capped(scores: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Scaled scores, soft-capped if the rule has a cap."""
    return scores if rule.cap is None else torch.tanh(scores / rule.cap) * rule.cap


def attention_weights(scores: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Softmax of capped and masked scores `[heads, queries, keys]` over the keys and the heads' sinks."""
    if not rule.sinks:
        return torch.softmax(scores, -1)
    sinks = scores.new_tensor(rule.sinks)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]


@dataclass(frozen=True, slots=True, eq=False)
class KeyParts:
    """The part of each key, int32 `[at least the number of keys]`, -1 for none, and the number of parts.

    A request that has it wants its queries' mass by part.
    """

    table: torch.Tensor
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class OwnQueries:
    """One request's share of the batch: its query positions, and its keys and values.

    `keys` (after RoPE) and `values` are `[positions, kv_heads, head_dim]`, from position 0 to the last query's.
    `scores` is the same for all requests of a batch.
    """

    queries: ScatteredQueries
    keys: torch.Tensor
    values: torch.Tensor
    parts: KeyParts | None = None
    scores: ScoreRule = PLAIN_SCORES


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A kernel's sums of one request's attention weights, in float32.

    `by_part` `[queries, heads, parts]` excludes a query's own key, whose weight is `own` `[queries, heads]`;
    `log_sum_exp` `[queries, heads]` is that of the scaled scores.
    """

    by_part: torch.Tensor
    own: torch.Tensor
    log_sum_exp: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FlatResult:
    """`states` `[rows, heads * head_dim]`, and for each request its measured sums, if requested and supported."""

    states: torch.Tensor
    measured: Sequence[Measured | None]


class FlatAttention(Protocol):
    """Exact attention, causal by position, for all rows of a flat batch."""

    def attend(self, queries: torch.Tensor, owners: Sequence[OwnQueries]) -> FlatResult:
        """`queries` `[rows, heads, head_dim]` after RoPE, concatenated in the order of `owners`."""


class SdpaAttention:
    """One request after the other through PyTorch's own kernels. Works everywhere; measures no sums."""

    def attend(self, queries: torch.Tensor, owners: Sequence[OwnQueries]) -> FlatResult:
        """Attend each owner's queries by its `ScatteredQueries`."""
        states = []
        row = 0
        for owner in owners:
            own_queries = queries[row : row + len(owner.queries)]
            row += len(owner.queries)
            states.append(owner.queries.attend(own_queries, owner.keys, owner.values, owner.scores))
        return FlatResult(states[0] if len(states) == 1 else torch.cat(states), [None] * len(owners))


class Ranks:
    """Tensor-parallel ranks: each computes its share of a layer's heads; decisions over all heads are combined.

    Every rank calls the same methods in the same order and gets equal results. This base class is the single rank of an
    undivided model.
    """

    def own_heads(self, num_heads: int) -> range:
        """The query heads that this rank computes, of all `num_heads`."""
        return range(num_heads)

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks of tensors of equal shape."""
        return states

    def maximum(self, states: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over the ranks' tensors."""
        return states

    def norm(self, norms: torch.Tensor) -> torch.Tensor:
        """The L2 norm over all heads, from each rank's norm over its own."""
        return norms


ALONE = Ranks()
"""The single rank of an undivided model."""


_CPU_BLOCK_WEIGHTS = 1 << 19
"""Weights per block on a CPU: 2 MiB, which stay in its cache between softmax and sums."""

_DEVICE_BLOCK_WEIGHTS = 1 << 24
"""Weights per block on an accelerator: 64 MiB; few kernels per prompt, without work for keys far ahead."""


class AttentionMeter:
    """Sums the attention of queries at fixed positions; made once and used for every layer with the same queries.

    Attention kernels do not return weights, so the softmax is computed here, block by block in float32. One head of a
    layer costs about a hundredth of a layer (0.5B parameters, 3k tokens), so callers read few heads and layers, or few
    queries.
    """

    # Rejected: another call of the fused kernel with part membership as values. It gives the mass on parts with the
    # diagonal, whose weight also needs the log-sum-exp.

    def __init__(
        self,
        positions: torch.Tensor,
        parts: Sequence[Span],
        *,
        heads: Sequence[int] | None = None,
        hidden: torch.Tensor | None = None,
        where: Sequence[int] | None = None,
        window: int | None = None,
    ) -> None:
        """A meter for queries at `positions` `[queries]`, ascending, on the queries' device.

        `parts` are the spans of keys to sum over, ascending and disjoint; `heads` the query heads to average over
        (None: all). `hidden` `[positions]` on the same device flags positions that no query sees. `where` are the
        positions on the host (None: read from the device). A query sees the `window` keys up to its own (None: all).
        """
        self._positions = positions
        self._hidden = hidden
        self._window = window
        self._where: Sequence[int] = positions.tolist() if where is None else where
        self._stop = self._where[-1] + 1 if self._where else 0
        self._members = torch.zeros(self._stop, len(parts), device=positions.device)
        for index, span in enumerate(parts):
            self._members[span.start : span.stop, index] = 1.0
        self._chosen = heads
        self._heads = None if heads is None else positions.new_tensor(heads)

    def __len__(self) -> int:
        return len(self._where)

    def read(self, queries: torch.Tensor, keys: torch.Tensor, scores: ScoreRule = PLAIN_SCORES) -> torch.Tensor:
        """Mass of `queries` `[queries, heads, head_dim]` over `keys` `[positions, kv_heads, head_dim]`, by part.

        Both are after RoPE; key i is at position i, and a query sees keys at positions up to its own. `scores` covers
        all heads. Returns sums of weights `[queries, parts]`, mean over heads, in float32, without a query's own key.
        """
        rule = self._of_chosen(scores)
        q, k = self._by_head(queries, keys)
        by_part = q.new_zeros(len(self), self._members.shape[1])
        for rows, stop in self._blocks(q.shape[0] * q.shape[1], q.device):
            weights = self._weights(q[:, :, rows], k[:, :, :stop], rows, rule).mean(0)
            weights.scatter_(1, self._positions[rows, None], 0.0)
            by_part[rows] = weights @ self._members[:stop]
        return by_part

    def of_kernel(self, by_part: torch.Tensor) -> torch.Tensor:
        """The result of `read` from a kernel's sums `[queries, heads, parts]` over all heads (`Measured.by_part`)."""
        return by_part.mean(1) if self._heads is None else by_part[:, self._heads].mean(1)

    def combined(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        *,
        over_heads: Combine,
        over_queries: Combine,
        scores: ScoreRule = PLAIN_SCORES,
        ranks: Ranks = ALONE,
    ) -> torch.Tensor:
        """Attention to each key, own keys included, combined over heads and then queries, `[positions]`.

        A sum over heads is computed as their mean, which has the same ranking. Shapes are those of `read`; heads are
        this rank's, combined over all `ranks`.
        """
        rule = self._of_chosen(scores)
        q, k = self._by_head(queries, keys)
        received = q.new_zeros(keys.shape[0])
        for rows, stop in self._blocks(q.shape[0] * q.shape[1], q.device):
            by_head = self._weights(q[:, :, rows], k[:, :, :stop], rows, rule)
            maximal = over_heads is Combine.MAX
            weights = ranks.maximum(by_head.amax(0)) if maximal else ranks.mean(by_head.mean(0))
            if over_queries is Combine.MAX:
                received[:stop] = torch.maximum(received[:stop], weights.amax(0))
            else:
                received[:stop] += weights.sum(0)
        return received

    def _by_head(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled queries `[key heads, group, queries, head_dim]` and keys `[key heads, head_dim, positions]`, float32.

        Query heads that share a key head form a group; each chosen head gets its own copy of its key head.
        """
        n, heads, dim = queries.shape
        kv_heads = keys.shape[1]
        keys = keys[: self._stop]
        if self._heads is None:
            q = queries.view(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        else:
            q = queries[:, self._heads].transpose(0, 1).unsqueeze(1)
            keys = keys[:, self._heads // (heads // kv_heads)]
        return q.float() * dim**-0.5, keys.float().permute(1, 2, 0)

    def _of_chosen(self, scores: ScoreRule) -> ScoreRule:
        if self._chosen is None or not scores.sinks:
            return scores
        return replace(scores, sinks=tuple(scores.sinks[head] for head in self._chosen))

    def _blocks(self, heads: int, device: torch.device) -> Iterator[tuple[slice, int]]:
        """Rows of each block, and the end of the positions that they may see."""
        most = _CPU_BLOCK_WEIGHTS if device.type == "cpu" else _DEVICE_BLOCK_WEIGHTS
        size = max(1, most // max(1, heads * self._stop))
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            yield slice(start, stop), self._where[stop - 1] + 1

    def _weights(self, q: torch.Tensor, k: torch.Tensor, rows: slice, rule: ScoreRule) -> torch.Tensor:
        """Attention weights of one block, `[heads, queries, keys]`."""
        key_heads, group, n, dim = q.shape
        scores = capped(torch.bmm(q.reshape(key_heads, group * n, dim), k), rule).view(key_heads * group, n, -1)
        seen_by_all = self._where[rows.start] + 1
        tail = torch.arange(seen_by_all, k.shape[2], device=q.device)
        scores[:, :, seen_by_all:].masked_fill_(tail > self._positions[rows, None], -torch.inf)
        if self._window is not None:
            behind = torch.arange(k.shape[2], device=q.device) <= self._positions[rows, None] - self._window
            scores.masked_fill_(behind, -torch.inf)
        if self._hidden is not None:
            scores.masked_fill_(self._hidden[: k.shape[2]], -torch.inf)
        return attention_weights(scores, rule)
