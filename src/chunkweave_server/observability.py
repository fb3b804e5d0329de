"""Logs, traces and the last requests, and the observer that passes each request's outcome to them and the metrics."""

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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from chunkweave.errors import install_extra
from chunkweave.metrics import ReuseReport
from chunkweave_server.errors import HttpError
from chunkweave_server.metrics import Outcome, ServerMetrics, outcome_of
from chunkweave_server.settings import LogForm
from chunkweave_server.tenants import Tenant

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)


request_logger = logging.getLogger("chunkweave.requests")
"""One line for every request that has ended."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_current: ContextVar[str] = ContextVar("chunkweave_request_id", default="")
_QUIET = ("httpx", "httpcore", "uvicorn.access")


def request_id_of(given: str | None) -> str:
    """The id of a request: what its client gave as `x-request-id`, or a new one if that is none or no plain word.

    >>> request_id_of("a-1")
    'a-1'
    """
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


@contextmanager
def serving(request_id: str) -> Iterator[None]:
    """Whatever is logged inside, by this task and what it starts, carries the id."""
    token = _current.set(request_id)
    try:
        yield
    finally:
        _current.reset(token)


def log_request(
    outcome: str, report: ReuseReport | None = None, *, finish_reason: str = "", error: BaseException | None = None
) -> None:
    """The one line of a request that has ended: how, and what the report says of tokens and times.

    Of an error its class is logged: messages may quote the request.
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
    """A line is a JSON object: time, level, logger, message, the request's id, the fields of `extra`, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end."""
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
    """A line for a terminal: time, level, the beginning of the request's id, message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback on more if there is one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        request_id = getattr(record, "request_id", "")
        whose = f"[{request_id[:8]}] " if request_id else ""
        text = f"{time} {record.levelname:<7} {whose}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure_logging(form: LogForm, level: str = "INFO", stream: TextIO | None = None) -> logging.Handler:
    """Have everything that this process logs written to `stream` (stderr if None); returns the handler.

    For a process that is a server: it takes the place of the root logger's handlers. `level` is ours and uvicorn's;
    of other packages warnings are shown.
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
    """Note whose record it is, in the thread and task that made it."""
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
        """The spans of a request whose last token has just come.

        `traceparent` is its header of that name: the span that it belongs to.
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
        """Send what is still to be sent."""
        self._provider.shutdown()


def open_traces(endpoint: str | None = None, *, service: str = "chunkweave") -> OtelTraces | None:
    """Traces sent by OTLP over HTTP to `endpoint` (None: what OpenTelemetry's environment variables name).

    Without an endpoint, or without the packages of the extra `otel`, nothing is traced; the latter is warned of.
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
    """Names of OpenTelemetry's conventions for generative models where they have one."""
    return {
        "gen_ai.response.id": request_id,
        "gen_ai.response.finish_reasons": [finish_reason],
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.new_tokens,
        **{f"chunkweave.{name}": getattr(report, name) for name in _TRACED},
    }


MOST = 200
MOST_BYTES = 16 << 20
"""Of all reports that are kept, as `_bytes_of` counts them: long prompts leave fewer of them."""

_BYTES_OF_A_CHUNK = 500
_BYTES_OF_A_SPAN = 120
"""About what these objects take in memory."""


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """A request that has ended, without its texts; only its parts' names are kept. Without an answer it has no report.

    `key` names it on the page: a number would tell how many others there were. `ended_s` is a Unix time, `error` says
    what ended it: status and code of a refusal, else the class.
    """

    id: str
    tenant: str
    outcome: str
    report: ReuseReport | None = None
    finish_reason: str = ""
    error: str = ""
    ended_s: float = field(default_factory=time.time)
    key: str = field(default_factory=lambda: secrets.token_hex(8))


class RecentRequests:
    """The last `MOST` requests of all tenants, or as many as `MOST_BYTES` hold. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._kept: deque[RecentRequest] = deque()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """About what the reports take."""
        return self._nbytes

    def add(
        self,
        request_id: str,
        tenant: str,
        outcome: str,
        report: ReuseReport | None = None,
        *,
        finish_reason: str = "",
        error: BaseException | None = None,
    ) -> None:
        """A request has ended."""
        name = _short(error)
        self._kept.append(RecentRequest(request_id, tenant, outcome, report, finish_reason, name))
        self._nbytes += _bytes_of(report)
        while len(self._kept) > MOST or (self._nbytes > MOST_BYTES and len(self._kept) > 1):
            self._nbytes -= _bytes_of(self._kept.popleft().report)

    def seen_by(self, tenant: "Tenant") -> Iterator[RecentRequest]:
        """What a tenant may see, the last first: its own; an admin all."""
        return (one for one in reversed(self._kept) if tenant.admin or one.tenant == tenant.name)

    def find(self, tenant: "Tenant", key: str) -> RecentRequest | None:
        """A request by its key or its id, if the tenant may see it and it is still kept; of one id the last."""
        return next((one for one in self.seen_by(tenant) if key in (one.key, one.id)), None)


def _bytes_of(report: ReuseReport | None) -> int:
    chunks = () if report is None else report.chunks
    return sum(_BYTES_OF_A_CHUNK + sys.getsizeof(one.source) + _BYTES_OF_A_SPAN * len(one.recomputed) for one in chunks)


def _short(error: BaseException | None) -> str:
    """An error without its text, which may quote the request."""
    if isinstance(error, HttpError):
        return f"{error.status_code} {error.code or ''}".strip()
    return "" if error is None else type(error).__name__


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """What names a request in logs, metrics and traces: its id, its tenant, and its client's span, if there is one."""

    request_id: str
    tenant: str
    traceparent: str | None = None


class Observer:
    """One call for each request, when it has ended."""

    def __init__(self, metrics: ServerMetrics, traces: OtelTraces | None) -> None:
        self.metrics = metrics
        self.recent = RecentRequests()
        self._traces = traces

    def answered(self, meta: RequestMeta, report: ReuseReport, *, finish_reason: str) -> None:
        """It has its whole answer."""
        self.metrics.observe(report, finish_reason=finish_reason, tenant=meta.tenant)
        if self._traces is not None:
            self._traces.record(
                report, request_id=meta.request_id, finish_reason=finish_reason, traceparent=meta.traceparent
            )
        self.recent.add(meta.request_id, meta.tenant, Outcome.FINISHED, report, finish_reason=finish_reason)
        log_request(Outcome.FINISHED, report, finish_reason=finish_reason)

    def failed(self, meta: RequestMeta, error: BaseException) -> None:
        """It ended with an error."""
        refused = isinstance(error, HttpError) and error.status_code < 500
        self._ended(meta, Outcome.REJECTED if refused else outcome_of(error), error)

    def given_up(self, meta: RequestMeta) -> None:
        """Its client went before the answer's end."""
        self._ended(meta, Outcome.ABORTED, None)

    def close(self) -> None:
        """Send what is still to be sent."""
        if self._traces is not None:
            self._traces.close()

    def _ended(self, meta: RequestMeta, outcome: Outcome, error: BaseException | None) -> None:
        self.metrics.ended(outcome, tenant=meta.tenant)
        self.recent.add(meta.request_id, meta.tenant, outcome, error=error)
        log_request(outcome, error=error)
