"""Traces of requests for OpenTelemetry, made after the fact from the times in their reports."""

import logging
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from chunkweave.metrics import ReuseReport

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NS = 1_000_000_000


class RequestTraces(Protocol):
    """Takes what is known of a request that was answered."""

    def record(
        self, report: ReuseReport, *, request_id: str, finish_reason: str, traceparent: str | None = None
    ) -> None:
        """Its last token has just come. `traceparent` is its header of that name: the span that it was asked in."""

    def close(self) -> None:
        """Send what is still to be sent."""


class NoTraces:
    """Nobody wants them."""

    def record(
        self, report: ReuseReport, *, request_id: str, finish_reason: str, traceparent: str | None = None
    ) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class OtelTraces:
    """A span for each request, with one for each of its phases in it.

    A report has how long each phase took, not when. Queue and decoding stand where they were; lookup, loading and
    weaving are laid one behind the other between them, though loading and weaving took turns layer by layer.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        """Spans go to `provider`, which is shut down by `close`."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("chunkweave")
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self, report: ReuseReport, *, request_id: str, finish_reason: str, traceparent: str | None = None
    ) -> None:
        """Its spans, ending now."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        ended = time.time_ns()
        began = ended - round((report.ttft_s + report.decode_s) * _NS)
        asked_in = self._propagator.extract({"traceparent": traceparent} if traceparent else {})
        span = self._tracer.start_span(
            "chunkweave.request",
            context=asked_in,
            kind=SpanKind.SERVER,
            start_time=began,
            attributes=_attributes(report, request_id, finish_reason),
        )
        inside = set_span_in_context(span, asked_in)
        for name, start, stop in _phases(report):
            phase = self._tracer.start_span(f"chunkweave.{name}", context=inside, start_time=began + round(start * _NS))
            phase.end(began + round(stop * _NS))
        span.end(ended)

    def close(self) -> None:
        """Send what is still to be sent."""
        self._provider.shutdown()


def open_traces(endpoint: str | None = None, *, service: str = "chunkweave") -> RequestTraces:
    """Traces sent by OTLP over HTTP to `endpoint` (None: what OpenTelemetry's environment variables name).

    Without an endpoint, or without the packages of the extra `otel`, nothing is traced; the latter is warned of.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        return NoTraces()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("no traces are sent, a package is missing (pip install 'chunkweave[otel]'): %s", error)
        return NoTraces()
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OtelTraces(provider)


def _phases(report: ReuseReport) -> Iterator[tuple[str, float, float]]:
    """Names, beginnings and ends in seconds after the arrival."""
    at = 0.0
    for name, seconds in (
        ("queue", report.queue_s),
        ("lookup", report.lookup_s),
        ("load", report.load_s),
        ("weave", report.weave_s),
    ):
        yield name, min(at, report.ttft_s), min(at + seconds, report.ttft_s)
        at += seconds
    yield "decode", report.ttft_s, report.ttft_s + report.decode_s


def _attributes(report: ReuseReport, request_id: str, finish_reason: str) -> dict[str, str | int | float | list[str]]:
    """Names of OpenTelemetry's conventions for generative models where they have one."""
    return {
        "gen_ai.response.id": request_id,
        "gen_ai.response.finish_reasons": [finish_reason],
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.new_tokens,
        "chunkweave.method": report.method,
        "chunkweave.prefix_exact_tokens": report.prefix_exact_tokens,
        "chunkweave.reused_tokens": report.reused_tokens,
        "chunkweave.recomputed_tokens": report.recomputed_tokens,
        "chunkweave.computed_tokens": report.computed_tokens,
        "chunkweave.lost_segments": report.lost_segments,
        "chunkweave.ttft_s": report.ttft_s,
    }
