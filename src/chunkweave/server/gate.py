"""What every HTTP request passes first: a request id, its key, its tenant's rate, and the size of its body."""

import re
from collections.abc import Collection, MutableMapping
from typing import Any, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chunkweave.server.keys import Tenant, bearer
from chunkweave.server.limits import TenantLimits
from chunkweave.server.logs import request_id_of, serving
from chunkweave.server.refusals import RefusalError
from chunkweave.server.settings import LimitSettings
from chunkweave.units import parse_bytes

_INGESTING = re.compile(r"/v1/corpora/[^/]+/documents(/files)?")


class Gated(Protocol):
    """What a gate stands before, and asks whom to let in."""

    @property
    def limits(self) -> TenantLimits:
        """What each tenant has done of late."""

    def tenant_of(self, key: str | None) -> Tenant:
        """Whose key it is; raises `RefusalError` if a key is needed and this is none."""

    def require_ready(self) -> object:
        """Raise `RefusalError` unless requests are answered."""


class Gate:
    """ASGI middleware around the whole app; a request that it refuses costs neither a parsed nor a read body.

    Everything under `/v1` needs a key if the server has any; with `but` everything else, save these paths. The tenant
    goes into `request.state.tenant`.
    """

    def __init__(
        self, app: ASGIApp, service: Gated, limits: LimitSettings, *, but: Collection[str] | None = None
    ) -> None:
        self._app = app
        self._service = service
        self._but = but
        self._max_body_bytes = parse_bytes(limits.max_body)
        self._max_upload_bytes = parse_bytes(limits.max_upload)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
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

        try:
            if self._needs_key(scope["path"]):
                state["tenant"] = self._admitted(headers)
            limit_bytes = self._max_upload_bytes if _INGESTING.fullmatch(scope["path"]) else self._max_body_bytes
            limited = _limited(receive, headers, limit_bytes)
        except RefusalError as refusal:
            await refusal.response(scope, receive, named_send)
            return
        with serving(request_id):
            await self._app(scope, limited, named_send)

    def _needs_key(self, path: str) -> bool:
        return path.startswith("/v1/") if self._but is None else path not in self._but

    def _admitted(self, headers: Headers) -> Tenant:
        tenant = self._service.tenant_of(bearer(headers))
        self._service.limits.count_request(tenant.name)
        self._service.require_ready()
        return tenant


def _limited(receive: Receive, headers: Headers, limit_bytes: int) -> Receive:
    """`receive` that gives at most `limit_bytes` of body.

    Raises:
        RefusalError: 413, the request says that it has more; the returned function raises it when more comes.
    """
    refusal = RefusalError(413, f"the body may have {limit_bytes} bytes", code="body_too_large")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit_bytes:
        raise refusal
    taken = 0

    async def limited() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > limit_bytes:
            raise refusal
        return message

    return limited
