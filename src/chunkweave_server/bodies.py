"""JSON bodies: bounded before they are parsed; large ones are parsed and validated in a thread.

`json.loads` and Pydantic hold the interpreter's lock for a whole call, so a thread alone does not help other requests.
Therefore the number of values, and with it the duration of a call, is bounded first.
"""

import json
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from chunkweave_server.errors import HttpError, place_of
from chunkweave_server.requests import Body
from chunkweave_server.tenants import TenantLimits
from chunkweave_server.threads import TenantThreads

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
RawT = TypeVar("RawT", bytes, bytearray)

NOTHING_NAMED = ("x-chunkweave", "no documents named: nothing woven")
"""Header of an answer to a request without documents."""


@cache
def say_that_nothing_was_named() -> None:
    """Log once in a process that a request named no documents, so nothing was woven."""
    logger.info("a request named no documents: nothing is woven; send `documents` or `chunkweave.corpus` (logged once)")


_LARGE_BYTES = 1 << 16
"""Smaller bodies are parsed in the event loop: a thread would cost more."""

_INDENT_BYTES = 64
_WINDOW_BYTES = 1 << 20
_BLOCK_BYTES = 2048


def refuse_costly(raw: bytes | bytearray, most_values: int) -> None:
    """Refuse a body that is expensive to parse, independent of its size. Parses nothing.

    Counts lists, objects, and values after commas.

    Raises:
        HttpError: 400, more than `most_values` values, or a number with thousands of digits.
    """
    begun = 0
    digits = False
    for window in _windows(raw):
        begun += int(np.count_nonzero(_begins_value(window)))
        digits = digits or _has_long_number(_is_digit(window))
    if begun <= most_values and not digits:
        return  # below the limits even if all counted characters are outside strings
    values = 0
    quoted = False
    escaped = False
    for window in _windows(raw):
        quotes = window == ord('"')
        escaped = _drop_escaped(window, quotes, escaped)
        outside = ~(np.logical_xor.accumulate(quotes) ^ quoted)
        values += int(np.count_nonzero(_begins_value(window) & outside))
        if values > most_values:
            raise HttpError(400, f"the body may have {most_values} values in lists and objects", code="too_many_values")
        if _has_long_number(_is_digit(window) & outside):
            raise HttpError(400, "the body is not JSON: a number has too many digits", code="invalid_json")
        quoted = not outside[-1]


def _windows(raw: bytes | bytearray) -> Iterator[Any]:
    """The bytes in arrays of at most 1 MiB. NumPy releases the interpreter's lock while it works on an array."""
    for start in range(0, len(raw), _WINDOW_BYTES):
        yield np.frombuffer(raw, np.uint8, min(_WINDOW_BYTES, len(raw) - start), start)


def _begins_value(window: Any) -> Any:
    return (window == ord(",")) | (window == ord("[")) | (window == ord("{"))


def _is_digit(window: Any) -> Any:
    return (window >= ord("0")) & (window <= ord("9"))


def _has_long_number(digits: Any) -> bool:
    """Whether a run of digits is too long: true for 2 * `_BLOCK_BYTES` digits, false below `_BLOCK_BYTES`."""
    whole = len(digits) // _BLOCK_BYTES * _BLOCK_BYTES
    return bool(digits[:whole].reshape(-1, _BLOCK_BYTES).all(axis=1).any())


def _drop_escaped(window: Any, quotes: Any, escaped: bool) -> bool:
    """Clear the `quotes` that a backslash escapes, in place.

    `escaped` is whether the window's first byte is escaped; returns whether the next window's first byte is. In a run
    of backslashes the first, third and so on escape the byte after them.
    """
    backslashes = np.flatnonzero(window == ord("\\"))
    if escaped:
        backslashes = np.concatenate(([-1], backslashes))
    if not len(backslashes):
        return False
    first = np.concatenate(([True], np.diff(backslashes) != 1))
    begins = np.maximum.accumulate(np.where(first, np.arange(len(backslashes)), 0))
    escaping = backslashes[(np.arange(len(backslashes)) - begins) % 2 == 0] + 1
    if escapes_next := bool(escaping[-1] == len(window)):
        escaping = escaping[:-1]
    quotes[escaping] = False
    return escapes_next


