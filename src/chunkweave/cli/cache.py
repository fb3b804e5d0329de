"""`chunkweave cache`: lists and checks a cache directory. No command here loads a model."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from chunkweave.cli.console import Output, counted, progress, size, status, table_of
from chunkweave.cli.options import with_blocks
from chunkweave.errors import UsageError
from chunkweave.planning.calibration import OWN_FILES
from chunkweave.planning.cost import cost_model_path
from chunkweave.store.records import ANYTHING, SegmentRecord
from chunkweave.store.shared_folder import DTYPE_FILE, PIN_FILE, REMOVED_FILE, PinFile

if TYPE_CHECKING:
    from chunkweave.tiers.disk import DiskTier
    from chunkweave.tiers.segment_header import SegmentHeader


_FINGERPRINT = re.compile(r"[0-9A-Za-z_-]{1,128}")


_SHARD = re.compile(r"[0-9a-f]{2}")


CacheFolderPath = Annotated[Path, typer.Argument(metavar="CACHE_DIR", help="The folder given as --cache-dir.")]
Fingerprint = Annotated[
    str | None, typer.Option("--fingerprint", help="Only segments of this model: its fingerprint, or its beginning.")
]


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """Segments to select: those that match every option. Options may give the beginning of an id."""

    cache_dir: CacheFolderPath
    document: Annotated[str | None, typer.Option(help="Only segments of this document.")] = None
    chunk: Annotated[str | None, typer.Option(help="Only segments of this chunk: its id or the id's beginning.")] = None
    segment: Annotated[str | None, typer.Option(help="Only this segment: its id, or the beginning of it.")] = None
    fingerprint: Fingerprint = None

    @property
    def created_before_s(self) -> float | None:
        """Latest creation time, in seconds since the epoch; None: any time."""
        return None

    @property
    def whole_models(self) -> bool:
        """Whether only the fingerprint restricts the selection."""
        return {self.document, self.chunk, self.segment, self.created_before_s} == {None}

    @property
    def everything(self) -> bool:
        """Whether no option restricts the selection."""
        return self.whole_models and self.fingerprint is None

    def fits(self, record: SegmentRecord, created_s: float) -> bool:
        """Whether a segment matches. The caller has checked its model's fingerprint."""
        before_s = self.created_before_s
        return (
            (self.document is None or self.document in (record.source, record.document))
            and (self.chunk is None or record.chunk_id.startswith(self.chunk))
            and (self.segment is None or record.id.startswith(self.segment))
            and (before_s is None or created_s <= before_s)
        )


@dataclass(frozen=True, slots=True)
class CachedSegment:
    """One segment file: its header, and whether it is pinned."""

    header: "SegmentHeader"
    pinned: bool

    @property
    def record(self) -> SegmentRecord:
        """The segment's record."""
        return self.header.record

    @property
    def dtype(self) -> str:
        """The number format in which its KV was computed."""
        return str(self.header.layout.dtype).removeprefix("torch.")

    def age_s(self, now_s: float) -> float:
        """Seconds from its creation to `now_s`."""
        return max(0.0, now_s - self.header.created_s)

    def as_dict(self, now_s: float) -> dict[str, Any]:
        """JSON-able; `age_s` is its age at `now_s`.

        `contexts` counts the contexts of a mean, and is 0 for other segments. `read` counts the other chunks that it
        attended to; None if these were too many to record.
        """
        record = self.record
        return {
            "id": record.id,
            "chunk": record.chunk_id,
            "document": record.document,
            "source": record.source,
            "tokens": len(record),
            "bytes": record.nbytes,
            "context_parts": max(map(len, record.contexts or (record.context,))),
            "contexts": len(record.contexts),
            "read": None if ANYTHING in record.sources else len(record.sources),
            "exact": record.exact,
            "age_s": self.age_s(now_s),
            "codec": self.header.layout.codec.name,
            "dtype": self.dtype,
            "fingerprint": self.header.fingerprint,
            "pinned": self.pinned,
        }


