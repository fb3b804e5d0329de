"""Tenants, their API keys, and the limits of rate and concurrency for each tenant."""

import hashlib
import hmac
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport, Saved
from chunkweave_server.errors import HttpError
from chunkweave_server.settings import LimitSettings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{32,64}")
_ROLES = ("tenant", "admin")
_LEAST_CHARACTERS = 24
"""Shorter keys are refused: the hash is fast, so it protects only keys that cannot be guessed."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client with its own keys and limits. An `admin` may see and clear data of all tenants. Anonymous: no name."""

    name: str = ""
    admin: bool = False

    @property
    def anonymous(self) -> bool:
        """Whether the server has no keys, so there are no other tenants."""
        return not self.name

    def salt(self, client_salt: str) -> str:
        """The cache salt of a request with the salt `given`: never equal to a salt of another tenant.

        The anonymous tenant's requests without a salt have none, so that they reuse what `chunkweave cache warm`
        stored.
        """
        if self.anonymous and not client_salt:
            return ""
        return self._digest("cache-salt", client_salt)

    @property
    def folder(self) -> str:
        """Name of this tenant's folder; unique for each tenant."""
        return self._digest("folder", "")

    def _digest(self, purpose: str, name: str) -> str:
        digest = hashlib.blake2b(digest_size=16, person=b"chunkweave-srv")
        for text in (purpose, self.name, name):
            encoded = text.encode("utf-8")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


ANONYMOUS = Tenant(admin=True)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A stored key: its BLAKE2b-256 hash, keyed by a random salt."""

    tenant: Tenant
    salt: str
    hash: str

    @classmethod
    def of(cls, tenant: Tenant, key: str) -> "StoredKey":
        """Hash a key.

        Raises:
            UsageError: the key is too short, or the tenant's name is invalid.
        """
        if len(key) < _LEAST_CHARACTERS:
            raise UsageError(f"an API key must have at least {_LEAST_CHARACTERS} characters: use `chunkweave keys new`")
        if _NAME.fullmatch(tenant.name) is None:
            raise UsageError(f"{tenant.name!r} is not a valid tenant name: use up to 64 letters, digits, - and _")
        salt = secrets.token_hex(16)
        return cls(tenant, salt, _hash(salt, key))

    @property
    def line(self) -> str:
        """Its line in a keys file."""
        return f"{self.tenant.name} {_ROLES[self.tenant.admin]} {self.salt} {self.hash}"


class KeyRing:
    """The hashed keys of a server. A tenant may have several keys, so that keys can be replaced."""

    def __init__(self, keys: Iterable[StoredKey] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """The tenants of the keys, each once."""
        return tuple({key.tenant.name: key.tenant for key in self._keys}.values())

    def find(self, presented: str) -> Tenant | None:
        """The tenant of a key, or None. Takes the same time for every key, known or not."""
        tenant: Tenant | None = None
        for key in self._keys:
            if hmac.compare_digest(_hash(key.salt, presented), key.hash):
                tenant = key.tenant
        return tenant

    def tenant_of(self, key: str | None) -> Tenant:
        """The tenant of a request that presents `key`.

        Raises:
            HttpError: 401, a key is needed and is missing or unknown.
        """
        if not self._keys:
            return ANONYMOUS
        tenant = None if key is None else self.find(key)
        if tenant is None:
            message = "give an API key as `Authorization: Bearer KEY`" if key is None else "no such API key"
            raise HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return tenant


def new_key() -> str:
    """A key with 256 random bits."""
    return f"cw-{secrets.token_urlsafe(32)}"


def read_keys(file: Path | None, variable: str) -> KeyRing:
    """The keys of a file and of an environment variable's value.

    A line of the file is `TENANT tenant|admin SALT HASH`; empty lines and lines that begin with # are ignored. The
    value is a list of plain keys, such as `acme=KEY, ops:admin=KEY`.

    Raises:
        UsageError: the file cannot be read, or a line or an entry is invalid; messages never contain a key.
    """
    keys = [] if file is None else _from_file(file)
    for number, entry in enumerate(filter(None, (part.strip() for part in variable.split(","))), start=1):
        who, equals, key = entry.partition("=")
        name, _, role = who.strip().partition(":")
        if not equals or role not in ("", *_ROLES):
            raise UsageError(f"entry {number} of the API keys is not TENANT=KEY or TENANT:admin=KEY")
        keys.append(StoredKey.of(Tenant(name, admin=role == "admin"), key.strip()))
    return KeyRing(keys)


def add_to_file(file: Path, key: StoredKey) -> None:
    """Append a line to a keys file. A new file is readable only by its owner.

    Raises:
        UsageError: the file cannot be written.
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
            raise UsageError(f"{file}, line {number}: not in the form that `chunkweave keys new` prints")
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


