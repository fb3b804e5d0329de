"""Executes the rule `StopUnfocused` for one request: which chunks does the question keep attending to."""

import torch

from chunkweave.models.attention_mass import AttentionMeter
from chunkweave.models.ranks import ALONE, Ranks
from chunkweave.planning.focus import FocusTracker
from chunkweave.planning.plan import StopUnfocused
from chunkweave.types import Span


class FocusWatch:
    """Shows the question's attention to the tracker, layer by layer, until that has found the focused chunks.

    The question is few tokens, so that all heads are looked at.
    """

    def __init__(self, rule: StopUnfocused, device: torch.device, *, ranks: Ranks = ALONE) -> None:
        self.rule = rule
        self._ranks = ranks
        self._tracker = FocusTracker(rule.window, rule.reading)
        question = torch.arange(rule.question.start, rule.question.stop, device=device)
        self._meter = AttentionMeter(question, rule.chunks, where=rule.question.positions())

    def look(self, queries: torch.Tensor, keys: torch.Tensor) -> frozenset[int] | None:
        """Indices of the focused chunks once they are known; None until then.

        `queries` `[question tokens, heads, head_dim]` and `keys` `[positions, kv_heads, head_dim]` of the next layer,
        after RoPE.
        """
        mass = self._ranks.mean(self._meter.read(queries, keys).by_part.sum(0))
        return self._tracker.update(mass.tolist())

    def unfocused(self, focused: frozenset[int]) -> tuple[Span, ...]:
        """The chunks that are not focused."""
        return tuple(span for index, span in enumerate(self.rule.chunks) if index not in focused)
