"""Prometheus metrics of one server, named as vLLM names its own, with `chunkweave:` before them."""

from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chunkweave.errors import DeadlineError, QueueFullError, RequestAbortedError, UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.retrieval.speculation import SpeculationCounts
from chunkweave.scheduling.shadow import ShadowMonitor

if TYPE_CHECKING:  # the vLLM backend counts without torch
    from chunkweave.engine.scheduler import BatchingStats
    from chunkweave.kv.segment import SegmentSource
    from chunkweave.store.store import TieredStore

PREFIX = "chunkweave:"


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One metric now: its name without prefix, what it means, and its values by that of `label` ("" = it has none)."""

    name: str
    meaning: str
    values: Mapping[str, float]
    label: str = ""
    counter: bool = False


SampleSource = Callable[[], Iterable[MetricSample]]
"""Reads samples; called at every scrape, from whatever thread scrapes."""


class SampleCollector(Collector):
    """Shows the samples of its sources as metrics of one model."""

    def __init__(self, model: str, sources: Iterable[SampleSource]) -> None:
        """`model` is the value of every metric's `model_name`."""
        self._model = model
        self._sources = tuple(sources)

    def describe(self) -> Iterable[Metric]:
        """Nothing: so that registering does not read the sources."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every sample of every source, as it is now."""
        for source in self._sources:
            for sample in source():
                yield self._metric(sample)

    def _metric(self, sample: MetricSample) -> Metric:
        labels = ["model_name", *([sample.label] if sample.label else [])]
        family = CounterMetricFamily if sample.counter else GaugeMetricFamily
        metric = family(PREFIX + sample.name, sample.meaning, labels=labels)
        for value_of_label, value in sample.values.items():
            metric.add_metric([self._model, *([value_of_label] if sample.label else [])], value)
        return metric


def batching_samples(stats: "BatchingStats") -> Iterator[MetricSample]:
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


def store_samples(store: "TieredStore[SegmentSource]") -> Iterator[MetricSample]:
    """What is stored by tier, what came and went, and which faults were survived."""
    stats = store.stats
    by_tier = stats.levels.items()

    def tiers(name: str, meaning: str, field: str, *, counter: bool) -> MetricSample:
        return MetricSample(name, meaning, {tier: getattr(one, field) for tier, one in by_tier}, "tier", counter)

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
    yield MetricSample(
        "store_lookups", "Prompt parts looked up, by whether anything was stored.", lookups, "result", True
    )
    writes = {
        "done": stats.writes_done,
        "skipped": stats.writes_skipped,
        "rejected": stats.writes_rejected,
        "failed": stats.writes_failed,
    }
    yield MetricSample("store_writes", "Writes to slow tiers in the background.", writes, "result", True)
    yield from _tier_faults(store)


def shadow_samples(monitor: ShadowMonitor) -> Iterator[MetricSample]:
    """How far woven answers stray from full prefill, as far as it was checked."""
    stats = monitor.stats
    results = {"checked": stats.checked, "dropped": stats.dropped, "failed": stats.failed}
    yield _gauge("weaving_enabled", "1, or 0 once shadow checks switched approximate reuse off.", stats.weaving)
    yield _counter("weaving_switch_offs", "How often it was switched off.", stats.switched_off)
    yield _counter("woven_answers", "Answers with chunks reused approximately.", stats.woven)
    yield MetricSample("shadow_checks", "Woven answers sampled, by what came of their check.", results, "result", True)
    yield _counter("shadow_agreements", "Checks in which the first token was that of full prefill.", stats.agreed)
    yield _counter("shadow_compared_tokens", "Answer tokens held against full prefill's.", stats.compared_tokens)
    yield _counter("shadow_same_tokens", "Of these, tokens before the first that differs.", stats.same_tokens)
    divergence = {"mean": stats.mean_kl, "p99": stats.p99_kl, "window": stats.window_kl}
    meaning = "KL divergence of the first token from full prefill, nats: over 1000 checks, and the guard's window."
    yield MetricSample("shadow_divergence", meaning, divergence, "statistic")
    yield _gauge("shadow_window_agreement", "Share of the guard's window that agreed.", stats.window_agreement)