Clock = Callable[[], float]


class TokenBucket:
    """Holds up to `burst` tokens and gains `per_s` tokens a second; a request takes one. Not thread-safe."""

    def __init__(self, per_s: float, burst: int, *, clock: Clock = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._at_s = clock()

    def take(self) -> float:
        """Take a token; returns 0, or the seconds until one is available."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at_s) * self._per_s)
        self._at_s = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_s


class TenantLimits:
    """Rate and concurrency of every tenant. Used in the event loop's thread only.

    Tenants come from the operator's keys, so the number of counts is bounded.
    """

    def __init__(self, settings: LimitSettings, *, clock: Clock = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._running: Counter[str] = Counter()

    def count_request(self, tenant: str) -> None:
        """Count one request of a tenant.

        Raises:
            HttpError: 429, the tenant is above its rate.
        """
        per_minute = self.settings.requests_per_minute
        if per_minute is None:
            return
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = TokenBucket(per_minute / 60, self.settings.burst, clock=self._clock)
        if wait_s := bucket.take():
            raise HttpError(
                429,
                f"more than {per_minute:g} requests a minute; try again in {ceil(wait_s)} s",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )

    def occupy(self, tenant: str) -> ExitStack:
        """Take one of the tenant's slots for concurrent requests; closing the stack frees it.

        Raises:
            HttpError: 429, all slots are taken.
        """
        if self._running[tenant] >= self.settings.max_concurrent:
            raise HttpError(
                429,
                f"{self.settings.max_concurrent} requests of yours are running already, the maximum",
                code="too_many_requests_at_once",
                retry_after_s=1,
            )
        self._running[tenant] += 1
        place = ExitStack()
        place.callback(self._leave, tenant)
        return place

    def running(self, tenant: str) -> int:
        """Number of the tenant's running requests."""
        return self._running[tenant]

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]


@dataclass(slots=True)
class TenantCounts:
    """Totals of one tenant's answers since the server started, in tokens, and the time that reuse saved.

    `full_s` is what full prefill would have taken for the answers whose savings are known.
    """

    requests: int = 0
    prompt_tokens: int = 0
    prefix_exact_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    answer_tokens: int = 0
    tokens_not_computed: int = 0
    full_s: float = 0.0
    time_saved_s: float = 0.0

    def add(self, report: ReuseReport, saved: Saved | None) -> None:
        """Count one answer, and what it `saved` if this is known."""
        self.requests += 1
        self.answer_tokens += report.new_tokens
        self.tokens_not_computed += report.tokens_not_computed
        for name in ("prompt", "prefix_exact", "reused", "recomputed", "computed"):
            tokens = f"{name}_tokens"
            setattr(self, tokens, getattr(self, tokens) + getattr(report, tokens))
        if saved is not None:
            self.full_s += saved.full_s
            self.time_saved_s += saved.seconds

    def as_dict(self) -> dict[str, Any]:
        """As JSON values. `time_saved_s`, and its share of full prefill's time, are null while they are not known."""
        saved = (self.time_saved_s, self.time_saved_s / self.full_s) if self.full_s else (None, None)
        return {**asdict(self), "time_saved_s": saved[0], "saved_share": saved[1]}
