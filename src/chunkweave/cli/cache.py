"""`chunkweave cache`: sums up, fills, clears and verifies a cache directory."""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from chunkweave.cli.ask import computing
from chunkweave.cli.console import Output, counted, progress, size, status, table_of
from chunkweave.cli.options import DocumentOptions, ModelOptions, Only, with_blocks
from chunkweave.config import CaptureConfig, ReuseConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.planning.calibration import OWN_FILES
from chunkweave.planning.method import prefer_mean
from chunkweave.store.records import SegmentRecord
from chunkweave.store.shared_folder import DTYPE_FILE, REMOVED_FILE
from chunkweave.types import Chunk, ChunkId, SegmentId

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.tiers.disk import DiskTier
    from chunkweave.tiers.segment_header import SegmentHeader

_FINGERPRINT = re.compile(r"[0-9A-Za-z_-]{1,128}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_HARMLESS = ("foreign", "other-version")
"""Files of other programs or format versions: listed, never removed, and not counted as damage."""
_MOST_PROBLEMS = 50

CacheFolderPath = Annotated[Path, typer.Argument(metavar="CACHE_DIR", help="The folder given as --cache-dir.")]
Fingerprint = Annotated[
    str | None, typer.Option("--fingerprint", help="Only segments of this model: its fingerprint, or its beginning.")
]


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
        self.fingerprints = tuple(sorted(name for name, is_ours in names.items() if is_ours))
        if not self.fingerprints and names.keys() - {REMOVED_FILE, DTYPE_FILE}:
            raise UsageError(f"{root} is no cache directory: it holds other files, and no model's folder of segments")

    def chosen(self, fingerprint: str | None) -> list[str]:
        """The models whose fingerprint begins with `fingerprint`; None: all.

        Raises:
            UsageError: there is no such fingerprint.
        """
        chosen = [name for name in self.fingerprints if name.startswith(fingerprint or "")]
        if fingerprint is not None and not chosen:
            listed = ", ".join(self.fingerprints) or "none"
            raise UsageError(f"no fingerprint {fingerprint!r} in {self.root}; there are: {listed}")
        return chosen

    def tiers(self, fingerprint: str | None = None) -> Iterator["DiskTier"]:
        """The disk tiers of `chosen` models."""
        from chunkweave.tiers.disk import DiskTier

        for name in self.chosen(fingerprint):
            yield DiskTier(self.root, name)

    def headers(self, tier: "DiskTier") -> "dict[SegmentId, SegmentHeader]":
        """Headers of one model's segments by id; those that are removed meanwhile are skipped."""
        sources = ((record.id, tier.get(record.id)) for record in tier.records())
        return {segment: source.header for segment, source in sources if source is not None}


def _is_model_folder(path: Path) -> bool:
    if not _FINGERPRINT.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    try:
        return any(child.name in OWN_FILES or _is_shard(child) for child in path.iterdir())
    except OSError:  # its tier reports that it cannot be read
        return True


def _is_shard(path: Path) -> bool:
    return _SHARD.fullmatch(path.name) is not None and path.is_dir()


app = typer.Typer(no_args_is_help=True, help="Sum up, fill, clear and verify a cache directory.")


@app.command()
@with_blocks
def stats(cache_dir: CacheFolderPath, *, fingerprint: Fingerprint = None, output: Output) -> None:
    """Report sizes by model and by document, and files that are not used. Reads headers only."""
    folder = CacheFolder(cache_dir)
    now_s = time.time()
    models = []
    problems = []
    with status("reading headers"):
        for tier in folder.tiers(fingerprint):
            models.append(_about_model(folder, tier, now_s))
            problems += _problems(tier, folder.root)
    keys = ("segments", "tokens", "bytes")
    report = {**{key: sum(model[key] for model in models) for key in keys}, "models": models, "problems": problems}
    output.show(*stats_tables(report))
    output.finish(report)


def _about_model(folder: CacheFolder, tier: "DiskTier", now_s: float) -> dict[str, Any]:
    headers = sorted(folder.headers(tier).values(), key=lambda header: header.record.document)
    ages = [max(0.0, now_s - header.created_s) for header in headers]
    documents = groupby(headers, key=lambda header: header.record.document)
    return {
        "fingerprint": tier.folder.name,
        "chunks": len({header.record.chunk_id for header in headers}),
        **_sums(headers),
        "means": sum(bool(header.record.contexts) for header in headers),
        "oldest_s": max(ages, default=None),
        "newest_s": min(ages, default=None),
        "documents": [{"document": name, **_sums(list(headers_of))} for name, headers_of in documents],
    }


def _sums(headers: Sequence["SegmentHeader"]) -> dict[str, int]:
    return {
        "segments": len(headers),
        "tokens": sum(len(header.record) for header in headers),
        "bytes": sum(header.record.nbytes for header in headers),
    }


def stats_tables(report: dict[str, Any]) -> list[RenderableType]:
    """Sizes by model, by document, and the files that are not used."""
    models = table_of(
        report["models"],
        *((name, name) for name in ("fingerprint", "segments", "chunks", "means", "tokens")),
        ("size", lambda model: size(model["bytes"])),
        ("oldest", lambda model: age(model["oldest_s"])),
        ("newest", lambda model: age(model["newest_s"])),
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
        {"file": str(problem.path.relative_to(root)), "problem": problem.problem.value, "reason": problem.reason}
        for problem in tier.problems()
        if problem.path.name not in OWN_FILES
    ]


def age(value_s: float | None) -> str:
    """A duration in its largest sensible unit: `3 d`, `12 h`, `5 min`, `42 s`."""
    if value_s is None:
        return "-"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if value_s >= 2 * length_s:
            return f"{value_s / length_s:.0f} {unit}"
    return f"{value_s:.0f} s"


@app.command()
@with_blocks
def verify(
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
    total = sum(1 for tier in tiers for _ in tier.records())
    done = count(1)
    rows = []
    with progress("verifying segments") as report:
        for tier in tiers:
            tier.verify(lambda: report(next(done), total))
            problems = _problems(tier, folder.root)
            removed = {str(path.relative_to(folder.root)) for path in tier.repair()} if repair else set()
            rows += [{**row, "repaired": row["file"] in removed} for row in problems]
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


@app.command()
@with_blocks
def warm(
    cache_dir: Annotated[Path, typer.Argument(metavar="CACHE_DIR", help="Created if it is missing.", file_okay=False)],
    more_docs: Annotated[
        list[Path] | None, typer.Argument(metavar="[DOC]...", help="Further documents, so that --docs *.md works.")
    ] = None,
    *,
    documents: DocumentOptions,
    model: ModelOptions,
    store: Annotated[StoreConfig, Only("host_budget", "disk_budget", "remote_url", "codec")],
    capture: CaptureConfig,
    output: Output,
) -> None:
    """Compute every chunk of the documents and keep it on disk. After an interruption, the same command continues.

    Cut the documents with the same options as in `ask`; otherwise `ask` finds other chunks. Exit code 1 if a chunk is
    not on disk afterwards: the disk or its budget is too small, or not writable.
    """
    paths = [*(documents.docs or []), *(more_docs or [])]
    if not paths:
        raise UsageError("no documents: give --docs")
    store = replace(store, cache_dir=cache_dir)
    model.named()
    read = documents.read(paths)
    with model.open(store=store, reuse=ReuseConfig(capture=capture)) as engine:
        result = {"model": model.name, "documents": len(read), **_warm(engine, documents.chunks(engine, read))}
    written = f"computed {counted(result['computed'], 'chunk')}, stored before: {result['present']}; "
    means = f"of them means over several contexts: {result['means']}; " if result["means"] else ""
    output.show(f"{written}{means}{counted(result['tokens'], 'token')}, {size(result['bytes'])} on disk")
    if result["missing"]:
        missing = counted(result["missing"], "chunk")
        output.show(f"[red]not on disk: {missing}; the budget is too small, or writing failed[/red]")
    output.finish(result)
    if result["missing"]:
        raise typer.Exit(1)


def _warm(engine: "Engine", chunks: Sequence[Chunk]) -> dict[str, Any]:
    with progress(computing(engine, chunks)) as report:

        def computed_one(done: int, total: int) -> None:
            engine.store.flush()  # the queue of the background writer drops what it has no room for
            report(done, total)

        computed = engine.precompute(chunks, progress=computed_one)
        engine.store.flush()
    disk = next(level for level in engine.store.levels if level.name == "disk")
    parts = {part.id: part for part in map(engine.builder.chunk_part, chunks)}
    preferred = [prefer_mean(disk.store.variants(part)) for part in parts.values()]
    usable_variants = [
        record for record in preferred if record is not None and (record.contexts or record.neutral or record.alone)
    ]
    return {
        "chunks": len(parts),
        "computed": computed,
        "present": len(parts) - computed,
        "means": sum(bool(record.contexts) for record in usable_variants),
        "missing": len(parts) - len(usable_variants),
        "tokens": sum(map(len, usable_variants)),
        "bytes": sum(record.nbytes for record in usable_variants),
    }


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """Segments to remove: those that match every option. Options may give the beginning of an id."""

    cache_dir: CacheFolderPath
    document: Annotated[str | None, typer.Option(help="Only segments of this document.")] = None
    chunk: Annotated[str | None, typer.Option(help="Only segments of this chunk: its id or the id's beginning.")] = None
    fingerprint: Fingerprint = None

    @property
    def whole_models(self) -> bool:
        """Whether only the fingerprint restricts the selection."""
        return self.document is None and self.chunk is None

    @property
    def everything(self) -> bool:
        """Whether no option restricts the selection."""
        return self.whole_models and self.fingerprint is None

    def chunks(self, records: Iterable[SegmentRecord]) -> frozenset[ChunkId]:
        """The chunks to remove, among those that a model's `records` hold or have read."""
        named: set[ChunkId] = set()
        for record in records:
            if self.document is None or self.document in (record.source, record.document):
                named.add(record.chunk_id)
            if self.document is None:  # perhaps only segments that have read it are left
                named |= record.sources
        return frozenset(chunk for chunk in named if chunk.startswith(self.chunk or ""))


@dataclass(slots=True)
class _Cleared:
    """Result of a removal so far.

    `readers` of the removed segments were not chosen, but attended to a chosen chunk. `unknown` counts unreadable
    files, which may belong to the chosen segments. `remote_error` is the error that ended the removal in the remote.
    """

    removed: int = 0
    removed_bytes: int = 0
    readers: int = 0
    remote_removed: int = 0
    failed: list[str] = field(default_factory=list)
    unknown: int = 0
    remote_error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether all chosen segments are certainly removed."""
        return not (self.failed or self.unknown or self.remote_error)

    @contextmanager
    def remote_calls(self) -> Iterator[None]:
        """Note an error of the remote instead of raising it."""
        try:
            yield
        except OSError as error:
            self.remote_error = str(error)


@app.command()
@with_blocks
def clear(
    *,
    chosen: SegmentOptions,
    everything: Annotated[bool, typer.Option("--all", help="Every segment of every model.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    remote: Annotated[StoreConfig, Only("remote_url")],
    output: Output,
) -> None:
    """Remove segments, with --remote-url also from the remote.

    With --document or --chunk, segments of other documents that attended to them are removed too, also means: `cache
    warm` with those documents computes them again. Exit code 1 if a segment could not be removed, or if unreadable
    files may be among them.
    """
    if everything != chosen.everything:
        raise UsageError("say what to remove: --document, --chunk or --fingerprint, or --all")
    folder = CacheFolder(chosen.cache_dir)
    if everything and not yes:
        typer.confirm(f"Remove every segment in {chosen.cache_dir}?", abort=True, err=True)
    from chunkweave.weaving.stores import UNBOUNDED_BYTES

    # A store evicts down to its budget when it is opened.
    config = replace(remote, cache_dir=folder.root, disk_budget_bytes=UNBOUNDED_BYTES)
    cleared = _Cleared()
    with status("removing segments"):
        for fingerprint in _fingerprints(folder, chosen.fingerprint, remote=config.remote_url is not None):
            _clear_model(config, fingerprint, chosen, cleared)
    output.show(_summary(cleared))
    output.finish(asdict(cleared))
    if not cleared.complete:
        raise typer.Exit(1)


def _fingerprints(folder: CacheFolder, fingerprint: str | None, *, remote: bool) -> list[str]:
    """The chosen models. With a remote, the model of a whole fingerprint need not be in the folder."""
    if remote and fingerprint is not None and not any(name.startswith(fingerprint) for name in folder.fingerprints):
        return [fingerprint]
    return folder.chosen(fingerprint)


def _clear_model(config: StoreConfig, fingerprint: str, chosen: SegmentOptions, cleared: _Cleared) -> None:
    """Remove the chosen segments of one model from the remote, if there is one, and from the disk."""
    from chunkweave.tiers.disk import DiskTier
    from chunkweave.tiers.remote import RemoteTier
    from chunkweave.weaving.stores import slow_levels

    levels = {level.name: level.store for level in slow_levels(config, fingerprint)}
    on_disk = {record.id: record for record in levels["disk"].tier.records()}
    in_remote: dict[SegmentId, SegmentRecord] = {}
    remote = levels["remote"].tier if "remote" in levels else None
    if isinstance(remote, RemoteTier) and not chosen.whole_models:
        with cleared.remote_calls():
            in_remote.update((record.id, record) for record in remote.records())
        cleared.unknown += remote.stats.garbage + remote.stats.refused
    gone = chosen.chunks([*on_disk.values(), *in_remote.values()])

    def is_doomed(record: SegmentRecord) -> bool:
        return chosen.whole_models or (bool(gone) and record.depends_on(gone))

    doomed = {segment: record for segment, record in {**in_remote, **on_disk}.items() if is_doomed(record)}
    cleared.readers += sum(record.chunk_id not in gone for record in doomed.values())
    if isinstance(remote, RemoteTier):
        with cleared.remote_calls():
            if chosen.whole_models:
                cleared.remote_removed += remote.clear()
            else:
                for segment in doomed:
                    remote.delete(segment)
                    cleared.remote_removed += segment in in_remote
        remote.close()
    removal = levels["disk"].withdraw(is_doomed)
    disk = levels["disk"].tier
    assert isinstance(disk, DiskTier)
    if chosen.whole_models:
        disk.repair()
    left = {record.id for record in removal.left}
    cleared.removed += removal.removed
    cleared.removed_bytes += sum(on_disk[segment].nbytes for segment in doomed.keys() & on_disk.keys() - left)
    cleared.failed += sorted(left)
    cleared.unknown += sum(problem.problem.value in ("corrupt", "unreadable") for problem in disk.problems())


def _summary(cleared: _Cleared) -> str:
    lines = [f"removed {counted(cleared.removed, 'segment')} of {size(cleared.removed_bytes)}"]
    if cleared.readers:
        lines.append(
            f"of them {counted(cleared.readers, 'segment')} of other documents that attended to the chosen ones; "
            "`cache warm` with those documents computes them again"
        )
    if cleared.remote_removed:
        lines.append(f"removed {counted(cleared.remote_removed, 'segment')} from the remote")
    if cleared.remote_error:
        lines.append(f"the remote was not searched to its end; run this command again: {escape(cleared.remote_error)}")
    if cleared.failed:
        lines.append(f"not removed: {counted(len(cleared.failed), 'segment')}; is the folder writable?")
    if cleared.unknown:
        lines.append(
            f"unreadable: {counted(cleared.unknown, 'file')}, which may belong to the chosen segments; `cache verify "
            "--repair` removes damaged files"
        )
    return "\n".join(lines)
