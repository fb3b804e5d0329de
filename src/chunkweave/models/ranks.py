"""Tensor-parallel ranks: each computes its share of a layer's heads, and what is decided by all heads is combined."""

from typing import Protocol

import torch


class Ranks(Protocol):
    """What the ranks of one model combine. Every rank calls the same methods in the same order and gets the same."""

    def own_heads(self, num_heads: int) -> range:
        """The query heads that this rank computes, of all `num_heads`."""

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks of a tensor of one shape."""

    def maximum(self, states: torch.Tensor) -> torch.Tensor:
        """Greatest of the ranks' tensors, element by element."""

    def norm(self, norms: torch.Tensor) -> torch.Tensor:
        """The L2 norm over all heads from the norms over each rank's own."""


class OneRank:
    """A model that is not divided: what is combined is what there is."""

    def own_heads(self, num_heads: int) -> range:
        """All of them."""
        return range(num_heads)

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return states

    def maximum(self, states: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return states

    def norm(self, norms: torch.Tensor) -> torch.Tensor:
        """The norms themselves."""
        return norms


ALONE: Ranks = OneRank()
"""What a model computes that runs in one piece."""
