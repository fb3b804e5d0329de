"""HTTP to one vLLM server: completions as events, and requests handed through as they are."""

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
"""One event of vLLM's stream of a completion, parsed."""

RawHeaders = Sequence[tuple[bytes, bytes]]
"""Names and values as they are on the wire, in any encoding."""

COMPLETIONS = "/v1/completions"
_VALIDATION = re.compile(r"'loc': '(?P<place>[^']*)', 'msg': (?P<quote>['\"])(?P<message>.*?)(?P=quote)[,}]")
"""The first error of a list of Pydantic's, as vLLM writes them into its message."""

_MOST_CHARACTERS = 2000
"""Of a message of vLLM's, which may quote the request: more is not looked at."""

_ABOUT_FIELD = re.compile(r"(?P<field>[a-z]+(_[a-z]+)*) (must|cannot|contains)\b")
"""How vLLM begins what it says of one field."""

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
"""Headers that concern one connection, or that this server sets itself."""


class UpstreamLostError(ChunkweaveError):
    """A vLLM server could not be reached or went away: another one may do better."""


class UpstreamLateError(UpstreamLostError):
    """A vLLM server has not begun to answer in time: another one may, or the same if it is asked again."""


class UpstreamFailedError(ChunkweaveError):
    """A vLLM server answered that it failed: because of the request, or because its engine is gone.

    Only `Upstream.healthy` tells which.
    """


