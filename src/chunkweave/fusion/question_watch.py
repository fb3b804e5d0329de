"""Notes what the question attends to during a pass: evidence for what the next pass recomputes."""

import torch

from chunkweave.config import Combine
from chunkweave.models.attention_mass import AttentionMeter
from chunkweave.models.ranks import ALONE, Ranks
from chunkweave.planning.plan import Watch


class QuestionWatch:
    """Combines the attention of one question's tokens on every position, layer by layer, in float32."""

    def __init__(
        self, watch: Watch, device: torch.device, *, hidden: torch.Tensor | None = None, ranks: Ranks = ALONE
    ) -> None:
        """`hidden` flags the positions that the question does not see, `[positions]`."""
        self._ranks = ranks
        question = watch.question
        self.watch = watch
        where = question.positions()
        positions = torch.arange(question.start, question.stop, device=device)
        self._meter = AttentionMeter(positions, (), hidden=hidden, where=where)
        self.attention = torch.zeros(question.stop, device=device)

    def wants(self, layer: int) -> bool:
        """Whether this layer is watched."""
        return layer in self.watch.layers

    def look(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Take in one layer: `queries` `[question tokens, heads, head_dim]`, `keys` `[positions, kv_heads, head_dim]`.

        Both after RoPE.
        """
        watch = self.watch
        found = self._meter.combined(
            queries, keys, over_heads=watch.over_heads, over_queries=watch.over_tokens, ranks=self._ranks
        )
        if watch.over_layers is Combine.MAX:
            self.attention = torch.maximum(self.attention, found)
        else:
            self.attention += found
