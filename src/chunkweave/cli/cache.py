"""`chunkweave cache`: looks after a cache directory. Only `warm` loads a model."""

import time
from typing import Annotated, Any

import typer

from chunkweave.cli import options
from chunkweave.cli.cache_check import check
from chunkweave.cli.cache_clear import clear
from chunkweave.cli.cache_export import export
from chunkweave.cli.cache_folder import CachedSegment, CacheFolder, Selection, without_own_files
from chunkweave.cli.cache_pins import pin, unpin
from chunkweave.cli.cache_tables import problem_dict, segments_table, stats_tables
from chunkweave.cli.cache_warm import warm
from chunkweave.cli.console import Output, status
from chunkweave.cli.option_blocks import with_blocks
from chunkweave.planning.cost_file import cost_model_path

app = typer.Typer(no_args_is_help=True, help="Look into a cache directory, check, empty, fill and copy it.")


@app.command()
@with_blocks
def ls(
    cache_dir: options.CacheFolderPath,
    *,
    document: options.DocumentName = None,
    chunk: options.ChunkPrefix = None,
    fingerprint: options.Fingerprint = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most segments that are listed.")] = None,
    output: Output,
) -> None:
    """List segments, the newest first."""
    folder, selection = CacheFolder(cache_dir), Selection(document, chunk)
    with status("reading headers"):
        found = [one for name, tier in folder.tiers(fingerprint) for one in folder.segments(name, tier, selection)]
    found.sort(key=lambda one: (-one.created_s, one.record.source))
    listed, now_s = found[:limit], time.time()
    output.show(segments_table(listed, len(found), now_s))
    output.finish({"found": len(found), "segments": [one.as_dict(now_s) for one in listed]})


@app.command()
@with_blocks
def stats(
    cache_dir: options.CacheFolderPath,
    *,
    fingerprint: options.Fingerprint = None,
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


app.command()(check)
app.command()(clear)
app.command()(warm)
app.command()(pin)
app.command()(unpin)
app.command()(export)
