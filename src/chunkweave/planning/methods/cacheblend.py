"""`cacheblend`: recompute the tokens whose KV deviates most (CacheBlend §4.3, gradual filtering)."""

from math import ceil

from chunkweave.config import ReuseConfig
from chunkweave.planning.method import (
    RATIO_BUDGET,
    prefer_mean,
    required_spans,
    reuse_every_hit,
    reused_spans,
)
from chunkweave.planning.plan import Evidence, KeepTop, Pass, Plan
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry

_SPREAD = 0.25
"""Relative distance of the first and last check's share from the average (the paper says "slightly")."""


class CacheBlend:
    """Reuses every stored passage and computes those tokens again whose KV differs most from what is stored.

    High-KV-deviation (HKVD) tokens are found at the check layers and computed from there on. Every reused token starts
    active: layer 0 cannot deviate (its K and V depend on the token alone), so the layers before the first check run
    dense. At each check layer the active tokens with the greatest deviation survive. Deviation from the paper: with
    ratio 0 no dense layer runs, because nothing is selected.
    """

    name = "cacheblend"
    budget = RATIO_BUDGET
    parameters = ("check_layers",)

    def __init__(self, config: ReuseConfig) -> None:
        self._ratio = config.recompute_ratio
        self._check_layers = config.check_layers

    def plan(self, lookup: PromptLookup, geometry: Geometry) -> Plan:
        """One pass that starts with every token of every reused chunk and narrows at the check layers."""
        parts = reuse_every_hit(lookup, prefer_mean)
        candidates = reused_spans(parts)
        total = sum(len(span) for span in candidates)
        required = required_spans(parts)
        if not total or not self._ratio:
            return Plan(self.name, parts, (Pass(required),))
        ratios = filter_ratios(self._ratio, self._check_layers, geometry.num_layers)
        rules = tuple(
            KeepTop(layer, ceil(ratio * total), Evidence.KV_DEVIATION)
            for layer, ratio in zip(self._check_layers, ratios, strict=True)
        )
        return Plan(self.name, parts, (Pass(required, candidates, rules),))


def filter_ratios(ratio: float, check_layers: tuple[int, ...], num_layers: int) -> tuple[float, ...]:
    """Decreasing ratios, one per check layer, whose average over the layers from the first check on is `ratio`.

    Each ratio applies from its check layer to the next; the average is weighted by these numbers of layers. The ratios
    decrease linearly, with a smaller spread if an average close to 1 leaves no room above it.

    >>> filter_ratios(0.15, (1,), 24)
    (0.15,)
    >>> [round(r, 4) for r in filter_ratios(0.15, (1, 2, 3), 24)]
    [0.2396, 0.1917, 0.1437]
    """
    n = len(check_layers)
    if n == 1:
        return (ratio,)
    ends = (*check_layers[1:], max(num_layers, check_layers[-1] + 1))
    weights = [end - layer for layer, end in zip(check_layers, ends, strict=True)]
    slope = [1 - 2 * i / (n - 1) for i in range(n)]
    lean = sum(w * s for w, s in zip(weights, slope, strict=True)) / sum(weights)
    spread = _SPREAD if ratio <= lean else min(_SPREAD, (1 - ratio) / (ratio - lean))
    return tuple(min(1.0, ratio * (1 + spread * s) / (1 + spread * lean)) for s in slope)