class CacheFolder:
    """A cache directory, as `--cache-dir` writes it. Other processes may add and remove files at any time.

    Raises:
        UsageError: the folder is not a cache directory. An empty folder is one.
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
        if not self.fingerprints and names.keys() - {PIN_FILE, REMOVED_FILE, DTYPE_FILE}:
            raise UsageError(f"{root} is no cache directory: it holds other files, and no model's folder of segments")

    def tiers(self, fingerprint: str | None = None) -> Iterator["DiskTier"]:
        """The disk tier of every model, or of the models whose fingerprint begins with `fingerprint`.

        Raises:
            UsageError: there is no such fingerprint.
        """
        from chunkweave.tiers.disk import DiskTier

        chosen = [name for name in self.fingerprints if name.startswith(fingerprint or "")]
        if fingerprint is not None and not chosen:
            there = ", ".join(self.fingerprints) or "none"
            raise UsageError(f"no fingerprint {fingerprint!r} in {self.root}; there are: {there}")
        for name in chosen:
            yield DiskTier(self.root, name)

    def segments(self, tier: "DiskTier", chosen: SegmentOptions | None = None) -> Iterator[CachedSegment]:
        """Segments of one model, read from their headers; those that are removed meanwhile are skipped."""
        pinned = self.pins.read().get(tier.folder.name, frozenset())
        for record in tier.records():
            source = tier.get(record.id)
            if source is not None and (chosen is None or chosen.fits(record, source.header.created_s)):
                yield CachedSegment(source.header, record.id in pinned)


def _is_model_folder(path: Path) -> bool:
    if not _FINGERPRINT.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    try:
        return any(child.name in OWN_FILES or _is_shard(child) for child in path.iterdir())
    except OSError:  # its tier reports that it cannot be read
        return True


def _is_shard(path: Path) -> bool:
    return _SHARD.fullmatch(path.name) is not None and path.is_dir()


app = typer.Typer(no_args_is_help=True, help="List, check, fill, clear and copy a cache directory.")


@app.command()
@with_blocks
def ls(
    *,
    chosen: SegmentOptions,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of listed segments.")] = None,
    output: Output,
) -> None:
    """List segments, the newest first."""
    folder = CacheFolder(chosen.cache_dir)
    with status("reading headers"):
        found = [one for tier in folder.tiers(chosen.fingerprint) for one in folder.segments(tier, chosen)]
    found.sort(key=lambda one: (-one.header.created_s, one.record.source))
    listed, now_s = found[:limit], time.time()
    output.show(segments_table(listed, len(found), now_s))
    output.finish({"found": len(found), "segments": [one.as_dict(now_s) for one in listed]})


@app.command()
@with_blocks
def stats(
    cache_dir: CacheFolderPath,
    *,
    fingerprint: Fingerprint = None,
    output: Output,
) -> None:
    """Report sizes by model and by document, and files that are not used. Reads headers only."""
    folder, now_s = CacheFolder(cache_dir), time.time()
    models, problems = [], []
    with status("reading headers"):
        for tier in folder.tiers(fingerprint):
            models.append(_about_model(folder, tier, now_s))
            problems += _problems(tier, folder.root)
    keys = ("segments", "tokens", "bytes")
    report = {**{key: sum(model[key] for model in models) for key in keys}, "models": models, "problems": problems}
    output.show(*stats_tables(report))
    output.finish(report)


def _about_model(folder: CacheFolder, tier: "DiskTier", now_s: float) -> dict[str, Any]:
    found = sorted(folder.segments(tier), key=lambda one: one.record.document)
    ages = [one.age_s(now_s) for one in found]
    documents = groupby(found, key=lambda one: one.record.document)
    return {
        "fingerprint": tier.folder.name,
        "cost_model": cost_model_path(folder.root, tier.folder.name).exists(),
        "chunks": len({one.record.chunk_id for one in found}),
        **_sums(found),
        "pinned": sum(one.pinned for one in found),
        "oldest_s": max(ages, default=None),
        "newest_s": min(ages, default=None),
        "documents": [{"document": name, **_sums(list(own))} for name, own in documents],
    }


def _sums(found: Sequence[CachedSegment]) -> dict[str, int]:
    return {
        "segments": len(found),
        "tokens": sum(len(one.record) for one in found),
        "bytes": sum(one.record.nbytes for one in found),
    }


_MOST_PROBLEMS = 50


def segments_table(listed: Sequence[CachedSegment], found: int, now_s: float) -> Table:
    """One line per segment."""
    every = counted(found, "segment")
    caption = f"{len(listed)} of {every}" if len(listed) < found else every
    return table_of(
        listed,
        ("segment", lambda one: one.record.id[:12]),
        ("chunk", lambda one: one.record.chunk_id[:12]),
        ("document", lambda one: escape(one.record.source) or "-"),
        ("tokens", lambda one: str(len(one.record))),
        ("size", lambda one: size(one.record.nbytes)),
        ("context", lambda one: _context(one.record)),
        ("exact", lambda one: "yes" if one.record.exact else "no"),
        ("age", lambda one: age(one.age_s(now_s))),
        ("codec", lambda one: one.header.layout.codec.name),
        ("dtype", lambda one: one.dtype),
        ("model", lambda one: one.header.fingerprint[:8]),
        ("", lambda one: "pinned" if one.pinned else ""),
        caption=caption,
        left=3,
    )


def _context(record: SegmentRecord) -> str:
    return f"mean of {len(record.contexts)}" if record.contexts else str(len(record.context))


def stats_tables(report: dict[str, Any]) -> list[RenderableType]:
    """Sizes by model, by document, and the files that are not used."""
    models = table_of(
        report["models"],
        *((name, name) for name in ("fingerprint", "segments", "chunks", "tokens")),
        ("size", lambda model: size(model["bytes"])),
        ("pinned", "pinned"),
        ("oldest", lambda model: age(model["oldest_s"])),
        ("newest", lambda model: age(model["newest_s"])),
        ("cost model", lambda model: "yes" if model["cost_model"] else "no"),
        title="By model",
    )
    documents = table_of(
        [{"model": model["fingerprint"][:8], **row} for model in report["models"] for row in model["documents"]],
        ("model", "model"),
        ("document", lambda row: escape(row["document"]) or "-"),
        ("segments", "segments"),
        ("tokens", "tokens"),
        ("size", lambda row: size(row["bytes"])),
        title="By document",
        left=2,
    )
    return [models, documents, *([problems_table(report["problems"])] if report["problems"] else [])]


def problems_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Files that are not used, and why."""
    more = len(rows) - _MOST_PROBLEMS
    caption = f"and {more} more; --json lists all" if more > 0 else None
    return table_of(
        rows[:_MOST_PROBLEMS],
        ("file", "file"),
        ("problem", lambda row: row["problem"] + (" (removed)" if row.get("repaired") else "")),
        ("reason", "reason"),
        title="Files that are not used",
        caption=caption,
        left=3,
    )


