"""Evidence by which rules rank tokens."""

import torch

from chunkweave.models.ranks import ALONE, Ranks
from chunkweave.planning.plan import Evidence


def measure(
    by: Evidence,
    keys: torch.Tensor,
    values: torch.Tensor,
    cached: torch.Tensor,
    read: torch.Tensor | None = None,
    *,
    ranks: Ranks = ALONE,
) -> torch.Tensor:
    """Evidence of each token, `[tokens]` in float32.

    `keys` and `values` are fresh, `[tokens, kv_heads, head_dim]`, `cached` is `[2, tokens, kv_heads, head_dim]`; all
    before RoPE. `read` `[tokens]` is what the question gave to each in the pass before, where that counts. The heads
    are this rank's; the evidence is over those of all `ranks`.
    """
    deviation = ranks.norm(kv_deviation(keys, values, cached))
    match by:
        case Evidence.KV_DEVIATION:
            return deviation
        case Evidence.READ_DEVIATION:
            assert read is not None, "a pass that ranks by what was read starts by it"
            return deviation * read


def kv_deviation(keys: torch.Tensor, values: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """L2 norm over heads and dims of fresh minus cached (K, V), `[tokens]` (CacheBlend §4.1).

    The paper says "absolute difference"; the norm of keys and values together is what DESIGN settles. Before RoPE,
    so that the position plays no part (a rotation would not change the norm anyway).
    """
    fresh = torch.stack((keys, values)).float()
    return (fresh - cached.float()).pow(2).sum(dim=(0, 2, 3)).sqrt()
