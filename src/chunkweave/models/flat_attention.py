"""Attention of a flat batch: the queries of several requests, each over the KV of its own request.

Which implementation attends is chosen once, when a runner is made, and forced or forbidden by a setting.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from chunkweave.config import AttentionKernel
from chunkweave.errors import UsageError
from chunkweave.models.attention import ScatteredQueries
from chunkweave.types import Geometry

logger = logging.getLogger(__name__)


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
    """

    queries: ScatteredQueries
    keys: torch.Tensor
    values: torch.Tensor
    parts: KeyParts | None = None


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
            states.append(owner.queries.attend(mine, owner.keys, owner.values))
        return FlatResult(states[0] if len(states) == 1 else torch.cat(states), [None] * len(owners))


def make_attention(
    method_request: AttentionKernel, geometry: Geometry, *, dtype: torch.dtype, device: torch.device
) -> FlatAttention:
    """The Triton kernel where it runs, is asked for or is best, else PyTorch's.

    `auto` takes it on CUDA if Triton is there, the model's shape fits, and a few scattered queries come out as they
    should; a kernel that does not work here costs a warning, never an answer.

    Raises:
        UsageError: Triton was asked for and cannot be had; the message says why.
    """
    if method_request == AttentionKernel.SDPA or (method_request == AttentionKernel.AUTO and device.type != "cuda"):
        return SdpaAttention()
    problem = _no_triton(geometry, dtype, device)
    if problem is None:
        from chunkweave.models.triton_attention import TritonAttention, failed_trial

        problem = failed_trial(geometry, dtype=dtype, device=device)
        if problem is None:
            return TritonAttention()
    if method_request == AttentionKernel.TRITON:
        raise UsageError(f"the Triton kernel was asked for, but {problem}; use attention='sdpa'")
    logger.warning("attention falls back to PyTorch's: %s", problem)
    return SdpaAttention()


def _no_triton(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the Triton kernel cannot attend, as far as can be told without running it."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    from chunkweave.models.kernels.scattered import SUPPORTED_DTYPES, SUPPORTED_HEAD_DIMS, interpreted

    if device.type != "cuda" and not interpreted():
        return f"the model is on {device}, and Triton runs there only with TRITON_INTERPRET=1"
    if geometry.head_dim not in SUPPORTED_HEAD_DIMS or geometry.num_heads % geometry.num_kv_heads:
        return (
            f"it does not know heads of {geometry.head_dim} dimensions, {geometry.num_heads} to {geometry.num_kv_heads}"
        )
    return None if dtype in SUPPORTED_DTYPES else f"it does not know {dtype}"
