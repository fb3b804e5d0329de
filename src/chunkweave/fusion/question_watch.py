"""Sums up what the question attends to during a pass: evidence for what the next pass recomputes."""

import torch

from chunkweave.models.attention_mass import AttentionMeter
from chunkweave.types import Span


class QuestionWatch:
    """Adds up the attention of one question's tokens on every position, layer by layer; all heads, in float32."""

    def __init__(self, question: Span, device: torch.device) -> None:
        self.question = question
        self._meter = AttentionMeter(torch.arange(question.start, question.stop, device=device), ())
        self.attention = torch.zeros(question.stop, device=device)

    def look(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Add one layer: `queries` `[question tokens, heads, head_dim]`, `keys` `[positions, kv_heads, head_dim]`."""
        self.attention += self._meter.total(queries, keys)
