"""`chunkweave cache pin` and `unpin`."""

from dataclasses import dataclass

from chunkweave.cli import options
from chunkweave.cli.cache_folder import CacheFolder, Selection
from chunkweave.cli.console import Output, status
from chunkweave.cli.option_blocks import with_blocks
from chunkweave.errors import UsageError


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Segments of a cache directory, as the options name them."""

    cache_dir: options.CacheFolderPath
    document: options.DocumentName = None
    chunk: options.ChunkPrefix = None
    segment: options.SegmentPrefix = None
    fingerprint: options.Fingerprint = None


@with_blocks
def pin(*, chosen: _Chosen, output: Output) -> None:
    """Keep segments from eviction and expiry, until they are unpinned or cleared. Processes see it when they open."""
    _change(chosen, output, pinning=True)


@with_blocks
def unpin(*, chosen: _Chosen, output: Output) -> None:
    """Take pins back."""
    _change(chosen, output, pinning=False)


def _change(chosen: _Chosen, output: Output, *, pinning: bool) -> None:
    selection = Selection(chosen.document, chosen.chunk, chosen.segment)
    if selection.everything and chosen.fingerprint is None:
        raise UsageError("say which segments: --document, --chunk, --segment or --fingerprint")
    folder = CacheFolder(chosen.cache_dir)
    matching = changed = 0
    with status("reading headers"):
        for name, tier in folder.tiers(chosen.fingerprint):
            ids = [one.record.id for one in folder.segments(name, tier, selection)]
            matching += len(ids)
            changed += (folder.pins.add if pinning else folder.pins.discard)(name, ids)
    if not matching:
        raise UsageError(f"no segment in {chosen.cache_dir} fits")
    output.show(f"{'pinned' if pinning else 'unpinned'} {changed} of {matching} segments that fit")
    output.finish({"matching": matching, "changed": changed})
