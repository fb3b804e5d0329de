"""`chunkweave cache warm`: computes documents' chunks into a cache directory before anybody asks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkweave.cli import options
from chunkweave.cli.console import Output, progress
from chunkweave.cli.option_blocks import DocumentOptions, ModelOptions, StoreOptions, with_blocks
from chunkweave.cli.tables import size
from chunkweave.errors import UsageError
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine


@with_blocks
def warm(
    cache_dir: Annotated[Path, typer.Argument(metavar="CACHE_DIR", help="Made if it does not exist.", file_okay=False)],
    more_docs: Annotated[
        list[Path] | None, typer.Argument(metavar="[DOC]...", help="Further documents, so that --docs *.md works.")
    ] = None,
    *,
    documents: DocumentOptions,
    model: ModelOptions,
    store_budget: options.StoreBudget = options.DEFAULT_STORE_BUDGET,
    disk_budget: options.DiskBudget = options.DEFAULT_DISK_BUDGET,
    remote_url: options.RemoteUrl = None,
    codec: options.Codec = "raw",
    output: Output,
) -> None:
    """Compute every chunk of the documents by itself and keep it on disk. Interrupted, it goes on where it was.

    Cut the documents as `ask` is told to, or it finds other chunks. Exit code 1 if a chunk is not on disk afterwards:
    the disk or its budget is too small, or not writable.
    """
    paths = [*(documents.docs or []), *(more_docs or [])]
    if not paths:
        raise UsageError("no documents: give --docs")
    choice = model.choice()
    store = StoreOptions(store_budget, cache_dir, disk_budget, remote_url, codec).config()
    read = documents.read(paths)
    with choice.open(store=store) as engine:
        result = {"model": choice.name, "documents": len(read), **_warm(engine, documents.chunks(engine, read))}
    written = f"computed {result['computed']} chunks, {result['present']} were there already; "
    output.show(f"{written}{result['tokens']} tokens, {size(result['bytes'])} on disk")
    if result["missing"]:
        output.show(
            f"[red]{result['missing']} chunks are not on disk: the budget is too small, or writing failed[/red]"
        )
    output.finish(result)
    if result["missing"]:
        raise typer.Exit(1)


def _warm(engine: "Engine", chunks: Sequence[Chunk]) -> dict[str, Any]:
    computed = 0
    with progress("computing chunks") as report:
        for done, chunk in enumerate(chunks, start=1):
            computed += engine.precompute([chunk])
            # One at a time: the queue of the background writer drops what it has no room for.
            engine.store.flush()
            report(done, len(chunks))
    disk = next(level for level in engine.store.levels if level.name == "disk")
    prompts = {prompt.parts[-1].id: prompt.parts[-1] for prompt in map(engine.builder.alone, chunks)}
    alone = [next((r for r in disk.store.variants(part) if r.alone), None) for part in prompts.values()]
    found = [record for record in alone if record is not None]
    return {
        "chunks": len(prompts),
        "computed": computed,
        "present": len(prompts) - computed,
        "missing": len(prompts) - len(found),
        "tokens": sum(map(len, found)),
        "bytes": sum(record.nbytes for record in found),
    }