def speculation_samples(counts: SpeculationCounts) -> Iterator[MetricSample]:
    """What became of prefills that were begun before the search had ended."""
    events = {
        "started": counts.started,
        "terminated": counts.terminated,
        "deferred": counts.deferred,
        "matched": counts.matched,
        "regenerated": counts.regenerated,
        "late": counts.late,
    }
    yield MetricSample("speculations", "Speculative prefills and requests by what happened.", events, "event", True)


def _tier_faults(store: "TieredStore[SegmentSource]") -> Iterator[MetricSample]:
    from chunkweave.tiers.remote import RemoteTier

    failures = {level.name: level.failures for level in store.levels}
    available = {level.name: float(level.available) for level in store.levels}
    yield MetricSample("tier_failures", "Reads and writes that the tier failed with an error.", failures, "tier", True)
    yield MetricSample("tier_available", "1, or 0 while the tier is left alone after failures.", available, "tier")
    remotes = {level.name: tier for level in store.levels if isinstance(tier := level.store.tier, RemoteTier)}
    if not remotes:
        return
    opened = {name: tier.breaker.times_opened for name, tier in remotes.items()}
    yield MetricSample(
        "breaker_opens", "How often requests to a remote stopped because it failed.", opened, "tier", True
    )
    for field, meaning in (
        ("unavailable", "Reads that the remote did not answer."),
        ("garbage", "Reads that the remote answered with something broken."),
        ("failed_puts", "Segments that the remote did not take."),
    ):
        values = {name: getattr(tier.stats, field) for name, tier in remotes.items()}
        yield MetricSample(f"remote_{field}", meaning, values, "tier", True)


def _gauge(name: str, meaning: str, value: float) -> MetricSample:
    return MetricSample(name, meaning, {"": value})


def _counter(name: str, meaning: str, value: float) -> MetricSample:
    return MetricSample(name, meaning, {"": value}, counter=True)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The classic format. prometheus_client's OpenMetrics turns the colon of every name into an underscore."""

OTHER_TENANT = "other"
"""What a tenant is called that no label is kept for."""

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_PHASE_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SHARE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"
    """It was never begun: a wrong request, a full queue, no leave."""


def outcome_of(error: BaseException) -> Outcome:
    """How a request ended that `error` ended.

    >>> outcome_of(DeadlineError())
    <Outcome.TIMED_OUT: 'timed_out'>
    """
    if isinstance(error, DeadlineError):
        return Outcome.TIMED_OUT
    if isinstance(error, RequestAbortedError):
        return Outcome.ABORTED
    return Outcome.REJECTED if isinstance(error, QueueFullError | UsageError) else Outcome.FAILED


