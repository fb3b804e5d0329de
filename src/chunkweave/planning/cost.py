"""Costs of computing and loading on a machine: measured or estimated, stored in a file, and decisions based on them."""

import json
import logging
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Self

from chunkweave.errors import DocumentError, UnknownMethodError, UsageError
from chunkweave.planning.outcome import LayerWork, layer_flops
from chunkweave.planning.plan import Expected, KVSource, Pass, Plan
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import segment_id
from chunkweave.store.shared_folder import replace_file
from chunkweave.types import Geometry, SegmentId, Span

logger = logging.getLogger(__name__)


FORMAT = 1


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prefill times over a grid of (cached, new) tokens, and each tier's throughput.

    `prefill_s[i][j]` is the time to compute `new_tokens[j]` tokens after `cached_tokens[i]` cached ones (RAGCache §5.1
    profiles the same table for PGDSF). `tier_bytes_per_s` is the throughput of layer-wise reads. Axes ascend.
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
        """Seconds to compute `new` tokens after `cached` ones: bilinear, proportional outside the grid."""
        if new <= 0:
            return 0.0
        low, high, at = _bracket(self.cached_tokens, min(cached, self.cached_tokens[-1]))
        first, second = (self._along_new(row, new) for row in (self.prefill_s[low], self.prefill_s[high]))
        return first + at * (second - first)

    def load(self, tokens: float, tier: str) -> float:
        """Seconds to load the KV of `tokens` tokens from `tier`: bytes over throughput (CacheBlend §5.1).

        A tier without a measurement is memory, and costs nothing.
        """
        throughput = self.tier_bytes_per_s.get(tier)
        return tokens * self.kv_bytes_per_token / throughput if throughput else 0.0

    def _along_new(self, row: Sequence[float], new: float) -> float:
        axis = self.new_tokens
        if new <= axis[0]:
            return row[0]  # with few tokens, the layer loop's overhead dominates
        if new >= axis[-1]:
            return row[-1] * new / axis[-1]
        low, high, at = _bracket(axis, new)
        return row[low] + at * (row[high] - row[low])

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        replace_file(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file written by `save`.

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
            raise DocumentError(
                f"{path} is no cost model ({error}); remove it, and the next start measures anew"
            ) from error


def _bracket(axis: Sequence[int], value: float) -> tuple[int, int, float]:
    """Indices of the neighbours of `value`, and its relative distance between them, 0 to 1."""
    high = min(bisect_right(axis, value), len(axis) - 1)
    low = max(high - 1, 0)
    if axis[high] == axis[low] or value <= axis[low]:
        return low, low, 0.0
    return low, high, min(1.0, (value - axis[low]) / (axis[high] - axis[low]))


COST_FILE = "cost-model.json"
MEASURED_BY_ENGINE = "prefill-engine.json"
"""Prefill times measured at a start, for the eviction policy: here by our own engine, below by vLLM."""
MEASURED_BY_VLLM = "prefill-vllm.json"


def cost_model_path(cache_dir: Path, fingerprint: str) -> Path:
    """Path of a model's costs in a cache folder; they are read at a start."""
    return cache_dir / fingerprint / COST_FILE


def given_cost_model(path: Path | None, fingerprint: str | None) -> CostModel | None:
    """The cost model in the file that a setting names; None without a file, or if it does not exist yet. Any model is
    accepted without `fingerprint`.

    Raises:
        UsageError: the file cannot be read, or was measured with another model.
    """
    if path is None or not path.expanduser().exists():
        return None
    try:
        cost = CostModel.read(path.expanduser())
    except DocumentError as error:
        raise UsageError(f"cost_model: {error}") from error
    if fingerprint is not None and cost.fingerprint not in ("", fingerprint):
        raise UsageError(f"cost_model: {path} was measured with another model")
    return cost


def stored_cost_model(cache_dir: Path | None, fingerprint: str, name: str = COST_FILE) -> CostModel | None:
    """The cost model stored in this cache folder for this model; None if there is none that can be used.

    A damaged file, and one of another model, is logged and ignored.
    """
    if cache_dir is None or not (path := cost_model_path(cache_dir, fingerprint).with_name(name)).exists():
        return None
    try:
        cost = CostModel.read(path)
    except DocumentError as error:
        logger.warning("%s; loading costs are unknown", error)
        return None
    if cost.fingerprint != fingerprint:
        logger.warning("%s was measured with another model; it is not used", path)
        return None
    return cost


TimePrefill = Callable[[int, int], float]
"""`(cached, new)` -> seconds to compute `new` tokens after `cached` ones."""

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
    """A cost model from few prefills, for a server that starts without one (RAGCache §5.1 profiles a whole table
    offline).

    Times prefills of few to more new tokens, for about `most_s` seconds, then, if time is left, the same after as many
    cached tokens. No prompt exceeds `most_tokens`. Ranks that compute together use `agreed` to decide alike whether to
    continue. `about` are the other fields of the model. Beyond the axes, times are proportional, so attention's extra
    cost in longer prompts is not included.
    """
    until_s = clock() + most_s

    def row(cached: int, axis: Sequence[int], expected_s: float = 0.0) -> Iterator[float]:
        for place, new in enumerate(axis):
            if (place or cached) and not agreed(clock() + expected_s < until_s):
                return
            found_s = time_prefill(cached, new)
            yield found_s
            expected_s = 2 * found_s * axis[min(place + 1, len(axis) - 1)] / new  # a warm-up run and a timed one

    alone = tuple(row(0, [new for new in _QUICK_TOKENS if new <= most_tokens] or [most_tokens]))
    axis = ([new for new in _QUICK_TOKENS if new <= most_tokens] or [most_tokens])[: len(alone)]
    cached = axis[-1]
    fits = 2 * cached <= most_tokens
    behind = tuple(row(cached, axis, 2 * sum(alone))) if fits else ()
    rows = (alone, behind) if len(behind) == len(alone) else (alone,)
    return CostModel(cached_tokens=(0, cached)[: len(rows)], new_tokens=tuple(axis), prefill_s=rows, **about)


@dataclass(frozen=True, slots=True)
class KnownShape:
    """A model's family, sizes, and RoPE base."""

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
    """The shape with this name.

    Raises:
        UnknownMethodError: no such shape; the message lists the known ones.
    """
    if name not in KNOWN_SHAPES:
        raise UnknownMethodError(f"unknown shape {name!r}; there are: {', '.join(KNOWN_SHAPES)}")
    return KNOWN_SHAPES[name]


@dataclass(frozen=True, slots=True)
class LoadingChoice:
    """The loading controller's decision, with the expected delays in seconds.

    `head_s` passes before recomputation starts: if the question is computed first, over layers that must be loaded.
    """

    ratio: float
    load_s: float
    recompute_s: float
    head_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """The longer of the two, because loading and recomputation overlap layer by layer."""
        return max(self.load_s, self.head_s + self.recompute_s)


def ratio_that_hides(prefill_s: float, load_s: float, *, least_ratio: float, head_s: float = 0.0) -> LoadingChoice:
    """The ratio at which recomputing takes as long as loading, at least `least_ratio` (r*) and at most 1.

    `prefill_s` is the time to compute all the tokens, `load_s` the time to load them; `T_recompute(r) = r prefill_s`.
    On a slow device that time passes anyway, so recomputing more tokens is free. Recomputation starts after `head_s`,
    so only the loading left at that point can hide behind it.

    >>> ratio_that_hides(1.0, 0.5, least_ratio=0.15)
    LoadingChoice(ratio=0.5, load_s=0.5, recompute_s=0.5, head_s=0.0)
    """
    equal = max(0.0, load_s - head_s) / prefill_s if prefill_s else 0.0
    ratio = min(1.0, max(least_ratio, equal))
    return LoadingChoice(ratio, load_s, ratio * prefill_s, head_s)


def preload_depth(num_layers: int, prefill_s: float, load_s: float) -> int:
    """Layers to load before the first one computes, so that no later one waits (Cache-Craft eq. 16).

    `Lp = max(1, ceil((L - 1)(1 - T_prefill / T_load) + 1))`, at most L; 1 if loading is faster.

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
    """The cost of loading segments from their current tiers when a plan is made.

    `tier_of` gives a segment's tier, `left` the share of it that is still to be read: 0 if it was prefetched whole.
    """

    cost: CostModel
    tier_of: Callable[[SegmentId], str | None]
    left: Callable[[SegmentId], float] = lambda _: 1.0

    def seconds(self, segment: SegmentId, tokens: int) -> float:
        """Seconds until a segment of `tokens` tokens is in memory, if nothing else is read."""
        return self.left(segment) * self.cost.load(tokens, self.tier_of(segment) or "")

    def pays(self, segment: SegmentId, span: Span) -> bool:
        """Whether loading a segment is no slower than computing its tokens at `span`."""
        return self.seconds(segment, len(span)) <= self.cost.prefill(len(span), span.start)


def too_slow(lookup: PromptLookup, loading: Loading) -> frozenset[SegmentId]:
    """Segments whose remaining bytes take longer to load than their tokens take to compute.

    Each segment is compared with its own tokens. So loading all others takes no longer than computing them.
    """
    return frozenset(
        record.id
        for entry in lookup.parts
        for record in {*entry.variants, *([entry.exact] if entry.exact else [])}
        if not loading.pays(record.id, entry.span)
    )


_PASS_TOKENS = 25.0
"""What a pass costs besides its tokens, in tokens: reading the weights, and Python between the layers."""
_PLACED_TOKENS = 0.03
"""What rotating and copying one stored token costs, in computed tokens. Both are of SmolLM2 on one core; the rates of
`PrefillCosts` correct them.
"""


def prefill_work(passes: Iterable[Pass], geometry: Geometry, *, placed: int, prompt_tokens: int) -> float:
    """The work of passes over a prompt with `placed` stored tokens, as tokens through all layers without attention.

    Attention to one key counts by its FLOPs. Windows of layers are ignored, and which candidates will be active is
    unknown: they count as in the middle of the prompt.
    """
    layers = geometry.num_layers
    key = layer_flops(geometry, LayerWork(0, 0, 0, 1)) / layer_flops(geometry, LayerWork(1, 1, 1, 0))
    work = _PLACED_TOKENS * placed
    for pass_ in passes:
        depth = layers if pass_.depth is None else pass_.depth
        candidates = sum(map(pass_.candidates_at, range(depth))) / layers
        keys = sum(len(span) * (span.start + span.stop) / 2 for span in pass_.required) * depth / layers
        work += (pass_.required_tokens + _PASS_TOKENS) * depth / layers + candidates
        work += key * (keys + candidates * prompt_tokens / 2)
    return work


_LATEST = 9
"""Prefills over which a rate is the median."""
_LEAST_MEASURED = 3
_TRIED_EVERY = 100
_MOST_PATHS = 10_000
"""Paths whose forgone savings are remembered, the latest."""


class PrefillCosts:
    """What prefills are expected to cost, corrected by what they took; and what it cost that a path is not stored.

    The rate of a weaving method, or of exact prefills by any method, is the median of its latest seconds per token of
    `prefill_work`. Two ways are compared by their rates once both ran often enough; until then by work alone, because
    a first prefill is slow. Owned by the thread that runs the model.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._rates: dict[str, deque[float]] = {}  # by weaving method; "" of exact prefills
        self._forgone: OrderedDict[SegmentId, float] = OrderedDict()
        self._passed_over = 0

    def cheaper(self, woven: Plan, exact: Plan, lookup: PromptLookup, *, stores: bool) -> Plan:
        """The plan that is expected to be sooner, of one that weaves and an exact one; `expected` is set.

        If it `stores` its whole path, the exact one is also returned if that path was woven so often that storing it
        would have been cheaper (ski rental: once the cost of not having it reaches what it costs, at most twice the
        optimum is paid). If only the learned rates speak against weaving, one request in 100 weaves, so that they are
        corrected.
        """
        work = self._work(woven), self._work(exact)
        ids = [entry.part.id for entry in lookup.parts if entry.part.id is not None]
        new = tuple(entry.span for entry in lookup.parts if entry.part.id is None)
        rates = self._rates_of(woven)
        expected = Expected(
            woven=work[0] * rates[0],
            exact=work[1] * rates[1],
            stored=rates[1] * self._work_of([Pass(new)], exact.prompt_tokens, sum(map(len, new))),
            path=segment_id(ids[-1], tuple(ids[:-1])),
            measured=bool(self._rates),
        )
        gain = expected.exact - expected.woven
        if gain > 0:
            weaves = not stores or self._forgone.get(expected.path, 0.0) < gain
        else:
            doubted = work[0] < work[1]
            self._passed_over += doubted
            weaves = doubted and self._passed_over % _TRIED_EVERY == 0
        return replace(woven if weaves else exact, expected=expected)

    def ran(self, plan: Plan, seconds: float | None) -> None:
        """Count an executed plan. `seconds` is the time of its passes; None if other requests shared them."""
        expected = plan.expected
        if expected is not None and plan.gave_way:
            self._forgone.pop(expected.path, None)
        elif expected is not None:
            more = max(0.0, expected.woven - expected.stored)
            self._forgone[expected.path] = self._forgone.pop(expected.path, 0.0) + more
            if len(self._forgone) > _MOST_PATHS:
                self._forgone.popitem(last=False)
        if seconds is None or seconds <= 0:
            return
        if not self._rates:
            self._forgone.clear()  # they were in tokens until now
        way = plan.method if plan.spans(KVSource.REUSED) else ""
        self._rates.setdefault(way, deque(maxlen=_LATEST)).append(seconds / self._work(plan))

    def _work(self, plan: Plan) -> float:
        return self._work_of(plan.passes, plan.prompt_tokens, plan.tokens(KVSource.COMPUTED))

    def _work_of(self, passes: Iterable[Pass], prompt_tokens: int, new_tokens: int) -> float:
        return prefill_work(passes, self._geometry, placed=prompt_tokens - new_tokens, prompt_tokens=prompt_tokens)

    def _rates_of(self, woven: Plan) -> tuple[float, float]:
        """Seconds per token of work, of a weaving plan and of exact ones; 1 while nothing was measured."""
        ways = [self._rates.get(way, ()) for way in (woven.method, "")]
        if min(map(len, ways)) >= _LEAST_MEASURED:
            return median(ways[0]), median(ways[1])
        every = median([rate for rates in self._rates.values() for rate in rates] or [1.0])
        return every, every
