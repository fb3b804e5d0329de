"""How the tensor-parallel ranks of one model agree on what to weave, beside vLLM's own messages."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import distributed
from vllm.distributed import get_tp_group


class Agreement(Protocol):
    """The ranks that weave the same requests, each with its share of the heads. Every call is made by all of them."""

    @property
    def rank(self) -> int:
        """Which of them this is."""

    @property
    def size(self) -> int:
        """How many there are."""

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number over all ranks; numbers of 63 bits and a sign."""

    def gather(self, what: Any) -> list[Any]:
        """What each rank has, by rank."""


class Alone:
    """One worker that has all heads."""

    rank = 0
    size = 1

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Its own numbers."""
        return list(numbers)

    def gather(self, what: Any) -> list[Any]:
        """Its own alone."""
        return [what]


class RankAgreement:
    """vLLM's tensor-parallel group, over its CPU channel: what is agreed on are a few numbers a weave."""

    def __init__(self) -> None:
        self._group = get_tp_group()

    @property
    def rank(self) -> int:
        """Which of them this is."""
        rank: int = self._group.rank_in_group
        return rank

    @property
    def size(self) -> int:
        """How many there are."""
        size: int = self._group.world_size
        return size

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(tensor, distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return [int(number) for number in tensor]

    def gather(self, what: Any) -> list[Any]:
        """What each rank has, by rank."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, what, group=self._group.cpu_group)
        return found


def agreement_here() -> Agreement:
    """That of this worker's model."""
    ranks = RankAgreement()
    return ranks if ranks.size > 1 else Alone()
