"""What the OpenAPI schema says about answers."""

from typing import Any

from pydantic import BaseModel


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
    409: "it is there already",
    413: "too large",
    429: "too many requests; see Retry-After",
    503: "not ready, too busy or stopping; see Retry-After",
    504: "not answered in time",
}

_ALWAYS = (401, 413, 429)

STREAMED: Responses = {
    200: {
        "description": "the answer; with `stream` as server-sent events",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


def refusals(*statuses: int) -> Responses:
    """The errors that an endpoint may answer with; those of every endpoint (401, 413, 429) are added."""
    told = {status: _MEANINGS[status] for status in {*statuses, *_ALWAYS}}
    return {status: {"description": meaning, "model": ErrorBody} for status, meaning in sorted(told.items())}
