"""Logs, traces and the last requests, and the observer that reports each request's outcome to them and to metrics."""

import json
import logging
import os
import re
import secrets
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from chunkweave.errors import install_extra
from chunkweave.metrics import ReuseReport, Saved
from chunkweave_server.errors import HttpError
from chunkweave_server.metrics import Outcome, ServerMetrics, outcome_of
from chunkweave_server.settings import LogForm
from chunkweave_server.tenants import Tenant

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)


request_logger = logging.getLogger("chunkweave.requests")
"""Logs one line for each ended request."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_current: ContextVar[str] = ContextVar("chunkweave_request_id", default="")
_QUIET = ("httpx", "httpcore", "uvicorn.access")


def request_id_of(header: str | None) -> str:
    """The client's `x-request-id` if it is valid (letters, digits, `.`, `_`, `-`, up to 128), else a new id.

    >>> request_id_of("a-1")
    'a-1'
    """
    return header if header and _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex


@contextmanager
def serving(request_id: str) -> Iterator[None]:
    """Add the id to everything logged inside, by this task and the tasks that it starts."""
    token = _current.set(request_id)
    try:
        yield
    finally:
        _current.reset(token)


def log_request(
    outcome: str, report: ReuseReport | None = None, *, finish_reason: str = "", error: BaseException | None = None
) -> None:
    """Log an ended request: outcome, and tokens and times of its report.

    Only the class of an error is logged, since its message may quote the request.
    """
    fields: dict[str, Any] = {"event": "request", "outcome": str(outcome)}
    if finish_reason:
        fields["finish_reason"] = finish_reason
    if error is not None:
        fields["error"] = type(error).__name__
    if report is None:
        request_logger.info("request %s", outcome, extra={"fields": fields})
        return
    request_logger.info("%s", _in_words(outcome, report), extra={"fields": {**fields, **_fields_of(report)}})


class JsonFormatter(logging.Formatter):
    """Lines as JSON objects: time, level, logger, message, request id, fields of `extra`, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, without a newline at its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line |= {key: value for key, value in fields.items() if key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class PlainFormatter(logging.Formatter):
    """Lines for a terminal: time, level, first characters of the request id, message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, followed by the traceback if there is one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        request_id = getattr(record, "request_id", "")
        whose = f"[{request_id[:8]}] " if request_id else ""
        text = f"{time} {record.levelname:<7} {whose}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure_logging(form: LogForm, level: str = "INFO", stream: TextIO | None = None) -> logging.Handler:
    """Write all logs of this process to `stream` (None: stderr); returns the handler.

    Replaces the handlers of the root logger. `level` applies to chunkweave and uvicorn; other packages log warnings.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if form is LogForm.JSON else PlainFormatter())
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("chunkweave", "uvicorn"):
        logging.getLogger(name).setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    return handler


def _add_request_id(record: logging.LogRecord) -> bool:
    """Set the record's request id; called in the thread and task that logs."""
    record.request_id = _current.get()
    return True


_TOKENS = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
_LOGGED = ("method", "why", "prompt_tokens", *_TOKENS, "new_tokens", "lost_segments")
_LOGGED_SECONDS = ("ttft_s", "queue_s", "lookup_s", "load_s", "weave_s", "decode_s")


def _fields_of(report: ReuseReport) -> dict[str, Any]:
    return {
        **{name: getattr(report, name) for name in _LOGGED},
        **{name: round(getattr(report, name), 6) for name in _LOGGED_SECONDS},
        "chunks": len(report.chunks),
        "recompute_fraction": round(report.recompute_fraction, 4),
    }


def _in_words(outcome: str, report: ReuseReport) -> str:
    return (
        f"request {outcome}: {report.method}, {report.prompt_tokens} tokens "
        f"({report.prefix_exact_tokens} exact, {report.reused_tokens} reused, {report.recomputed_tokens} recomputed, "
        f"{report.computed_tokens} computed), {report.new_tokens} new, first after {report.ttft_s:.3f} s, "
        f"all after {report.ttft_s + report.decode_s:.3f} s"
    )


_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NS = 1_000_000_000
_TRACED = ("method", *_TOKENS, "lost_segments", "ttft_s")


