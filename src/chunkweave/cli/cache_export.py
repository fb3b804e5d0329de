"""`chunkweave cache export`: segments as files that another machine can use as its cache directory."""

import io
import os
import secrets
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from chunkweave.cli import options
from chunkweave.cli.cache_folder import CachedSegment, CacheFolder, Selection
from chunkweave.cli.console import Output, progress
from chunkweave.cli.option_blocks import with_blocks
from chunkweave.cli.tables import size
from chunkweave.errors import UsageError
from chunkweave.eval.results import check_writable

if TYPE_CHECKING:
    from chunkweave.tiers.disk import DiskTier


class _Target(Protocol):
    """Where copies go. `name` is `<fingerprint>/<2 hex>/<id>.safetensors`."""

    def add(self, name: str, data: bytes, created_s: float) -> None:
        """Take one file."""


@with_blocks
def export(
    cache_dir: options.CacheFolderPath,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A .tar file, or a folder for a --cache-dir.")],
    *,
    document: options.DocumentName = None,
    chunk: options.ChunkPrefix = None,
    fingerprint: options.Fingerprint = None,
    everything: Annotated[bool, typer.Option("--all", help="Every segment of every model.")] = False,
    output: Output,
) -> None:
    """Copy segments out, each verified while it is copied. Exit code 1 if some had to be left out.

    A .tar file is used by unpacking it into a folder.
    """
    selection = Selection(document, chunk)
    if everything != (selection.everything and fingerprint is None):
        raise UsageError("say what to export: --document, --chunk or --fingerprint, or --all")
    folder = CacheFolder(cache_dir)
    tiers = list(folder.tiers(fingerprint))
    chosen = [(tier, one) for name, tier in tiers for one in folder.segments(name, tier, selection)]
    if not chosen:
        raise UsageError(f"no segment in {cache_dir} fits")
    exported_bytes, left_out = 0, []
    with _opened(folder.root, target) as copies, progress("copying segments") as report:
        for done, (tier, one) in enumerate(chosen, start=1):
            data = _verified(tier, one)
            if data is None:
                left_out.append(one.record.id)
            else:
                copies.add(_name(one), data, one.created_s)
                exported_bytes += len(data)
            report(done, len(chosen))
    exported = len(chosen) - len(left_out)
    output.show(f"exported {exported} segments of {size(exported_bytes)} to {target}")
    if left_out:
        output.show(f"[red]{len(left_out)} were left out: corrupt, or gone meanwhile[/red]")
    output.finish({"exported": exported, "bytes": exported_bytes, "left_out": left_out})
    if left_out:
        raise typer.Exit(1)


class _Folder:
    """Copies in a folder that is, or becomes, a cache directory. Files appear whole, for their owner only."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, name: str, data: bytes, created_s: float) -> None:  # noqa: ARG002 - the header has it
        path = self._root
        for part in Path(name).parent.parts:
            path = path / part
            path.mkdir(mode=0o700, exist_ok=True)
        final = self._root / name
        partial = final.with_name(f".{final.stem}.{secrets.token_hex(8)}.tmp")
        try:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(file)
            partial.replace(final)
        finally:
            partial.unlink(missing_ok=True)


class _Archive:
    """Copies in an archive that is being written."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive

    def add(self, name: str, data: bytes, created_s: float) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = len(data), 0o600, int(created_s)
        self._archive.addfile(entry, io.BytesIO(data))


@contextmanager
def _opened(source: Path, target: Path) -> Iterator[_Target]:
    """The target, whole if nothing is raised.

    Raises:
        UsageError: it is the cache directory itself, holds something else, or cannot be written.
    """
    try:
        if target.suffix == ".tar":
            with _archive(target) as archive:
                yield archive
        else:
            if target.exists():
                CacheFolder(target)
                if target.samefile(source):
                    raise UsageError(f"{target} is the cache directory itself")
            else:
                target.mkdir(mode=0o700)
            yield _Folder(target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from error


@contextmanager
def _archive(target: Path) -> Iterator[_Archive]:
    check_writable(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as archive:
            yield _Archive(archive)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _verified(tier: "DiskTier", one: CachedSegment) -> bytes | None:
    """The bytes of a segment file, every checksum of which was compared; None if it is corrupt or gone."""
    from chunkweave.kv.segment import SegmentLost
    from chunkweave.tiers.segment_bytes import decode_segment
    from chunkweave.tiers.segment_header import SegmentRefused

    source = tier.get(one.record.id)
    if source is None:
        return None
    try:
        data = source.path.read_bytes()
        segment = decode_segment(data)
        for layer in range(segment.header.layout.num_layers):
            segment.layer(layer)
    except (OSError, SegmentRefused, SegmentLost):
        return None
    return data if segment.header.record.id == one.record.id else None


def _name(one: CachedSegment) -> str:
    return f"{one.fingerprint}/{one.record.id[:2]}/{one.record.id}.safetensors"
