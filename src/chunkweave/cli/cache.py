"""`chunkweave cache`: looks into a cache directory and checks it. No command here loads a model."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from chunkweave.cli.console import Output, progress, size, status, table_of
from chunkweave.cli.options import with_blocks
from chunkweave.errors import UsageError
from chunkweave.planning.calibration import OWN_FILES
from chunkweave.planning.cost import cost_model_path
from chunkweave.store.records import SegmentRecord
from chunkweave.store.shared_folder import PIN_FILE, REMOVED_FILE, PinFile
from chunkweave.types import SegmentId

if TYPE_CHECKING:
    from chunkweave.tiers.disk import DiskTier, ProblemFile
    from chunkweave.tiers.segment_file import DiskSegment


_FINGERPRINT = re.compile(r"[0-9A-Za-z_-]{1,128}")


_SHARD = re.compile(r"[0-9a-f]{2}")


CacheFolderPath = Annotated[Path, typer.Argument(metavar="CACHE_DIR", help="The folder given as --cache-dir.")]
Fingerprint = Annotated[
    str | None, typer.Option("--fingerprint", help="Only this model's; the beginning of its fingerprint is enough.")
]


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """Which segments, as options name them."""

    cache_dir: CacheFolderPath
    document: Annotated[str | None, typer.Option(help="Only segments of the document of this name.")] = None
    chunk: Annotated[str | None, typer.Option(help="Only segments of this chunk: its id, or its beginning.")] = None
    segment: Annotated[str | None, typer.Option(help="Only this segment: its id, or its beginning.")] = None
    fingerprint: Fingerprint = None

    @property
    def everything(self) -> bool:
        """Whether nothing restricts them."""
        return self.fingerprint is None and self.selection().everything

    def selection(self, created_before_s: float | None = None) -> "Selection":
        """Which segments of a model they are."""
        return Selection(self.document, self.chunk, self.segment, created_before_s)


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
        if not self.fingerprints and names.keys() - {PIN_FILE, REMOVED_FILE}:
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


app = typer.Typer(no_args_is_help=True, help="Look into a cache directory, check, empty, fill and copy it.")


@app.command()
@with_blocks
def ls(
    *,
    chosen: SegmentOptions,
    limit: Annotated[int | None, typer.Option(min=1, help="Most segments that are listed.")] = None,
    output: Output,
) -> None:
    """List segments, the newest first."""
    folder, selection = CacheFolder(chosen.cache_dir), chosen.selection()
    with status("reading headers"):
        found = [
            one for name, tier in folder.tiers(chosen.fingerprint) for one in folder.segments(name, tier, selection)
        ]
    found.sort(key=lambda one: (-one.created_s, one.record.source))
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
    """Report sizes by model and by document, and files that are not used. Headers are read, not the data."""
    folder, now_s = CacheFolder(cache_dir), time.time()
    models, problems = [], []
    with status("reading headers"):
        for name, tier in folder.tiers(fingerprint):
            found = list(folder.segments(name, tier))
            measured = cost_model_path(folder.root, name).exists()
            models.append({"fingerprint": name, "cost_model": measured, **_sizes(found, now_s), **_by_document(found)})
            problems += [problem_dict(problem, folder.root) for problem in without_own_files(tier.problems())]
    keys = ("segments", "tokens", "bytes")
    report = {**{key: sum(model[key] for model in models) for key in keys}, "models": models, "problems": problems}
    output.show(*stats_tables(report))
    output.finish(report)


def _sizes(found: list[CachedSegment], now_s: float) -> dict[str, Any]:
    ages = [max(0.0, now_s - one.created_s) for one in found]
    return {
        "segments": len(found),
        "chunks": len({one.record.chunk_id for one in found}),
        "tokens": sum(len(one.record) for one in found),
        "bytes": sum(one.record.nbytes for one in found),
        "pinned": sum(one.pinned for one in found),
        "oldest_s": max(ages, default=None),
        "newest_s": min(ages, default=None),
    }


def _by_document(found: list[CachedSegment]) -> dict[str, Any]:
    documents: dict[str, list[CachedSegment]] = {}
    for one in found:
        documents.setdefault(one.document, []).append(one)
    rows = [
        {
            "document": name,
            "segments": len(own),
            "tokens": sum(len(one.record) for one in own),
            "bytes": sum(one.record.nbytes for one in own),
        }
        for name, own in sorted(documents.items())
    ]
    return {"documents": rows}


_MOST_PROBLEMS = 50


def segments_table(listed: Sequence[CachedSegment], found: int, now_s: float) -> Table:
    """One line a segment."""
    caption = f"{len(listed)} of {found} segments" if len(listed) < found else f"{found} segments"
    return table_of(
        listed,
        ("segment", lambda one: one.record.id[:12]),
        ("chunk", lambda one: one.record.chunk_id[:12]),
        ("document", lambda one: escape(one.record.source) or "-"),
        ("tokens", lambda one: str(len(one.record))),
        ("size", lambda one: size(one.record.nbytes)),
        ("context", lambda one: str(len(one.record.context))),
        ("exact", lambda one: "yes" if one.record.exact else "no"),
        ("age", lambda one: age(max(0.0, now_s - one.created_s))),
        ("codec", lambda one: one.codec),
        ("dtype", lambda one: one.dtype),
        ("model", lambda one: one.fingerprint[:8]),
        ("", lambda one: "pinned" if one.pinned else ""),
        caption=caption,
        left=3,
    )


def stats_tables(report: dict[str, Any]) -> list[RenderableType]:
    """Sizes by model, by document, and the files that are not used."""
    models = table_of(
        report["models"],
        ("fingerprint", lambda model: model["fingerprint"]),
        *((name, partial(_count, name)) for name in ("segments", "chunks", "tokens")),
        ("size", lambda model: size(model["bytes"])),
        ("pinned", lambda model: str(model["pinned"])),
        ("oldest", lambda model: age(model["oldest_s"])),
        ("newest", lambda model: age(model["newest_s"])),
        ("cost model", lambda model: "yes" if model["cost_model"] else "no"),
        title="By model",
    )
    documents = table_of(
        [{"model": model["fingerprint"][:8], **row} for model in report["models"] for row in model["documents"]],
        ("model", lambda row: row["model"]),
        ("document", lambda row: escape(row["document"]) or "-"),
        *((name, partial(_count, name)) for name in ("segments", "tokens")),
        ("size", lambda row: size(row["bytes"])),
        title="By document",
        left=2,
    )
    return [models, documents, *([problems_table(report["problems"])] if report["problems"] else [])]


def _count(name: str, row: dict[str, Any]) -> str:
    return str(row[name])


def problems_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Files that are not used, and why."""
    more = len(rows) - _MOST_PROBLEMS
    caption = f"and {more} more; --json lists all" if more > 0 else None
    return table_of(
        rows[:_MOST_PROBLEMS],
        ("file", lambda row: escape(row["file"])),
        ("problem", lambda row: row["problem"] + (" (removed)" if row.get("repaired") else "")),
        ("reason", lambda row: escape(row["reason"])),
        title="Files that are not used",
        caption=caption,
        left=3,
    )