class OtelTraces:
    """A span for each request, with child spans for its phases.

    A report has the duration of each phase, not its start. Queue and decoding have their true times. Lookup, loading
    and weaving are placed one after the other between them, although loading and weaving alternate layer by layer.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        """Spans are sent to `provider`; `close` shuts it down."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("chunkweave")
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self, report: ReuseReport, *, request_id: str, finish_reason: str, traceparent: str | None = None
    ) -> None:
        """Record the spans of a request that has just ended.

        `traceparent` is the request's header of that name: the client's span.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        ended = time.time_ns()
        began = ended - round((report.ttft_s + report.decode_s) * _NS)
        client_span = self._propagator.extract({"traceparent": traceparent} if traceparent else {})
        span = self._tracer.start_span(
            "chunkweave.request",
            context=client_span,
            kind=SpanKind.SERVER,
            start_time=began,
            attributes=_attributes(report, request_id, finish_reason),
        )
        inside = set_span_in_context(span, client_span)
        decoding = ("decode", report.ttft_s, report.ttft_s + report.decode_s)
        for name, start, stop in (*report.phases, decoding):
            phase = self._tracer.start_span(f"chunkweave.{name}", context=inside, start_time=began + round(start * _NS))
            phase.end(began + round(stop * _NS))
        span.end(ended)

    def close(self) -> None:
        """Send pending spans."""
        self._provider.shutdown()


def open_traces(endpoint: str | None = None, *, service: str = "chunkweave") -> OtelTraces | None:
    """Traces by OTLP over HTTP to `endpoint` (None: the endpoint in OpenTelemetry's environment variables).

    Returns None without an endpoint; also, with a warning, if the packages of the extra `otel` are missing.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("no traces are sent, a package is missing (%s): %s", install_extra("otel"), error)
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OtelTraces(provider)


def _attributes(report: ReuseReport, request_id: str, finish_reason: str) -> dict[str, str | int | float | list[str]]:
    """Attributes, named by OpenTelemetry's conventions for generative models where they exist."""
    return {
        "gen_ai.response.id": request_id,
        "gen_ai.response.finish_reasons": [finish_reason],
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.new_tokens,
        **{f"chunkweave.{name}": getattr(report, name) for name in _TRACED},
    }


MOST = 200
MOST_UNANSWERED = 50
"""Limits of the requests that are kept."""


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """An ended request, without its texts and the names of its parts. `report` is None without an answer, `saved` if
    it is not known.

    `key` is random, since a number would reveal the number of other requests. `ended_s` is a Unix time. `error` is the
    status and code of a refusal, else the error's class.
    """

    id: str
    tenant: str
    outcome: str
    report: ReuseReport | None = None
    finish_reason: str = ""
    error: str = ""
    saved: Saved | None = None
    ended_s: float = field(default_factory=time.time)
    key: str = field(default_factory=lambda: secrets.token_hex(8))


class RecentRequests:
    """The last requests of all tenants: up to `MOST` answered ones and `MOST_UNANSWERED` others.

    Both are kept apart, so that refusals do not displace answers. Used in the event loop's thread only.
    """

    def __init__(self) -> None:
        self._answered: deque[RecentRequest] = deque(maxlen=MOST)
        self._unanswered: deque[RecentRequest] = deque(maxlen=MOST_UNANSWERED)

    def answered(
        self, request_id: str, tenant: str, report: ReuseReport, *, finish_reason: str = "", saved: Saved | None = None
    ) -> None:
        """Keep a request with a complete answer; what it `saved` may be unknown."""
        report = replace(report, chunks=())
        self._answered.append(RecentRequest(request_id, tenant, Outcome.FINISHED, report, finish_reason, saved=saved))

    def unanswered(self, request_id: str, tenant: str, outcome: str, error: BaseException | None) -> None:
        """Keep a request without a complete answer. `error` is None if the client closed the connection."""
        self._unanswered.append(RecentRequest(request_id, tenant, outcome, error=_short(error)))

    def seen_by(self, tenant: "Tenant", *, answered: bool = True) -> Iterator[RecentRequest]:
        """The answered or unanswered requests that a tenant may see, newest first: its own; an admin sees all."""
        requests = self._answered if answered else self._unanswered
        return (request for request in reversed(requests) if tenant.admin or request.tenant == tenant.name)


def _short(error: BaseException | None) -> str:
    """An error without its message, which may quote the request."""
    if isinstance(error, HttpError):
        return f"{error.status_code} {error.code or ''}".strip()
    return "" if error is None else type(error).__name__


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """Identifies a request in logs, metrics and traces: its id, its tenant, and its client's span, if any."""

    request_id: str
    tenant: str
    traceparent: str | None = None


class Observer:
    """Reports ended requests to metrics, traces, log and the last requests: one call for each request."""

    def __init__(self, metrics: ServerMetrics, traces: OtelTraces | None) -> None:
        self.metrics = metrics
        self.recent = RecentRequests()
        self._traces = traces

    def answered(
        self, meta: RequestMeta, report: ReuseReport, *, finish_reason: str, saved: Saved | None = None
    ) -> None:
        """The request has its complete answer; what it `saved` may be unknown."""
        self.metrics.observe(report, finish_reason=finish_reason, tenant=meta.tenant, saved=saved)
        if self._traces is not None:
            self._traces.record(
                report, request_id=meta.request_id, finish_reason=finish_reason, traceparent=meta.traceparent
            )
        self.recent.answered(meta.request_id, meta.tenant, report, finish_reason=finish_reason, saved=saved)
        log_request(Outcome.FINISHED, report, finish_reason=finish_reason)

    def failed(self, meta: RequestMeta, error: BaseException) -> None:
        """The request ended with an error."""
        refused = isinstance(error, HttpError) and error.status_code < 500
        self._ended(meta, Outcome.REJECTED if refused else outcome_of(error), error)

    def given_up(self, meta: RequestMeta) -> None:
        """The client closed the connection before the answer's end."""
        self._ended(meta, Outcome.ABORTED, None)

    def close(self) -> None:
        """Send pending traces."""
        if self._traces is not None:
            self._traces.close()

    def _ended(self, meta: RequestMeta, outcome: Outcome, error: BaseException | None) -> None:
        self.metrics.ended(outcome, tenant=meta.tenant)
        self.recent.unanswered(meta.request_id, meta.tenant, outcome, error)
        log_request(outcome, error=error)
