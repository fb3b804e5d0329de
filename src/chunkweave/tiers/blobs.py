"""Named bytes on another machine: what the remote tier needs of a server or an object store."""

import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, urlsplit

from chunkweave.errors import ChunkweaveError, UsageError, install_extra
from chunkweave.types import SegmentId

if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)


_FINGERPRINT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_SEGMENT = re.compile(r"[0-9a-f]{32}")
_REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")


class BlobRefused(OSError):  # noqa: N818  (named for what happened, like FileNotFoundError's siblings)
    """The store answered and will not take it: full, read-only, too large. Asking again is no use; it is alive."""


@dataclass(frozen=True, slots=True)
class BlobKey:
    """Names one segment's bytes; how that is spelled on the wire is the blob store's choice.

    Only harmless names come into being, so that no store has to guard against `..`, globs or separators.

    Raises:
        ValueError: the fingerprint is not of letters, digits and `._-`, or the segment not 32 hex digits.
    """

    fingerprint: str
    segment: SegmentId

    def __post_init__(self) -> None:
        if not _FINGERPRINT.fullmatch(self.fingerprint) or ".." in self.fingerprint:
            raise ValueError(f"not a fingerprint: {self.fingerprint!r}")
        if not _SEGMENT.fullmatch(self.segment):
            raise ValueError(f"not a segment id: {self.segment!r}")


class BlobStore(Protocol):
    """Named, immutable bytes in one place that may be slow, gone, restarted, full, or shared with other processes.

    Thread-safe. Every method may block for as long as the place does (`RemoteCalls` bounds that) and
    raises `OSError` if it has no answer, `PermissionError` if it is not let in, `BlobRefused` if the place said no.
    A key that is not there is an answer. Bytes come back as they lie there: what they are worth is for the caller
    to check.
    """

    name: str
    """Where it is, for logs: without user, password and options."""

    expires: bool
    """Whether `put` takes a time to live."""

    def get(self, key: BlobKey, first_bytes: int | None = None) -> bytes | None:
        """The bytes (no more than `first_bytes` of them, from the start), or None if there are none."""

    def put(self, key: BlobKey, data: bytes, ttl_s: float | None = None) -> None:
        """Keep `data` under `key`, replacing what was there; readers see the old bytes or the new ones.

        Raises:
            UsageError: `ttl_s` is given, and this store does not expire.
        """

    def delete(self, key: BlobKey) -> None:
        """Forget it; unknown keys are ignored."""

    def size(self, key: BlobKey) -> int | None:
        """Bytes held under `key`, or None if there are none. Does not transfer them."""

    def keys(self, fingerprint: str) -> Iterator[BlobKey]:
        """Keys of one fingerprint, in no order, asked for page by page while iterating; foreign names are left out.

        What is put or deleted meanwhile may be seen or not, and a key may come twice.
        """

    def close(self) -> None:
        """Drop all connections: calls under way in other threads end with an error, later calls open new ones."""


def open_blobs(url: str) -> BlobStore:
    """The blob store that `url` names; connects when it is first asked for something.

    `redis://`, `rediss://` (TLS), `valkey://`, `valkeys://` and `unix://` are a Valkey or Redis server,
    everything else is a URL of fsspec (`s3://bucket/path`, `gs://bucket/path`, `file:///path`, `memory://name`).

    Raises:
        UsageError: not such a URL, or the package that it needs is not installed.
    """
    return RedisBlobs(url) if urlsplit(url).scheme in _REDIS_SCHEMES else FsspecBlobs(url)


def without_secrets(url: str) -> str:
    """`url` as it may stand in a log: without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def missing_package(name: str) -> UsageError:
    """The error for a client package that is not installed."""
    return UsageError(f"a remote store of this kind needs {name}: {install_extra('remote')}")


@contextmanager
def only_os_errors() -> Iterator[None]:
    """Whatever a client library raises inside comes out as `OSError`; our own errors pass.

    Client libraries raise what they like (an object store's HTTP errors; an AttributeError when `close` cut
    a connection in mid-reply), and a list of those types would be wrong with their next release.
    """
    try:
        yield
    except (OSError, ChunkweaveError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


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
        local = _LOOPBACK.fullmatch(parts.hostname or "localhost")
        if parts.scheme == "redis" and (password or parts.password) and not local:
            logger.warning("the password for %s travels in clear text: use rediss:// (TLS)", parts.hostname)
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
        """Disconnect, also where a reply is being waited for."""
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
            # NOAUTH and WRONGPASS have had several exception types in redis-py; the server's own words have not changed
            if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
                raise PermissionError(str(error)) from error
            raise


_SUFFIX = ".safetensors"
_WHOLE_PUTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"})
"""Protocols whose objects appear whole or not at all; on others a temporary name is renamed."""


class FsspecBlobs:
    """`chunkweave.tiers.blobs.BlobStore` over any file system of fsspec.

    Names are `<root>/<fingerprint>/<2 hex>/<id>.safetensors`, the same as on disk, so that a folder of the disk tier
    can be copied to a bucket as it is. On `file://` folders and files are readable by their owner only. Nothing
    expires: object stores do that by life-cycle rules on the prefix.
    """

    expires = False

    def __init__(self, url: str, **storage_options: Any) -> None:
        """Connects when first asked, except where a driver connects on creation.

        Args:
            url: where the fingerprints' folders lie, such as `s3://bucket/chunkweave`.
            storage_options: what fsspec's driver takes (`endpoint_url`, `key`, ...); most read their own environment
                variables and configuration files.

        Raises:
            UsageError: fsspec or the driver for this URL is not installed, or there is no such protocol.
        """
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError as error:
            raise missing_package("fsspec") from error
        self.name = without_secrets(url)
        # Listings change under us (other processes write), so a remembered one is a wrong one.
        options = {"use_listings_cache": False, **storage_options}
        try:
            filesystem, root = fsspec.core.url_to_fs(url, **options)
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
        """Store `data`; readers never see half of it."""
        if ttl_s is not None:
            raise UsageError(f"{self.name} cannot expire what it holds: use a life-cycle rule of the object store")
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
            except BaseException:  # Ctrl-C too must leave nothing behind
                self._forget(temporary)
                raise

    def delete(self, key: BlobKey) -> None:
        """Forget it; a name that is not there is no error."""
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
        """Nothing to cut: fsspec shares its connections between users and has no way to end a call."""

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

    def _forget(self, temporary: str) -> None:
        try:
            with only_os_errors():
                self._fs.rm_file(temporary)
        except OSError as error:
            logger.debug("%s: a temporary file stays: %s", self.name, type(error).__name__)
