"""Figures that engine, store and shadow check keep themselves, read at the moment they are asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chunkweave.engine.scheduler import BatchingStats
from chunkweave.kv.segment import SegmentSource
from chunkweave.scheduling.shadow import ShadowMonitor
from chunkweave.scheduling.speculation import SpeculationCounts
from chunkweave.store.store import TieredStore
from chunkweave.tiers.remote import RemoteTier

PREFIX = "chunkweave:"


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric now: its name without prefix, what it means, and its values by that of `label` ("" = it has none)."""

    name: str
    meaning: str
    values: Mapping[str, float]
    label: str = ""
    counter: bool = False


Source = Callable[[], Iterable[Figure]]
"""Reads figures; called at every scrape, from whatever thread scrapes."""


class FigureCollector(Collector):
    """Shows the figures of its sources as metrics of one model."""

    def __init__(self, model: str, sources: Iterable[Source]) -> None:
        """`model` is the value of every metric's `model_name`."""
        self._model = model
        self._sources = tuple(sources)

    def describe(self) -> Iterable[Metric]:
        """Nothing: so that registering does not read the sources."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every figure of every source, as it is now."""
        for source in self._sources:
            for figure in source():
                yield self._metric(figure)

    def _metric(self, figure: Figure) -> Metric:
        labels = ["model_name", *([figure.label] if figure.label else [])]
        family = CounterMetricFamily if figure.counter else GaugeMetricFamily
        metric = family(PREFIX + figure.name, figure.meaning, labels=labels)
        for value_of_label, value in figure.values.items():
            metric.add_metric([self._model, *([value_of_label] if figure.label else [])], value)
        return metric


def batching_figures(stats: BatchingStats) -> Iterator[Figure]:
    """What the batching engine does now, and what it had to do over again."""
    yield _gauge("num_requests_running", "Requests that are prefilled or decode now.", stats.running)
    yield _gauge("num_requests_waiting", "Requests that wait to be begun.", stats.waiting)
    used = stats.blocks_reserved / stats.blocks if stats.blocks else 0.0
    yield _gauge("kv_cache_usage_perc", "Share of the running requests' KV memory in use, 0 to 1.", used)
    yield _counter("num_preemptions", "Requests that gave their KV memory up for older ones.", stats.preempted)
    yield _counter("request_retries", "Requests that failed and were tried once more.", stats.tried_again)
    yield _counter("engine_steps", "Runs through the layers.", stats.steps)
    yield _counter("engine_prefilled_tokens", "Tokens computed by prefills, retries included.", stats.prefilled_tokens)
    yield _counter("engine_decoded_tokens", "Tokens computed one at a time.", stats.decoded_tokens)


def store_figures(store: TieredStore[SegmentSource]) -> Iterator[Figure]:
    """What is stored by tier, what came and went, and which faults were survived."""
    stats = store.stats
    by_tier = stats.levels.items()

    def tiers(name: str, meaning: str, field: str, *, counter: bool) -> Figure:
        return Figure(name, meaning, {tier: getattr(one, field) for tier, one in by_tier}, "tier", counter)

    yield tiers("store_bytes", "Bytes of KV stored.", "bytes", counter=False)
    yield tiers("store_segments", "Segments stored.", "segments", counter=False)
    yield tiers("store_inserts", "Segments that came into the tier.", "inserts", counter=True)
    yield tiers("store_evictions", "Segments that had to leave the tier to make room.", "evictions", counter=True)
    yield tiers("store_rejections", "Segments that did not fit the tier's budget.", "rejected", counter=True)
    yield tiers(
        "store_lost_segments", "Segments that the tier no longer had or that were broken.", "lost", counter=True
    )
    yield _counter("store_promotions", "Segments copied to a faster tier.", stats.promotions)
    yield _counter("store_demotions", "Segments that left memory for a slower tier.", stats.demotions)
    yield _counter("store_expirations", "Segments that outlived their time.", stats.expired)
    lookups = {"hit": stats.hits, "miss": stats.misses}
    yield Figure("store_lookups", "Prompt parts looked up, by whether anything was stored.", lookups, "result", True)
    writes = {
        "done": stats.writes_done,
        "skipped": stats.writes_skipped,
        "rejected": stats.writes_rejected,
        "failed": stats.writes_failed,
    }
    yield Figure("store_writes", "Writes to slow tiers in the background.", writes, "result", True)
    yield from _tier_faults(store)


def shadow_figures(monitor: ShadowMonitor) -> Iterator[Figure]:
    """How far woven answers stray from full prefill, as far as it was checked."""
    stats = monitor.stats
    results = {"checked": stats.checked, "dropped": stats.dropped, "failed": stats.failed}
    yield _gauge("weaving_enabled", "1, or 0 once shadow checks switched approximate reuse off.", stats.weaving)
    yield _counter("weaving_switch_offs", "How often it was switched off.", stats.switched_off)
    yield _counter("woven_answers", "Answers with chunks reused approximately.", stats.woven)
    yield Figure("shadow_checks", "Woven answers sampled, by what came of their check.", results, "result", True)
    yield _counter("shadow_agreements", "Checks in which the first token was that of full prefill.", stats.agreed)
    yield _counter("shadow_compared_tokens", "Answer tokens held against full prefill's.", stats.compared_tokens)
    yield _counter("shadow_same_tokens", "Of these, tokens before the first that differs.", stats.same_tokens)
    divergence = {"mean": stats.mean_kl, "p99": stats.p99_kl, "window": stats.window_kl}
    meaning = "KL divergence of the first token from full prefill, nats: over 1000 checks, and the guard's window."
    yield Figure("shadow_divergence", meaning, divergence, "statistic")
    yield _gauge("shadow_window_agreement", "Share of the guard's window that agreed.", stats.window_agreement)


def speculation_figures(counts: SpeculationCounts) -> Iterator[Figure]:
    """What became of prefills that were begun before the search had ended."""
    events = {
        "started": counts.started,
        "terminated": counts.terminated,
        "deferred": counts.deferred,
        "matched": counts.matched,
        "regenerated": counts.regenerated,
        "late": counts.late,
    }
    yield Figure("speculations", "Speculative prefills and requests by what happened.", events, "event", True)


def _tier_faults(store: TieredStore[SegmentSource]) -> Iterator[Figure]:
    failures = {level.name: level.failures for level in store.levels}
    available = {level.name: float(level.available) for level in store.levels}
    yield Figure("tier_failures", "Reads and writes that the tier failed with an error.", failures, "tier", True)
    yield Figure("tier_available", "1, or 0 while the tier is left alone after failures.", available, "tier")
    remotes = {level.name: tier for level in store.levels if isinstance(tier := level.store.tier, RemoteTier)}
    if not remotes:
        return
    opened = {name: tier.breaker.times_opened for name, tier in remotes.items()}
    yield Figure("breaker_opens", "How often a remote stopped being asked because it failed.", opened, "tier", True)
    for field, meaning in (
        ("unavailable", "Reads that the remote did not answer."),
        ("garbage", "Reads that the remote answered with something broken."),
        ("failed_puts", "Segments that the remote did not take."),
    ):
        values = {name: getattr(tier.stats, field) for name, tier in remotes.items()}
        yield Figure(f"remote_{field}", meaning, values, "tier", True)


def _gauge(name: str, meaning: str, value: float) -> Figure:
    return Figure(name, meaning, {"": value})


def _counter(name: str, meaning: str, value: float) -> Figure:
    return Figure(name, meaning, {"": value}, counter=True)
