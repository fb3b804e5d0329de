"""A cost model from sizes alone, for a machine that nobody has measured."""

from collections.abc import Mapping

from chunkweave.planning.cost_model import CostModel
from chunkweave.planning.flops import LayerWork, prefill_flops
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
    """Prefill as its floating-point operations over `flops_per_s`, plus `overhead_s` a prefill.

    The table has the axes' powers of two up to 262 144 tokens; between them it is interpolated like a measured one.

    Raises:
        ValueError: the speed is not positive.
    """
    if not flops_per_s > 0:
        raise ValueError(f"a machine computes at a positive speed, not {flops_per_s} FLOP/s")
    return CostModel(
        cached_tokens=_CACHED_TOKENS,
        new_tokens=_NEW_TOKENS,
        prefill_s=tuple(
            tuple(overhead_s + _prefill_flops(geometry, new, cached) / flops_per_s for new in _NEW_TOKENS)
            for cached in _CACHED_TOKENS
        ),
        kv_bytes_per_token=geometry.kv_elements_per_token() * element_bytes,
        tier_bytes_per_s=dict(tier_bytes_per_s or {}),
    )


def _prefill_flops(geometry: Geometry, new: int, cached: int) -> float:
    visible = new * cached + new * (new + 1) // 2
    layers = [LayerWork(new, new, new, visible)] * (geometry.num_layers - 1)
    return prefill_flops(geometry, [*layers, LayerWork(new, new, 1, cached + new)])
