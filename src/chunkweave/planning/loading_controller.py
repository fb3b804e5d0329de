"""Chooses the recompute ratio that hides loading, and where to keep segments (CacheBlend §5.1, Figure 10)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from chunkweave.planning.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class StorageDevice:
    """A place that could hold segments: its name in the cost model, its throughput, and its price."""

    name: str
    bytes_per_s: float
    price_per_gib_hour: float


@dataclass(frozen=True, slots=True)
class LoadingChoice:
    """What the controller decided, with the delays that it expects in seconds.

    `head_s` passes before recomputation begins: where the question is asked first, about layers that must be in.
    """

    ratio: float
    load_s: float
    recompute_s: float
    head_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Loading and recomputation overlap layer by layer, so the longer one counts."""
        return max(self.load_s, self.head_s + self.recompute_s)


def choose_ratio(cost: CostModel, tokens: int, tier: str, *, least_ratio: float) -> LoadingChoice:
    """The ratio at which recomputing takes as long as loading, but at least `least_ratio` (r*) and at most 1.

    `T_recompute(r) = r Prefill(len)`, `T_load = bytes / throughput`: on a slow device the time is spent anyway, so
    more tokens are recomputed for nothing.

    >>> cost = CostModel((0,), (1000,), ((1.0,),), 100, {"disk": 200_000.0})
    >>> choose_ratio(cost, 1000, "disk", least_ratio=0.15)
    LoadingChoice(ratio=0.5, load_s=0.5, recompute_s=0.5, head_s=0.0)
    """
    return ratio_that_hides(cost.prefill(tokens), cost.load(tokens, tier), least_ratio=least_ratio)


def ratio_that_hides(prefill_s: float, load_s: float, *, least_ratio: float, head_s: float = 0.0) -> LoadingChoice:
    """The same from the two times: of computing all the tokens anew, and of loading them.

    After `head_s` recomputation begins; only the loading that is left then can hide behind it. A method whose question
    is asked about all layers first has nothing left.
    """
    equal = max(0.0, load_s - head_s) / prefill_s if prefill_s else 0.0
    ratio = min(1.0, max(least_ratio, equal))
    return LoadingChoice(ratio, load_s, ratio * prefill_s, head_s)


def choose_device(cost: CostModel, tokens: int, devices: Sequence[StorageDevice], *, ratio: float) -> StorageDevice:
    """The cheapest device whose loading hides behind recomputing `ratio` of the tokens, else the fastest.

    Raises:
        ValueError: there are no devices.
    """
    if not devices:
        raise ValueError("no storage devices to choose from")
    budget_s = ratio * cost.prefill(tokens)
    hidden = [d for d in devices if tokens * cost.kv_bytes_per_token / d.bytes_per_s <= budget_s]
    if hidden:
        return min(hidden, key=lambda device: (device.price_per_gib_hour, -device.bytes_per_s))
    return max(devices, key=lambda device: device.bytes_per_s)


def preload_depth(num_layers: int, prefill_s: float, load_s: float) -> int:
    """Layers to have in before the first one computes, so that none later waits (Cache-Craft eq. 16).

    `Lp = max(1, ceil((L - 1)(1 - T_prefill / T_load) + 1))`, at most L; 1 where loading is the faster.

    >>> preload_depth(32, prefill_s=1.0, load_s=2.0)
    17
    >>> preload_depth(32, prefill_s=2.0, load_s=1.0)
    1
    """
    if load_s <= 0:
        return 1
    return min(num_layers, max(1, ceil((num_layers - 1) * (1 - prefill_s / load_s) + 1)))


def worth_loading(cost: CostModel, tokens: int, cached: int, tier: str) -> bool:
    """Whether bringing a segment in is no slower than computing its tokens anew behind `cached` others."""
    return cost.load(tokens, tier) <= cost.prefill(tokens, cached)


def pipelined_s(layer_load_s: Sequence[float], layer_compute_s: Sequence[float], head_start_s: float = 0.0) -> float:
    """Seconds from the start of computing to its end if layer l may compute once layers 0..l are loaded.

    Loading runs ahead by `head_start_s`. With an empty head start this is CacheBlend Figure 10 (a), layer by layer.

    >>> pipelined_s([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    7.0
    >>> pipelined_s([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], head_start_s=2.0)
    5.0
    """
    return staged_s(layer_load_s, [layer_compute_s], head_start_s)


def staged_s(layer_load_s: Sequence[float], passes_s: Sequence[Sequence[float]], head_start_s: float = 0.0) -> float:
    """The same over several passes, each of which may end early: a layer is loaded once, and waited for once.

    >>> staged_s([1.0, 1.0, 1.0], [[0.5, 0.5, 0.5], [2.0, 2.0, 2.0]])  # asked about all layers, then recomputed
    9.5
    >>> staged_s([1.0, 1.0, 1.0], [[0.5], [2.0, 2.0, 2.0]])  # asked about the first: the rest loads meanwhile
    7.5
    """
    loaded_s = [total - head_start_s for total in accumulate(layer_load_s)]
    end_s = 0.0
    for a_pass in passes_s:
        for layer, compute_s in enumerate(a_pass):
            end_s = max(end_s, loaded_s[layer]) + compute_s
    return end_s
