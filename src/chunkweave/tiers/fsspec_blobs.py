"""Bytes in an object store or a folder that fsspec can reach."""

import logging
import secrets
from collections.abc import Iterator
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.tiers.blobs import BlobKey, missing_package, only_os_errors, without_secrets
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)

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
        with only_os_errors():
            try:
                data = self._fs.cat_file(self._path(key), start=None if first_bytes is None else 0, end=first_bytes)
            except FileNotFoundError:
                return None
            return bytes(data)

    def put(self, key: BlobKey, data: bytes, ttl_s: float | None = None) -> None:
        """Store `data`; nobody sees half of it."""
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
        with only_os_errors():
            try:
                self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                return

    def size(self, key: BlobKey) -> int | None:
        """Bytes of the object, or None if there is none."""
        with only_os_errors():
            try:
                size = self._fs.size(self._path(key))
            except FileNotFoundError:
                return None
            return None if size is None else int(size)

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
        with only_os_errors():
            try:
                return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(folder, detail=False)]
            except FileNotFoundError:
                return []

    def _make_folders(self, key: BlobKey) -> None:
        folder = self._root
        self._fs.makedirs(folder, exist_ok=True)
        for name in (key.fingerprint, key.segment[:2]):
            folder = f"{folder}/{name}"
            if self._local and not self._fs.exists(folder):
                self._fs.makedirs(folder, exist_ok=True)
                self._fs.chmod(folder, 0o700)
            elif not self._local:
                self._fs.makedirs(folder, exist_ok=True)

    def _forget(self, temporary: str) -> None:
        try:
            with only_os_errors():
                self._fs.rm_file(temporary)
        except OSError as error:
            logger.debug("%s: a temporary file stays: %s", self.name, type(error).__name__)
