"""What computing and loading cost on a machine: measured or estimated, kept in a file, and what follows from it."""

import json
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any, Self

from chunkweave.errors import DocumentError, UnknownMethodError, UsageError
from chunkweave.planning.outcome import full_prefill_flops
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry, SegmentId, Span

logger = logging.getLogger(__name__)


FORMAT = 1


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prefill times over a grid of (cached, new) tokens, and each tier's throughput.

    `prefill_s[i][j]` is the time to compute `new_tokens[j]` tokens behind `cached_tokens[i]` cached ones (RAGCache §5.1
    profiles the same table for PGDSF). `tier_bytes_per_s` is what a layer-wise read reaches. Axes ascend.
    """

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    prefill_s: tuple[tuple[float, ...], ...]
    kv_bytes_per_token: int
    tier_bytes_per_s: dict[str, float] = field(default_factory=dict)
    fingerprint: str = ""

    def __post_init__(self) -> None:
        axes = (self.cached_tokens, self.new_tokens)
        if any(not axis or list(axis) != sorted(set(axis)) for axis in axes):
            raise ValueError("the axes of a cost model must ascend")
        if [len(row) for row in self.prefill_s] != [len(self.new_tokens)] * len(self.cached_tokens):
            raise ValueError("the prefill table does not fit its axes")

    def prefill(self, new: float, cached: float = 0.0) -> float:
        """Seconds to compute `new` tokens behind `cached` ones: bilinear, proportional outside the grid."""
        if new <= 0:
            return 0.0
        low, high, at = _bracket(self.cached_tokens, min(cached, self.cached_tokens[-1]))
        first, second = (self._along_new(row, new) for row in (self.prefill_s[low], self.prefill_s[high]))
        return first + at * (second - first)

    def load(self, tokens: float, tier: str) -> float:
        """Seconds to bring the KV of `tokens` tokens in from `tier`: bytes over throughput (CacheBlend §5.1).

        A tier that was not measured costs nothing: it is memory.
        """
        throughput = self.tier_bytes_per_s.get(tier)
        return tokens * self.kv_bytes_per_token / throughput if throughput else 0.0

    def _along_new(self, row: Sequence[float], new: float) -> float:
        axis = self.new_tokens
        if new <= axis[0]:
            return row[0]  # a layer loop of few tokens costs what its overhead costs
        if new >= axis[-1]:
            return row[-1] * new / axis[-1]
        low, high, at = _bracket(axis, new)
        return row[low] + at * (row[high] - row[low])

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DocumentError: the file cannot be read or is no cost model; the message says to measure again.
        """
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("format", None) != FORMAT:
                raise ValueError("another format")
            return cls(
                cached_tokens=tuple(data["cached_tokens"]),
                new_tokens=tuple(data["new_tokens"]),
                prefill_s=tuple(tuple(row) for row in data["prefill_s"]),
                kv_bytes_per_token=data["kv_bytes_per_token"],
                tier_bytes_per_s=dict(data["tier_bytes_per_s"]),
                fingerprint=data["fingerprint"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DocumentError(f"{path} is no cost model ({error}); make one with `chunkweave profile`") from error


def _bracket(axis: Sequence[int], value: float) -> tuple[int, int, float]:
    """Neighbouring places around `value` and how far it lies between them, 0 to 1."""
    high = min(bisect_right(axis, value), len(axis) - 1)
    low = max(high - 1, 0)
    if axis[high] == axis[low] or value <= axis[low]:
        return low, low, 0.0
    return low, high, min(1.0, (value - axis[low]) / (axis[high] - axis[low]))


COST_FILE = "cost-model.json"
MEASURED_BY_ENGINE = "prefill-engine.json"
"""Beside it, what a start of our own engine has measured for its eviction policy, and below, one of vLLM."""
MEASURED_BY_VLLM = "prefill-vllm.json"


def cost_model_path(cache_dir: Path, fingerprint: str) -> Path:
    """Where `chunkweave profile` writes it, and where it is looked for."""
    return cache_dir / fingerprint / COST_FILE


def given_cost_model(path: Path | None, fingerprint: str | None) -> CostModel | None:
    """The cost model that a setting names, of any model if no `fingerprint` is given; None if it names none.

    Raises:
        UsageError: it cannot be read, or was measured with another model.
    """
    if path is None:
        return None
    try:
        cost = CostModel.read(path.expanduser())
    except DocumentError as error:
        raise UsageError(f"cost_model: {error}") from error
    if fingerprint is not None and cost.fingerprint not in ("", fingerprint):
        raise UsageError(f"cost_model: {path} was measured with another model")
    return cost


def stored_cost_model(cache_dir: Path | None, fingerprint: str, name: str = COST_FILE) -> CostModel | None:
    """The cost model measured for this cache folder and model, if there is one that can be read.

    One of another model is refused as much as one that is damaged: logged, and done without.
    """
    if cache_dir is None or not (path := cost_model_path(cache_dir, fingerprint).with_name(name)).exists():
        return None
    try:
        cost = CostModel.read(path)
    except DocumentError as error:
        logger.warning("%s; nothing is known about what loading costs", error)
        return None
    if cost.fingerprint != fingerprint:
        logger.warning("%s was measured with another model; it is not used", path)
        return None
    return cost


TimePrefill = Callable[[int, int], float]
"""Computes so many new tokens behind so many cached ones, and returns the seconds that took: `(cached, new)`."""

_QUICK_TOKENS = (16, 64, 256, 1024)


def measured_quickly(
    time_prefill: TimePrefill,
    *,
    most_tokens: int,
    most_s: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
    agreed: Callable[[bool], bool] = bool,
    **about: Any,
) -> CostModel:
    """A cost model of few prefills, for a server that starts without one: RAGCache §5.1 profiles a whole table offline.

    New tokens alone, from few to more as long as about `most_s` allow it, then, if they allow it again, behind as many
    cached ones. No prompt has more than `most_tokens`. Ranks that compute together have `agreed` whether to go on.
    `about` are the other fields of the model. Beyond its axes times are proportional, so that what attention adds to
    prompts longer than those measured is left out.
    """
    until_s = clock() + most_s

    def row(cached: int, axis: Sequence[int], expected_s: float = 0.0) -> Iterator[float]:
        for place, new in enumerate(axis):
            if (place or cached) and not agreed(clock() + expected_s < until_s):
                return
            found_s = time_prefill(cached, new)
            yield found_s
            expected_s = 2 * found_s * axis[min(place + 1, len(axis) - 1)] / new  # it is run once before it is timed

    alone = tuple(row(0, [new for new in _QUICK_TOKENS if new <= most_tokens] or [most_tokens]))
    axis = ([new for new in _QUICK_TOKENS if new <= most_tokens] or [most_tokens])[: len(alone)]
    cached = axis[-1]
    fits = 2 * cached <= most_tokens
    behind = tuple(row(cached, axis, 2 * sum(alone))) if fits else ()
    rows = (alone, behind) if len(behind) == len(alone) else (alone,)
    return CostModel(cached_tokens=(0, cached)[: len(rows)], new_tokens=tuple(axis), prefill_s=rows, **about)


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
            tuple(overhead_s + full_prefill_flops(geometry, new, cached) / flops_per_s for new in _NEW_TOKENS)
            for cached in _CACHED_TOKENS
        ),
        kv_bytes_per_token=geometry.kv_elements_per_token() * element_bytes,
        tier_bytes_per_s=dict(tier_bytes_per_s or {}),
    )


