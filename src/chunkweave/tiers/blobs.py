"""The interface of the remote tier to servers and object stores: named bytes on another machine."""

import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from chunkweave.errors import ChunkweaveError, UsageError, install_extra
from chunkweave.types import SegmentId

if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)


_FINGERPRINT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_SEGMENT = re.compile(r"[0-9a-f]{32}")
_REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")


class BlobRefused(OSError):  # noqa: N818  (named for what happened, like FileNotFoundError's siblings)
    """The store is reachable but refused the value: full, read-only, or the value is too large. Not retried."""


@dataclass(frozen=True, slots=True)
class BlobKey:
    """Names one segment's bytes; each blob store chooses the spelling on the wire.

    Both names are validated here, so no store has to guard against `..`, globs or separators.

    Raises:
        ValueError: the fingerprint has characters other than letters, digits and `._-`, or the segment is not 32 hex
            digits.
    """

    fingerprint: str
    segment: SegmentId

    def __post_init__(self) -> None:
        if not _FINGERPRINT.fullmatch(self.fingerprint) or ".." in self.fingerprint:
            raise ValueError(f"not a fingerprint: {self.fingerprint!r}")
        if not _SEGMENT.fullmatch(self.segment):
            raise ValueError(f"not a segment id: {self.segment!r}")


class BlobStore(Protocol):
    """Named, immutable bytes in a store that may be slow, gone, restarted, full, or shared with other processes.

    Thread-safe. Every method may block as long as the store does (`RemoteCalls` bounds that). It raises `OSError`
    without an answer, `PermissionError` if access is denied, `BlobRefused` if the store refuses. A missing key is not
    an error. The caller must validate the bytes returned.
    """

    name: str
    """The location for logs, without user, password and options."""

    expires: bool
    """Whether `put` accepts a time to live."""

    def get(self, key: BlobKey, first_bytes: int | None = None) -> bytes | None:
        """The bytes (at most the first `first_bytes`), or None if there are none."""

    def put(self, key: BlobKey, data: bytes, ttl_s: float | None = None) -> None:
        """Store `data` under `key`, replacing earlier bytes; readers see the old bytes or the new ones.

        Raises:
            UsageError: `ttl_s` is given, but this store cannot expire keys.
        """

    def delete(self, key: BlobKey) -> None:
        """Delete a key; unknown keys are ignored."""

    def size(self, key: BlobKey) -> int | None:
        """Number of bytes under `key`, or None if there are none. Does not transfer them."""

    def keys(self, fingerprint: str) -> Iterator[BlobKey]:
        """Keys of one fingerprint, in no order, fetched page by page while iterating; foreign names are skipped.

        Concurrent puts and deletions may be seen or not, and a key may occur twice.
        """

    def close(self) -> None:
        """Close all connections: running calls in other threads fail, later calls open new connections."""


def open_blobs(url: str) -> BlobStore:
    """The blob store for `url`; connects at the first call.

    `redis://`, `rediss://` (TLS), `valkey://`, `valkeys://` and `unix://` are a Valkey or Redis server,
    everything else is a URL of fsspec (`s3://bucket/path`, `gs://bucket/path`, `file:///path`, `memory://name`).

    Raises:
        UsageError: the URL is of no such kind, or the package that it needs is not installed.
    """
    return RedisBlobs(url) if urlsplit(url).scheme in _REDIS_SCHEMES else FsspecBlobs(url)


def without_secrets(url: str) -> str:
    """`url` for logs: without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def missing_package(name: str) -> UsageError:
    """The error for a client package that is not installed."""
    return UsageError(f"a remote store of this kind needs {name}: {install_extra('remote')}")


@contextmanager
def only_os_errors() -> Iterator[None]:
    """Convert any exception of a client library to `OSError`; our own errors pass.

    Client libraries raise many types (HTTP errors of object stores; an AttributeError when `close` cuts a connection
    during a reply), and a list of them would be outdated with their next release.
    """
    try:
        yield
    except (OSError, ChunkweaveError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


_PREFIX = "chunkweave"
_LARGEST_VALUE_BYTES = 512 * 1024 * 1024
"""A server's default `proto-max-bulk-len`; a larger value ends the connection."""
_SCAN_COUNT = 500
_CONNECT_TIMEOUT_S = 0.5
_READ_TIMEOUT_S = 1.0
"""Longest wait for the next bytes of a reply, not for the whole reply."""
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