def problem_dict(problem: "ProblemFile", root: Path) -> dict[str, Any]:
    """JSON-able; the file is named from the cache directory on."""
    return {
        "file": str(problem.path.relative_to(root)),
        "problem": problem.problem.value,
        "reason": problem.reason,
    }


def age(value_s: float | None) -> str:
    """A duration in its largest sensible unit: `3 d`, `12 h`, `5 min`, `42 s`."""
    if value_s is None:
        return "-"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if value_s >= 2 * length_s:
            return f"{value_s / length_s:.0f} {unit}"
    return f"{value_s:.0f} s"


_HARMLESS = ("foreign", "future-version")
"""Not ours, or not ours yet: listed, never touched, and nothing is wrong with the cache."""


@app.command()
@with_blocks
def check(
    cache_dir: CacheFolderPath,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove corrupt files. What is not a segment of ours stays.")
    ] = False,
    fingerprint: Fingerprint = None,
    output: Output,
) -> None:
    """Verify the checksums of every file. Exit code 1 if anything is wrong and not repaired."""
    folder = CacheFolder(cache_dir)
    tiers = list(folder.tiers(fingerprint))
    total = sum(1 for _, tier in tiers for _ in tier.records())
    sound, rows = 0, []
    with progress("checking segments") as report:
        done = 0

        def one_more() -> None:
            nonlocal done
            done += 1
            report(done, total)

        for _, tier in tiers:
            good, problems = _check_tier(tier, one_more, repair=repair)
            sound += good
            rows += [problem_dict(problem, folder.root) | {"repaired": removed} for problem, removed in problems]
    _finish(output, sound, rows)


def _finish(output: Output, sound: int, rows: list[dict[str, Any]]) -> None:
    wrong = [row for row in rows if row["problem"] not in _HARMLESS and not row["repaired"]]
    repaired = sum(row["repaired"] for row in rows)
    summary = f"{sound} segments are sound; {len(wrong)} files are wrong, {repaired} were removed, "
    output.show(*([problems_table(rows)] if rows else []), f"{summary}{len(rows) - len(wrong) - repaired} are not ours")
    output.finish({"sound": sound, "wrong": len(wrong), "repaired": repaired, "problems": rows})
    if wrong:
        raise typer.Exit(1)


def _check_tier(
    tier: "DiskTier", one_more: Callable[[], None], *, repair: bool
) -> tuple[int, list[tuple["ProblemFile", bool]]]:
    """How many segments are sound, and the files that are not, each with whether it was removed."""
    sound, damaged = 0, []
    for record in tier.records():
        source = tier.get(record.id)
        if source is not None:
            problem = _damage(tier, source)
            if problem is None:
                sound += 1
            else:
                damaged.append((problem, repair and _remove(tier, source, problem)))
        one_more()
    known = {problem.path: problem for problem in without_own_files(tier.problems())}
    removed = set(tier.repair()) if repair else set()
    reported = {problem.path for problem, _ in damaged}
    return sound, [*damaged, *((known[path], path in removed) for path in known if path not in reported)]


def _damage(tier: "DiskTier", source: "DiskSegment") -> "ProblemFile | None":
    """What is wrong with a segment's data; None too if its file went or was replaced while it was read."""
    from chunkweave.kv.segment import SegmentLost
    from chunkweave.tiers.disk import ProblemFile
    from chunkweave.tiers.segment_header import FileProblem

    try:
        for layer in range(source.header.layout.num_layers):
            source.layer(layer)
    except SegmentLost as lost:
        if not _is_still(tier, source):
            return None
        # What the system would not read may be sound: no reason to remove it.
        unread = isinstance(lost.__cause__, OSError)
        return ProblemFile(source.path, FileProblem.UNREADABLE if unread else FileProblem.CORRUPT, str(lost))
    return None


def _remove(tier: "DiskTier", source: "DiskSegment", problem: "ProblemFile") -> bool:
    if problem.problem.value != "corrupt" or not _is_still(tier, source):
        return False
    with suppress(OSError):  # whether it is gone is asked below
        tier.delete(source.header.record.id)
    return not source.path.exists()


def _is_still(tier: "DiskTier", source: "DiskSegment") -> bool:
    """Whether the file is the one that was read, not a new one of the same name."""
    current = tier.get(source.header.record.id)
    return current is not None and current.header is source.header
