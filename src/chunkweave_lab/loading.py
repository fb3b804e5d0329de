"""Measures how well loading hides behind computing: one weave over links of chosen speed, in every order of loading.

Each time is compared with the cost model's prediction. The cost model is independent of these runs: it was measured
before, with other prefills and segments, as by `chunkweave profile`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from chunkweave.calibration.prompts import alone_prompts
from chunkweave.config import ReuseConfig
from chunkweave.engine.runner import Prefilled, Runner
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.cost import CostModel, pipelined_s
from chunkweave.planning.method import make_method
from chunkweave.planning.outcome import LayerWork
from chunkweave.prompt.parts import Prompt
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier import Tier
from chunkweave.store.tier_store import SegmentStore
from chunkweave.testing import Link, ThrottledTier
from chunkweave.tiers.disk import DiskTier
from chunkweave.tiers.host import HostTier
from chunkweave.tiers.preload import LayerLoader, LoadOrder
from chunkweave.weaving.stores import drop_page_cache, measure_throughput

QUOTIENTS = (0.25, 0.5, 1.0, 2.0, 4.0)
MEMORY, PREFETCH = "memory", "layer-wise + prefetch"
MODES = (MEMORY, str(LoadOrder.SYNC), str(LoadOrder.SEGMENTS), str(LoadOrder.LAYERS), PREFETCH)

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


@dataclass(frozen=True, slots=True)
class LoadingRow:
    """One way of loading at one quotient of T_load / T_recompute, from a `link` of chosen speed or a real `disk`.

    `ratio_to_memory` is the median over repeats of TTFT divided by that of the same weave with everything in memory, in
    the same repeat; `predicted_s` is the cost model's prediction (`weave_layers_s`, `CostModel.load`, `predict`).
    """

    source: str
    quotient: float
    mode: str
    ttft_median_s: float
    ratio_to_memory: float
    predicted_s: float

    @property
    def prediction_error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.ttft_median_s - 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "prediction_error": self.prediction_error}


@dataclass(frozen=True, slots=True)
class LoadingConfig:
    """The settings of a measurement. `wait_s` is the time that a prefetched request waits before its turn."""

    recompute_ratio: float = 0.15
    quotients: tuple[float, ...] = QUOTIENTS
    repeats: int = 5
    wait_s: float = 0.3


def measure_loading(
    model: HuggingFaceModel, prompt: Prompt, config: LoadingConfig, cost: CostModel, progress: Progress | None = None
) -> Iterator[LoadingRow]:
    """Rows of all modes by quotient. Every repeat runs all modes, so that they share the machine's state.

    The link's speed is computed from the quotient and the time of the weave in memory, measured just before. The cost
    model gets the link's throughput, measured as for any tier.
    """
    link = Link(1e15)
    bench = _Bench(model, prompt, config, _memory_store(ThrottledTier(link)))
    bench.time_memory()
    total = len(config.quotients) * config.repeats
    for number, quotient in enumerate(config.quotients):
        recompute_s = median(bench.time_memory() for _ in range(config.repeats))
        link.bytes_per_s = bench.nbytes / (quotient * recompute_s)
        known = bench.knowing(cost, "link", ThrottledTier(link))
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for repeat in range(config.repeats):
            for mode in MODES:
                times[mode].append(bench.time(mode))
            if progress is not None:
                progress(number * config.repeats + repeat + 1, total)
        yield from bench.rows("link", quotient, times, known)


def measure_disk_loading(
    model: HuggingFaceModel, prompt: Prompt, config: LoadingConfig, folder: Path, cost: CostModel
) -> Iterator[LoadingRow]:
    """Rows for a real disk: segments are written under `folder`, and dropped from the page cache before each run.

    The quotient is measured: a layer-wise read of the segments alone, divided by the weave with everything in memory.
    The disk's throughput is measured before with other segments, unless the cost model has it.
    """
    disk = DiskTier(folder, "loading-benchmark")
    slow: Level[SegmentSource] = Level("disk", SegmentStore(disk, budget_bytes=1 << 50, shared=True), background=True)
    host: Level[SegmentSource] = Level("host", SegmentStore(HostTier(), budget_bytes=0))
    store: TieredStore[SegmentSource] = TieredStore([host, slow])
    try:
        bench = _Bench(model, prompt, config, store, before=lambda: drop_page_cache(disk.folder.rglob("*.safetensors")))
        known = cost if "disk" in cost.tier_bytes_per_s else bench.knowing(cost, "disk", disk)
        bench.time_memory()
        recompute_s = median(bench.time_memory() for _ in range(config.repeats))
        load_s = median(bench.time_reading() for _ in range(config.repeats))
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(config.repeats):
            for mode in MODES:
                times[mode].append(bench.time(mode))
        yield from bench.rows("disk", load_s / recompute_s, times, known)
    finally:
        store.close()


def weave_layers_s(cost: CostModel, work: Sequence[LayerWork], prompt_tokens: int) -> list[float]:
    """A cost model's prediction for each layer of a weave, in seconds: its share of a prefill of as many tokens.

    These are the tokens that the layer's rule keeps, behind all others of the prompt.
    """
    return [cost.prefill(one.kept_tokens, prompt_tokens - one.kept_tokens) / len(work) for one in work]


def predict(mode: str, load_s: float, layer_compute_s: Sequence[float], wait_s: float) -> float:
    """TTFT of one mode if loading all layers takes `load_s` and computing each layer `layer_compute_s`."""
    if mode == MEMORY:
        return sum(layer_compute_s)
    if mode in (LoadOrder.SYNC, LoadOrder.SEGMENTS):  # the last segment's first layer is read close to the end
        return load_s + sum(layer_compute_s)
    layers = [load_s / len(layer_compute_s)] * len(layer_compute_s)
    return pipelined_s(layers, layer_compute_s, wait_s if mode == PREFETCH else 0.0)


class _Bench:
    """One prompt's segments in a slow store and in memory, and the weave over either."""

    def __init__(
        self,
        model: HuggingFaceModel,
        prompt: Prompt,
        config: LoadingConfig,
        slow: TieredStore[SegmentSource],
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._prompt, self._config, self._before = prompt, config, before
        self._method = make_method("cacheblend", ReuseConfig(config.recompute_ratio))
        self._slow, self._memory = Runner(model, slow), Runner(model, _memory_store(HostTier()))
        for runner in (self._slow, self._memory):
            for part in alone_prompts(prompt):
                runner.store_new(runner.prefill(part, make_method("full")))
            runner.store.flush()
        woven = self.weave()
        self._work = woven.work
        self._segments = woven.plan.segments()
        taken = [record for record in slow.records() if record.id in self._segments]
        self.nbytes = sum(record.nbytes for record in taken)
        self._tokens = [len(record) for record in taken]

    def weave(self) -> Prefilled:
        return self._memory.prefill(self._prompt, self._method, capture=False)

    def time_memory(self) -> float:
        return self._timed(self.weave)

    def time_reading(self) -> float:
        """Seconds to load all segments while nothing computes."""
        self._before()
        sources = [(segment, source) for segment in self._segments if (source := self._slow.store.get(segment))]
        started = time.perf_counter()
        loader = LayerLoader(sources, self._slow.model.geometry.num_layers)
        loader.release(self._slow.model.geometry.num_layers)
        elapsed = time.perf_counter() - started
        loader.close()
        return elapsed

    def time(self, mode: str) -> float:
        if mode == MEMORY:
            return self.time_memory()
        self._before()
        self._slow.load_order = LoadOrder.LAYERS if mode == PREFETCH else LoadOrder(mode)
        if mode != PREFETCH:
            return self._timed(lambda: self._slow.prefill(self._prompt, self._method, capture=False))
        with self._slow.prefetch(self._prompt, self._method) as ahead:
            time.sleep(self._config.wait_s)
            return self._timed(lambda: self._slow.prefill(self._prompt, self._method, capture=False, prefetched=ahead))

    def knowing(self, cost: CostModel, name: str, tier: Tier[SegmentSource]) -> CostModel:
        """`cost` with a tier's throughput, measured with two other segments of the maximum length here."""
        model = self._slow.model

        speed = measure_throughput(tier, model.geometry, model.dtype, tokens=max(self._tokens), segments=2)
        return replace(cost, tier_bytes_per_s={**cost.tier_bytes_per_s, name: speed})

    def rows(self, tier: str, quotient: float, times: dict[str, list[float]], cost: CostModel) -> Iterator[LoadingRow]:
        """One row per mode, from its times and the cost model's predictions."""
        load_s = cost.load(sum(self._tokens), tier)
        compute_s = weave_layers_s(cost, self._work, len(self._prompt))
        for mode in MODES:
            ratios = [t / memory for t, memory in zip(times[mode], times[MEMORY], strict=True)]
            predicted = predict(mode, load_s, compute_s, self._config.wait_s)
            yield LoadingRow(tier, quotient, mode, median(times[mode]), median(ratios), predicted)

    @staticmethod
    def _timed(work: Callable[[], Prefilled]) -> float:
        started = time.perf_counter()
        work().logits.argmax().item()
        return time.perf_counter() - started


def _memory_store(tier: Tier[SegmentSource]) -> TieredStore[SegmentSource]:
    return TieredStore([Level("memory", SegmentStore(tier, budget_bytes=1 << 40))])
