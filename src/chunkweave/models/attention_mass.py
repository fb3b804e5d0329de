"""Sums of attention weights: how much queries give to parts of the prompt, to their own key, and to each key."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from chunkweave.config import Combine
from chunkweave.models.attention import ALONE, Ranks, attention_weights, capped
from chunkweave.types import PLAIN_SCORES, ScoreRule, Span

_CPU_BLOCK_WEIGHTS = 1 << 19
"""Weights of one block on a CPU: 2 MiB, which stay in its cache between softmax and sums."""

_DEVICE_BLOCK_WEIGHTS = 1 << 24
"""Weights of one block on an accelerator: 64 MiB, few kernels a prompt and still no work for keys far ahead."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMass:
    """Sums of attention weights, mean over heads, in float32.

    `by_part` `[queries, parts]` is the mass on each part, a query's own key left out; `own` `[queries]` is the weight
    of that key (the diagonal). `received` `[positions]` is what each key got from the queries in its own part, the
    diagonal left out again; 0 for a key outside all parts.
    """

    by_part: torch.Tensor
    own: torch.Tensor
    received: torch.Tensor


class AttentionMeter:
    """Sums the attention of queries at fixed positions; made once and used for every layer with the same queries.

    Attention kernels keep their weights to themselves, so the softmax is written out here (DESIGN §5.1), block by block
    in float32, each block summed at once. A head of a layer costs about a hundredth of a layer that way (0.5B
    parameters, 3k tokens), so callers look at few heads and layers, or at few queries.
    """

    # Rejected: one more call of the fused kernel with the parts' membership as values. It gives the mass on parts
    # alone; the diagonal needs its log-sum-exp on top, and what a key receives needs a second product.

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
        """A meter for queries at `positions` `[queries]`, ascending, on the device of the queries.

        `parts` are the spans of keys whose mass is wanted, ascending and disjoint; `heads` the query heads to average
        over (None: all). `hidden` flags the positions that no query sees, `[positions]` on the same device. `where`
        are the positions as the host knows them (None: it asks the device). A query sees the `window` keys up to its
        own (None: all).
        """
        self._positions = positions
        self._hidden = hidden
        self._window = window
        self._where: Sequence[int] = positions.tolist() if where is None else where
        self._stop = self._where[-1] + 1 if self._where else 0
        self._members = torch.zeros(self._stop, len(parts), device=positions.device)
        for index, span in enumerate(parts):
            self._members[span.start : span.stop, index] = 1.0
        rows = [(span, bisect_left(self._where, span.start), bisect_left(self._where, span.stop)) for span in parts]
        self._groups = [(span, first, last) for span, first, last in rows if first < last]
        self._chosen = heads
        self._heads = None if heads is None else positions.new_tensor(heads)

    def __len__(self) -> int:
        return len(self._where)

    def read(self, queries: torch.Tensor, keys: torch.Tensor, scores: ScoreRule = PLAIN_SCORES) -> AttentionMass:
        """The mass of `queries` `[queries, heads, head_dim]` over `keys` `[positions, kv_heads, head_dim]`.

        Both after RoPE; key i stands at position i, and a query sees the keys at positions up to its own. `scores` are
        those of all heads.
        """
        rule = self._of_chosen(scores)
        q, k = self._by_head(queries, keys)
        by_part = q.new_zeros(len(self), self._members.shape[1])
        own, received = q.new_zeros(len(self)), q.new_zeros(keys.shape[0])
        for rows, stop in self._blocks(q.shape[0] * q.shape[1], q.device):
            weights = self._weights(q[:, :, rows], k[:, :, :stop], rows, rule).mean(0)
            at = self._positions[rows, None]
            own[rows] = weights.gather(1, at).squeeze(1)
            weights.scatter_(1, at, 0.0)
            by_part[rows] = weights @ self._members[:stop]
            for span, first, last in self._groups:
                if first < rows.stop and rows.start < last:
                    inside = slice(max(first, rows.start) - rows.start, min(last, rows.stop) - rows.start)
                    reached = slice(span.start, min(span.stop, stop))
                    received[reached] += weights[inside, reached].sum(0)
        return AttentionMass(by_part, own, received)

    def finish(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        *,
        by_part: torch.Tensor,
        own: torch.Tensor,
        log_sum_exp: torch.Tensor,
        scores: ScoreRule = PLAIN_SCORES,
    ) -> AttentionMass:
        """What `read` would give, where a kernel has summed the mass already; only what keys received is worked out.

        `by_part` `[queries, heads, parts]`, `own` and `log_sum_exp` `[queries, heads]` are that kernel's, of all heads:
        with the log-sum-exp, which is over their sinks too, a key's weight needs no other keys, so that each part looks
        at its own alone.
        """
        q, k = self._by_head(queries, keys)
        heads = slice(None) if self._heads is None else self._heads
        norms = log_sum_exp[:, heads].T.reshape(q.shape[0], q.shape[1], len(self), 1)
        received = q.new_zeros(keys.shape[0])
        for span, first, last in self._groups:
            reached = slice(span.start, min(span.stop, self._stop))
            n, width = last - first, reached.stop - reached.start
            found = capped(torch.bmm(q[:, :, first:last].reshape(len(q), -1, q.shape[-1]), k[:, :, reached]), scores)
            weights = torch.exp(found.view(*q.shape[:2], n, width) - norms[:, :, first:last])
            at = torch.arange(reached.start, reached.stop, device=q.device)
            weights.masked_fill_(at >= self._positions[first:last, None], 0.0)
            received[reached] += weights.sum(2).mean((0, 1))
        return AttentionMass(by_part[:, heads].mean(1), own[:, heads].mean(1), received)

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
        """Attention that each key gets, own keys included, combined over heads and then over queries, `[positions]`.

        A sum over heads is taken as their mean, which ranks alike. Shapes are those of `read`; the heads are this
        rank's, and combined over all `ranks`.
        """
        rule = self._of_chosen(scores)
        q, k = self._by_head(queries, keys)
        found = q.new_zeros(keys.shape[0])
        for rows, stop in self._blocks(q.shape[0] * q.shape[1], q.device):
            by_head = self._weights(q[:, :, rows], k[:, :, :stop], rows, rule)
            maximal = over_heads is Combine.MAX
            weights = ranks.maximum(by_head.amax(0)) if maximal else ranks.mean(by_head.mean(0))
            if over_queries is Combine.MAX:
                found[:stop] = torch.maximum(found[:stop], weights.amax(0))
            else:
                found[:stop] += weights.sum(0)
        return found

    def _by_head(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled queries `[key heads, group, queries, head_dim]` and keys `[key heads, head_dim, positions]`, float32.

        Query heads that share a key head are a group; of chosen heads each gets a copy of its key head to itself.
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
        """Rows of each block, and the position up to which they may see keys."""
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
