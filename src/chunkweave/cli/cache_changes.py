"""`chunkweave cache warm`, `pin`, `unpin`, `clear` and `export`: commands that change or copy a cache directory."""

import io
import os
import secrets
import tarfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from chunkweave.cli.ask import computing
from chunkweave.cli.cache import CachedSegment, CacheFolder, SegmentOptions
from chunkweave.cli.console import Output, check_writable, counted, progress, size, status, stderr
from chunkweave.cli.options import DocumentOptions, ModelOptions, Only, with_blocks
from chunkweave.config import CaptureConfig, ReuseConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.planning.method import prefer_mean
from chunkweave.settings import parse_duration
from chunkweave.store.records import ANYTHING
from chunkweave.store.shared_folder import Tombstones
from chunkweave.types import Chunk, SegmentId

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.tiers.blobs import BlobKey, BlobStore
    from chunkweave.tiers.disk import DiskTier
    from chunkweave.tiers.segment_header import SegmentHeader


@with_blocks
def warm(
    cache_dir: Annotated[Path, typer.Argument(metavar="CACHE_DIR", help="Created if it is missing.", file_okay=False)],
    more_docs: Annotated[
        list[Path] | None, typer.Argument(metavar="[DOC]...", help="Further documents, so that --docs *.md works.")
    ] = None,
    *,
    documents: DocumentOptions,
    model: ModelOptions,
    store: Annotated[StoreConfig, Only("host_budget", "disk_budget", "remote_url", "remote_budget", "codec")],
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
    kept = [prefer_mean(disk.store.variants(part)) for part in parts.values()]
    found = [record for record in kept if record is not None and (record.contexts or record.neutral or record.alone)]
    return {
        "chunks": len(parts),
        "computed": computed,
        "present": len(parts) - computed,
        "means": sum(bool(record.contexts) for record in found),
        "missing": len(parts) - len(found),
        "tokens": sum(map(len, found)),
        "bytes": sum(record.nbytes for record in found),
    }


@with_blocks
def pin(*, chosen: SegmentOptions, output: Output) -> None:
    """Protect segments from eviction and expiry, until they are unpinned or cleared.

    A process reads pins when it opens the folder.
    """
    _change(chosen, output, pinning=True)


@with_blocks
def unpin(*, chosen: SegmentOptions, output: Output) -> None:
    """Remove pins."""
    _change(chosen, output, pinning=False)


def _change(chosen: SegmentOptions, output: Output, *, pinning: bool) -> None:
    if chosen.everything:
        raise UsageError("say which segments: --document, --chunk, --segment or --fingerprint")
    folder = CacheFolder(chosen.cache_dir)
    matching = changed = 0
    with status("reading headers"):
        for tier in folder.tiers(chosen.fingerprint):
            ids = [one.record.id for one in folder.segments(tier, chosen)]
            matching += len(ids)
            changed += (folder.pins.add if pinning else folder.pins.discard)(tier.folder.name, ids)
    if not matching:
        raise UsageError(f"no segment in {chosen.cache_dir} fits")
    output.show(f"{'pinned' if pinning else 'unpinned'} {changed} of {counted(matching, 'segment')}")
    output.finish({"matching": matching, "changed": changed})


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


@dataclass(frozen=True, slots=True)
class ClearedOptions(SegmentOptions):
    """Segments to remove."""

    older_than: Annotated[
        str | None, typer.Option(help="Only segments older than this, such as 7d; pinned ones stay.")
    ] = None

    @property
    def created_before_s(self) -> float | None:
        """Latest creation time, in seconds since the epoch; None: any time."""
        return None if self.older_than is None else time.time() - parse_duration(self.older_than)

    @property
    def forgets(self) -> bool:
        """Whether every segment that attended to the chosen text is removed too."""
        return (self.document, self.chunk) != (None, None) and self.segment is None and self.older_than is None

    def of(self, headers: Mapping[SegmentId, "SegmentHeader"]) -> tuple[set[SegmentId], set[SegmentId]]:
        """Ids of a model's segments that match, and ids of others that attended to a chunk of these."""
        fitting = {one for one, header in headers.items() if self.fits(header.record, header.created_s)}
        if not self.forgets:
            return fitting, set()
        gone = {headers[one].record.chunk_id for one in fitting}
        if self.chunk is not None and self.document is None:  # perhaps only segments that attended to it are left
            read = {chunk for header in headers.values() for chunk in header.record.sources}
            gone |= {chunk for chunk in read if chunk.startswith(self.chunk)}
        if gone:
            gone.add(ANYTHING)
        readers = {one for one, header in headers.items() if not gone.isdisjoint(header.record.sources)}
        return fitting, readers - fitting


@with_blocks
def clear(
    *,
    chosen: ClearedOptions,
    everything: Annotated[bool, typer.Option("--all", help="Every segment of every model.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    remote: Annotated[StoreConfig, Only("remote_url")],
    output: Output,
) -> None:
    """Remove segments, with --remote-url also from the remote.

    With --document or --chunk alone, segments of other documents that attended to them are removed too, also means:
    `cache warm` with those documents computes them again. With --segment or --older-than these are kept. Exit code 1 if
    a segment could not be removed, or if unreadable files may be among them.
    """
    remote_url = remote.remote_url
    if everything != chosen.everything:
        raise UsageError("say what to remove: --document, --chunk, --segment, --older-than or --fingerprint, or --all")
    folder = CacheFolder(chosen.cache_dir)
    if everything and not yes:
        typer.confirm(f"Remove every segment in {chosen.cache_dir}?", abort=True, err=True)
    cleared = _Cleared()
    tiers = _tiers(folder, chosen.fingerprint, remote=remote_url is not None)
    with status("removing segments"):
        for tier in tiers:
            _clear_model(folder, tier, chosen, cleared, remote_url)
    output.show(_summary(cleared), *_kept(chosen))
    output.finish(asdict(cleared))
    if not cleared.complete:
        raise typer.Exit(1)


def _tiers(folder: CacheFolder, fingerprint: str | None, *, remote: bool) -> list["DiskTier"]:
    """Disk tiers of the chosen models. With a remote, the model of a whole fingerprint need not be in the folder."""
    if remote and fingerprint is not None and not any(name.startswith(fingerprint) for name in folder.fingerprints):
        from chunkweave.tiers.disk import DiskTier

        return [DiskTier(folder.root, fingerprint)]
    return list(folder.tiers(fingerprint))


def _clear_model(
    folder: CacheFolder, tier: "DiskTier", chosen: ClearedOptions, cleared: _Cleared, remote_url: str | None
) -> None:
    from chunkweave.tiers.blobs import BlobKey, open_blobs

    name = tier.folder.name
    on_disk = {one.record.id: one for one in folder.segments(tier)}
    headers = {one: segment.header for one, segment in on_disk.items()}
    kept = folder.pins.read().get(name, frozenset()) if chosen.created_before_s is not None else frozenset()
    if remote_url is None:
        fitting, readers = chosen.of(headers)
    else:
        blobs = open_blobs(remote_url)
        try:
            there = _remote_headers(blobs, name, chosen, on_disk.keys(), cleared)
            fitting, readers = chosen.of({**headers, **{one: header for one, header in there.items() if header}})
            unread = {one for one, header in there.items() if header is None}
            doomed = (fitting | readers | (unread if chosen.whole_models else set())) - kept
            _clear_remote(blobs, {BlobKey(name, one) for one in doomed}, cleared)
        finally:
            blobs.close()
    cleared.readers += len(readers)
    found = [on_disk[one] for one in (fitting | readers) - kept if one in on_disk]
    left = []
    for one in found:
        try:
            tier.delete(one.record.id)
        except OSError:
            left.append(one)
    removed = Tombstones(folder.root, name, "disk")
    removed.add(one.record for one in left)
    removed.discard({one.record.id for one in found} - {one.record.id for one in left})
    if chosen.whole_models:
        tier.repair()
    cleared.failed += sorted(one.record.id for one in left)
    gone = [one for one in found if one not in left]
    cleared.removed += len(gone)
    cleared.removed_bytes += sum(one.record.nbytes for one in gone)
    cleared.unknown += sum(problem.problem.value in ("corrupt", "unreadable") for problem in tier.problems())
    folder.pins.discard(name, (one.record.id for one in gone))


def _remote_headers(
    blobs: "BlobStore", fingerprint: str, chosen: ClearedOptions, known: Collection[SegmentId], cleared: _Cleared
) -> dict[SegmentId, "SegmentHeader | None"]:
    """Headers of a model's segments in the remote that are not `known`; None where only the id is needed.

    Reads the blobs without the tier's deadlines and circuit breaker: a miss because of a timeout must not count as a
    deletion.
    """
    from chunkweave.tiers.remote import fetch_header
    from chunkweave.tiers.segment_header import SegmentRefused

    found: dict[SegmentId, SegmentHeader | None] = {}
    with _asked(blobs, cleared):
        for key in blobs.keys(fingerprint):
            if chosen.whole_models:
                found[key.segment] = None
            elif key.segment not in known:
                try:
                    header = fetch_header(blobs, key)
                except SegmentRefused as refused:
                    stderr().print(f"segment {key.segment} in the remote cannot be read: {refused}", markup=False)
                    cleared.unknown += 1
                else:
                    found |= {} if header is None else {key.segment: header}
    return found


def _clear_remote(blobs: "BlobStore", keys: "Iterable[BlobKey]", cleared: _Cleared) -> None:
    with _asked(blobs, cleared):
        for key in keys:
            cleared.remote_removed += blobs.size(key) is not None
            blobs.delete(key)


@contextmanager
def _asked(blobs: "BlobStore", cleared: _Cleared) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        cleared.remote_error = f"{blobs.name}: {error}"


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
            f"unreadable: {counted(cleared.unknown, 'file')}, which may belong to the chosen segments; `cache check "
            "--repair` removes damaged files"
        )
    return "\n".join(lines)


def _kept(chosen: ClearedOptions) -> list[str]:
    """A line on segments that stay although they attended to the removed ones."""
    if (chosen.document, chosen.chunk) == (None, None) or chosen.forgets:
        return []
    return [
        "kept: segments of other documents that attended to the removed ones; without --segment and --older-than they "
        "are removed too"
    ]


_Add = Callable[[CachedSegment, bytes], None]
"""Adds a copy of a segment file under the name `<fingerprint>/<2 hex>/<id>.safetensors`."""


@with_blocks
def export(
    chosen: SegmentOptions,
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .tar file, or a folder that becomes a cache directory.")
    ],
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every segment of every model.")] = False,
    output: Output,
) -> None:
    """Copy segments to a file or folder, and verify each. Exit code 1 if some were left out.

    To use a .tar file, unpack it into a folder.
    """
    if everything != chosen.everything:
        raise UsageError("say what to export: --document, --chunk, --segment or --fingerprint, or --all")
    folder = CacheFolder(chosen.cache_dir)
    tiers = list(folder.tiers(chosen.fingerprint))
    copied = [(tier, one) for tier in tiers for one in folder.segments(tier, chosen)]
    if not copied:
        raise UsageError(f"no segment in {chosen.cache_dir} fits")
    exported_bytes, left_out = 0, []
    with _opened(folder.root, target) as add, progress("copying segments") as report:
        for done, (tier, one) in enumerate(copied, start=1):
            data = _verified(tier, one)
            if data is None:
                left_out.append(one.record.id)
            else:
                add(one, data)
                exported_bytes += len(data)
            report(done, len(copied))
    exported = len(copied) - len(left_out)
    output.show(f"exported {counted(exported, 'segment')} of {size(exported_bytes)} to {target}")
    if left_out:
        output.show(f"[red]left out: {counted(len(left_out), 'segment')}, corrupt or removed meanwhile[/red]")
    output.finish({"exported": exported, "bytes": exported_bytes, "left_out": left_out})
    if left_out:
        raise typer.Exit(1)


def _add_to_folder(root: Path, one: CachedSegment, data: bytes) -> None:
    """A copy in a folder that is, or becomes, a cache directory."""
    final = root / _name(one)
    for folder in (final.parent.parent, final.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    with _written(final) as stream:
        stream.write(data)


def _add_to_archive(archive: tarfile.TarFile, one: CachedSegment, data: bytes) -> None:
    entry = tarfile.TarInfo(_name(one))
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(one.header.created_s)
    archive.addfile(entry, io.BytesIO(data))


@contextmanager
def _opened(source: Path, target: Path) -> Iterator[_Add]:
    """A function that adds copies to the target. A .tar file appears only if nothing is raised.

    Raises:
        UsageError: the target is the cache directory itself, has other files, or cannot be written.
    """
    try:
        if target.suffix == ".tar":
            check_writable(target)
            with _written(target) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
                yield partial(_add_to_archive, archive)
        else:
            if target.exists():
                CacheFolder(target)
                if target.samefile(source):
                    raise UsageError(f"{target} is the cache directory itself")
            else:
                target.mkdir(mode=0o700)
            yield partial(_add_to_folder, target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from error


@contextmanager
def _written(final: Path) -> Iterator[IO[bytes]]:
    """A file that only its owner can read. It appears whole, and only if nothing is raised."""
    unfinished = final.with_name(f".{final.stem}.{secrets.token_hex(8)}.tmp")
    try:
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(file)
        unfinished.replace(final)
    finally:
        unfinished.unlink(missing_ok=True)


def _verified(tier: "DiskTier", one: CachedSegment) -> bytes | None:
    """The bytes of a segment file whose checksums are all correct; None if it is corrupt or gone."""
    from chunkweave.kv.segment import SegmentLost
    from chunkweave.tiers.segment_file import MemorySegment
    from chunkweave.tiers.segment_header import SegmentRefused

    source = tier.get(one.record.id)
    if source is None:
        return None
    try:
        data = source.path.read_bytes()
        segment = MemorySegment(data)
        for layer in range(segment.header.layout.num_layers):
            segment.layer(layer)
    except (OSError, SegmentRefused, SegmentLost):
        return None
    return data if segment.header.record.id == one.record.id else None


def _name(one: CachedSegment) -> str:
    return f"{one.header.fingerprint}/{one.record.id[:2]}/{one.record.id}.safetensors"
