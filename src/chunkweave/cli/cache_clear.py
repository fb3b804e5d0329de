"""`chunkweave cache clear`: removes segments from a cache directory, and from the remote behind it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from chunkweave.cli import options
from chunkweave.cli.cache_folder import CacheFolder, Selection
from chunkweave.cli.console import Output, status, stderr
from chunkweave.cli.option_blocks import with_blocks
from chunkweave.cli.tables import size
from chunkweave.errors import UsageError
from chunkweave.types import SegmentId
from chunkweave.units import parse_duration

if TYPE_CHECKING:
    from chunkweave.tiers.blobs import BlobKey, BlobStore
    from chunkweave.tiers.disk import DiskTier


@dataclass(slots=True)
class _Cleared:
    """What was removed so far, and what could not be.

    `unknown` files cannot be read, so nobody can say whose they are. `remote_error` ended the removal in the remote.
    """

    removed: int = 0
    removed_bytes: int = 0
    remote_removed: int = 0
    failed: list[str] = field(default_factory=list)
    unknown: int = 0
    remote_error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether what was asked for is gone for certain."""
        return not (self.failed or self.unknown or self.remote_error)

    def as_dict(self) -> dict[str, Any]:
        return {
            "removed": self.removed,
            "removed_bytes": self.removed_bytes,
            "remote_removed": self.remote_removed,
            "failed": self.failed,
            "unknown": self.unknown,
            "remote_error": self.remote_error,
        }


@with_blocks
def clear(
    cache_dir: options.CacheFolderPath,
    *,
    document: options.DocumentName = None,
    chunk: options.ChunkPrefix = None,
    segment: options.SegmentPrefix = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only segments older than that, such as 7d; pinned ones stay.")
    ] = None,
    fingerprint: options.Fingerprint = None,
    everything: Annotated[bool, typer.Option("--all", help="Every segment of every model.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    remote_url: options.RemoteUrl = None,
    output: Output,
) -> None:
    """Remove segments, with --remote-url from the remote too.

    Exit code 1 if any could not be removed, or if files that cannot be read may be among them.
    """
    before_s = None if older_than is None else time.time() - parse_duration(older_than)
    selection = Selection(document, chunk, segment, before_s)
    if everything != (selection.everything and fingerprint is None):
        raise UsageError("say what to remove: --document, --chunk, --segment, --older-than or --fingerprint, or --all")
    folder = CacheFolder(cache_dir)
    if everything and not yes:
        typer.confirm(f"Remove every segment in {cache_dir}?", abort=True, err=True)
    cleared = _Cleared()
    tiers = _tiers(folder, fingerprint, remote=remote_url is not None)
    with status("removing segments"):
        for name, tier in tiers:
            _clear_model(folder, name, tier, selection, cleared, remote_url)
    output.show(_summary(cleared))
    output.finish(cleared.as_dict())
    if not cleared.complete:
        raise typer.Exit(1)


def _tiers(folder: CacheFolder, fingerprint: str | None, *, remote: bool) -> list[tuple[str, "DiskTier"]]:
    """Models to go through: a whole fingerprint need not be in the folder if it may be in the remote."""
    if remote and fingerprint is not None and not any(name.startswith(fingerprint) for name in folder.fingerprints):
        from chunkweave.tiers.disk import DiskTier

        return [(fingerprint, DiskTier(folder.root, fingerprint))]
    return list(folder.tiers(fingerprint))


def _clear_model(
    folder: CacheFolder, name: str, tier: "DiskTier", selection: Selection, cleared: _Cleared, remote_url: str | None
) -> None:
    aged = selection.created_before_s is not None
    found = [one for one in folder.segments(name, tier, selection) if not (aged and one.pinned)]
    ids = [one.record.id for one in found]
    if remote_url is not None:
        kept = folder.pins.read().get(name, frozenset()) if aged else frozenset()
        _clear_remote(remote_url, name, selection, ids, kept, cleared)
    for one in found:
        tier.delete(one.record.id)
    if selection.everything:
        tier.repair()
    undeleted = {problem.path.stem for problem in tier.problems() if problem.problem.value == "undeletable"}
    cleared.failed += sorted(undeleted & set(ids))
    gone = [one for one in found if one.record.id not in undeleted]
    cleared.removed += len(gone)
    cleared.removed_bytes += sum(one.record.nbytes for one in gone)
    cleared.unknown += sum(problem.problem.value in ("corrupt", "unreadable") for problem in tier.problems())
    folder.pins.discard(name, (one.record.id for one in gone))


def _clear_remote(
    url: str,
    fingerprint: str,
    selection: Selection,
    known: Iterable[SegmentId],
    kept: frozenset[SegmentId],
    cleared: _Cleared,
) -> None:
    """Remove what fits from the remote, whether it is on disk too or not.

    The blobs are asked without the tier's deadlines and breaker: a miss that only means "not now" must not pass for
    a deletion.
    """
    from chunkweave.tiers.blobs import BlobKey, open_blobs

    blobs = open_blobs(url)
    known = set(known)
    try:
        for key in {BlobKey(fingerprint, segment) for segment in known} | set(blobs.keys(fingerprint)):
            if key.segment not in kept and (key.segment in known or _fits(blobs, key, selection, cleared)):
                cleared.remote_removed += blobs.size(key) is not None
                blobs.delete(key)
    except (OSError, ValueError) as error:
        cleared.remote_error = f"{blobs.name}: {error}"
    finally:
        blobs.close()


def _fits(blobs: "BlobStore", key: "BlobKey", selection: Selection, cleared: _Cleared) -> bool:
    from chunkweave.tiers.blob_segments import fetch_header
    from chunkweave.tiers.segment_header import SegmentRefused

    if selection.everything:
        return True
    try:
        header = fetch_header(blobs, key)
    except SegmentRefused as refused:
        stderr().print(f"segment {key.segment} in the remote cannot be read: {refused}", markup=False)
        cleared.unknown += 1
        return False
    return header is not None and selection.fits(header.record, header.created_s)


def _summary(cleared: _Cleared) -> str:
    lines = [f"removed {cleared.removed} segments of {size(cleared.removed_bytes)}"]
    if cleared.remote_removed:
        lines.append(f"removed {cleared.remote_removed} segments from the remote")
    if cleared.remote_error:
        lines.append(f"the remote was not gone through to its end, run this again: {escape(cleared.remote_error)}")
    if cleared.failed:
        lines.append(f"{len(cleared.failed)} segments could not be removed: is the folder writable?")
    if cleared.unknown:
        lines.append(
            f"{cleared.unknown} files cannot be read and may belong to it: `cache check --repair` removes them"
        )
    return "\n".join(lines)
