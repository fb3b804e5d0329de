"""ASGI middleware that every HTTP request passes first: checks host, origin, key, rate and body size.

A page of evil.example in a browser on this machine can send requests to servers on loopback. It does so under its own
name that resolves to 127.0.0.1 (DNS rebinding), which only `Host` shows, or from its own origin, which `Origin` and
`Sec-Fetch-Site` show. Keys protect from both, since no page has them.
"""

import asyncio
import re
from collections.abc import Callable, Collection, MutableMapping
from ipaddress import ip_address
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chunkweave_server.errors import HttpError
from chunkweave_server.observability import request_id_of, serving
from chunkweave_server.settings import ANY_HOST, ListenSettings, Settings
from chunkweave_server.tenants import KeyRing, Tenant, TenantLimits, bearer

_PROBES = frozenset({("GET", "/health"), ("GET", "/ready")})
"""Accepted under every host: probes use the addresses of pods, and the response has no data of tenants."""

_PAGE = ("GET", "/")
"""Links of other sites may open the page: it has no data, and other pages cannot frame it."""

_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?")


def _check_host(headers: Headers, listen: ListenSettings, *, opens_page: bool) -> None:
    """Check a request's `Host` and origin.

    Raises:
        HttpError: 421, the server does not accept this `Host`; 403, a page of another origin sent the request.
    """
    hosts = headers.getlist("host")
    host = _name(hosts[0]) if len(hosts) == 1 else None
    if host is None or not _is_ours(host, listen):
        message = f"this server does not accept the host {', '.join(hosts) or '(none)'}: see allowed_hosts"
        raise HttpError(421, message, code="host_not_allowed")
    for origin in headers.getlist("origin"):
        if origin in listen.cors_origins:
            continue
        # An IP address is not trusted here, since pages can be served from one, too.
        page = _name(origin.lower().partition("://")[2])
        if page is None or not (page == host or _is_named(page, listen)):
            message = f"pages of {origin} may not use this server: see allowed_hosts"
            raise HttpError(403, message, code="origin_not_allowed")
    if headers.get("sec-fetch-site") != "cross-site" or headers.getlist("origin"):
        return
    follows_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    if not (opens_page and follows_link):
        raise HttpError(403, "a page of another site may not use this server", code="origin_not_allowed")


def _name(host: str) -> str | None:
    """The name or address in a `Host` header, without the port; None if the header is invalid."""
    match = _HOST.fullmatch(host.strip().lower())
    return None if match is None else match["v6"] or match["name"].removesuffix(".")


def _is_ours(host: str, listen: ListenSettings) -> bool:
    return _is_named(host, listen) or (not listen.loopback and _is_address(host))


def _is_named(host: str, listen: ListenSettings) -> bool:
    """Whether a host is loopback, the address listened on, or in `allowed_hosts`."""
    if host == "localhost" or (_is_address(host) and ip_address(host).is_loopback) or host == listen.host.lower():
        return True
    return any(_matches(host, pattern) for pattern in listen.allowed_hosts)


def _matches(host: str, pattern: str) -> bool:
    pattern = pattern.lower()
    return host == pattern or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


_INGESTING = re.compile(r"/v1/corpora/[^/]+/documents(/files)?")

_UNCOUNTED = ("/v1/requests", "/metrics")
"""Paths that programs poll every few seconds: they do not count towards the rate."""


class Gate:
    """ASGI middleware around the whole app. It refuses requests before their body is read.

    Host and origin are checked first. Without keys, `Host` must be a loopback address, the name or address that the
    server listens on, or one of `allowed_hosts`. If the server listens on another address than loopback, any IP address
    is accepted too, since rebinding needs a name. With keys, hosts are checked only if `allowed_hosts` is given.

    If the server has keys, every request needs one, except the methods and paths of `without_key`. Sets
    `request.state.tenant` and `request.state.request_id`.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        keys: KeyRing,
        limits: TenantLimits,
        *,
        require_ready: Callable[[], object],
        without_key: Collection[tuple[str, str]],
    ) -> None:
        """`require_ready` raises `HttpError` while requests cannot be answered."""
        self._app = app
        self._keys = keys
        self._limits = limits
        self._require_ready = require_ready
        self._without_key = without_key
        self._max_body_bytes = settings.limits.max_body_bytes
        self._max_upload_bytes = settings.limits.max_upload_bytes
        self._listen = settings.listen
        allowed = self._listen.allowed_hosts
        self._checks_hosts = ANY_HOST not in allowed and (bool(allowed) or not len(keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the app, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get("x-request-id"))
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        endpoint = (scope["method"], scope["path"])
        try:
            if self._checks_hosts and endpoint not in _PROBES:
                _check_host(headers, self._listen, opens_page=endpoint == _PAGE)
            if endpoint not in self._without_key:
                state["tenant"] = self._admitted(headers, counted=scope["path"] not in _UNCOUNTED)
            limit_bytes = self._max_upload_bytes if _INGESTING.fullmatch(scope["path"]) else self._max_body_bytes
            limited = _limited(receive, headers, limit_bytes, self._listen.stalled_s)
        except HttpError as error:
            await error.response(scope, receive, named_send)
            return
        with serving(request_id):
            await self._app(scope, limited, named_send)

    def _admitted(self, headers: Headers, *, counted: bool) -> Tenant:
        tenant = self._keys.tenant_of(bearer(headers))
        if counted:
            self._limits.count_request(tenant.name)
        self._require_ready()
        return tenant


_LEAST_BYTES_PER_S = 500
"""Minimum rate of a body, as in Apache's `RequestReadTimeout`."""


def _limited(receive: Receive, headers: Headers, limit_bytes: int, stalled_s: float) -> Receive:
    """Wrap `receive` with limits on a body's size and time: `stalled_s`, plus time for the bytes received so far.

    Raises:
        HttpError: 413, `content-length` is above the limit. The returned function raises 413 when more bytes arrive,
            and 408 when the rest does not arrive in time.
    """
    too_large = HttpError(413, f"the body may have {limit_bytes} bytes", code="body_too_large")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit_bytes:
        raise too_large
    taken, whole, begun_s = 0, False, None

    async def limited() -> Message:
        nonlocal taken, whole, begun_s
        if whole:  # the only further message is the client's disconnect
            return await receive()
        now_s = asyncio.get_running_loop().time()
        begun_s = now_s if begun_s is None else begun_s
        try:
            async with asyncio.timeout_at(begun_s + stalled_s + taken / _LEAST_BYTES_PER_S):
                message = await receive()
        except TimeoutError:
            raise HttpError(
                408, "the body was not received in time", code="body_too_slow", headers={"connection": "close"}
            ) from None
        taken += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if taken > limit_bytes:
            raise too_large
        return message

    return limited


async def tenant_of(request: Request) -> Tenant:
    """The tenant of a request, as set by the gate.

    Raises:
        HttpError: 401, the gate passed the request without a key, so it has no tenant.
    """
    tenant: Tenant | None = getattr(request.state, "tenant", None)
    if tenant is None:
        raise HttpError(401, "this needs an API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    return tenant


OfTenant = Annotated[Tenant, Depends(tenant_of)]
NEEDS_KEY = [Security(HTTPBearer(auto_error=False, description="An API key, if the server has keys."))]
"""For routers whose endpoints need a key: declares it in the schema. The gate enforces it."""
