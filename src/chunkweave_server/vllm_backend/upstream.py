"""HTTP to one vLLM server: completions as events, and forwarded requests."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx

from chunkweave.errors import ChunkweaveError
from chunkweave_server.errors import HttpError

Event = dict[str, Any]
"""One parsed event of vLLM's completion stream."""

RawHeaders = Sequence[tuple[bytes, bytes]]
"""Names and values as bytes, in any encoding."""

COMPLETIONS = "/v1/completions"
_VALIDATION = re.compile(r"'loc': '(?P<place>[^']*)', 'msg': (?P<quote>['\"])(?P<message>.*?)(?P=quote)[,}]")
"""The first of Pydantic's errors in a message of vLLM."""

_MOST_CHARACTERS = 2000
"""Most characters that are read of vLLM's message, which may quote the request."""

_ABOUT_FIELD = re.compile(r"(?P<field>[a-z]+(_[a-z]+)*) (must|cannot|contains)\b")
"""Beginning of vLLM's messages about one field."""

_RANK = "x-data-parallel-rank"
_CONNECT_S = 5.0
_DONE = "[DONE]"
_ENGINE = re.compile(r'^vllm:num_requests_running\{.*\bengine="(\d+)"', re.MULTILINE)
_HOP_BY_HOP = frozenset(
    {
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
    }
)
"""Headers of one connection, and headers that this server sets itself; not forwarded."""


class UpstreamLostError(ChunkweaveError):
    """A vLLM server could not be reached or closed the connection: another one may succeed."""


class UpstreamLateError(UpstreamLostError):
    """A vLLM server has not started to answer in time: a retry may succeed."""


class UpstreamFailedError(ChunkweaveError):
    """A vLLM server answered with a failure: because of the request, or because its engine has died.

    `Upstream.healthy` distinguishes the two.
    """


