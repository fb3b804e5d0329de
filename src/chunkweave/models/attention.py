"""Attention of queries at any positions over one request's whole KV cache.

Query i at position p sees the keys at positions <= p. Where the queries end in a run of consecutive positions that
begins near the start, the run takes the causal path. Other queries are sorted by position and cut into blocks; a block
reads keys only up to its last position, so that little beyond the visible half is computed. The query heads that share
a key head become rows of one query block: on CPUs that is up to a fifth faster than SDPA's own grouped-query path,
whose blocks of few scattered queries are too small for its matrix kernels. Rejected: plain matmul and softmax (faster
still in bfloat16 on CPUs, but it rounds the scores to bfloat16).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch reader knows)

_CPU_BLOCK_QUERIES = 32
"""Few, so that little beyond the visible keys is computed: a sixth faster than 128 for a hundred scattered queries."""

_DEVICE_BLOCK_QUERIES = 128
"""More on an accelerator, where each block is a launch."""

_MAX_MASK_BYTES = 128 << 20
_MAX_BEFORE = 0.25
"""A run of queries goes through the causal path if the positions before it are at most this share of its length."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlock:
    """Queries `[start, stop)` see keys below `key_stop`, as `mask` says (additive, `[queries, keys]`), else all."""

    start: int
    stop: int
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
    ) -> None:
        """`positions` is `[queries]`, ascending, on the device of the queries.

        `hidden` flags the positions whose keys no query sees, `[positions]` on the same device; their values must
        still be finite. `where` are the positions as the host knows them; None if it would have to ask the device,
        which happens at the first `attend`, and never if another kernel attends.
        """
        self.positions = positions
        self.hidden = hidden
        self.causal = where is not None and hidden is None and _causal_from(where) == 0
        self._where = where
        self._dtype = dtype
        self._block_queries = block_queries
        self._ways: tuple[list[QueryBlock], tuple[int, int] | None] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Exact causal attention by position.

        `queries` is `[queries, heads, head_dim]` after RoPE; `keys` and `values` are `[positions, kv_heads, head_dim]`
        from position 0 on. Returns `[queries, heads * head_dim]`.
        """
        blocks, run = self._ways = self._ways or self._cut()
        out = [
            _masked(
                queries[b.start : b.stop],
                keys[: b.key_stop],
                values[: b.key_stop],
                self._mask(b) if b.mask is None else b.mask,
            )
            for b in blocks
        ]
        if run is not None:
            first, before = run
            out.append(_causal(queries[first:], keys, values, before))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _cut(self) -> tuple[list[QueryBlock], tuple[int, int] | None]:
        """The blocks of queries, and the causal run behind them: its first query and the positions before it."""
        where: Sequence[int] = self.positions.tolist() if self._where is None else self._where
        first = len(where) if self.hidden is not None else _causal_from(where)
        self.causal = first == 0
        run = (first, where[first]) if first < len(where) else None
        size = self._block_queries
        if size is None:
            size = _CPU_BLOCK_QUERIES if self.positions.device.type == "cpu" else _DEVICE_BLOCK_QUERIES
        edges = [*range(0, first, size), first]
        blocks = [QueryBlock(a, b, where[b - 1] + 1) for a, b in pairwise(edges) if b > a]
        mask_bytes = sum(len(b) * b.key_stop for b in blocks) * torch.finfo(self._dtype).bits // 8
        if mask_bytes <= _MAX_MASK_BYTES:
            blocks = [QueryBlock(b.start, b.stop, b.key_stop, self._mask(b)) for b in blocks]
        return blocks, run

    def _mask(self, block: QueryBlock) -> torch.Tensor | None:
        """0 where a key is visible and -inf where not; None for a single query that sees all keys before it."""
        if len(block) == 1 and self.hidden is None:
            return None
        positions = self.positions[block.start : block.stop]
        hidden = torch.arange(block.key_stop, device=positions.device) > positions[:, None]
        if self.hidden is not None:
            hidden |= self.hidden[: block.key_stop]
        return torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


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


def _masked(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """One block: the query heads of each key head are folded into rows, `[kv_heads, queries * group, head_dim]`."""
    n, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = queries.view(n, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, n * group, dim)
    k, v = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    rows = None if mask is None else mask.repeat_interleave(group, dim=0) if group > 1 else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows)
    return out.view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads * dim)
