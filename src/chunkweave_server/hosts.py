"""Under which names a server without keys answers, and for which web pages.

A page of evil.example in a browser on this machine reaches what listens on loopback: under a name of its own that
resolves to 127.0.0.1 (DNS rebinding), which only `Host` shows, or from its own origin, which `Origin` and
`Sec-Fetch-Site` show. Keys protect from both, since no page has them.
"""

import re
from ipaddress import ip_address
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from chunkweave_server.errors import HttpError
from chunkweave_server.observability import request_id_of
from chunkweave_server.settings import ANY_HOST, ListenSettings

if TYPE_CHECKING:
    from chunkweave_server.service import Service

_PROBES = frozenset({("GET", "/health"), ("GET", "/ready")})
"""Answered under every name: probes use the addresses of pods, and nothing of a tenant is in the answer."""

_PAGE = "/"
"""A link of another site may open it: it has no data, and no other page may frame it."""

_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?")


class HostGuard:
    """ASGI middleware that refuses names and pages which are not the server's own, before anything else is done.

    Without keys a request has to name a loopback address, the name or address that the server listens on, or one of
    `allowed_hosts`; where other machines reach the server, any IP address, since rebinding needs a name. With keys
    names are checked only if `allowed_hosts` is given.
    """

    def __init__(self, app: ASGIApp, service: "Service") -> None:
        self._app = app
        self._listen = service.settings.listen
        allowed = self._listen.allowed_hosts
        self._checks = ANY_HOST not in allowed and (bool(allowed) or not len(service.keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "http" and self._checks and (scope["method"], scope["path"]) not in _PROBES:
            headers = Headers(scope=scope)
            try:
                _check(headers, self._listen, opens_page=scope["method"] == "GET" and scope["path"] == _PAGE)
            except HttpError as error:
                response = error.response
                response.headers["x-request-id"] = request_id_of(headers.get("x-request-id"))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _check(headers: Headers, listen: ListenSettings, *, opens_page: bool) -> None:
    """Hold a request's names against what the server answers to.

    Raises:
        HttpError: 421, its `Host` is none of the server's names; 403, a page of another origin sent it.
    """
    given = headers.getlist("host")
    host = _name(given[0]) if len(given) == 1 else None
    if host is None or not _is_ours(host, listen):
        message = f"this server does not answer as {', '.join(given) or 'no host'}: see allowed_hosts"
        raise HttpError(421, message, code="host_not_allowed")
    for origin in headers.getlist("origin"):
        # An address is no proof here: a page may come from one, too.
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
    """The name or address of a `Host` header without its port; None if it is none."""
    found = _HOST.fullmatch(host.strip().lower())
    return None if found is None else found["v6"] or found["name"].removesuffix(".")


def _is_ours(host: str, listen: ListenSettings) -> bool:
    return _is_named(host, listen) or (not listen.loopback and _is_address(host))


def _is_named(host: str, listen: ListenSettings) -> bool:
    """Whether a host is a loopback one, or named by the settings."""
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