@dataclass(frozen=True, slots=True)
class KnownShape:
    """The family whose layers a model has, its sizes, and the base of its rotary embedding."""

    family: str
    geometry: Geometry
    rope_theta: float
    tied_embeddings: bool = False


def _llama_like(
    family: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    theta: float,
    *,
    head_dim: int | None = None,
    tied: bool = False,
) -> KnownShape:
    geometry = Geometry(layers, hidden, heads, kv_heads, head_dim or hidden // heads, inner, vocab, positions)
    return KnownShape(family, geometry, theta, tied)


KNOWN_SHAPES: dict[str, KnownShape] = {
    "demo": _llama_like("llama", 256, 704, 8, 8, 4, 4096, 8192, 1e4, tied=True),
    "smollm2-135m": _llama_like("llama", 576, 1536, 30, 9, 3, 49152, 8192, 1e5, tied=True),
    "qwen2.5-0.5b": _llama_like("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, 1e6, tied=True),
    "qwen3-0.6b": _llama_like("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, 1e6, head_dim=128, tied=True),
    "llama-3.2-1b": _llama_like("llama", 2048, 8192, 16, 32, 8, 128256, 131072, 5e5, tied=True),
    "qwen2.5-1.5b": _llama_like("qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, 1e6, tied=True),
    "llama-3-8b": _llama_like("llama", 4096, 14336, 32, 32, 8, 128256, 8192, 5e5),
    "mistral-7b": _llama_like("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, 1e6),
}


def known_shape(name: str) -> KnownShape:
    """The shape of that name.

    Raises:
        UnknownMethodError: there is none; the message lists them.
    """
    if name not in KNOWN_SHAPES:
        raise UnknownMethodError(f"unknown shape {name!r}; there are: {', '.join(KNOWN_SHAPES)}")
    return KNOWN_SHAPES[name]


@dataclass(frozen=True, slots=True)
class StorageDevice:
    """A place that could hold segments: its name in the cost model, its throughput, and its price."""

    name: str
    bytes_per_s: float
    price_per_gib_hour: float


@dataclass(frozen=True, slots=True)
class LoadingChoice:
    """What the controller decided, with the delays that it expects in seconds.

    `head_s` passes before recomputation begins: where the question is computed first, over layers that must be loaded.
    """

    ratio: float
    load_s: float
    recompute_s: float
    head_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Loading and recomputation overlap layer by layer, so the longer one counts."""
        return max(self.load_s, self.head_s + self.recompute_s)


def ratio_that_hides(prefill_s: float, load_s: float, *, least_ratio: float, head_s: float = 0.0) -> LoadingChoice:
    """The ratio at which recomputing takes as long as loading, but at least `least_ratio` (r*) and at most 1.

    `prefill_s` is the time to compute all the tokens anew, `load_s` to load them; `T_recompute(r) = r prefill_s`. On a
    slow device the time is spent anyway, so more tokens are recomputed for free. Recomputation begins after `head_s`:
    only the loading that is left then can hide behind it.

    >>> ratio_that_hides(1.0, 0.5, least_ratio=0.15)
    LoadingChoice(ratio=0.5, load_s=0.5, recompute_s=0.5, head_s=0.0)
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


@dataclass(frozen=True, slots=True)
class Loading:
    """What it takes to bring segments in from where they are when a plan is made.

    `tier_of` says where one is, `left` what share of it is still to be read: 0 of one that was read ahead whole.
    """

    cost: CostModel
    tier_of: Callable[[SegmentId], str | None]
    left: Callable[[SegmentId], float] = lambda _: 1.0

    def seconds(self, segment: SegmentId, tokens: int) -> float:
        """Seconds until a segment of so many tokens is in memory, if nothing else is read."""
        return self.left(segment) * self.cost.load(tokens, self.tier_of(segment) or "")

    def pays(self, segment: SegmentId, span: Span) -> bool:
        """Whether bringing a segment in is no slower than computing its tokens anew at `span`."""
        return self.seconds(segment, len(span)) <= self.cost.prefill(len(span), span.start)


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

    >>> staged_s([1.0, 1.0, 1.0], [[0.5, 0.5, 0.5], [2.0, 2.0, 2.0]])  # the question over all layers, then recomputed
    9.5
    >>> staged_s([1.0, 1.0, 1.0], [[0.5], [2.0, 2.0, 2.0]])  # the question over the first: the rest loads meanwhile
    7.5
    """
    loaded_s = [total - head_start_s for total in accumulate(layer_load_s)]
    end_s = 0.0
    for a_pass in passes_s:
        for layer, compute_s in enumerate(a_pass):
            end_s = max(end_s, loaded_s[layer]) + compute_s
    return end_s


def too_slow(lookup: PromptLookup, loading: Loading) -> frozenset[SegmentId]:
    """Segments of which loading what is left takes longer than computing them anew at their place.

    Each is held against its own tokens. What is kept then loads in no more time than computing all of it would take.
    """
    return frozenset(
        record.id
        for entry in lookup.parts
        for record in {*entry.variants, *([entry.exact] if entry.exact else [])}
        if not loading.pays(record.id, entry.span)
    )