class RedisBlobs:
    """`chunkweave.tiers.blobs.BlobStore` over redis-py: one string value per segment, `chunkweave:<fingerprint>:<id>`.

    Values are plain bytes: nothing is pickled, and no script runs on the server. The only commands are GETRANGE, SET,
    UNLINK, STRLEN and SCAN, so an ACL can allow just these. `RemoteCalls` retries, the client does not. Connections are
    opened on demand and kept.
    """

    expires = True

    def __init__(self, url: str) -> None:
        """Create the store without connecting.

        `url` is `redis://[user:password@]host:port/db`, `rediss://` for TLS, or `unix://path`; `valkey` for `redis`
        too. With TLS, certificate and host name are verified, unless an option of the URL says otherwise:
        `?ssl_ca_certs=FILE` names an authority, `ssl_certfile` and `ssl_keyfile` the client's own certificate.

        Raises:
            UsageError: redis-py is not installed, or the URL is invalid.
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
        # Not the default before redis-py 6.
        options: dict[str, Any] = {"ssl_check_hostname": True} if parts.scheme == "rediss" else {}
        local = _LOOPBACK.fullmatch(parts.hostname or "localhost")
        if parts.scheme == "redis" and parts.password and not local:
            logger.warning("the password for %s travels in clear text: use rediss:// (TLS)", parts.hostname)
        try:
            self._client: Redis = redis.Redis.from_url(
                url,
                socket_connect_timeout=_CONNECT_TIMEOUT_S,
                socket_timeout=_READ_TIMEOUT_S,
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
        # GETRANGE returns an empty string for a missing key; `put` stores no empty values.
        return data if isinstance(data, bytes) and data else None

    def put(self, key: BlobKey, data: bytes, ttl_s: float | None = None) -> None:
        """Store `data`, replacing the value and its time to live."""
        if not data or len(data) > _LARGEST_VALUE_BYTES:
            raise BlobRefused(f"a value of {len(data)} bytes is empty or too large for {self.name}")
        with _answers():
            self._client.set(_name(key), data, px=None if ttl_s is None else max(1, round(ttl_s * 1000)))

    def delete(self, key: BlobKey) -> None:
        """Delete the key; the server frees the memory in the background."""
        with _answers():
            self._client.unlink(_name(key))

    def size(self, key: BlobKey) -> int | None:
        """Bytes of the value, or None if there is none."""
        with _answers():
            size = self._client.strlen(_name(key))
        return int(size) or None

    def keys(self, fingerprint: str) -> Iterator[BlobKey]:
        """Keys of one fingerprint by SCAN, which does not block the server for long."""
        prefix = f"{_PREFIX}:{fingerprint}:"
        escaped = re.sub(r"([*?\[\]\\^])", r"\\\1", prefix)
        names = self._client.scan_iter(match=f"{escaped}*", count=_SCAN_COUNT)
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
        """Disconnect, including connections that wait for a reply."""
        with only_os_errors():
            self._client.connection_pool.disconnect(inuse_connections=True)


def _name(key: BlobKey) -> str:
    return f"{_PREFIX}:{key.fingerprint}:{key.segment}"


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
            # redis-py versions raise different types for NOAUTH and WRONGPASS; the server's messages stay the same
            if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
                raise PermissionError(str(error)) from error
            raise


_SUFFIX = ".safetensors"
_WHOLE_PUTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"})
"""Protocols that create objects atomically; on others a temporary file is renamed."""


class FsspecBlobs:
    """`chunkweave.tiers.blobs.BlobStore` over any file system of fsspec.

    Names are `<root>/<fingerprint>/<2 hex>/<id>.safetensors`, as on disk, so a folder of the disk tier can be copied to
    a bucket unchanged. On `file://`, folders and files are readable only by their owner. Nothing expires: use the
    object store's life-cycle rules on the prefix.
    """

    expires = False

    def __init__(self, url: str) -> None:
        """Create the store; connects at the first call, unless the driver connects on creation.

        `url` is the parent of the fingerprints' folders, such as `s3://bucket/chunkweave`. Drivers read credentials and
        endpoints from their own environment variables and configuration files.

        Raises:
            UsageError: fsspec or the driver for this URL is not installed, or there is no such protocol.
        """
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError as error:
            raise missing_package("fsspec") from error
        self.name = without_secrets(url)
        try:
            # Other processes write too, so a cached listing would be outdated.
            filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{self.name}: {error}") from error
        self._fs: Any = filesystem
        self._root = str(root).rstrip("/")
        protocol = filesystem.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._whole_puts = bool(names & _WHOLE_PUTS)
        self._local = "file" in names

    def get(self, key: BlobKey, first_bytes: int | None = None) -> bytes | None:
        """The object or its first bytes, or None if there is none."""
        start = None if first_bytes is None else 0
        with only_os_errors(), suppress(FileNotFoundError):
            return bytes(self._fs.cat_file(self._path(key), start=start, end=first_bytes))
        return None

    def put(self, key: BlobKey, data: bytes, ttl_s: float | None = None) -> None:
        """Store `data` atomically."""
        if ttl_s is not None:
            raise UsageError(f"{self.name} cannot expire segments: use a life-cycle rule of the object store")
        path = self._path(key)
        with only_os_errors():
            if self._whole_puts:
                self._fs.pipe_file(path, data)
                return
            self._make_folders(key)
            temporary = f"{path}.{secrets.token_hex(8)}.tmp"
            try:
                self._fs.pipe_file(temporary, data)
                if self._local:
                    self._fs.chmod(temporary, 0o600)
                self._fs.mv(temporary, path)
            except BaseException:  # also on KeyboardInterrupt nothing may remain
                with suppress(OSError), only_os_errors():
                    self._fs.rm_file(temporary)
                raise

    def delete(self, key: BlobKey) -> None:
        """Delete the object; a missing one is not an error."""
        with only_os_errors(), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def size(self, key: BlobKey) -> int | None:
        """Bytes of the object, or None if there is none."""
        with only_os_errors(), suppress(FileNotFoundError):
            size = self._fs.size(self._path(key))
            return None if size is None else int(size)
        return None

    def keys(self, fingerprint: str) -> Iterator[BlobKey]:
        """Keys of one fingerprint, one listing for each of up to 256 folders."""
        for shard in self._names(f"{self._root}/{fingerprint}"):
            for name in self._names(f"{self._root}/{fingerprint}/{shard}"):
                try:
                    key = BlobKey(fingerprint, SegmentId(name.removesuffix(_SUFFIX)))
                except ValueError:
                    continue
                if name.endswith(_SUFFIX) and shard == key.segment[:2]:
                    yield key

    def close(self) -> None:
        """Does nothing: fsspec shares connections between users and cannot end a call."""

    def _path(self, key: BlobKey) -> str:
        return f"{self._root}/{key.fingerprint}/{key.segment[:2]}/{key.segment}{_SUFFIX}"

    def _names(self, folder: str) -> list[str]:
        with only_os_errors(), suppress(FileNotFoundError):
            return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(folder, detail=False)]
        return []

    def _make_folders(self, key: BlobKey) -> None:
        folder = self._root
        self._fs.makedirs(folder, exist_ok=True)
        for name in (key.fingerprint, key.segment[:2]):
            folder = f"{folder}/{name}"
            new = self._local and not self._fs.exists(folder)
            self._fs.makedirs(folder, exist_ok=True)
            if new:
                self._fs.chmod(folder, 0o700)
