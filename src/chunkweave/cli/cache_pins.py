"""`chunkweave cache pin` and `unpin`."""

from pathlib import Path

from chunkweave.cli import options
from chunkweave.cli.cache_folder import CacheFolder, Selection
from chunkweave.cli.console import Output, status
from chunkweave.errors import UsageError


def pin(
    cache_dir: options.CacheFolderPath,
    document: options.Document = None,
    chunk: options.ChunkPrefix = None,
    segment: options.SegmentPrefix = None,
    fingerprint: options.Fingerprint = None,
    json: options.Json = False,
    out: options.Out = None,
) -> None:
    """Keep segments from eviction and expiry, until they are unpinned or cleared. Processes see it when they open."""
    _change(cache_dir, Selection(document, chunk, segment), fingerprint, Output(json, out), pinning=True)


def unpin(
    cache_dir: options.CacheFolderPath,
    document: options.Document = None,
    chunk: options.ChunkPrefix = None,
    segment: options.SegmentPrefix = None,
    fingerprint: options.Fingerprint = None,
    json: options.Json = False,
    out: options.Out = None,
) -> None:
    """Take pins back."""
    _change(cache_dir, Selection(document, chunk, segment), fingerprint, Output(json, out), pinning=False)


def _change(cache_dir: Path, selection: Selection, fingerprint: str | None, output: Output, *, pinning: bool) -> None:
    if selection.everything and fingerprint is None:
        raise UsageError("say which segments: --document, --chunk, --segment or --fingerprint")
    folder = CacheFolder(cache_dir)
    matching = changed = 0
    with status("reading headers"):
        for name, tier in folder.tiers(fingerprint):
            ids = [one.record.id for one in folder.segments(name, tier, selection)]
            matching += len(ids)
            changed += (folder.pins.add if pinning else folder.pins.discard)(name, ids)
    if not matching:
        raise UsageError(f"no segment in {cache_dir} fits")
    output.show(f"{'pinned' if pinning else 'unpinned'} {changed} of {matching} segments that fit")
    output.finish({"matching": matching, "changed": changed})
