"""The answer to a request that fails: a status, a body in OpenAI's form, and what the schema says of it."""

import logging
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

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
        self.message = message
        self.param = param
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
    logger.error("a request failed", exc_info=error)
    what = "the corpus cannot be used now" if isinstance(error, CorpusError) else "the request failed"
    return HttpError(500, f"{what}; the server's log says why", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Have an app answer every error in this form."""
    for kind in (HTTPException, RequestValidationError, ChunkweaveError, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        return invalid_request(error.errors()).response
    if isinstance(error, HTTPException) and not isinstance(error, HttpError):
        return HttpError(error.status_code, str(error.detail), headers=error.headers).response
    return http_error_of(error).response


def invalid_request(errors: Sequence[Mapping[str, Any]]) -> HttpError:
    """A 400 for the first thing that is wrong with a request's fields; unsupported ones are all named."""
    unsupported = [_place(one["loc"]) for one in errors if one["type"] == "extra_forbidden"]
    if unsupported:
        message = f"not supported: {', '.join(unsupported)}"
        return HttpError(400, message, param=unsupported[0], code="unsupported_field")
    first = errors[0]
    place = _place(first["loc"])
    if first["type"] == "json_invalid":
        return HttpError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', '')}", code="invalid_json")
    message = str(first["msg"]).removeprefix("Value error, ")
    named = message if not place or place.rpartition(".")[2] in message else f"{place}: {message}"
    return HttpError(400, named, param=place or None)


def _place(loc: Sequence[int | str]) -> str:
    """`messages[0].content` of a place in a body, query or path."""
    text = ""
    for step in loc[1:] if loc and loc[0] in ("body", "query", "path") else loc:
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
    409: "it is there already; or a conversation is busy, or another turn of it comes next",
    413: "too large",
    429: "too many requests; see Retry-After",
    501: "this backend does not do that",
    503: "not ready, too busy, stopping, or KV that cannot be removed now; see Retry-After",
    504: "not answered in time",
}

_ALWAYS = (401, 413, 429)

STREAMED: Responses = {
    200: {
        "description": "the answer; with `stream` as server-sent events",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


def error_responses(*statuses: int) -> Responses:
    """The errors that an endpoint may answer with; those of every endpoint (401, 413, 429) are added."""
    return {status: {"description": _MEANINGS[status], "model": ErrorBody} for status in sorted({*statuses, *_ALWAYS})}
