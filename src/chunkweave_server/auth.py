"""Who may use the server: keys, tenants, and what every HTTP request passes first."""

import asyncio
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chunkweave.errors import UsageError
from chunkweave_server.errors import HttpError
from chunkweave_server.observability import request_id_of, serving
from chunkweave_server.settings import ListenSettings

if TYPE_CHECKING:
    from chunkweave_server.service import Service

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{32,64}")
_ROLES = ("tenant", "admin")
_LEAST_CHARACTERS = 24
"""A keyed hash is no slow one: it protects keys that nobody can guess, so short ones are refused."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is. An `admin` may look at, and empty, what all tenants share. The anonymous one has no name."""

    name: str = ""
    admin: bool = False

    @property
    def anonymous(self) -> bool:
        """Whether the server asks for no keys, so that there are no other tenants."""
        return not self.name

    def salt(self, given: str) -> str:
        """The cache salt of a request that gives `given` as its own: no other tenant's is ever equal.

        What nobody names and salts has none, so that `chunkweave cache warm` works for it.
        """
        if self.anonymous and not given:
            return ""
        return self._digest("cache-salt", given)

    @property
    def folder(self) -> str:
        """The name of a folder that is this tenant's alone."""
        return self._digest("folder", "")

    def _digest(self, purpose: str, given: str) -> str:
        digest = hashlib.blake2b(digest_size=16, person=b"chunkweave-srv")
        for text in (purpose, self.name, given):
            encoded = text.encode("utf-8")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


