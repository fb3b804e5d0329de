"""Segments as files: a tier that outlives the process and may be shared by several."""

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from chunkweave.errors import UsageError
from chunkweave.kv.codecs import make_codec
from chunkweave.kv.segment import SegmentLost, SegmentSource
from chunkweave.store.folder import sync_folder
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.disk_index import DiskIndex, ProblemFile, is_folder
from chunkweave.tiers.segment_file import DiskSegment, write_segment
from chunkweave.tiers.segment_header import FileProblem
from chunkweave.tiers.segment_layers import file_bytes
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)

_FINGERPRINT = re.compile(r"[0-9A-Za-z_-]{1,128}")


class DiskTier:
    """Segments under `<root>/<fingerprint>/<2 hex>/<segment id>.safetensors`; implements `chunkweave.store.tier.Tier`.

    Several processes may share a folder: files that others add, replace or delete are noticed when they are asked for.
    Files that are not whole segments of this model are refused, listed by `problems`, and left alone: only `repair`,
    `delete` and `put` of the same id remove a corrupt one, and nothing here removes a foreign or newer one.

    Opening never fails on the file system's account: a folder that cannot be read is an empty one with a problem.
    Thread-safe; no lock is held while a file is read or written.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        *,
        codec: str = "raw",
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open a folder, which need not exist, and index it by the headers of its files.

        Args:
            root: the cache folder; shared by models and processes.
            fingerprint: the model's; names the folder below `root`.
            codec: how new segments are written; every codec is read.
            ttl_s: seconds after its creation at which `expired` lists a segment; None: never.
            clock: seconds since the epoch.

        Raises:
            UsageError: the fingerprint cannot name a folder, or the codec is unknown.
        """
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise UsageError(f"not a model fingerprint: {fingerprint[:80]!r}")
        self._root = root
        self._fingerprint = fingerprint
        self._codec = make_codec(codec)
        self._ttl_s = ttl_s
        self._clock = clock
        self._index = DiskIndex(root / fingerprint, fingerprint, clock=clock)
        self._index.scan()

    @property
    def folder(self) -> Path:
        """Where this model's segments lie."""
        return self._root / self._fingerprint

    def put(self, record: SegmentRecord, payload: SegmentSource) -> None:
        """Write a segment, replacing one of the same id; it survives a crash once this returns.

        Raises:
            OSError: it cannot be written, its KV has no place in this codec, or the file's place is taken by one that
                is not ours to replace. Nothing half-written stays.
            UsageError: id, record and payload do not fit each other.
            SegmentLost: the payload could not be read.
        """
        path = self._index.path(record.id)
        if path is None:
            raise UsageError(f"not a segment id: {record.id[:80]!r}")
        self._make_folders(path.parent)
        self._index.find(record.id)
        refused = self._index.problem(record.id)
        if refused is not None and refused.problem in (FileProblem.FOREIGN, FileProblem.FUTURE):
            raise FileExistsError(f"{path} is not replaced: {refused.reason}")
        header = write_segment(
            path, record, payload, codec=self._codec, fingerprint=self._fingerprint, created_s=self._clock()
        )
        # The caller's record, not the parsed one: its token ids are shared with the other variants of the chunk.
        self._index.add(path, replace(header, record=replace(record, nbytes=header.record.nbytes)))

    def get(self, segment: SegmentId) -> DiskSegment | None:
        """The segment, its layers still on disk, or None if there is no whole file of it."""
        header, path = self._index.find(segment), self._index.path(segment)
        return None if header is None or path is None else DiskSegment(path, header)

    def delete(self, segment: SegmentId) -> None:
        """Remove the file, corrupt or whole; unknown ids, foreign files and newer versions are left alone.

        A file that cannot be removed (a read-only folder) is logged, listed by `problems`, and used no more by this
        process. The removal is not synced: after a power failure the file may be there again.
        """
        path = self._index.path(segment)
        if path is None:
            return
        if self._index.find(segment) is None:
            refused = self._index.problem(segment)
            if refused is None or refused.problem is not FileProblem.CORRUPT:
                return
        self._index.remove(path)

    def nbytes(self, segment: SegmentId) -> int:
        """Size of the file, 0 if there is no whole one."""
        header = self._index.find(segment)
        return 0 if header is None else header.record.nbytes

    def size_of(self, record: SegmentRecord, payload: SegmentSource) -> int:
        """Size that the file would have; exact, and nothing is encoded for it.

        Raises:
            UsageError: record and payload do not fit each other.
            SegmentLost: the payload could not be read.
        """
        return file_bytes(record, payload, self._codec, self._fingerprint)

    def records(self) -> Iterator[SegmentRecord]:
        """What this process knows of: a snapshot, `nbytes` being the size of each file."""
        return iter([header.record for header in self._index.headers()])

    def find(self, segments: Sequence[SegmentId]) -> list[SegmentRecord]:
        """Records of those of `segments` that are on disk now, whoever wrote them."""
        return [header.record for segment in segments if (header := self._index.find(segment)) is not None]

    def stored_at_s(self, segment: SegmentId) -> float | None:
        """When the file was written, in seconds since the epoch; None if there is no whole one."""
        header = self._index.find(segment)
        return None if header is None else header.created_s

    def expired(self, now: float) -> list[SegmentId]:
        """Segments created `ttl_s` or longer before `now` (seconds since the epoch); the caller removes them."""
        ttl_s = self._ttl_s
        if ttl_s is None:
            return []
        return [header.record.id for header in self._index.headers() if header.created_s + ttl_s <= now]

    def verify(self) -> None:
        """Read every layer of every segment; those that fail are used no more and listed by `problems`."""
        for record in self.records():
            source = self.get(record.id)
            if source is None:
                continue
            try:
                for layer in range(source.header.layout.num_layers):
                    source.layer(layer)
            except SegmentLost as error:
                if not isinstance(error.__cause__, OSError):  # what cannot be read just now need not be damaged
                    self._index.refuse_if_unchanged(source.path, source.header, str(error))

    def problems(self) -> tuple[ProblemFile, ...]:
        """Files that are not used, by path. `verify` finds damage that the headers do not show."""
        return tuple(self._index.problems())

    def repair(self) -> tuple[Path, ...]:
        """Remove the corrupt files among `problems`, unless they were replaced meanwhile; returns what was removed."""
        return tuple(self._index.remove_corrupt())

    def _make_folders(self, shard: Path) -> None:
        """The folders down to `shard`, for their owner only, each synced into its parent if it is new."""
        self._root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self._root, self.folder, shard):
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                if folder != self._root and not is_folder(folder):  # a link would lead out of the cache folder
                    raise
            else:
                sync_folder(folder.parent)
