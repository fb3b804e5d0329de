"""The answer to a request that fails: a status, a body in OpenAI's form, and what the schema says of it."""

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
    ChunkweaveError,
    ConversationBusyError,
    ConversationEndedError,
    ConversationTurnError,
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
    ConversationBusyError: (409, "conversation_busy"),
    ConversationTurnError: (409, "conversation_mismatch"),
    ConversationEndedError: (404, "conversation_not_found"),
    UsageError: (400, None),
    DocumentError: (400, None),
}
"""Status and code of errors that a client can mend, subclasses first. It gets their message."""

_CONVERSATIONS = (ConversationBusyError, ConversationTurnError, ConversationEndedError)

_SERVERS: Mapping[type[ChunkweaveError], tuple[int, str, str, float | None]] = {
    QueueFullError: (503, "the server has too much to do; try again", "overloaded", 1),
    DeadlineError: (504, "the request was not answered in time", "timeout", None),
    RequestAbortedError: (503, "the server is stopping", "stopping", 5),
}
"""Status, message, code and `retry-after` in seconds of errors that it cannot."""


_REMOVED_AGAIN_S = 30.0
NOT_READY_AGAIN_S = 2.0

_DISK_FULL = (
    "disk_full",
    "the server's disk is full, so that this could not be stored: remove a corpus, or have somebody free some space "
    "there; then send the same again",
)
_DISK_READ_ONLY = (
    "disk_read_only",
    "the server may not write to its disk, so that nothing can be changed: whoever runs it has to make its data folder "
    "writable; the log names the file",
)
_DISKS: Mapping[int | None, tuple[str, str]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _DISK_FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _DISK_READ_ONLY),
}
"""Code and message of a change that cannot be stored, by the error's number."""


