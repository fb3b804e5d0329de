"""A cache directory as seen by those who look after it: what is in it, without any model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkweave.errors import UsageError
from chunkweave.planning.own_files import OWN_FILES
from chunkweave.store.pin_file import PIN_FILE, PinFile
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId

if TYPE_CHECKING:
    from chunkweave.tiers.disk import DiskTier
    from chunkweave.tiers.disk_index import ProblemFile

_FINGERPRINT = re.compile(r"[0-9A-Za-z_-]{1,128}")
_SHARD = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class CachedSegment:
    """One segment file: what its header says, and whether it is pinned."""

    record: SegmentRecord
    fingerprint: str
    codec: str
    dtype: str
    created_s: float
    pinned: bool

    @property
    def document(self) -> str:
        """Name of the document that the chunk was cut from."""
        return self.record.document

    def as_dict(self, now_s: float) -> dict[str, Any]:
        """JSON-able; `age_s` counts to `now_s`."""
        record = self.record
        return {
            "id": record.id,
            "chunk": record.chunk_id,
            "document": self.document,
            "source": record.source,
            "tokens": len(record),
            "bytes": record.nbytes,
            "context_parts": len(record.context),
            "exact": record.exact,
            "age_s": max(0.0, now_s - self.created_s),
            "codec": self.codec,
            "dtype": self.dtype,
            "fingerprint": self.fingerprint,
            "pinned": self.pinned,
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """Which segments a command is about: those that fit every field given. Ids may be cut short."""

    document: str | None = None
    chunk: str | None = None
    segment: str | None = None
    created_before_s: float | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing restricts it."""
        return self == Selection()

    def fits(self, record: SegmentRecord, created_s: float) -> bool:
        """Whether a segment is one of them."""
        return (
            (self.document is None or self.document in (record.source, record.document))
            and (self.chunk is None or record.chunk_id.startswith(self.chunk))
            and (self.segment is None or record.id.startswith(self.segment))
            and (self.created_before_s is None or created_s <= self.created_before_s)
        )


class CacheFolder:
    """What `--cache-dir` left in a folder. Others may add and remove files at any time.

    Raises:
        UsageError: it is no cache directory. An empty folder is an empty one.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UsageError(f"no cache directory at {root}: {'not a folder' if root.exists() else 'no such folder'}")
        try:
            names = {child.name: _is_model_folder(child) for child in root.iterdir()}
        except OSError as error:
            raise UsageError(f"the cache directory {root} cannot be read: {error.strerror or error}") from error
        self.root = root
        self.pins = PinFile(root)
        self.fingerprints = tuple(sorted(name for name, is_ours in names.items() if is_ours))
        if not self.fingerprints and names.keys() - {PIN_FILE}:
            raise UsageError(f"{root} is no cache directory: it holds other files, and no model's folder of segments")

    def tiers(self, fingerprint: str | None = None) -> Iterator[tuple[str, "DiskTier"]]:
        """Every model's segments, or those of the models whose fingerprint begins with `fingerprint`.

        Raises:
            UsageError: there is no such fingerprint.
        """
        from chunkweave.tiers.disk import DiskTier

        chosen = [name for name in self.fingerprints if name.startswith(fingerprint or "")]
        if fingerprint is not None and not chosen:
            raise UsageError(f"no fingerprint {fingerprint!r} in {self.root}; there are: {_listed(self.fingerprints)}")
        for name in chosen:
            yield name, DiskTier(self.root, name)

    def segments(
        self,
        name: str,
        tier: "DiskTier",
        selection: Selection | None = None,
        pinned: frozenset[SegmentId] | None = None,
    ) -> Iterator[CachedSegment]:
        """Segments of one model, as their headers say; what vanishes meanwhile is left out."""
        wanted = selection or Selection()
        pinned = self.pins.read().get(name, frozenset()) if pinned is None else pinned
        for record in tier.records():
            source = tier.get(record.id)
            if source is not None and wanted.fits(record, source.header.created_s):
                layout = source.header.layout
                dtype = str(layout.dtype).removeprefix("torch.")
                created_s = source.header.created_s
                yield CachedSegment(
                    source.header.record, name, layout.codec.name, dtype, created_s, record.id in pinned
                )


def without_own_files(problems: tuple["ProblemFile", ...]) -> list["ProblemFile"]:
    """Problems without the files of ours that are no segments."""
    return [problem for problem in problems if problem.path.name not in OWN_FILES]


def _is_model_folder(path: Path) -> bool:
    if not _FINGERPRINT.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    try:
        return any(child.name in OWN_FILES or _is_shard(child) for child in path.iterdir())
    except OSError:  # ours or not, its tier will say that it cannot be read
        return True


def _is_shard(path: Path) -> bool:
    return _SHARD.fullmatch(path.name) is not None and path.is_dir()


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