def parsed_json(raw: bytes | bytearray) -> Any:
    """The value of a JSON body.

    Raises:
        HttpError: 400, the body is not JSON, or it has a number that is not finite or half of a surrogate pair; in the
            latter cases `param` names the field.
    """
    try:
        # Decoded here: `json.loads` also accepts UTF-16 bytes, whose values were not counted.
        body = json.loads(raw.decode())
        for place, why in _unsendable(body):
            where = place_of(place)
            raise HttpError(400, f"{where or 'the body'} {why}", param=where or None)
        return body
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.pos}"
    except UnicodeDecodeError:
        why = "it is not in UTF-8"
    except ValueError:
        why = "a number has too many digits"
    except RecursionError:
        why = "it is nested too deeply"
    raise HttpError(400, f"the body is not JSON: {why}", code="invalid_json")


def _unsendable(value: Any, place: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Values, field names included, that the parser accepts but that cannot be written as JSON: place and reason."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not _encodable(name):
                yield place, "must be valid Unicode: the name of a field has half of a surrogate pair"
            yield from _unsendable(inner, (*place, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _unsendable(inner, (*place, number))
    elif isinstance(value, float) and not math.isfinite(value):
        yield place, "must be a finite number"
    elif isinstance(value, str) and not _encodable(value):
        yield place, "must be valid Unicode: it has half of a surrogate pair"


def _encodable(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def place_of_tenant(request: Request) -> ExitStack:
    """Take one of the request slots of its tenant.

    Raises:
        HttpError: 429, all slots are taken.
    """
    limits: TenantLimits = request.app.state.limits
    return limits.occupy(request.state.tenant.name)


def place_if_large(request: Request) -> AbstractContextManager[Any]:
    """Take a slot of the tenant while a large body is received and parsed; nothing for small bodies.

    Raises:
        HttpError: 429, all slots are taken.
    """
    length = request.headers.get("content-length", "")
    large = not length.isdecimal() or int(length) > _LARGE_BYTES
    return place_of_tenant(request) if large else nullcontext()


async def beside(request: Request, raw: RawT, work: Callable[[RawT], ResultT]) -> ResultT:
    """Run `work` on a body: at once if it is small, else in a thread, in the tenant's turn."""
    threads: TenantThreads = request.app.state.threads
    return work(raw) if len(raw) <= _LARGE_BYTES else await threads.run(request.state.tenant.name, partial(work, raw))


class BodyRoute(APIRoute):
    """A route that bounds and validates its JSON body.

    A large body takes one of its tenant's slots while it is received and parsed; a form takes one until it is answered.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the usual handler: it gets requests with a validated body."""
        handler = super().get_route_handler()
        kind = None if self.body_field is None else self.body_field.field_info.annotation
        if kind is None:
            return handler

        async def handle(request: Request) -> Response:
            if not (isinstance(kind, type) and issubclass(kind, Body)):  # a form: its handler reads the body
                with place_of_tenant(request):
                    return await handler(request)
            if not _is_json(request):
                raise HttpError(
                    400, "the body must be JSON: send `content-type: application/json`", code="invalid_json"
                )
            with place_if_large(request):
                read = await self.read(request, kind)
            return read if isinstance(read, Response) else await handler(read)

        return handle

    async def read(self, request: Request, kind: type[Body]) -> "Request | Response":
        """The request with a validated body; or a response, if another server answers the request.

        Raises:
            HttpError: 400, the body is not JSON, or has too many values.
            RequestValidationError: a field is invalid.
        """
        raw = bytearray()  # of the declared length it would let a client that sends nothing take memory
        async for piece in request.stream():  # `request.body()` holds all pieces beside the whole
            raw += piece
        return ReadRequest(request, await beside(request, raw, partial(_read, kind)))


class ReadRequest(Request):
    """A request with its body validated, and no longer held as bytes."""

    def __init__(self, request: Request, body: Body) -> None:
        super().__init__(request.scope, request.receive)
        self._read = body

    async def body(self) -> bytes:
        """Not empty: FastAPI asks for it before `json`, and ignores what it is."""
        return b"{}"

    async def json(self) -> Body:
        """The validated body; Pydantic accepts it without another validation."""
        return self._read


def _read(kind: type[Body], raw: bytearray) -> Body:
    """Parse and validate a body.

    Raises:
        HttpError: 400, the body is not JSON, or has too many values, or is large and no object.
        RequestValidationError: a field is invalid; the errors have the form that FastAPI's handlers expect.
    """
    begins = raw[:_INDENT_BYTES].lstrip()[:1]
    if len(raw) > _LARGE_BYTES and begins and begins != b"{":
        raise HttpError(400, "the body must be an object")  # before the costly parsing
    refuse_costly(raw, kind.most_values)
    fields = parsed_json(raw)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError(
            [{**detail, "loc": ("body", *detail["loc"])} for detail in errors], body=fields
        ) from error


def _is_json(request: Request) -> bool:
    main, _, kind = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    return main == "application" and (kind == "json" or kind.endswith("+json"))
