"""Responses to failed requests: status, body in OpenAI's form, and their description in the schema."""

import errno
import logging
import re
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from chunkweave.errors import (
    AnswerFormError,
    ChunkweaveError,
    CorpusError,
    DeadlineError,
    DocumentError,
    DuplicateDocumentError,
    NotRemovedError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    UnknownDocumentError,
    UsageError,
)

logger = logging.getLogger(__name__)


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


_CLIENTS: Mapping[type[ChunkweaveError], tuple[int, str | None]] = {
    PromptTooLongError: (400, "context_length_exceeded"),
    UnknownDocumentError: (404, "document_not_found"),
    DuplicateDocumentError: (409, "document_exists"),
    UsageError: (400, None),
    DocumentError: (400, None),
}
"""Status and code of errors that the client can fix, subclasses first. The client gets their message."""


_SERVERS: Mapping[type[ChunkweaveError], tuple[int, str, str, float | None]] = {
    QueueFullError: (503, "the server is overloaded; try again", "overloaded", 1),
    DeadlineError: (504, "the request was not answered in time", "timeout", None),
    RequestAbortedError: (503, "the server is stopping", "stopping", 5),
}
"""Status, message, code and `retry-after` in seconds of errors that the client cannot fix."""


_FAULTS: Mapping[type[ChunkweaveError], str] = {
    CorpusError: "the corpus cannot be used now; see the server's log",
    AnswerFormError: "no token continues the answer in the form that the request gave it; see the server's log",
    ChunkweaveError: "the request failed; see the server's log",
}
"""Messages of errors that are logged, subclasses first."""

_REMOVED_AGAIN_S = 30.0
NOT_READY_AGAIN_S = 2.0

_DISK_FULL = (
    "disk_full",
    "the server's disk is full, so this was not stored: remove a corpus, or ask the operator to free space, and retry",
)
_DISK_READ_ONLY = (
    "disk_read_only",
    "the server cannot write to its disk, so nothing was changed: the operator must make its data folder writable; "
    "the log names the file",
)
_DISKS: Mapping[int | None, tuple[str, str]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _DISK_FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _DISK_READ_ONLY),
}
"""Code and message of a change that cannot be stored, by errno."""


class HttpError(HTTPException):
    """An error response: status, message, code, field, headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """`param` names the invalid field, `retry_after_s` becomes a header, `more` adds fields next to `error`."""
        after = {} if retry_after_s is None else {"retry-after": str(max(1, ceil(retry_after_s)))}
        super().__init__(status, message, {**after, **(headers or {})})
        self.message = _sendable(message)
        self.param = param and _sendable(param)
        self.code = code
        self.more = more or {}

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`, and the fields of `more`."""
        usual = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status_code, usual)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}, **self.more}

    @property
    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status_code, dict(self.headers or {}))


_MOST_CHARACTERS = 1000
"""Most characters of a message; it may quote the request."""


def _sendable(text: str) -> str:
    """The text as valid Unicode, truncated."""
    text = text[:_MOST_CHARACTERS] + "..." if len(text) > _MOST_CHARACTERS else text
    return text.encode("utf-8", "backslashreplace").decode()


def http_error_of(error: Exception) -> HttpError:
    """The response to an error. Errors that the client did not cause are logged, and their message is not sent."""
    if isinstance(error, HttpError):
        return error
    for kind, (status, code) in _CLIENTS.items():
        if isinstance(error, kind):
            return HttpError(status, str(error), code=code)
    if isinstance(error, NotRemovedError):
        tiers = [*error.tiers, *error.unasked]
        more = {"segments_removed": error.removed, "segments_left": error.left, "tiers": tiers}
        return HttpError(503, str(error), code="not_removed", retry_after_s=_REMOVED_AGAIN_S, more=more)
    for kind, (status, message, code, retry_after_s) in _SERVERS.items():
        if isinstance(error, kind):
            return HttpError(status, message, code=code, retry_after_s=retry_after_s)
    if isinstance(error, CorpusError) and (refused := _not_stored(error)) is not None:
        return refused
    logger.error("a request failed", exc_info=error)
    message = next((text for kind, text in _FAULTS.items() if isinstance(error, kind)), _FAULTS[ChunkweaveError])
    return HttpError(500, message, code="internal_error")


def _not_stored(error: Exception) -> HttpError | None:
    """A 507 for an error caused by a full or read-only disk; None for other errors."""
    cause = error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in _DISKS:
        return None
    logger.error("%s (%s)", error, cause)
    code, message = _DISKS[cause.errno]
    return HttpError(507, message, code=code)


