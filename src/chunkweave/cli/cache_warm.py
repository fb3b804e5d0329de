"""`chunkweave cache warm`: computes documents' chunks into a cache directory before anybody asks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkweave.chunking.documents import read_documents
from chunkweave.cli import options
from chunkweave.cli.ask import split_documents
from chunkweave.cli.console import Output, progress
from chunkweave.cli.model_choice import ModelChoice
from chunkweave.cli.tables import size
from chunkweave.errors import UsageError
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine


def warm(
    cache_dir: Annotated[Path, typer.Argument(metavar="CACHE_DIR", help="Made if it does not exist.", file_okay=False)],
    more_docs: Annotated[
        list[Path] | None, typer.Argument(metavar="[DOC]...", help="Further documents, so that --docs *.md works.")
    ] = None,
    docs: Annotated[list[Path] | None, typer.Option("--docs", help="Text file or folder of them; repeatable.")] = None,
    model: options.Model = None,
    shape: options.Shape = None,
    chunk_tokens: Annotated[int, typer.Option(help="Most tokens of a chunk; as `ask` is given.")] = 512,
    overlap_tokens: Annotated[int, typer.Option(help="Tokens that neighbouring chunks share at most.")] = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    store_budget: options.StoreBudget = options.DEFAULT_STORE_BUDGET,
    disk_budget: options.DiskBudget = options.DEFAULT_DISK_BUDGET,
    remote_url: options.RemoteUrl = None,
    codec: options.Codec = "raw",
    skip_bad_docs: Annotated[bool, typer.Option("--skip-bad-docs", help="Leave out unreadable documents.")] = False,
    json: options.Json = False,
    out: options.Out = None,
) -> None:
    """Compute every chunk of the documents by itself and keep it on disk. Interrupted, it goes on where it was.

    Exit code 1 if a chunk is not on disk afterwards: the disk or its budget is too small, or not writable.
    """
    from chunkweave.chunking.splitter import SplitConfig

    output = Output(json, out)
    paths = [*(docs or []), *(more_docs or [])]
    if not paths:
        raise UsageError("no documents: give --docs")
    choice = ModelChoice(model, shape, device, dtype)
    store = options.store_config(
        store_budget=store_budget, cache_dir=cache_dir, disk_budget=disk_budget, remote_url=remote_url, codec=codec
    )
    split = SplitConfig(chunk_tokens, overlap_tokens)
    documents = read_documents(paths, on_error="skip" if skip_bad_docs else "raise")
    with choice.open(store=store) as engine:
        chunks = split_documents(engine, [(document.name, document.text) for document in documents], split)
        result = {"model": choice.name, "documents": len(documents), **_warm(engine, chunks)}
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
