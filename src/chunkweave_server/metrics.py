"""Prometheus metrics of one server, with vLLM's names after the prefix `chunkweave:`."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chunkweave.errors import DeadlineError, QueueFullError, RequestAbortedError, UsageError
from chunkweave.metrics import ReuseReport, Saved
from chunkweave.models.kernels.compiles import KERNEL_COMPILES
from chunkweave.planning.calibration import Quality
from chunkweave.planning.evidence import Evidence
from chunkweave.retrieval.speculation import SpeculationCounts

if TYPE_CHECKING:  # the vLLM backend must not import torch
    from chunkweave.engine.scheduler import BatchingStats
    from chunkweave.kv.segment import SegmentSource
    from chunkweave.store.store import TieredStore

PREFIX = "chunkweave:"


@dataclass(frozen=True, slots=True)
class MetricSample:
    """Current values of one metric: its name without prefix, and values by the value of `label` ("": no label)."""

    name: str
    meaning: str
    values: Mapping[str, float]
    label: str = ""
    counter: bool = False


SampleSource = Callable[[], Iterable[MetricSample]]
"""Reads samples; called at every scrape, in the scraping thread."""


class SampleCollector(Collector):
    """Exports the samples of its sources as metrics of one model."""

    def __init__(self, model: str, sources: Iterable[SampleSource]) -> None:
        """`model` is the value of every metric's `model_name`."""
        self._model = model
        self._sources = tuple(sources)

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering does not read the sources."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The current samples of all sources."""
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
    """Requests, memory and work of the batching engine."""
    yield _gauge("num_requests_running", "Requests in prefill or decoding.", stats.running)
    yield _gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
    used = stats.blocks_reserved / stats.blocks if stats.blocks else 0.0
    yield _gauge("kv_cache_usage_perc", "Share of the running requests' KV memory in use, 0 to 1.", used)
    yield _counter("num_preemptions", "Requests that gave up their KV memory to older ones.", stats.preempted)
    yield _counter("request_retries", "Requests that failed and were retried.", stats.tried_again)
    yield _counter("shared_prefills", "Requests that waited for parts in another request's prefill.", stats.shared)
    yield _counter("engine_steps", "Runs through the layers.", stats.steps)
    yield _counter("engine_prefilled_tokens", "Tokens computed by prefills, retries included.", stats.prefilled_tokens)
    yield _counter("engine_decoded_tokens", "Tokens of answers computed.", stats.decoded_tokens)
    yield _counter("engine_draft_tokens", "Tokens of answers guessed from prompts.", stats.draft_tokens)
    yield _counter("engine_accepted_tokens", "Guessed tokens that were right.", stats.accepted_tokens)
    yield _counter("engine_turns_stored", "Answers stored for the next turn of their conversation.", stats.turns_stored)
    changed = "Answers whose text would not be tokenized as it was generated."
    yield _counter("engine_turns_changed", changed, stats.turns_changed)


def kernel_samples() -> Iterator[MetricSample]:
    """Stalls of this process, in which requests waited for a compiler."""
    stalls = KERNEL_COMPILES.stalls
    seconds = KERNEL_COMPILES.stall_s
    yield _counter("kernel_compiles", "Attention kernels compiled after start-up.", stalls)
    yield _counter("kernel_compile_seconds", "Seconds that requests waited for these.", seconds)


def store_samples(store: "TieredStore[SegmentSource]") -> Iterator[MetricSample]:
    """Contents of the store by tier, inserts, evictions and faults."""
    from chunkweave.weaving.stores import store_counts

    yield from counted_samples(store_counts(store))


def counted_samples(counts: Mapping[str, Any]) -> Iterator[MetricSample]:
    """The same from `weaving.stores.store_counts`, of a store in this or another process."""
    levels, tiers, remotes = (counts.get(name) or {} for name in ("levels", "tiers", "remotes"))

    def by_tier(
        name: str, field: str, meaning: str, of: Mapping[str, Mapping[str, Any]], *, counter: bool = True
    ) -> MetricSample:
        values = {tier: float(counts.get(field, 0)) for tier, counts in of.items()}
        return MetricSample(name, meaning, values, "tier", counter)

    yield by_tier("store_bytes", "bytes", "Bytes of KV stored.", levels, counter=False)
    yield by_tier("store_segments", "segments", "Segments stored.", levels, counter=False)
    for name, field, meaning in (
        ("inserts", "inserts", "Segments inserted into the tier."),
        ("evictions", "evictions", "Segments evicted from the tier."),
        ("rejections", "rejected", "Segments that did not fit the tier's budget."),
        ("lost_segments", "lost", "Segments that were missing or damaged in the tier."),
    ):
        yield by_tier(f"store_{name}", field, meaning, levels)
    for name, field, meaning in (
        ("promotions", "promotions", "Segments copied to a faster tier."),
        ("demotions", "demotions", "Segments moved from memory to a slower tier."),
        ("expirations", "expired", "Segments that reached their ttl."),
    ):
        yield _counter(f"store_{name}", meaning, counts.get(field, 0))
    lookups = {"hit": counts.get("hits", 0), "miss": counts.get("misses", 0)}
    yield MetricSample(
        "store_lookups", "Prompt parts looked up, by whether anything was stored.", lookups, "result", True
    )
    writes = {result: counts.get(f"writes_{result}", 0) for result in ("done", "skipped", "rejected", "failed")}
    yield MetricSample("store_writes", "Writes to slow tiers in the background.", writes, "result", True)
    yield by_tier("tier_failures", "failures", "Reads and writes of the tier that failed with an error.", tiers)
    meaning = "1; 0 while the tier is not used after failures."
    yield by_tier("tier_available", "available", meaning, tiers, counter=False)
    if not remotes:
        return
    yield by_tier("breaker_opens", "opens", "How often calls to a remote were suspended after failures.", remotes)
    for field, meaning in (
        ("unavailable", "Reads that the remote did not answer."),
        ("garbage", "Reads that the remote answered with damaged data."),
        ("failed_puts", "Segments that the remote did not store."),
    ):
        yield by_tier(f"remote_{field}", field, meaning, remotes)


