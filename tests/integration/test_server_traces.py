"""Spans of answered requests, held against the times in their reports."""

import sys

import pytest

from chunkweave import Engine
from chunkweave_server.metrics import ServerMetrics
from chunkweave_server.observability import Observer, OtelTraces, RequestMeta, open_traces
from tests.toys import toy_model

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

NS = 1e9
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def report():
    engine = Engine(toy_model("llama"))
    engine.precompute(["The ferry leaves at noon."])
    return engine.generate("When?", ["The ferry leaves at noon."], method="cacheblend", max_new_tokens=5).report


def spans_of(report, **options):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = OtelTraces(provider)
    traces.record(report, request_id="r-1", finish_reason="stop", **options)
    spans = {span.name.removeprefix("chunkweave."): span for span in exporter.get_finished_spans()}
    traces.close()
    return spans


def test_every_phase_is_a_span_as_long_as_the_report_says(report):
    spans = spans_of(report)
    whole = spans.pop("request")
    assert (whole.end_time - whole.start_time) / NS == pytest.approx(report.ttft_s + report.decode_s, abs=1e-6)
    lengths = {name: (span.end_time - span.start_time) / NS for name, span in spans.items()}
    assert lengths == pytest.approx(
        {
            "queue": report.queue_s,
            "lookup": report.lookup_s,
            "load": report.load_s,
            "weave": report.weave_s,
            "decode": report.decode_s,
        },
        abs=1e-6,
    )
    assert (spans["decode"].start_time - whole.start_time) / NS == pytest.approx(report.ttft_s, abs=1e-6)
    for span in spans.values():
        assert span.parent.span_id == whole.context.span_id
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time + 1000
    assert whole.attributes["chunkweave.method"] == "cacheblend"
    assert whole.attributes["gen_ai.usage.input_tokens"] == report.prompt_tokens
    assert whole.attributes["gen_ai.response.id"] == "r-1"


def test_a_clients_trace_goes_on_here(report):
    whole = spans_of(report, traceparent=f"00-{TRACE}-{PARENT}-01")["request"]
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert spans_of(report, traceparent="nonsense")["request"].parent is None


def test_without_an_endpoint_or_a_package_nothing_is_traced(report, monkeypatch, caplog):
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert open_traces() is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    traces = open_traces("http://127.0.0.1:1/v1/traces")
    assert traces is None
    assert "pip install '.[otel]'" in caplog.text
    observer = Observer(ServerMetrics("toy"), traces)
    observer.answered(RequestMeta("r-1", ""), report, finish_reason="stop")
    observer.close()


def test_with_an_endpoint_spans_are_sent(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    traces = open_traces("http://127.0.0.1:1/v1/traces")
    assert isinstance(traces, OtelTraces)
    traces.close()
