"""Named bytes on another machine: what the remote tier needs of a server or an object store."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.types import SegmentId

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
    if urlsplit(url).scheme in _REDIS_SCHEMES:
        from chunkweave.tiers.redis_blobs import RedisBlobs

        return RedisBlobs(url)
    from chunkweave.tiers.fsspec_blobs import FsspecBlobs

    return FsspecBlobs(url)


def without_secrets(url: str) -> str:
    """`url` as it may stand in a log: without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def missing_package(name: str) -> UsageError:
    """The error for a client package that is not installed."""
    return UsageError(f"a remote store of this kind needs {name}: pip install 'chunkweave[remote]'")


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
