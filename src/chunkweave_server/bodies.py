"""JSON bodies: bounded before they are parsed, and where they are large, parsed and validated beside the event loop.

`json.loads` and Pydantic hold the interpreter's lock in one call, so that a thread alone would not help other requests:
what such a call costs is bounded first, by the number of values.
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

NOTHING_NAMED = ("x-chunkweave", "no documents named: nothing woven")
"""The header of an answer over nothing."""


@cache
def say_that_nothing_was_named() -> None:
    """Log, once in a process, that a request named no documents: a client that expects weaving would wonder."""
    logger.info("a request named no documents: nothing is woven; send `documents` or `chunkweave.corpus` (said once)")


_LARGE_BYTES = 1 << 16
"""A smaller body is read where the request is: a thread would cost more."""

_WINDOW_BYTES = 1 << 20
_BLOCK_BYTES = 2048


def refuse_costly(raw: bytes, most_values: int) -> None:
    """Refuse a body that would cost much to parse, whatever its size; parses nothing.

    Counted are lists, objects, and values behind commas.

    Raises:
        HttpError: 400, it has more than `most_values`, or a number of thousands of digits.
    """
    begun, digits = 0, False
    for window in _windows(raw):
        begun += int(np.count_nonzero(_begins_value(window)))
        digits = digits or _has_long_number(_is_digit(window))
    if begun <= most_values and not digits:
        return  # even if all of these characters are outside of texts
    found, quoted, escaped = 0, False, False
    for window in _windows(raw):
        quotes = window == ord('"')
        escaped = _drop_escaped(window, quotes, escaped)
        outside = ~(np.logical_xor.accumulate(quotes) ^ quoted)
        found += int(np.count_nonzero(_begins_value(window) & outside))
        if found > most_values:
            raise HttpError(400, f"the body may have {most_values} values in lists and objects", code="too_many_values")
        if _has_long_number(_is_digit(window) & outside):
            raise HttpError(400, "the body is no JSON: a number has too many digits", code="invalid_json")
        quoted = not outside[-1]


def _windows(raw: bytes) -> Iterator[Any]:
    """The bytes in arrays of at most a MiB: NumPy lets other threads run while it works on one."""
    for start in range(0, len(raw), _WINDOW_BYTES):
        yield np.frombuffer(raw, np.uint8, min(_WINDOW_BYTES, len(raw) - start), start)


def _begins_value(window: Any) -> Any:
    return (window == ord(",")) | (window == ord("[")) | (window == ord("{"))


def _is_digit(window: Any) -> Any:
    return (window >= ord("0")) & (window <= ord("9"))


def _has_long_number(digits: Any) -> bool:
    """Whether there are twice `_BLOCK_BYTES` digits in a row, and maybe if there are fewer."""
    whole = len(digits) // _BLOCK_BYTES * _BLOCK_BYTES
    return bool(digits[:whole].reshape(-1, _BLOCK_BYTES).all(axis=1).any())


def _drop_escaped(window: Any, quotes: Any, escaped: bool) -> bool:
    """Clear the `quotes` that a backslash escapes; `escaped` says of the window's first byte, the result of the next.

    Of a run of backslashes the first, third and so on escape what follows them.
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


def parsed_json(raw: bytes) -> Any:
    """What a body says.

    Raises:
        HttpError: 400, it is no JSON, or holds a number that is not finite or half of a surrogate pair; the latter
            names the field.
    """
    try:
        body = json.loads(raw.decode())  # bytes may also be UTF-16 to it, in which nothing was counted
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
    raise HttpError(400, f"the body is no JSON: {why}", code="invalid_json")


def _unsendable(value: Any, place: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Values that a parser takes and no JSON can be written from: where, and what is wrong. Names of fields count."""
    if isinstance(value, dict):
        for name, one in value.items():
            if not _encodable(name):
                yield place, "must be valid Unicode: the name of a field has half of a surrogate pair"
            yield from _unsendable(one, (*place, name))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _unsendable(one, (*place, number))
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
    """One of its tenant's places for a request.

    Raises:
        HttpError: 429, all places are taken.
    """
    limits: TenantLimits = request.app.state.limits
    return limits.occupy(request.state.tenant.name)


def place_if_large(request: Request) -> AbstractContextManager[Any]:
    """One of a tenant's places while a large body comes and is read, or nothing.

    Raises:
        HttpError: 429, all places are taken.
    """
    length = request.headers.get("content-length", "")
    large = not length.isdecimal() or int(length) > _LARGE_BYTES
    return place_of_tenant(request) if large else nullcontext()


async def beside(request: Request, raw: bytes, work: Callable[[bytes], ResultT]) -> ResultT:
    """Do something with a body that was read: at once, or in one of its tenant's turns if it is large."""
    threads: TenantThreads = request.app.state.threads
    return work(raw) if len(raw) <= _LARGE_BYTES else await threads.run(request.state.tenant.name, partial(work, raw))


class BodyRoute(APIRoute):
    """A route whose JSON body is read here. A large one takes one of its tenant's places while it comes and is read.

    A form takes one until it is answered.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """A handler that gives the usual one a body that is valid."""
        handler = super().get_route_handler()
        kind = None if self.body_field is None else self.body_field.field_info.annotation
        if kind is None:
            return handler

        async def handle(request: Request) -> Response:
            if not (isinstance(kind, type) and issubclass(kind, Body)):  # a form, which its handler reads on
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
        """The request with a valid body; or an answer, if it is not ours to give.

        Raises:
            HttpError: 400, the body is no JSON, or has too many values.
            RequestValidationError: a field is wrong.
        """
        raw = await request.body()
        return ReadRequest(request, raw, await beside(request, raw, partial(_read, kind)))


class ReadRequest(Request):
    """A request whose body was read and is valid."""

    def __init__(self, request: Request, raw: bytes, body: Body) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._read = body

    async def body(self) -> bytes:
        """As it came."""
        return self._raw

    async def json(self) -> Body:
        """What it says. Pydantic takes what is valid as it is."""
        return self._read


def _read(kind: type[Body], raw: bytes) -> Body:
    """A valid body of that kind.

    Raises:
        HttpError: 400, it is no JSON, or has too many values.
        RequestValidationError: a field is wrong; it has the first errors, as FastAPI's handlers know them.
    """
    refuse_costly(raw, kind.most_values)
    fields = parsed_json(raw)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in errors], body=fields) from error


def _is_json(request: Request) -> bool:
    main, _, kind = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    return main == "application" and (kind == "json" or kind.endswith("+json"))