class Upstream:
    """A vLLM server by its URL, or one of its data-parallel ranks. Belongs to one event loop.

    Leaving a stream early closes its connection, and vLLM aborts a request whose connection is closed.
    """

    def __init__(self, name: str, url: str, *, rank: int | None = None) -> None:
        """Completions go to that `rank` of the server (None: to any). Its `name` then has the rank behind a point."""
        self.server = name
        """The server's name, whatever the rank."""
        self.name = name if rank is None else f"{name}.{rank}"
        self.url = url
        self._rank = {} if rank is None else {_RANK: str(rank)}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=_CONNECT_S)  # a long prefill says nothing for a long time
        self._client = httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def complete_begun(
        self, body: Mapping[str, Any], request_id: str, *, within_s: float | None
    ) -> AsyncGenerator[Event, None]:
        """`complete`, if its first event comes `within_s`; else its connection is closed, and the server aborts it.

        Raises:
            UpstreamLateError: it does not come.
            UpstreamLostError, UpstreamFailedError, HttpError: what `complete` raises.
        """
        async with aclosing(self.complete(body, request_id)) as events:
            try:
                async with asyncio.timeout(within_s):
                    first = await anext(events, None)
            except TimeoutError:
                raise UpstreamLateError(f"{self.name} has not begun to answer within {within_s:.3g} s") from None
            if first is not None:
                yield first
            async for event in events:
                yield event

    async def complete(self, body: Mapping[str, Any], request_id: str) -> AsyncGenerator[Event, None]:
        """Events of a streamed completion, without the mark of its end.

        Raises:
            UpstreamLostError: the server is gone, or ended the stream before its end.
            UpstreamFailedError: it says that it failed.
            HttpError: it refused the request, in its own words; or the body is not JSON.
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
            raise UpstreamLostError(f"{self.name} ended an answer before its end")

    @asynccontextmanager
    async def passed(
        self, method: str, path: str, headers: RawHeaders, body: AsyncIterator[bytes] | bytes
    ) -> AsyncIterator[httpx.Response]:
        """The server's answer to a request that is handed through, its body still to be read.

        Raises:
            HttpError: the path cannot be one.
            UpstreamLostError: it cannot be reached, or goes away.
        """
        # What it sends is handed on byte by byte: it must not be compressed for us alone.
        encoding = [value for name, value in headers if name.lower() == b"accept-encoding"] or [b"identity"]
        kept = [*_end_to_end(headers), *((b"accept-encoding", value) for value in encoding)]
        try:
            request = self._client.build_request(method, path, headers=kept, content=body)
        except httpx.InvalidURL as error:
            raise HttpError(400, "the path or its query cannot be handed on") from error
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
        """The answer to a body, both JSON.

        Raises:
            UpstreamLostError: the server is gone.
            UpstreamFailedError: it says that it failed, or what it says is no JSON.
            HttpError: it refused the body, in its own words; or the body is not JSON.
        """
        request = self._posting(path, body, headers or {})
        with self._lost_if_silent(f"does not answer {path}"):
            reply = await self._client.send(request)
        if reply.status_code != 200:
            raise refusal(reply.status_code, reply.content)
        return _object(reply.content)

    @contextmanager
    def _lost_if_silent(self, what: str) -> Iterator[None]:
        """Raise `UpstreamLostError` for errors of the connection."""
        try:
            yield
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise UpstreamLostError(f"{self.name} {what}: {type(error).__name__} {error}") from error

    async def healthy(self) -> bool:
        """Whether the server says so: one that failed at a request, and is, may be asked for others."""
        try:
            await self.text("/health")
        except UpstreamLostError:
            return False
        return True

    def _posting(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Request:
        """A request with a body as JSON.

        Raises:
            HttpError: 400, the body holds what no JSON can be written from.
        """
        try:
            return self._client.build_request("POST", path, json=body, headers=dict(headers))
        except (ValueError, RecursionError) as error:
            raise HttpError(400, "a value of the request cannot be sent as JSON", code="invalid_json") from error

    async def complete_whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A completion that is not streamed, of this rank if there are several.

        Raises:
            UpstreamLostError: the server is gone, or failed.
            HttpError: it refused the body, in its own words.
        """
        try:
            return await self.post(COMPLETIONS, body, self._rank)
        except UpstreamFailedError as error:
            raise UpstreamLostError(f"{self.name} failed: {error}") from error

    async def model_names(self) -> list[str]:
        """What it serves: the model, then its adapters.

        Raises:
            UpstreamLostError: it does not answer, or serves nothing.
        """
        try:
            names = [str(one["id"]) for one in json.loads(await self.text("/v1/models"))["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UpstreamLostError(f"{self.name} does not say what it serves: {error!r}") from error
        if not names:
            raise UpstreamLostError(f"{self.name} serves no model")
        return names

    async def hides_ranks(self) -> bool:
        """Whether it says in its metrics that it has several data-parallel ranks, and requests go to any of them."""
        if self._rank:
            return False
        with suppress(UpstreamLostError):
            return len(set(_ENGINE.findall(await self.text("/metrics")))) > 1
        return False

    async def serves(self, path: str) -> bool:
        """Whether something takes bodies there: what is missing or switched off does not.

        Raises:
            UpstreamLostError: it does not answer.
        """
        with self._lost_if_silent(f"does not answer {path}"):
            return (await self._client.post(path, json={})).status_code in (400, 422)

    async def text(self, path: str, *, timeout_s: float = 5.0) -> str:
        """The body of a GET.

        Raises:
            UpstreamLostError: there is none.
        """
        with self._lost_if_silent(f"does not answer {path}"):
            return (await self._client.get(path, timeout=timeout_s)).raise_for_status().text

    async def most_tokens(self) -> int | None:
        """The context length that it was started with; None if it does not say.

        Raises:
            UpstreamLostError: it does not answer.
        """
        models = json.loads(await self.text("/v1/models"))["data"]
        found = models[0].get("max_model_len") if models else None
        return found if isinstance(found, int) else None


def handed_back(headers: httpx.Headers) -> RawHeaders:
    """The headers of an answer that its client gets."""
    return _end_to_end(headers.raw)


def _end_to_end(headers: RawHeaders) -> RawHeaders:
    return [(name, value) for name, value in headers if name.lower().decode("latin-1") not in _HOP_BY_HOP]


def _event(data: str) -> Event:
    """An event that is no error.

    Raises:
        UpstreamFailedError: the server says that it failed, or the event is no JSON object.
        HttpError: it says that the request is wrong.
    """
    event = _object(data)
    if error := event.get("error"):
        raise _refusal_of(error if isinstance(error, dict) else {}, 500)
    return event


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UpstreamFailedError("vLLM failed: what it says is no JSON object")
    return found


def refusal(status: int, body: bytes) -> UpstreamFailedError | HttpError:
    """What an answer of vLLM's with an error's status means: `HttpError` for what the client can mend."""
    try:
        reply = json.loads(body)
    except ValueError:
        reply = {}
    error = reply.get("error", reply) if isinstance(reply, dict) else {}
    return _refusal_of(error if isinstance(error, dict) else {"message": error}, status)


def failed_reply(status: int = 502) -> HttpError:
    """The answer to a client whose request vLLM failed at, though it is up."""
    message = "vLLM failed at this request, though it is up: the request may be wrong; vLLM's log says why"
    return HttpError(status, message, code="upstream_error")


def _refusal_of(error: Mapping[str, Any], status: int) -> UpstreamFailedError | HttpError:
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else status
    message = str(error.get("message") or error.get("detail") or "vLLM refused the request")[:_MOST_CHARACTERS]
    if status >= 500:
        return UpstreamFailedError(f"vLLM failed: {message}")
    param = error.get("param")
    if (found := _VALIDATION.search(message)) is not None:
        place, message = found["place"], found["message"]
        param, message = place, f"{place.removeprefix('body.')}: {message}"
    elif not isinstance(param, str):
        about = _ABOUT_FIELD.match(message)
        param = None if about is None else about["field"]
    return HttpError(status, message, param=param and param.removeprefix("body."))
