"""Prefill times computed from floating-point operations, for simulations."""

from collections.abc import Mapping

from chunkweave.planning.cost import CostModel
from chunkweave.planning.outcome import full_prefill_flops
from chunkweave.types import Geometry

_CACHED_TOKENS = (0, *(1 << power for power in range(9, 19)))
_NEW_TOKENS = (1, *(1 << power for power in range(5, 19)))


def analytic_cost(
    geometry: Geometry,
    *,
    flops_per_s: float,
    overhead_s: float = 0.0,
    element_bytes: int = 2,
    tier_bytes_per_s: Mapping[str, float] | None = None,
) -> CostModel:
    """Prefill time as floating-point operations over `flops_per_s`, plus `overhead_s` per prefill.

    The axes are powers of two up to 262 144 tokens; values between them are interpolated as for measured tables.

    Raises:
        ValueError: the speed is not positive.
    """
    if not flops_per_s > 0:
        raise ValueError(f"the speed must be positive, not {flops_per_s} FLOP/s")
    return CostModel(
        cached_tokens=_CACHED_TOKENS,
        new_tokens=_NEW_TOKENS,
        prefill_s=tuple(
            tuple(overhead_s + full_prefill_flops(geometry, new, cached) / flops_per_s for new in _NEW_TOKENS)
            for cached in _CACHED_TOKENS
        ),
        kv_bytes_per_token=geometry.kv_elements_per_token() * element_bytes,
        tier_bytes_per_s=dict(tier_bytes_per_s or {}),
    )