def comparison_samples(evidence: Evidence, counts: Mapping[str, int]) -> Iterator[MetricSample]:
    """Results of comparing answers with full prefill, and what they decided. `counts`: answers by what became of
    them.
    """
    serves = evidence.decision(Quality.BALANCED) is not None
    yield _gauge("weaving_enabled", "1; 0 while no reuse but exact prefixes may answer balanced requests.", serves)
    yield _counter(
        "weaving_switch_offs", "How often a method was taken back because answers drifted.", evidence.taken_back
    )
    yield MetricSample("comparisons", "Answers for comparison, by what became of them.", counts, "result", True)
    means = evidence.means()
    for name, field, meaning in (
        ("compared_answers", 0, "Answers compared with full prefill since the method was last taken back."),
        ("comparison_agreement", 1, "Share of their tokens that are full prefill's most likely ones."),
        ("comparison_divergence", 2, "Mean KL divergence of their tokens from full prefill, nats."),
    ):
        yield MetricSample(name, meaning, {method: values[field] for method, values in means.items()}, "compared")
    expected = evidence.progress(Quality.BALANCED).expected
    yield _gauge(
        "comparisons_expected", "About how many answers must be compared for a decision on balanced.", expected
    )


def speculation_samples(counts: SpeculationCounts) -> Iterator[MetricSample]:
    """Outcomes of prefills that were started before the search had ended."""
    names = ("started", "terminated", "deferred", "matched", "regenerated", "late")
    events = {name: getattr(counts, name) for name in names}
    yield MetricSample("speculations", "Speculative prefills and requests, by event.", events, "event", True)


def _gauge(name: str, meaning: str, value: float) -> MetricSample:
    return MetricSample(name, meaning, {"": value})


def _counter(name: str, meaning: str, value: float) -> MetricSample:
    return MetricSample(name, meaning, {"": value}, counter=True)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The classic format: prometheus_client's OpenMetrics replaces the colon in names by an underscore."""

OTHER_TENANT = "other"
"""Label of tenants that have no label of their own."""

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_PHASE_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SHARE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)


_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float], Sequence[str]]] = {
    "time_to_first_token_seconds": ("Seconds from arrival to the first token.", _TTFT_S, ("tenant", "method")),
    "request_time_per_output_token_seconds": ("A request's mean seconds a token after its first.", _TPOT_S, ()),
    "e2e_request_latency_seconds": ("Seconds from arrival to the last token.", _REQUEST_S, ("method",)),
    "request_queue_time_seconds": ("Seconds from a request's arrival to the start of its prefill.", _PHASE_S, ()),
    "request_lookup_time_seconds": ("Seconds to look up and plan.", _PHASE_S, ()),
    "request_load_time_seconds": ("Seconds that prefill waited for stored KV.", _PHASE_S, ()),
    "request_prefill_time_seconds": ("Seconds of prefill or weaving, without waiting for stored KV.", _PHASE_S, ()),
    "request_decode_time_seconds": ("Seconds from the first token to the last.", _PHASE_S, ()),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS, ()),
    "request_generation_tokens": ("Tokens of an answer.", _TOKENS, ()),
    "request_recompute_fraction": ("Share of a prompt's reused work that was recomputed.", _SHARE, ("method",)),
}
"""Meaning, buckets and labels by name. The label `tenant` is used only if tenants may be named."""

_COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "requests": ("Requests by outcome.", ("tenant", "outcome")),
    "request_success": ("Answers by finish reason.", ("finished_reason",)),
    "prompt_tokens": ("Prompt tokens of answered requests.", ("tenant",)),
    "prompt_tokens_by_source": ("Prompt tokens by source of their KV.", ("tenant", "method", "kv_source")),
    "generation_tokens": ("Tokens of answers.", ("tenant",)),
    "cache_queries": ("Tokens of instructions and chunks looked up in the store.", ()),
    "cache_hits": ("Of these, tokens taken from the store.", ("tier",)),
    "prefill_seconds": ("Seconds to first tokens, after the queue: actual, and by full prefill.", ("way",)),
    "request_lost_segments": ("Segments that were lost or late when a request read them.", ()),
}


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"
    """Never started: an invalid request, a full queue, or not permitted."""


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of a request that ended with `error`.

    >>> outcome_of(DeadlineError())
    <Outcome.TIMED_OUT: 'timed_out'>
    """
    if isinstance(error, DeadlineError):
        return Outcome.TIMED_OUT
    if isinstance(error, RequestAbortedError):
        return Outcome.ABORTED
    return Outcome.REJECTED if isinstance(error, QueueFullError | UsageError) else Outcome.FAILED


class _WithoutCreated(Collector):
    """A registry's metrics without `_created` samples: prometheus_client can omit them only for the whole process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """The current metrics."""
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class ServerMetrics:
    """The metrics of one server, in its own registry. Thread-safe.

    Each request is counted by one call of `observe` or `ended`. Samples are read at every scrape. Labels name only
    tenants in `tenants`.
    """

    def __init__(
        self, model: str, samples: Iterable[SampleSource] = (), *, tenants: Collection[str] | None = None
    ) -> None:
        """All counts are 0.

        Args:
            model: `model_name` of every metric.
            samples: sources of counts kept elsewhere (`lambda: store_samples(engine.store)`).
            tenants: values of the label `tenant`; other tenants are `other`. None: no such label.
        """
        self.registry = CollectorRegistry()
        self._model = model
        self._tenants = None if tenants is None else frozenset(tenants)
        options: dict[str, Any] = {"registry": self.registry}
        self._histograms = {
            name: Histogram(PREFIX + name, meaning, self._labels(labels), buckets=buckets, **options)
            for name, (meaning, buckets, labels) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, meaning, self._labels(labels), **options)
            for name, (meaning, labels) in _COUNTERS.items()
        }
        self.registry.register(SampleCollector(model, samples))

    def observe(self, report: ReuseReport, *, finish_reason: str, tenant: str = "", saved: Saved | None = None) -> None:
        """Count a request with a complete answer; what it `saved` may be unknown."""
        method = report.method
        answer_tokens = report.new_tokens
        self._observe("time_to_first_token_seconds", report.ttft_s, tenant=tenant, method=method)
        self._observe("e2e_request_latency_seconds", report.ttft_s + report.decode_s, method=method)
        if answer_tokens > 1:
            self._observe("request_time_per_output_token_seconds", report.decode_s / (answer_tokens - 1))
        for phase in ("queue", "lookup", "load", "decode"):
            self._observe(f"request_{phase}_time_seconds", getattr(report, f"{phase}_s"))
        self._observe("request_prefill_time_seconds", report.weave_s)
        self._observe("request_prompt_tokens", report.prompt_tokens)
        self._observe("request_generation_tokens", answer_tokens)
        if report.reused_tokens + report.recomputed_tokens:
            self._observe("request_recompute_fraction", report.recompute_fraction, method=method)
        self._count("prompt_tokens", report.prompt_tokens, tenant=tenant)
        for kv_source, tokens in report.tokens_by_source.items():
            self._count("prompt_tokens_by_source", tokens, tenant=tenant, method=method, kv_source=kv_source)
        self._count("generation_tokens", answer_tokens, tenant=tenant)
        self._count("request_success", 1, finished_reason=finish_reason)
        self._count("request_lost_segments", report.lost_segments)
        if saved is not None:
            self._count("prefill_seconds", saved.full_s, way="full")
            self._count("prefill_seconds", max(0.0, saved.full_s - saved.seconds), way="actual")
        self._count("cache_queries", report.looked_up_tokens)
        for tier, tokens in report.hits.items():
            self._count("cache_hits", tokens, tier=tier)
        self.ended(Outcome.FINISHED, tenant=tenant)

    def ended(self, outcome: Outcome, *, tenant: str = "") -> None:
        """Count a request without a complete answer; `observe` calls this itself."""
        self._count("requests", 1, tenant=tenant, outcome=outcome.value)

    def exposition(self) -> bytes:
        """All metrics as `CONTENT_TYPE`. Reads every stored segment: call it in a thread, not in the event loop."""
        return generate_latest(_WithoutCreated(self.registry))

    def _observe(self, name: str, value: float, **labels: str) -> None:
        self._histograms[name].labels(**self._values(labels)).observe(value)

    def _count(self, name: str, amount: float, **labels: str) -> None:
        self._counters[name].labels(**self._values(labels)).inc(amount)

    def _labels(self, names: Iterable[str]) -> list[str]:
        return ["model_name", *(name for name in names if name != "tenant" or self._tenants is not None)]

    def _values(self, labels: dict[str, str]) -> dict[str, str]:
        if self._tenants is None:
            labels.pop("tenant", None)
        elif labels.get("tenant", OTHER_TENANT) not in self._tenants:
            labels.update(dict.fromkeys(labels.keys() & {"tenant"}, OTHER_TENANT))
        return {"model_name": self._model, **labels}