def _problems(tier: "DiskTier", root: Path) -> list[dict[str, Any]]:
    """Files of a model that are not used, JSON-able, with paths relative to the cache folder. Skips `OWN_FILES`."""
    return [
        {"file": str(one.path.relative_to(root)), "problem": one.problem.value, "reason": one.reason}
        for one in tier.problems()
        if one.path.name not in OWN_FILES
    ]


def age(value_s: float | None) -> str:
    """A duration in its largest sensible unit: `3 d`, `12 h`, `5 min`, `42 s`."""
    if value_s is None:
        return "-"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if value_s >= 2 * length_s:
            return f"{value_s / length_s:.0f} {unit}"
    return f"{value_s:.0f} s"


_HARMLESS = ("foreign", "future-version")
"""Files of other programs or of later versions: listed, never removed, and not counted as damage."""


@app.command()
@with_blocks
def check(
    cache_dir: CacheFolderPath,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove corrupt files. Files that are not our segments stay.")
    ] = False,
    fingerprint: Fingerprint = None,
    output: Output,
) -> None:
    """Verify the checksums of every file. Exit code 1 if a file is damaged and not removed."""
    folder = CacheFolder(cache_dir)
    tiers = list(folder.tiers(fingerprint))
    total, done, rows = sum(1 for tier in tiers for _ in tier.records()), count(1), []
    with progress("checking segments") as report:
        for tier in tiers:
            tier.verify(lambda: report(next(done), total))
            found = _problems(tier, folder.root)
            removed = {str(path.relative_to(folder.root)) for path in tier.repair()} if repair else set()
            rows += [{**row, "repaired": row["file"] in removed} for row in found]
    sound = sum(1 for tier in tiers for _ in tier.records())
    wrong = [row for row in rows if row["problem"] not in _HARMLESS and not row["repaired"]]
    repaired = sum(row["repaired"] for row in rows)
    foreign = len(rows) - len(wrong) - repaired
    summary = (
        f"sound: {counted(sound, 'segment')}; damaged: {counted(len(wrong), 'file')}; removed: {repaired}; not ours: "
        f"{foreign}"
    )
    output.show(*([problems_table(rows)] if rows else []), summary)
    output.finish({"sound": sound, "wrong": len(wrong), "repaired": repaired, "problems": rows})
    if wrong:
        raise typer.Exit(1)
