"""The server's logs: lines that carry the id of their request, as JSON or for people to read.

What users send and get (prompts, documents, answers, keys) is in none of them.
"""

import json
import logging
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

from chunkweave.metrics import ReuseReport

request_logger = logging.getLogger("chunkweave.requests")
"""One line for every request that has ended."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_current: ContextVar[str] = ContextVar("chunkweave_request_id", default="")
_QUIET = ("httpx", "httpcore", "uvicorn.access")


class LogForm(StrEnum):
    """How lines look."""

    JSON = "json"
    PLAIN = "plain"


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
    request_logger.info("%s", _in_words(outcome, report), extra={"fields": {**fields, **_figures(report)}})


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


def _figures(report: ReuseReport) -> dict[str, Any]:
    return {
        "method": report.method,
        "why": report.why,
        "prompt_tokens": report.prompt_tokens,
        "prefix_exact_tokens": report.prefix_exact_tokens,
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "computed_tokens": report.computed_tokens,
        "new_tokens": report.new_tokens,
        "chunks": len(report.chunks),
        "lost_segments": report.lost_segments,
        "recompute_fraction": round(report.recompute_fraction, 4),
        "ttft_s": round(report.ttft_s, 6),
        "queue_s": round(report.queue_s, 6),
        "lookup_s": round(report.lookup_s, 6),
        "load_s": round(report.load_s, 6),
        "weave_s": round(report.weave_s, 6),
        "decode_s": round(report.decode_s, 6),
    }


def _in_words(outcome: str, report: ReuseReport) -> str:
    return (
        f"request {outcome}: {report.method}, {report.prompt_tokens} tokens "
        f"({report.prefix_exact_tokens} exact, {report.reused_tokens} reused, {report.recomputed_tokens} recomputed, "
        f"{report.computed_tokens} computed), {report.new_tokens} new, first after {report.ttft_s:.3f} s, "
        f"all after {report.ttft_s + report.decode_s:.3f} s"
    )
