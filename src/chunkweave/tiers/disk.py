"""The disk tier: segments as files that outlive the process and may be shared by several processes."""

import logging
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from chunkweave.errors import UsageError
from chunkweave.kv.segment import SegmentLost, SegmentSource, make_codec
from chunkweave.planning.calibration import OWN_FILES
from chunkweave.store.records import SegmentRecord
from chunkweave.store.shared_folder import sync_folder
from chunkweave.tiers.segment_file import DiskSegment, file_bytes, read_header, write_segment
from chunkweave.tiers.segment_header import FileProblem, SegmentHeader, SegmentRefused, is_segment_id
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
STALE_TEMPORARY_S = 3600.0
_FINGERPRINT = re.compile(r"[0-9A-Za-z_-]{1,128}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{16}\.tmp")
_SCAN_THREADS = 4

_Identity = tuple[int, int, int]
"""Inode, size, modification time in ns: a file with the same identity was not replaced."""


@dataclass(frozen=True, slots=True)
class ProblemFile:
    """A file in the folder that is not used, and the reason."""

    path: Path
    problem: FileProblem
    reason: str


class DiskTier:
    """Segments under `<root>/<fingerprint>/<2 hex>/<segment id>.safetensors`; implements `chunkweave.store.tier.Tier`.

    Several processes may share a folder: files that others add, replace or delete are noticed at the next access. Files
    that are not whole segments of this model are refused, listed by `problems`, and kept: only `repair`, `delete` and
    `put` of the same id remove a corrupt file, and nothing here removes a foreign one or another version. Opening never
    fails because of the file system: an unreadable folder counts as empty and is listed as a problem. Thread-safe; no
    lock is held while a file is read or written.
    """

    # The files are authoritative. Cached data about a file is valid only while the file's identity is unchanged.

    def __init__(
        self, root: Path, fingerprint: str, *, codec: str = "raw", clock: Callable[[], float] = time.time
    ) -> None:
        """Open a folder, which need not exist, and index the headers of its files.

        Args:
            root: the cache folder, shared by models and processes.
            fingerprint: the model's; names the folder below `root`.
            codec: for new segments; every codec is read.
            clock: seconds since the epoch.

        Raises:
            UsageError: the fingerprint cannot name a folder, or the codec is unknown.
        """
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise UsageError(f"not a model fingerprint: {fingerprint[:80]!r}")
        self.folder = root / fingerprint
        """The folder of this model's segments."""
        self._codec = make_codec(codec)
        self._clock = clock
        self._lock = Lock()
        self._held: dict[SegmentId, tuple[SegmentHeader, _Identity]] = {}
        self._refused: dict[Path, tuple[ProblemFile, _Identity | None]] = {}
        self._scan()

    def put(self, record: SegmentRecord, payload: SegmentSource) -> None:
        """Write a segment durably, replacing one with the same id.

        Raises:
            OSError: it cannot be written, the codec cannot represent its KV, or its path holds a file that is not ours
                to replace. No partial file remains.
            UsageError: id, record and payload are inconsistent.
            SegmentLost: the payload could not be read.
        """
        path = self._path(record.id)
        if path is None:
            raise UsageError(f"not a segment id: {record.id[:80]!r}")
        self._make_folders(path.parent)
        self._header(record.id)
        refused = self._problem(path)
        if refused is not None and refused.problem in (FileProblem.FOREIGN, FileProblem.OTHER_VERSION):
            raise FileExistsError(f"{path} is not replaced: {refused.reason}")
        header = write_segment(
            path, record, payload, codec=self._codec, fingerprint=self.folder.name, created_s=self._clock()
        )
        # The caller's record, not the parsed one: its token ids are shared with the other variants of the chunk.
        header = replace(header, record=replace(record, nbytes=header.record.nbytes))
        identity = _identity(path)
        with self._lock:
            self._refused.pop(path, None)
            if identity is not None:
                self._held[record.id] = header, identity

    def get(self, segment: SegmentId) -> DiskSegment | None:
        """The segment, with its layers still on disk, or None if there is no whole file."""
        header = self._header(segment)
        path = self._path(segment)
        return None if header is None or path is None else DiskSegment(path, header)

    def delete(self, segment: SegmentId) -> None:
        """Remove the file, corrupt or whole; unknown ids are ignored, foreign files and other versions are kept.

        A file that cannot be removed (a read-only folder) is logged, listed by `problems`, and no longer used by this
        process. The removal is not synced: after a power failure the file may be back.

        Raises:
            OSError: the file cannot be removed, or cannot be identified as one of ours.
        """
        path = self._path(segment)
        if path is None:
            return
        if self._is_ours(segment, path) and not self._remove(path):
            raise OSError(f"{path} could not be removed")

    def nbytes(self, segment: SegmentId) -> int:
        """Size of the file, 0 if there is no whole one."""
        header = self._header(segment)
        return 0 if header is None else header.record.nbytes

    def size_of(self, record: SegmentRecord, payload: SegmentSource) -> int:
        """Exact size that the file would have; encodes nothing. Raises the errors of `file_bytes`."""
        return file_bytes(record, payload, self._codec, self.folder.name)

    def records(self) -> Iterator[SegmentRecord]:
        """A snapshot of the records known to this process; `nbytes` is the size of each file."""
        with self._lock:
            return iter([header.record for header, _ in self._held.values()])

    def find(self, segments: Sequence[SegmentId]) -> list[SegmentRecord]:
        """Records of those of `segments` that are on disk now, written by any process."""
        return [header.record for segment in segments if (header := self._header(segment)) is not None]

    def stored_at_s(self, segment: SegmentId) -> float | None:
        """When the file was written, in seconds since the epoch; None if there is no whole one."""
        header = self._header(segment)
        return None if header is None else header.created_s

    def verify(self, progress: Callable[[], None] = lambda: None) -> None:
        """Read every layer of every segment; failures are listed by `problems`.

        Damaged segments are no longer used; ones that could not be read are tried again at the next access. `progress`
        is called for each segment.
        """
        for record in self.records():
            progress()
            source = self.get(record.id)
            if source is None:
                continue
            try:
                for layer in range(source.header.layout.num_layers):
                    source.layer(layer)
            except SegmentLost as error:
                unread = isinstance(error.__cause__, OSError)  # not necessarily damaged
                problem = FileProblem.UNREADABLE if unread else FileProblem.CORRUPT
                self._refuse_unless_replaced(source, problem, str(error))

    def problems(self) -> tuple[ProblemFile, ...]:
        """Unused files, by path. `verify` finds damage that the headers do not show."""
        with self._lock:
            return tuple(self._refused[path][0] for path in sorted(self._refused))

    def repair(self) -> tuple[Path, ...]:
        """Remove the corrupt files among `problems`, unless they were replaced since; returns the removed paths."""
        with self._lock:
            refused = list(self._refused.values())
        corrupt = [(file.path, identity) for file, identity in refused if file.problem is FileProblem.CORRUPT]
        unchanged = [path for path, identity in corrupt if identity == _identity(path)]
        return tuple(path for path in unchanged if self._remove(path))

    def _path(self, segment: str) -> Path | None:
        """The path of a segment; None if it is not a segment id, so that no id leads out of the folder."""
        return self.folder / segment[:2] / f"{segment}{SUFFIX}" if is_segment_id(segment) else None

    def _header(self, segment: SegmentId) -> SegmentHeader | None:
        """A segment's header, read again if its file changed; None if there is no whole file."""
        path = self._path(segment)
        if path is None:
            return None
        identity = _identity(path) if is_folder(self.folder) and is_folder(path.parent) else None
        with self._lock:
            if identity is None:
                self._held.pop(segment, None)
                self._refused.pop(path, None)
                return None
            held = self._held.get(segment)
            refused = self._refused.get(path)
            if held is not None and held[1] == identity:
                return held[0]
            # An unreadable file may be readable now (descriptors had run out, permissions have changed).
            retried = refused is None or refused[0].problem is FileProblem.UNREADABLE
            if refused is not None and refused[1] == identity and not retried:
                return None
        return self._examine(path, identity)

    def _is_ours(self, segment: SegmentId, path: Path) -> bool:
        """Whether there is a file that may be removed.

        Raises:
            OSError: the system does not say what is there. That is no reason to believe that nothing is.
        """
        for _ in range(2):  # a file that is there although it has no header may have appeared, or failed to be read
            if self._header(segment) is not None:
                return True
            refused = self._problem(path)
            if refused is not None and refused.problem is FileProblem.UNREADABLE:
                raise OSError(f"{path} is not removed: {refused.reason}")
            if refused is not None:
                return refused.problem not in (FileProblem.FOREIGN, FileProblem.OTHER_VERSION)
            folders = self.folder, path.parent
            if not all(stat.S_ISDIR(_mode(folder)) for folder in folders) or not _mode(path):  # a link leads elsewhere
                return False
        raise OSError(f"{path} is not removed: it could not be examined")

    def _problem(self, path: Path) -> ProblemFile | None:
        """Why a file was refused when `_header` last looked at it."""
        with self._lock:
            refused = self._refused.get(path)
        return None if refused is None else refused[0]

    def _examine(self, path: Path, identity: _Identity, *, level: int = logging.WARNING) -> SegmentHeader | None:
        try:
            header = read_header(path)
            if header.fingerprint != self.folder.name:
                raise SegmentRefused(FileProblem.FOREIGN, f"a segment of the model {header.fingerprint[:40]!r}")
        except FileNotFoundError:
            return None
        except SegmentRefused as refusal:
            self._refuse(path, refusal.problem, str(refusal), identity, level=level)
            return None
        with self._lock:
            self._refused.pop(path, None)
            self._held[header.record.id] = header, identity
        return header

    def _refuse(
        self, path: Path, problem: FileProblem, reason: str, identity: _Identity | None, *, level: int = logging.WARNING
    ) -> None:
        logger.log(level, "%s is not used: %s (%s)", path, problem.value, reason)
        with self._lock:
            self._held.pop(SegmentId(path.stem), None)
            self._refused[path] = ProblemFile(path, problem, reason), identity

    def _refuse_unless_replaced(self, source: DiskSegment, problem: FileProblem, reason: str) -> None:
        """Refuse a file whose data is unreadable or corrupt, unless it was replaced since its header was read."""
        identity = _identity(source.path)
        with self._lock:
            held = self._held.get(source.header.record.id)
        if held is not None and held[0] is source.header and held[1] == identity:
            self._refuse(source.path, problem, reason, identity)

    def _remove(self, path: Path) -> bool:
        """Remove a file and its cached header. A file that cannot be removed is logged and refused from now on."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            problem = self._problem(path)
            is_known = problem is not None and problem.problem is FileProblem.UNDELETABLE
            level, reason = logging.DEBUG if is_known else logging.WARNING, f"it could not be removed: {error}"
            self._refuse(path, FileProblem.UNDELETABLE, reason, _identity(path), level=level)
            return False
        with self._lock:
            self._held.pop(SegmentId(path.stem), None)
            self._refused.pop(path, None)
        return True

    def _scan(self) -> None:
        """Index every file by its header; remove temporary files of writers that have ended."""
        shards = [path for path in self._list(self.folder) if path.name not in OWN_FILES and self._is_shard(path)]
        with ThreadPoolExecutor(_SCAN_THREADS) as pool:
            for _ in pool.map(self._scan_shard, shards):
                pass
        if self._refused:
            kinds = Counter(file.problem.value for file, _ in self._refused.values())
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            logger.warning("%d files under %s are not used: %s", len(self._refused), self.folder, counts)

    def _scan_shard(self, shard: Path) -> None:
        for path in self._list(shard):
            identity = _identity(path)
            if identity is None:
                continue
            if path.suffix == SUFFIX and is_segment_id(path.stem) and path.name[:2] == shard.name:
                self._examine(path, identity, level=logging.INFO)
            elif not _TEMPORARY.fullmatch(path.name):
                self._refuse(path, FileProblem.FOREIGN, "not a segment's name", identity, level=logging.INFO)
            elif identity[2] / 1e9 < self._clock() - STALE_TEMPORARY_S and self._remove(path):
                logger.info("removed %s, left by an interrupted writer", path)

    def _is_shard(self, path: Path) -> bool:
        if _SHARD.fullmatch(path.name) and is_folder(path):
            return True
        self._refuse(path, FileProblem.FOREIGN, "not a folder of segments", _identity(path), level=logging.INFO)
        return False

    def _list(self, folder: Path) -> list[Path]:
        try:
            if stat.S_ISDIR(folder.lstat().st_mode):
                return sorted(folder.iterdir())
            self._refuse(folder, FileProblem.FOREIGN, "not a folder, or a link to one", None)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._refuse(folder, FileProblem.UNREADABLE, str(error), None)
        return []

    def _make_folders(self, shard: Path) -> None:
        """Create the folders down to `shard`, accessible by their owner only; syncs the parent of each new one."""
        root = self.folder.parent
        root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (root, self.folder, shard):
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                if folder != root and not is_folder(folder):  # a link would lead out of the cache folder
                    raise
            else:
                sync_folder(folder.parent)


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _mode(path: Path) -> int:
    """The mode of a file, folder or link; 0 if there is none. Raises `OSError` if the system cannot determine it."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def is_folder(path: Path) -> bool:
    """Whether this is a folder and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
