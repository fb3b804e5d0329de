"""Attention weights written out in float64: softmax(q k^T / sqrt(head_dim)), capped, masked, with sinks."""

from collections.abc import Sequence

import torch

from chunkweave.types import PLAIN_SCORES, ScoreRule

RULES = {
    "plain": PLAIN_SCORES,
    "capped": ScoreRule(cap=0.7),
    "sinks": ScoreRule(sinks=tuple(0.4 * head - 1.0 for head in range(8))),
    "both": ScoreRule(cap=0.7, sinks=tuple(1.5 - 0.4 * head for head in range(8))),
}
"""For up to eight heads."""


def of_heads(rule: ScoreRule, heads: int) -> ScoreRule:
    return ScoreRule(rule.cap, rule.sinks[:heads])


def weights_written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: Sequence[int],
    window: int | None = None,
    rule: ScoreRule = PLAIN_SCORES,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[heads, queries, keys]`; keys flagged `hidden` are not seen."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    behind = torch.tensor(positions)[:, None] - torch.arange(k.shape[1])
    unseen = (behind < 0) | (behind >= (window or k.shape[1]))
    unseen = unseen if hidden is None else unseen | hidden
    each = scores.masked_fill(unseen, -torch.inf).exp()
    beside = torch.tensor(rule.sinks or [-torch.inf] * q.shape[1], dtype=torch.float64).exp()
    return each / (each.sum(-1) + beside[:, None])[..., None]
