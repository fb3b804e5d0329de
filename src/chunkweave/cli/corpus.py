"""`chunkweave corpus`: looks into a corpus. No model is loaded."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.cli.console import Json, Out, Output, status
from chunkweave.cli.corpus_options import CorpusFolder, TopK, open_corpus, retrieved_table
from chunkweave.cli.tables import seconds

app = typer.Typer(no_args_is_help=True, help="List, search and remove the documents of a corpus.")


@app.command("list")
def list_documents(
    folder: CorpusFolder,
    limit: Annotated[int | None, typer.Option(min=1, help="Most documents that are listed.")] = None,
    json: Json = False,
    out: Out = None,
) -> None:
    """List documents in the order in which they were added."""
    output = Output(json, out)
    corpus = open_corpus(folder)
    listed = corpus.documents[:limit]
    table = Table(title=f"{corpus.num_documents} documents in {len(corpus)} chunks", title_justify="left")
    table.add_column("id", overflow="fold")
    table.add_column("title", overflow="fold")
    table.add_column("chunks", justify="right")
    for document in listed:
        table.add_row(escape(document.id), escape(document.title), str(len(document.chunks)))
    output.show(table)
    rows = [
        {"id": one.id, "title": one.title, "chunks": len(one.chunks), "metadata": dict(one.metadata)} for one in listed
    ]
    about = {"embedder": corpus.embedder.name, "index": str(corpus.index_config.kind)}
    output.finish({**about, "found": corpus.num_documents, "chunks": len(corpus), "documents": rows})


@app.command()
def search(
    folder: CorpusFolder,
    question: Annotated[str, typer.Argument(help="What to look for.")],
    top_k: TopK = None,
    stages: Annotated[bool, typer.Option("--stages", help="Show what was known after each stage, and when.")] = False,
    json: Json = False,
    out: Out = None,
) -> None:
    """Show the chunks that are nearest to a question."""
    from chunkweave.retrieval.stages import usual_top_k

    output = Output(json, out)
    corpus = open_corpus(folder)
    with status("searching"):
        k = max(1, usual_top_k(len(corpus))) if top_k is None else top_k
        found = list(corpus.search_stages(question, k))
    for stage in found if stages else found[-1:]:
        if stages:
            cost = f"{stage.distances} distances, {stage.extra_distances} of them extra"
            output.show(f"stage {stage.number} of {len(found)}: {seconds(stage.seconds)}, {cost}")
        output.show(retrieved_table(stage.chunks))
    told = [
        {
            "stage": stage.number,
            "seconds": stage.seconds,
            "distances": stage.distances,
            "extra_distances": stage.extra_distances,
            "chunks": [f"{chunk.document}#{chunk.place}" for chunk in stage.chunks],
        }
        for stage in found
    ]
    output.finish({"question": question, "retrieved": [one.as_dict() for one in found[-1].chunks], "stages": told})


@app.command()
def remove(
    folder: CorpusFolder,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Documents, as `corpus list` names them.")],
    json: Json = False,
    out: Out = None,
) -> None:
    """Remove documents, from the disk too.

    What a --cache-dir keeps of them goes with `chunkweave cache clear CACHE_DIR --document ID`.
    """
    output = Output(json, out)
    corpus = open_corpus(folder)
    change = corpus.remove(ids)
    with status("building the index"):
        corpus.build_index()
    output.show(
        f"removed {len(change.removed)} documents; {corpus.num_documents} are left in {len(corpus)} chunks",
        "their KV in a cache folder goes with: chunkweave cache clear CACHE_DIR --document ID",
    )
    gone = [{"source": chunk.source, "text": chunk.text} for chunk in change.gone]
    sizes = {"documents": corpus.num_documents, "chunks": len(corpus)}
    output.finish({"removed": list(change.removed), "gone": gone, **sizes})