def install_error_handlers(app: FastAPI) -> None:
    """Make an app answer every error in this form."""
    for kind in (HTTPException, RequestValidationError, ChunkweaveError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, ClientDisconnect):
        return HttpError(400, "the client closed the connection before the end of the body").response
    if isinstance(error, RequestValidationError):
        return invalid_request(error.errors(), error.body).response
    if isinstance(error, HTTPException) and not isinstance(error, HttpError):
        if (refused := _not_stored(error)) is not None:  # FastAPI keeps an upload on disk while it is read
            return refused.response
        return HttpError(error.status_code, str(error.detail), headers=error.headers).response
    return http_error_of(error).response


_KINDS = {
    "string_type": "a text",
    "string_unicode": "valid Unicode: it has half of a surrogate pair",
    "list_type": "a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
}
"""The required type of a field, by Pydantic's error types. Pydantic's own messages are for programmers."""

_MUST_BE = "Input should be "
_TEXT_HAS = "String should have "


def invalid_request(errors: Sequence[Mapping[str, Any]], body: Any = None) -> HttpError:
    """A 400 for the first invalid field of a request, or for all unsupported fields.

    For a field with several accepted types, the error is of the type that the value matches best: for a value of an
    accepted type it is why this value is refused, not that its type is wrong.
    """
    places = [_steps(detail, body) for detail in errors]
    unsupported = [
        place_of(steps) for detail, steps in zip(errors, places, strict=True) if detail["type"] == "extra_forbidden"
    ]
    if unsupported:
        message = f"not supported: {', '.join(unsupported)}"
        return HttpError(400, message, param=unsupported[0], code="unsupported_field")
    if errors[0]["type"] == "json_invalid":
        return HttpError(400, f"the body is not JSON: {errors[0].get('ctx', {}).get('error', '')}", code="invalid_json")
    steps = max((error_steps for error_steps in places if error_steps[: len(places[0])] == places[0]), key=len)
    meant = [detail for detail, at in zip(errors, places, strict=True) if at == steps]
    place = place_of(steps)
    refused = [detail for detail in meant if _kind(detail) is None]
    if not refused:
        kinds = dict.fromkeys(str(_kind(detail)) for detail in meant)
        return HttpError(400, f"{place or 'the body'} must be {' or '.join(kinds)}", param=place or None)
    message = _message(refused[0])
    if message.startswith(_TEXT_HAS):
        message = f"{place or 'the body'} must have {message.removeprefix(_TEXT_HAS)}"
    named = not place or re.search(rf"\b{re.escape(str(steps[-1]))}\b", message)
    return HttpError(400, message if named else f"{place}: {message}", param=place or None)


def _kind(error: Mapping[str, Any]) -> str | None:
    """The required type of a field, if the error is about its type."""
    message = _message(error)
    if message.startswith(_MUST_BE):
        return _KINDS.get(error["type"], message.removeprefix(_MUST_BE))
    return "a file" if message.startswith("Expected UploadFile") else None


def _message(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _steps(error: Mapping[str, Any], body: Any) -> list[int | str]:
    """The path to an error in a body, query or path, without Pydantic's steps for the type of a union."""
    loc = error["loc"]
    if loc[0] != "body":
        return list(loc[1:])
    steps: list[int | str] = []
    for step in loc[1:]:
        exists = isinstance(body, Mapping) and step in body
        if isinstance(step, int):
            body = body[step] if isinstance(body, list) and step < len(body) else None
        elif exists:
            body = body[step]
        elif error["type"] != "missing" or step != loc[-1]:
            continue
        steps.append(step)
    return steps


def place_of(steps: Sequence[int | str]) -> str:
    """A path as text, such as `messages[0].content`."""
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error, as in OpenAI's API."""

    error: ErrorDetail


Responses = dict[int | str, dict[str, Any]]

_MEANINGS = {
    401: "missing or unknown API key",
    400: "invalid request; the message names the field",
    403: "not allowed",
    404: "not found",
    408: "the body was not received in time",
    409: "it exists already",
    413: "too large",
    415: "unsupported kind of file; `files` has the reason for each file",
    421: "the server does not accept this Host",
    429: "too many requests; see Retry-After",
    501: "not supported by this backend or installation",
    502: "vLLM is gone, or failed at the request",
    503: "not ready, too busy, stopping, or KV that cannot be removed now; see Retry-After",
    504: "not answered in time",
    507: "not stored: the disk is full or read-only",
}

_ALWAYS = (401, 403, 408, 413, 421, 429)

STREAMED: Responses = {
    200: {
        "description": "the answer; with `stream` as server-sent events",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


def error_responses(*statuses: int) -> Responses:
    """The error responses of an endpoint in the schema, including those of every endpoint."""
    return {status: {"description": _MEANINGS[status], "model": ErrorBody} for status in sorted({*statuses, *_ALWAYS})}