class HttpError(HTTPException):
    """A request that is not answered, with all that its client is to know about it."""

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
        """An error; `param` names the field that is wrong, `retry_after_s` becomes a header, `more` goes beside it."""
        after = {} if retry_after_s is None else {"retry-after": str(max(1, ceil(retry_after_s)))}
        super().__init__(status, message, {**after, **(headers or {})})
        self.message = _sendable(message)
        self.param = param and _sendable(param)
        self.code = code
        self.more = more or {}

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`, and what else there is to say."""
        usual = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status_code, usual)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}, **self.more}

    @property
    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status_code, dict(self.headers or {}))


_MOST_CHARACTERS = 1000
"""Of a message: what is quoted of a request may be longer."""


def _sendable(text: str) -> str:
    """Text as valid Unicode, and not too long."""
    text = text[:_MOST_CHARACTERS] + "..." if len(text) > _MOST_CHARACTERS else text
    return text.encode("utf-8", "backslashreplace").decode()


def http_error_of(error: Exception) -> HttpError:
    """The answer to an error. What is not the client's doing is logged, and answered without its message."""
    if isinstance(error, HttpError):
        return error
    for kind, (status, code) in _CLIENTS.items():
        if isinstance(error, kind):
            param = "chunkweave.conversation_id" if kind in _CONVERSATIONS else None
            return HttpError(status, str(error), code=code, param=param)
    if isinstance(error, NotRemovedError):
        more = {"segments_removed": error.removed, "segments_left": error.left}
        return HttpError(503, str(error), code="not_removed", retry_after_s=_REMOVED_AGAIN_S, more=more)
    for kind, (status, message, code, retry_after_s) in _SERVERS.items():
        if isinstance(error, kind):
            return HttpError(status, message, code=code, retry_after_s=retry_after_s)
    if isinstance(error, CorpusError) and (refused := _not_stored(error)) is not None:
        return refused
    logger.error("a request failed", exc_info=error)
    what = "the corpus cannot be used now" if isinstance(error, CorpusError) else "the request failed"
    return HttpError(500, f"{what}; the server's log says why", code="internal_error")


def _not_stored(error: Exception) -> HttpError | None:
    """A 507 for an error whose cause is that the disk took no more; None for others."""
    cause = error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in _DISKS:
        return None
    logger.error("%s (%s)", error, cause)
    code, message = _DISKS[cause.errno]
    return HttpError(507, message, code=code)


def install_error_handlers(app: FastAPI) -> None:
    """Have an app answer every error in this form."""
    for kind in (HTTPException, RequestValidationError, ChunkweaveError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, ClientDisconnect):
        return HttpError(400, "the rest of the body did not come").response
    if isinstance(error, RequestValidationError):
        return invalid_request(error.errors(), error.body).response
    if isinstance(error, HTTPException) and not isinstance(error, HttpError):
        if (refused := _not_stored(error)) is not None:  # an upload is kept on disk while it is read
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
"""What a field must be, by Pydantic's names of errors; its own words are meant for programmers."""

_MUST_BE = "Input should be "


def invalid_request(errors: Sequence[Mapping[str, Any]], body: Any = None) -> HttpError:
    """A 400 for the first thing that is wrong with a request's fields; unsupported ones are all named.

    Where a field may be of several kinds, it is for what the nearest of them lacks.
    """
    places = [_steps(one, body) for one in errors]
    unsupported = [
        place_of(steps) for one, steps in zip(errors, places, strict=True) if one["type"] == "extra_forbidden"
    ]
    if unsupported:
        message = f"not supported: {', '.join(unsupported)}"
        return HttpError(400, message, param=unsupported[0], code="unsupported_field")
    if errors[0]["type"] == "json_invalid":
        return HttpError(400, f"the body is no JSON: {errors[0].get('ctx', {}).get('error', '')}", code="invalid_json")
    steps = max((one for one in places if one[: len(places[0])] == places[0]), key=len)
    meant = [one for one, at in zip(errors, places, strict=True) if at == steps]
    place, kinds = place_of(steps), [kind for one in meant if (kind := _kind(one)) is not None]
    if kinds:
        return HttpError(400, f"{place or 'the body'} must be {' or '.join(dict.fromkeys(kinds))}", param=place or None)
    message = _message(meant[0])
    named = not place or re.search(rf"\b{re.escape(str(steps[-1]))}\b", message)
    return HttpError(400, message if named else f"{place}: {message}", param=place or None)


def _kind(error: Mapping[str, Any]) -> str | None:
    """What a field must be, if an error says that."""
    message = _message(error)
    if message.startswith(_MUST_BE):
        return _KINDS.get(error["type"], message.removeprefix(_MUST_BE))
    return "a file" if message.startswith("Expected UploadFile") else None


def _message(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _steps(error: Mapping[str, Any], body: Any) -> list[int | str]:
    """The way to an error in a body, query or path, without the steps that name a kind that a field may be of."""
    loc = error["loc"]
    if loc[0] != "body":
        return list(loc[1:])
    steps: list[int | str] = []
    for step in loc[1:]:
        there = isinstance(body, Mapping) and step in body
        if isinstance(step, int):
            body = body[step] if isinstance(body, list) and step < len(body) else None
        elif there:
            body = body[step]
        elif error["type"] != "missing" or step != loc[-1]:
            continue
        steps.append(step)
    return steps


def place_of(steps: Sequence[int | str]) -> str:
    """`messages[0].content`."""
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error, as OpenAI's."""

    error: ErrorDetail


Responses = dict[int | str, dict[str, Any]]

_MEANINGS = {
    401: "no such API key",
    400: "the request is wrong; the message names the field",
    403: "not allowed",
    404: "not found",
    408: "the body did not come in time",
    409: "it is there already; or a conversation is busy, or another turn of it comes next",
    413: "too large",
    421: "the server does not answer to this Host",
    429: "too many requests; see Retry-After",
    501: "this backend does not do that",
    502: "vLLM went away, or failed at the request",
    503: "not ready, too busy, stopping, or KV that cannot be removed now; see Retry-After",
    504: "not answered in time",
    507: "it cannot be stored: the disk is full, or read-only",
}

_ALWAYS = (401, 403, 408, 413, 421, 429)

STREAMED: Responses = {
    200: {
        "description": "the answer; with `stream` as server-sent events",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


def error_responses(*statuses: int) -> Responses:
    """The errors that an endpoint may answer with; those of every endpoint are added."""
    return {status: {"description": _MEANINGS[status], "model": ErrorBody} for status in sorted({*statuses, *_ALWAYS})}
