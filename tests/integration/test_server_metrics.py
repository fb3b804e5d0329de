"""What the exposition says, as Prometheus reads it, after requests whose reports are known."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from chunkweave import BatchingConfig, Engine, Request, ReuseConfig, SamplingParams, StoreConfig
from chunkweave.config import CaptureConfig
from chunkweave.engine.scheduler import BatchingStats
from chunkweave.errors import (
    ChunkweaveError,
    DeadlineError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    RequestFailedError,
)
from chunkweave.metrics import Saved
from chunkweave.planning.evidence import Compared
from chunkweave.retrieval.speculation import Speculation
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.tiers.remote import RemoteTier
from chunkweave.tiers.remote_calls import CircuitBreaker
from chunkweave_server.improving import Improver
from chunkweave_server.metrics import (
    Outcome,
    ServerMetrics,
    batching_samples,
    comparison_samples,
    kernel_samples,
    outcome_of,
    speculation_samples,
    store_samples,
)
from chunkweave_server.settings import ImprovingSettings
from tests.integration.test_batching_core import CHUNKS, STORED, run_async, until
from tests.toys import toy_model

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(metrics: ServerMetrics) -> Samples:
    """Every sample by its name without prefix and its labels without `model_name`."""
    samples: Samples = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "toy"
            key = sample.name.removeprefix("chunkweave:"), frozenset(labels.items())
            assert key not in samples, "a sample stands there twice"
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def assert_shown(samples: Samples, labels: dict[str, str], **values: float) -> None:
    assert {name: value(samples, name, **labels) for name in values} == pytest.approx(values)


@pytest.fixture(scope="module")
def served():
    """Some requests of two methods, their reports, and what was exposed after them and in their midst."""
    engine = Engine(toy_model("llama"), reuse=ReuseConfig(recompute_ratio=0.3), compare=True)
    engine.precompute(STORED)
    reports = []

    async def work(batching):
        metrics = ServerMetrics(
            "toy",
            [
                lambda: batching_samples(batching.stats),
                lambda: store_samples(engine.store),
                lambda: compared_samples(engine),
            ],
        )
        before = scrape(metrics)
        method_requests = [("cacheblend", 6), ("full", 1), ("cacheblend", 9), ("prefix", 4)]
        for number, (method, tokens) in enumerate(method_requests):
            request = Request(
                f"When, {number}?",
                CHUNKS[number:] + CHUNKS[:number],
                sampling=SamplingParams(max_new_tokens=tokens),
            )
            answer = await batching.submit(request, method=method).answer()
            metrics.observe(answer.report, finish_reason=answer.finish_reason)
            reports.append(answer)
        long = [batching.submit(Request(f"{n}?", (), sampling=SamplingParams(200))) for n in range(3)]
        await until(lambda: batching.stats.running == 2)
        midst = scrape(metrics)
        for stream in long:
            await stream.aclose()
        return metrics, before, midst

    return engine, reports, *run_async(work, engine, BatchingConfig(max_running=2))


def test_tokens_by_source_are_those_of_the_reports(served):
    _, answers, metrics, _, _ = served
    samples = scrape(metrics)
    for method in ("cacheblend", "full", "prefix"):
        reports = [answer.report for answer in answers if answer.report.method == method]
        for kv_source, field in (
            ("prefix-exact", "prefix_exact_tokens"),
            ("reused", "reused_tokens"),
            ("recomputed", "recomputed_tokens"),
            ("computed", "computed_tokens"),
        ):
            there = value(samples, "prompt_tokens_by_source_total", method=method, kv_source=kv_source)
            assert there == sum(getattr(report, field) for report in reports)
    by_source = sum(number for (name, _), number in samples.items() if name == "prompt_tokens_by_source_total")
    assert by_source == value(samples, "prompt_tokens_total") == sum(a.report.prompt_tokens for a in answers)
    assert value(samples, "generation_tokens_total") == sum(len(answer.token_ids) for answer in answers)
    assert value(samples, "prompt_tokens_by_source_total", method="cacheblend", kv_source="reused") > 0


def test_times_are_those_of_the_reports(served):
    _, answers, metrics, _, _ = served
    samples = scrape(metrics)
    reports = [answer.report for answer in answers]
    woven = [report for report in reports if report.method == "cacheblend"]
    assert value(samples, "time_to_first_token_seconds_count", method="cacheblend") == len(woven) == 2
    there = value(samples, "time_to_first_token_seconds_sum", method="cacheblend")
    assert there == pytest.approx(sum(report.ttft_s for report in woven))
    there = value(samples, "e2e_request_latency_seconds_sum", method="full")
    assert there == pytest.approx(sum(r.ttft_s + r.decode_s for r in reports if r.method == "full"))
    for phase, field in (
        ("queue", "queue_s"),
        ("lookup", "lookup_s"),
        ("load", "load_s"),
        ("prefill", "weave_s"),
        ("decode", "decode_s"),
    ):
        assert value(samples, f"request_{phase}_time_seconds_count") == len(reports)
        there = value(samples, f"request_{phase}_time_seconds_sum")
        assert there == pytest.approx(sum(getattr(report, field) for report in reports))
    longer = [report for report in reports if report.new_tokens > 1]
    assert value(samples, "request_time_per_output_token_seconds_count") == len(longer) == 3
    there = value(samples, "request_time_per_output_token_seconds_sum")
    assert there == pytest.approx(sum(report.decode_s / (report.new_tokens - 1) for report in longer))
    assert value(samples, "request_recompute_fraction_count", method="cacheblend") == 2


def test_hits_by_tier_are_tokens_of_parts_taken_from_there(served):
    _, answers, metrics, _, _ = served
    samples = scrape(metrics)
    parts = [chunk for answer in answers for chunk in answer.report.chunks]
    assert value(samples, "cache_queries_total") == sum(chunk.tokens for chunk in parts)
    hits = sum(chunk.tokens for chunk in parts if chunk.tier == "host")
    assert 0 < value(samples, "cache_hits_total", tier="host") == hits


def test_gauges_show_what_goes_on_now(served):
    _, _, _, before, midst = served
    assert value(before, "num_requests_running") == value(before, "num_requests_waiting") == 0
    assert value(midst, "num_requests_running") == 2
    assert value(midst, "num_requests_waiting") == 1
    assert 0 < value(midst, "kv_cache_usage_perc") <= 1
    assert value(midst, "engine_steps_total") > value(before, "engine_steps_total")


def test_the_store_is_shown_by_tier(served):
    engine, _, metrics, before, _ = served
    samples, stats = scrape(metrics), engine.store.stats
    held = {"store_bytes": stats.levels["host"].bytes, "store_segments": stats.segments, "store_evictions_total": 0}
    assert_shown(samples, {"tier": "host"}, **held, tier_available=1, tier_failures_total=0)
    assert held["store_bytes"] > 0
    assert value(samples, "store_inserts_total", tier="host") > value(before, "store_inserts_total", tier="host")
    assert value(samples, "store_lookups_total", result="hit") == stats.hits


def compared_samples(engine: Engine):
    comparisons = engine.comparisons
    counts = {"compared": comparisons.compared, "dropped": comparisons.dropped, "failed": comparisons.failed}
    return comparison_samples(comparisons.evidence, counts)


def test_what_comparisons_say_is_shown(served):
    engine, _, metrics, _, _ = served
    evidence = engine.comparisons.evidence
    method = evidence.methods[0]
    assert_shown(scrape(metrics), {}, weaving_enabled=0, weaving_switch_offs_total=0, comparisons_expected=300)
    for _ in range(400):
        evidence.take({method: Compared(0.99, 0.02)})
    samples = scrape(metrics)
    assert_shown(samples, {}, weaving_enabled=1)
    assert_shown(samples, {"compared": method}, compared_answers=400, comparison_agreement=0.99)
    assert_shown(samples, {"compared": method}, comparison_divergence=0.02)
    for _ in range(100):
        evidence.take({method: Compared(0.5, 0.02)})
    assert_shown(scrape(metrics), {}, weaving_enabled=0)
    assert value(scrape(metrics), "weaving_switch_offs_total") > 0


def test_outcomes_are_counted_once_each(served):
    _, answers, _, _, _ = served
    metrics = ServerMetrics("toy")
    metrics.observe(answers[0].report, finish_reason=answers[0].finish_reason)
    refused = (QueueFullError, PromptTooLongError)
    for error in (DeadlineError, RequestAbortedError, RequestFailedError, *refused, ChunkweaveError, OSError):
        metrics.ended(outcome_of(error()))
    samples = scrape(metrics)
    counted = {outcome.value: value(samples, "requests_total", outcome=outcome.value) for outcome in Outcome}
    assert counted == {"finished": 1, "aborted": 1, "failed": 3, "timed_out": 1, "rejected": 2}
    assert value(samples, "request_success_total", finished_reason=answers[0].finish_reason) == 1


def test_no_label_names_a_tenant_unless_the_operator_says_which(served):
    _, answers, _, _, _ = served
    silent = ServerMetrics("toy")
    named = ServerMetrics("toy", tenants=["harbour"])
    for metrics in (silent, named):
        for tenant in ("harbour", "lighthouse", "customer-4711"):
            metrics.observe(answers[0].report, finish_reason="stop", tenant=tenant)
            metrics.ended(Outcome.REJECTED, tenant=tenant)
    told = silent.exposition().decode()
    assert "tenant" not in told
    assert "harbour" not in told
    samples = scrape(named)
    assert value(samples, "requests_total", tenant="harbour", outcome="rejected") == 1
    assert value(samples, "requests_total", tenant="other", outcome="rejected") == 2
    assert "lighthouse" not in named.exposition().decode()


def test_two_servers_in_a_process_share_nothing(served):
    _, answers, _, _, _ = served
    one, two = ServerMetrics("toy"), ServerMetrics("toy")
    one.observe(answers[0].report, finish_reason="stop")
    assert value(scrape(one), "prompt_tokens_total") == answers[0].report.prompt_tokens
    assert ("prompt_tokens_total", frozenset()) not in scrape(two)


def test_speculation_is_counted_if_there_is_any(served):
    speculation: Speculation[str, str] = Speculation(max_prefill_batch=1)
    metrics = ServerMetrics("toy", [lambda: speculation_samples(speculation.counts)])
    speculation.on_stage("r", ["a"], 0)
    speculation.on_stage("r", ["b"], 1)
    speculation.on_final("r", ["b"])
    samples = scrape(metrics)
    events = {"started": 1, "terminated": 1, "deferred": 1, "matched": 0, "regenerated": 1, "late": 0}
    assert {event: value(samples, "speculations_total", event=event) for event in events} == events


def test_lost_segments_are_survived_and_counted(tmp_path):
    """Half of every file on disk is overwritten between two processes: the answer is computed, and the loss shows."""
    loaded = toy_model("llama")
    config = StoreConfig(cache_dir=tmp_path)
    alone = ReuseConfig(capture=CaptureConfig(neutral_tokens=0))
    with Engine(loaded, store=config, reuse=alone) as engine:
        engine.precompute(STORED)
        expected = engine.generate("When?", STORED, method="full", max_new_tokens=4).token_ids
        engine.store.clear()
        engine.precompute(STORED)
    for file in tmp_path.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        file.write_bytes(data)
    with Engine(loaded, store=config) as engine:
        metrics = ServerMetrics("toy", [lambda: store_samples(engine.store)])
        answer = engine.generate("When?", STORED, method="full-reuse", max_new_tokens=4)
        metrics.observe(answer.report, finish_reason=answer.finish_reason)
        assert answer.report.lost_segments == len(STORED)
        assert answer.token_ids == expected
        assert value(scrape(metrics), "request_lost_segments_total") == len(STORED)


class DeadBlobs:
    """A remote that nobody answers at."""

    name, expires = "dead", False

    def __getattr__(self, _name):
        def call(*_args, **_kwargs):
            raise OSError("nobody answers")

        return call


@pytest.fixture(scope="module")
def dead_remote():
    """A store that has asked a remote in vain."""
    loaded = toy_model("llama")
    breaker = CircuitBreaker("remote", failures_to_open=1)
    remote = RemoteTier(DeadBlobs(), loaded.fingerprint, deadline_s=0.2, breaker=breaker)
    host = SegmentStore(HostTier(), budget_bytes=1 << 30)
    behind = SegmentStore(remote, budget_bytes=1 << 30, shared=True, load=False)
    store = TieredStore([Level("host", host), Level("remote", behind, background=True, patience=1)])
    Engine(loaded, store=store).generate("When?", STORED, max_new_tokens=1)
    store.flush(5.0)
    yield store
    store.close()


def test_a_dead_remote_shows_as_failures_and_an_open_breaker(dead_remote):
    samples = scrape(ServerMetrics("toy", [lambda: store_samples(dead_remote)]))
    assert_shown(samples, {"tier": "remote"}, breaker_opens_total=1, tier_available=0)
    assert value(samples, "tier_failures_total", tier="remote") >= 1


DEPLOY = Path(__file__).parents[2] / "deploy"
LIBRARY_LABELS = {"le", "model_name"}


@pytest.fixture(scope="module")
def everything(served, dead_remote) -> Samples:
    """What a server with all its parts exposes, and one whose remote does not answer."""
    engine, answers, *_ = served
    speculation: Speculation[str, str] = Speculation(max_prefill_batch=1)
    improver = Improver(ImprovingSettings(), engine.preparer, Mock())
    metrics = ServerMetrics(
        "toy",
        [
            lambda: batching_samples(BatchingStats()),
            kernel_samples,
            lambda: store_samples(engine.store),
            lambda: compared_samples(engine),
            lambda: speculation_samples(speculation.counts),
            improver.samples,
        ],
    )
    for answer in answers:
        metrics.observe(answer.report, finish_reason=answer.finish_reason, saved=Saved(1.0, 2.0))
    return scrape(metrics) | scrape(ServerMetrics("toy", [lambda: store_samples(dead_remote)]))


def test_dashboard_and_alerts_ask_only_for_what_there_is(everything):
    labels: dict[str, set[str]] = {}
    for name, own in everything:
        labels.setdefault(name, set()).update(label for label, _ in own)
    board = json.loads((DEPLOY / "grafana" / "chunkweave.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(asked) > 30
    (group,) = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"]
    alerts = [rule["expr"] for rule in group["rules"]]
    assert len(alerts) > 8
    for expression in [*asked, *alerts]:
        names = re.findall(r"chunkweave:(\w+)", expression)
        assert names or expression.startswith("up{")
        assert not set(names) - set(labels), f"{expression} asks for what no server has"
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        assert grouped <= LIBRARY_LABELS.union(*(labels[name] for name in names)), expression
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_every_metric_is_in_the_documentation(everything):
    families = {re.sub(r"_(bucket|count|sum|created|total)$", "", name) for name, _ in everything}
    page = (DEPLOY.parent / "docs" / "operating.md").read_text()
    section = page.partition("## Metrics\n")[2].partition("\n## ")[0]
    columns = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")]
    documented = {name for column in columns for name in re.findall(r"`(\w+?)(?:_total)?`", column)}
    assert families == documented