class ServerMetrics:
    """The metrics of one server, in a registry of its own. Thread-safe.

    `observe` and `ended` count requests, one call for each; the samples are read at every scrape. No label names a
    tenant, unless `tenants` says which ones may be named.
    """

    def __init__(
        self, model: str, samples: Iterable[SampleSource] = (), *, tenants: Collection[str] | None = None
    ) -> None:
        """Nothing has happened yet.

        Args:
            model: `model_name` of every metric.
            samples: read what engine, store and others count themselves (`lambda: store_samples(engine.store)`).
            tenants: names that a `tenant` label may have, all others being `other`; None = there is no such label.
        """
        self.registry = CollectorRegistry()
        self._model = model
        self._tenants = None if tenants is None else frozenset(tenants)
        self._make_histograms()
        self._make_counters()
        self.registry.register(SampleCollector(model, samples))

    def observe(self, report: ReuseReport, *, finish_reason: str, tenant: str = "") -> None:
        """A request was answered in full."""
        own, by_tenant = {"model_name": self._model}, self._by_tenant(tenant)
        by_method = {**by_tenant, "method": report.method}
        self._ttft.labels(**by_method).observe(report.ttft_s)
        self._latency.labels(**own, method=report.method).observe(report.ttft_s + report.decode_s)
        if report.new_tokens > 1:
            self._tpot.labels(**own).observe(report.decode_s / (report.new_tokens - 1))
        for name, seconds in (
            ("queue", report.queue_s),
            ("lookup", report.lookup_s),
            ("load", report.load_s),
            ("prefill", report.weave_s),
            ("decode", report.decode_s),
        ):
            self._phases[name].labels(**own).observe(seconds)
        self._prompt_sizes.labels(**own).observe(report.prompt_tokens)
        self._answer_sizes.labels(**own).observe(report.new_tokens)
        if report.reused_tokens + report.recomputed_tokens:
            self._recomputed.labels(**own, method=report.method).observe(report.recompute_fraction)
        self._prompt_tokens.labels(**by_tenant).inc(report.prompt_tokens)
        for kv_source, tokens in (
            ("prefix-exact", report.prefix_exact_tokens),
            ("reused", report.reused_tokens),
            ("recomputed", report.recomputed_tokens),
            ("computed", report.computed_tokens),
        ):
            self._sources.labels(**by_method, kv_source=kv_source).inc(tokens)
        self._new_tokens.labels(**by_tenant).inc(report.new_tokens)
        self._successes.labels(**own, finished_reason=finish_reason).inc()
        self._survived.labels(**own).inc(report.lost_segments)
        self._observe_tiers(report)
        self.ended(Outcome.FINISHED, tenant=tenant)

    def ended(self, outcome: Outcome, *, tenant: str = "") -> None:
        """A request ended without its answer; `observe` calls this itself for those that have one."""
        self._requests.labels(**self._by_tenant(tenant), outcome=outcome.value).inc()

    def exposition(self) -> bytes:
        """All metrics as `CONTENT_TYPE`. Looks at every stored segment: call it in a thread, not in the event loop."""
        return generate_latest(self.registry)

    def _observe_tiers(self, report: ReuseReport) -> None:
        found: Tally[str] = Tally()
        for chunk in report.chunks:
            if chunk.tier is not None:
                found[chunk.tier] += chunk.tokens
        self._queries.labels(model_name=self._model).inc(sum(chunk.tokens for chunk in report.chunks))
        for tier, tokens in found.items():
            self._hits.labels(model_name=self._model, tier=tier).inc(tokens)

    def _by_tenant(self, tenant: str) -> dict[str, str]:
        own = {"model_name": self._model}
        if self._tenants is not None:
            own["tenant"] = tenant if tenant in self._tenants else OTHER_TENANT
        return own

    def _make_histograms(self) -> None:
        by_tenant = self._tenant_labels
        phases = {
            "queue": "Seconds from a request's arrival to the beginning of its prefill.",
            "lookup": "Seconds to look up and plan.",
            "load": "Seconds that prefill waited for stored KV (load delay).",
            "prefill": "Seconds of prefill or weaving, without those.",
            "decode": "Seconds from the first token to the last.",
        }
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token.", _TTFT_S, *by_tenant, "method"
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean seconds a token after its first.", _TPOT_S
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the last token.", _REQUEST_S, "method"
        )
        self._phases = {
            name: self._histogram(f"request_{name}_time_seconds", meaning, _PHASE_S) for name, meaning in phases.items()
        }
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer_sizes = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._recomputed = self._histogram(
            "request_recompute_fraction", "Share of a prompt's reused work that was done again.", _SHARE, "method"
        )

    def _make_counters(self) -> None:
        by_tenant = self._tenant_labels
        self._requests = self._counter("requests", "Requests by how they ended.", *by_tenant, "outcome")
        self._successes = self._counter("request_success", "Answers by why they ended.", "finished_reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.", *by_tenant)
        self._sources = self._counter(
            "prompt_tokens_by_source", "Prompt tokens by what happened to them.", *by_tenant, "method", "kv_source"
        )
        self._new_tokens = self._counter("generation_tokens", "Tokens of answers.", *by_tenant)
        self._queries = self._counter("cache_queries", "Tokens of instructions and chunks that were looked up.")
        self._hits = self._counter("cache_hits", "Of these, tokens taken from the store.", "tier")
        self._survived = self._counter(
            "request_lost_segments", "Segments that were lost or late when a request was to read them."
        )

    @property
    def _tenant_labels(self) -> tuple[str, ...]:
        return () if self._tenants is None else ("tenant",)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, meaning, ("model_name", *labels), buckets=buckets, registry=self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, meaning, ("model_name", *labels), registry=self.registry)