class Upstream:
    """A vLLM server at a URL, or one of its data-parallel ranks. Used in one event loop only.

    Closing a stream early closes its connection; vLLM then aborts the request.
    """

    def __init__(self, name: str, url: str, *, rank: int | None = None) -> None:
        """Completions are sent to this `rank` of the server (None: any). `self.name` is then `name.rank`."""
        self.server = name
        """The server's name, without the rank."""
        self.name = name if rank is None else f"{name}.{rank}"
        self.url = url
        self.rank = rank
        self._rank = {} if rank is None else {_RANK: str(rank)}
        # vLLM closes a connection that is idle for 5 s; one that is used at that moment would seem a lost server.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        timeout = httpx.Timeout(None, connect=_CONNECT_S)  # a long prefill sends nothing for a long time
        self._client = httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def complete_begun(
        self, body: Mapping[str, Any], request_id: str, *, within_s: float | None
    ) -> AsyncGenerator[Event, None]:
        """`complete` with a time limit for the first event; after that the connection is closed and vLLM aborts it.

        Raises:
            UpstreamLateError: no event arrived `within_s`.
            UpstreamLostError, UpstreamFailedError, HttpError: as in `complete`.
        """
        async with aclosing(self.complete(body, request_id)) as events:
            try:
                async with asyncio.timeout(within_s):
                    first = await anext(events, None)
            except TimeoutError:
                raise UpstreamLateError(f"{self.name} has not started to answer within {within_s:.3g} s") from None
            if first is not None:
                yield first
            async for event in events:
                yield event

    async def complete(self, body: Mapping[str, Any], request_id: str) -> AsyncGenerator[Event, None]:
        """Events of a streamed completion, without the final `[DONE]`.

        Raises:
            UpstreamLostError: the server is gone, or closed the stream early.
            UpstreamFailedError: the server answered with a failure.
            HttpError: the server refused the request, with its message; or the body cannot be sent as JSON.
        """
        ended = False
        request = self._posting(COMPLETIONS, body, {"x-request-id": request_id, **self._rank})
        with self._lost_if_silent("is gone"):
            async with self._streamed(request) as reply:
                if reply.status_code != 200:
                    raise refusal(reply.status_code, await reply.aread())
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == line:  # an empty line between events, or a comment
                        continue
                    if data == _DONE:
                        ended = True
                        break
                    yield _event(data)
        if not ended:
            raise UpstreamLostError(f"{self.name} closed the stream of an answer early")

    @asynccontextmanager
    async def passed(
        self, method: str, path: str, headers: RawHeaders, body: AsyncIterator[bytes] | bytes
    ) -> AsyncIterator[httpx.Response]:
        """Forward a request; yields the response with its body unread.

        Raises:
            HttpError: 400, the path is invalid.
            UpstreamLostError: the server cannot be reached, or closed the connection.
        """
        # The body is forwarded unchanged, so it must have an encoding that the client accepts.
        encoding = [value for name, value in headers if name.lower() == b"accept-encoding"] or [b"identity"]
        forwarded = [*_end_to_end(headers), *((b"accept-encoding", value) for value in encoding)]
        try:
            request = self._client.build_request(method, path, headers=forwarded, content=body)
        except httpx.InvalidURL as error:
            raise HttpError(400, "the path or its query cannot be forwarded") from error
        with self._lost_if_silent("is gone"):
            async with self._streamed(request) as reply:
                yield reply

    @asynccontextmanager
    async def _streamed(self, request: httpx.Request) -> AsyncIterator[httpx.Response]:
        reply = await self._client.send(request, stream=True)
        try:
            yield reply
        finally:
            await reply.aclose()

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Post a JSON body; returns the JSON object of the response.

        Raises:
            UpstreamLostError: the server is gone.
            UpstreamFailedError: the server answered with a failure, or not with a JSON object.
            HttpError: the server refused the body, with its message; or the body cannot be sent as JSON.
        """
        request = self._posting(path, body, headers or {})
        with self._lost_if_silent(f"does not answer {path}"):
            reply = await self._client.send(request)
        if reply.status_code != 200:
            raise refusal(reply.status_code, reply.content)
        return _object(reply.content)

    @contextmanager
    def _lost_if_silent(self, what: str) -> Iterator[None]:
        """Convert errors of the connection to `UpstreamLostError`."""
        try:
            yield
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise UpstreamLostError(f"{self.name} {what}: {type(error).__name__} {error}") from error

    async def healthy(self) -> bool:
        """Whether the server's health check succeeds."""
        try:
            await self.text("/health")
        except UpstreamLostError:
            return False
        return True

    def _posting(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Request:
        """A request with a JSON body.

        Raises:
            HttpError: 400, the body cannot be written as JSON.
        """
        try:
            return self._client.build_request("POST", path, json=body, headers=dict(headers))
        except (ValueError, RecursionError) as error:
            raise HttpError(400, "a value of the request cannot be sent as JSON", code="invalid_json") from error

    async def complete_whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A completion that is not streamed, on this rank if there are several.

        Raises:
            UpstreamLostError: the server is gone, or answered with a failure.
            HttpError: the server refused the body, with its message.
        """
        try:
            return await self.post(COMPLETIONS, body, self._rank)
        except UpstreamFailedError as error:
            raise UpstreamLostError(f"{self.name} failed: {error}") from error

    async def model_names(self) -> list[str]:
        """Names of the served models: the model, then its adapters.

        Raises:
            UpstreamLostError: the server does not answer, or serves no model.
        """
        try:
            names = [str(served_model["id"]) for served_model in json.loads(await self.text("/v1/models"))["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UpstreamLostError(f"{self.name} does not list its models: {error!r}") from error
        if not names:
            raise UpstreamLostError(f"{self.name} serves no model")
        return names

    async def hides_ranks(self) -> bool:
        """Whether its metrics show several data-parallel ranks although this upstream has no rank."""
        if self._rank:
            return False
        with suppress(UpstreamLostError):
            return len(set(_ENGINE.findall(await self.text("/metrics")))) > 1
        return False

    async def serves(self, path: str) -> bool:
        """Whether an endpoint exists at `path` and is switched on.

        Raises:
            UpstreamLostError: the server does not answer.
        """
        with self._lost_if_silent(f"does not answer {path}"):
            return (await self._client.post(path, json={})).status_code in (400, 422)

    async def text(self, path: str, *, timeout_s: float = 5.0) -> str:
        """The response body of a GET.

        Raises:
            UpstreamLostError: the server does not answer with success.
        """
        with self._lost_if_silent(f"does not answer {path}"):
            return (await self._client.get(path, timeout=timeout_s)).raise_for_status().text

    async def most_tokens(self) -> int | None:
        """The server's context length; None if it does not report one.

        Raises:
            UpstreamLostError: the server does not answer.
        """
        models = json.loads(await self.text("/v1/models"))["data"]
        most_tokens = models[0].get("max_model_len") if models else None
        return most_tokens if isinstance(most_tokens, int) else None


def handed_back(headers: httpx.Headers) -> RawHeaders:
    """The headers of a response that are passed to the client."""
    return _end_to_end(headers.raw)


def _end_to_end(headers: RawHeaders) -> RawHeaders:
    return [(name, value) for name, value in headers if name.lower().decode("latin-1") not in _HOP_BY_HOP]


def _event(data: str) -> Event:
    """Parse an event.

    Raises:
        UpstreamFailedError: the event is a failure of the server, or not a JSON object.
        HttpError: the event is a refusal of the request.
    """
    event = _object(data)
    if error := event.get("error"):
        raise _refusal_of(error if isinstance(error, dict) else {}, 500)
    return event


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise UpstreamFailedError("vLLM failed: its response is not a JSON object")
    return body


def refusal(status: int, body: bytes) -> UpstreamFailedError | HttpError:
    """Convert an error response of vLLM: 4xx becomes `HttpError`, 5xx `UpstreamFailedError`."""
    try:
        reply = json.loads(body)
    except ValueError:
        reply = {}
    error = reply.get("error", reply) if isinstance(reply, dict) else {}
    return _refusal_of(error if isinstance(error, dict) else {"message": error}, status)


def failed_reply(status: int = 502) -> HttpError:
    """The error for a client whose request failed in a vLLM server that is up."""
    message = "vLLM failed at this request, but is up: the request may be invalid; see vLLM's log"
    return HttpError(status, message, code="upstream_error")


def _refusal_of(error: Mapping[str, Any], status: int) -> UpstreamFailedError | HttpError:
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else status
    message = str(error.get("message") or error.get("detail") or "vLLM refused the request")[:_MOST_CHARACTERS]
    if status >= 500:
        return UpstreamFailedError(f"vLLM failed: {message}")
    param = error.get("param")
    if (match := _VALIDATION.search(message)) is not None:
        place = match["place"]
        message = match["message"]
        param = place
        message = f"{place.removeprefix('body.')}: {message}"
    elif not isinstance(param, str):
        about = _ABOUT_FIELD.match(message)
        param = None if about is None else about["field"]
    return HttpError(status, message, param=param and param.removeprefix("body."))
