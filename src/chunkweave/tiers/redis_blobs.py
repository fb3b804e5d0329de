"""Bytes in a Valkey or Redis server."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from chunkweave.errors import UsageError
from chunkweave.tiers.blobs import BlobKey, BlobRefused, missing_package, only_os_errors, without_secrets
from chunkweave.types import SegmentId

if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)

_PREFIX = "chunkweave"
_LARGEST_VALUE_BYTES = 512 * 1024 * 1024
"""`proto-max-bulk-len` of a server as it is installed; what is larger ends the connection."""
_SCAN_COUNT = 500
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


class RedisBlobs:
    """`chunkweave.tiers.blobs.BlobStore` over redis-py: one string value a segment, `chunkweave:<fingerprint>:<id>`.

    Values are plain bytes: nothing is pickled, no script runs on the server, and the only commands are GETRANGE, SET,
    UNLINK, STRLEN and SCAN, so that an ACL can allow just these. Retries are `RemoteCalls`' business, not the
    client's. Connections are made on demand and kept.
    """

    expires = True

    def __init__(
        self,
        url: str,
        *,
        password: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        connect_timeout_s: float = 0.5,
        read_timeout_s: float = 1.0,
    ) -> None:
        """Does not connect yet.

        Args:
            url: `redis://[user:password@]host:port/db`, `rediss://` for TLS, `unix://path`; `valkey` for `redis` too.
            password: where the URL has none.
            ca_file: PEM file of the authority that signed the server's certificate; the system's authorities if None.
                Certificate and host name are always verified, unless an option of the URL says otherwise.
            cert_file: PEM file of the client's certificate, if the server asks for one.
            key_file: PEM file of its key.
            connect_timeout_s: longest wait for a connection.
            read_timeout_s: longest wait for the next bytes of a reply (not for all of it).

        Raises:
            UsageError: redis-py is not installed, or the URL is none, TLS files are given without TLS, or two
                passwords.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise missing_package("redis-py") from error
        self.name = without_secrets(url)
        url = re.sub(r"^valkey", "redis", url, count=1)
        parts = urlsplit(url)
        options: dict[str, Any] = {"ssl_ca_certs": ca_file, "ssl_certfile": cert_file, "ssl_keyfile": key_file}
        options = {name: value for name, value in options.items() if value is not None}
        if options and parts.scheme != "rediss":
            raise UsageError(f"TLS files are given, but {self.name} is not a rediss:// URL")
        if parts.scheme == "rediss":
            options["ssl_check_hostname"] = True  # redis-py before 6 does not by itself
        if password is not None:
            if parts.password or "password" in parse_qs(parts.query):
                # redis-py would quietly prefer the URL's
                raise UsageError(f"two passwords for {self.name}: one in the URL, one beside it")
            options["password"] = password
        _warn_of_clear_text(parts.scheme, parts.hostname, password or parts.password)
        try:
            self._client: Redis = redis.Redis.from_url(
                url,
                socket_connect_timeout=connect_timeout_s,
                socket_timeout=read_timeout_s,
                retry=Retry(NoBackoff(), 0),
                decode_responses=False,
                **options,
            )
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}") from error

    def get(self, key: BlobKey, first_bytes: int | None = None) -> bytes | None:
        """The value or its first bytes, or None if there is none."""
        with _answers():
            data = self._client.getrange(_name(key), 0, -1 if first_bytes is None else first_bytes - 1)
        # An empty string is how GETRANGE says that there is no such key; `put` stores none.
        return data if isinstance(data, bytes) and data else None

    def put(self, key: BlobKey, data: bytes, ttl_s: float | None = None) -> None:
        """Store `data`, replacing the value and its time to live."""
        if not data or len(data) > _LARGEST_VALUE_BYTES:
            raise BlobRefused(f"a value of {len(data)} bytes is empty or too large for {self.name}")
        with _answers():
            self._client.set(_name(key), data, px=None if ttl_s is None else max(1, round(ttl_s * 1000)))

    def delete(self, key: BlobKey) -> None:
        """Forget it; the server frees the memory in the background."""
        with _answers():
            self._client.unlink(_name(key))

    def size(self, key: BlobKey) -> int | None:
        """Bytes of the value, or None if there is none."""
        with _answers():
            size = self._client.strlen(_name(key))
        return int(size) or None

    def keys(self, fingerprint: str) -> Iterator[BlobKey]:
        """Keys of one fingerprint by SCAN, which never blocks the server for long."""
        prefix = f"{_PREFIX}:{fingerprint}:"
        names = self._client.scan_iter(match=_escaped(prefix) + "*", count=_SCAN_COUNT)
        while True:
            with _answers():
                name = next(names, None)
            if name is None:
                return
            try:
                yield BlobKey(fingerprint, SegmentId(name.decode("ascii").removeprefix(prefix)))
            except ValueError:  # also of a name that is not ASCII
                logger.debug("%s holds a foreign key under %s", self.name, prefix)

    def close(self) -> None:
        """Disconnect, also where a reply is being waited for."""
        with only_os_errors():
            self._client.connection_pool.disconnect(inuse_connections=True)


def _name(key: BlobKey) -> str:
    return f"{_PREFIX}:{key.fingerprint}:{key.segment}"


def _escaped(text: str) -> str:
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


@contextmanager
def _answers() -> Iterator[None]:
    from redis import exceptions

    with only_os_errors():
        try:
            yield
        except (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError) as error:
            raise PermissionError(str(error)) from error
        except exceptions.TimeoutError as error:
            raise TimeoutError(str(error)) from error
        except (exceptions.OutOfMemoryError, exceptions.ReadOnlyError) as error:
            raise BlobRefused(str(error)) from error
        except exceptions.ResponseError as error:
            # NOAUTH and WRONGPASS have had several exception types in redis-py; the server's own words have not changed
            if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
                raise PermissionError(str(error)) from error
            raise


def _warn_of_clear_text(scheme: str, host: str | None, password: str | None) -> None:
    if scheme == "redis" and password and not _LOOPBACK.fullmatch(host or "localhost"):
        logger.warning("the password for %s travels in clear text: use rediss:// (TLS)", host)