ANONYMOUS = Tenant(admin=True)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as it is kept: the BLAKE2b-256 of it, keyed by a salt of its own."""

    tenant: Tenant
    salt: str
    hash: str

    @classmethod
    def of(cls, tenant: Tenant, key: str) -> "StoredKey":
        """Hash a key.

        Raises:
            UsageError: it is so short that it could be guessed, or the tenant's name is none.
        """
        if len(key) < _LEAST_CHARACTERS:
            raise UsageError(f"an API key must have at least {_LEAST_CHARACTERS} characters: use `chunkweave keys new`")
        if _NAME.fullmatch(tenant.name) is None:
            raise UsageError(f"not a tenant's name: {tenant.name!r}; use up to 64 letters, digits, - and _")
        salt = secrets.token_hex(16)
        return cls(tenant, salt, _hash(salt, key))

    @property
    def line(self) -> str:
        """The line of a keys file."""
        return f"{self.tenant.name} {_ROLES[self.tenant.admin]} {self.salt} {self.hash}"


class KeyRing:
    """The keys that a server knows, hashed. Several keys may be one tenant's, so that keys can be replaced."""

    def __init__(self, keys: Iterable[StoredKey] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """Whose keys they are, each once."""
        return tuple({key.tenant.name: key.tenant for key in self._keys}.values())

    def find(self, presented: str) -> Tenant | None:
        """The tenant of a key, or None. Takes the same time for every key, known or not."""
        found: Tenant | None = None
        for key in self._keys:
            if hmac.compare_digest(_hash(key.salt, presented), key.hash):
                found = key.tenant
        return found


def new_key() -> str:
    """A key with 256 random bits."""
    return f"cw-{secrets.token_urlsafe(32)}"


def read_keys(file: Path | None, variable: str) -> KeyRing:
    """The keys of a file and of an environment variable's value.

    A line of the file is `TENANT tenant|admin SALT HASH`; empty ones and those that begin with # do not count. The
    value is a list such as `acme=KEY, ops:admin=KEY`, of keys as they are.

    Raises:
        UsageError: the file cannot be read, or a line or an entry is none; no message holds a key.
    """
    keys = [] if file is None else _from_file(file)
    for number, entry in enumerate(filter(None, (part.strip() for part in variable.split(","))), start=1):
        who, found, key = entry.partition("=")
        name, _, role = who.strip().partition(":")
        if not found or role not in ("", *_ROLES):
            raise UsageError(f"entry {number} of the API keys is not TENANT=KEY or TENANT:admin=KEY")
        keys.append(StoredKey.of(Tenant(name, admin=role == "admin"), key.strip()))
    return KeyRing(keys)


def add_to_file(file: Path, key: StoredKey) -> None:
    """Add a line to a keys file, which is made for its owner only if it is not there.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as lines:
            lines.write(f"{key.line}\n")
    except OSError as error:
        raise UsageError(f"the keys file {file} cannot be written: {error}") from error


def _from_file(file: Path) -> list[StoredKey]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the keys file {file} cannot be read: {error}") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 4 or words[1] not in _ROLES or not _NAME.fullmatch(words[0]) or not _are_hex(words[2:]):
            raise UsageError(f"{file}, line {number}: not a line that `chunkweave keys new` prints")
        keys.append(StoredKey(Tenant(words[0], admin=words[1] == "admin"), words[2], words[3]))
    return keys


def _are_hex(words: Iterable[str]) -> bool:
    return all(_HEX.fullmatch(word) for word in words)


def _hash(salt: str, key: str) -> str:
    return hashlib.blake2b(key.encode("utf-8", "replace"), key=bytes.fromhex(salt), digest_size=32).hexdigest()


def bearer(headers: Mapping[str, str]) -> str | None:
    """The key that a request presents as `Authorization: Bearer KEY`, or None."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def tenant_of(keys: KeyRing, key: str | None) -> Tenant:
    """Whose request it is that presents `key`.

    Raises:
        HttpError: 401, a key is needed, and this is none.
    """
    if not len(keys):
        return ANONYMOUS
    tenant = None if key is None else keys.find(key)
    if tenant is None:
        message = "give an API key as `Authorization: Bearer KEY`" if key is None else "no such API key"
        raise HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    return tenant


def refuse_open_door(listen: ListenSettings, keys: KeyRing) -> None:
    """Refuse to serve everybody on a network by accident.

    Raises:
        UsageError: there are no keys, other machines reach the address, and nobody said that they may.
    """
    if not len(keys) and not listen.loopback and not listen.allow_anonymous:
        raise UsageError(
            f"{listen.host} can be reached from other machines: give API keys (keys_file, CHUNKWEAVE_API_KEYS), "
            f"or allow_anonymous if everybody there may use the server"
        )


_INGESTING = re.compile(r"/v1/corpora/[^/]+/documents(/files)?")

_UNCOUNTED = ("/v1/page/live", "/metrics")
"""What a program asks for every few seconds: it does not count towards the rate."""


class Gate:
    """ASGI middleware around the whole app; a request that it refuses costs neither a parsed nor a read body.

    If the server has keys, everything needs one but the methods and paths of `without_key`. The tenant goes into
    `request.state.tenant`.
    """

    def __init__(self, app: ASGIApp, service: "Service", *, without_key: Collection[tuple[str, str]]) -> None:
        self._app = app
        self._service = service
        self._without_key = without_key
        self._max_body_bytes = service.settings.limits.max_body_bytes
        self._max_upload_bytes = service.settings.limits.max_upload_bytes
        self._stalled_s = service.settings.listen.stalled_s

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
            if (scope["method"], scope["path"]) not in self._without_key:
                state["tenant"] = self._admitted(headers, counted=scope["path"] not in _UNCOUNTED)
            limit_bytes = self._max_upload_bytes if _INGESTING.fullmatch(scope["path"]) else self._max_body_bytes
            limited = _limited(receive, headers, limit_bytes, self._stalled_s)
        except HttpError as error:
            await error.response(scope, receive, named_send)
            return
        with serving(request_id):
            await self._app(scope, limited, named_send)

    def _admitted(self, headers: Headers, *, counted: bool) -> Tenant:
        tenant = self._service.tenant_of(bearer(headers))
        if counted:
            self._service.limits.count_request(tenant.name)
        self._service.require_ready()
        return tenant


_LEAST_BYTES_PER_S = 500
"""A slower body is not waited for; the usual rate of Apache's `RequestReadTimeout`."""


def _limited(receive: Receive, headers: Headers, limit_bytes: int, stalled_s: float) -> Receive:
    """`receive` that gives at most `limit_bytes` of body, which has `stalled_s` to come and more for what did come.

    Raises:
        HttpError: 413, the request says that it has more; the returned function raises it when more comes, and 408 when
            the rest does not come in time.
    """
    too_large = HttpError(413, f"the body may have {limit_bytes} bytes", code="body_too_large")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit_bytes:
        raise too_large
    taken, whole, begun_s = 0, False, None

    async def limited() -> Message:
        nonlocal taken, whole, begun_s
        if whole:  # what comes now is that the client has gone
            return await receive()
        now_s = asyncio.get_running_loop().time()
        begun_s = now_s if begun_s is None else begun_s
        try:
            async with asyncio.timeout_at(begun_s + stalled_s + taken / _LEAST_BYTES_PER_S):
                message = await receive()
        except TimeoutError:
            raise HttpError(
                408, "the rest of the body did not come", code="body_too_slow", headers={"connection": "close"}
            ) from None
        taken += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if taken > limit_bytes:
            raise too_large
        return message

    return limited
