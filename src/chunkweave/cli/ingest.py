"""`chunkweave ingest`: files into a corpus that questions can be asked of."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkweave.cli.console import Json, Out, Output, progress, status
from chunkweave.cli.corpus_options import open_corpus
from chunkweave.errors import DuplicateDocumentError, UsageError

if TYPE_CHECKING:
    from chunkweave.retrieval.corpus import Corpus
    from chunkweave.retrieval.documents import CorpusDocument
    from chunkweave.retrieval.index import IndexKind


def ingest(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATHS...",
            help="Files or folders: .txt, .md and .rst, a document each; .jsonl, a document a line.",
            show_default=False,
        ),
    ],
    corpus: Annotated[
        Path, typer.Option("--corpus", help="Folder of the corpus; made if it is not there.", file_okay=False)
    ],
    embedder: Annotated[
        str | None,
        typer.Option(
            help="hashed-ngrams (built in), minilm, or a sentence-transformers model.", show_default="hashed-ngrams"
        ),
    ] = None,
    index: Annotated[
        str | None, typer.Option(help="flat, faiss-flat, ivf or hnsw; all but flat need faiss.", show_default="flat")
    ] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Most tokens of a chunk.", show_default="512")] = None,
    overlap_tokens: Annotated[
        int | None, typer.Option(help="Tokens that neighbouring chunks share at most.", show_default="0")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Replace documents that have changed.")] = False,
    skip_bad_docs: Annotated[
        bool, typer.Option("--skip-bad-docs", help="Leave out files and lines that cannot be read.")
    ] = False,
    json: Json = False,
    out: Out = None,
) -> None:
    """Cut documents into chunks, embed them, and keep them in a corpus.

    What is there already and has not changed is skipped, so an ingest that was interrupted goes on where it was.
    """
    output = Output(json, out)
    from chunkweave.retrieval.documents import read_corpus_documents

    with status("reading documents"):
        documents = read_corpus_documents(paths, on_error="skip" if skip_bad_docs else "raise")
    opened = _opened(corpus, embedder, index, chunk_tokens, overlap_tokens)
    if not update:
        _refuse_changed(opened, documents)
    with progress("embedding documents") as report:
        change = opened.update(documents, progress=report)
    with status("building the index"):
        opened.build_index()
    counts = {"added": change.added, "replaced": change.replaced, "unchanged": change.unchanged}
    told = ", ".join(f"{len(ids)} {name}" for name, ids in counts.items())
    output.show(f"{told}; the corpus has {opened.num_documents} documents in {len(opened)} chunks", "")
    settings = {
        "corpus": str(corpus),
        "embedder": opened.embedder.name,
        "dimension": opened.embedder.dimension,
        "index": str(opened.index_config.kind),
    }
    sizes = {"documents": opened.num_documents, "chunks": len(opened)}
    output.finish({**settings, **{name: len(ids) for name, ids in counts.items()}, **sizes})


def _opened(
    folder: Path, embedder: str | None, index: str | None, chunk_tokens: int | None, overlap_tokens: int | None
) -> "Corpus":
    """The corpus in the folder, or a new one; what is asked for has to be what a corpus was made with."""
    from chunkweave.chunking.splitter import SplitConfig
    from chunkweave.retrieval.corpus import Corpus
    from chunkweave.retrieval.embedder import make_embedder
    from chunkweave.retrieval.index import IndexConfig, IndexKind

    if not Corpus.exists(folder):
        kind = _kind(index or IndexKind.FLAT)
        split = SplitConfig(512 if chunk_tokens is None else chunk_tokens, overlap_tokens or 0)
        with status("loading the embedder"):
            made = make_embedder(embedder) if embedder is not None else make_embedder()
        return Corpus.create(folder, made, split=split, index=IndexConfig(kind))
    corpus = open_corpus(folder)
    split = corpus.split
    asked = {
        "--embedder": embedder,
        "--index": index,
        "--chunk-tokens": chunk_tokens,
        "--overlap-tokens": overlap_tokens,
    }
    kept = [corpus.embedder.name, str(corpus.index_config.kind), split.max_tokens, split.overlap_tokens]
    for (option, wanted), own in zip(asked.items(), kept, strict=True):
        if wanted is not None and wanted != own:
            raise UsageError(
                f"the corpus in {folder} was made with {option} {own}: leave it out, or make another corpus"
            )
    return corpus


def _kind(name: str) -> "IndexKind":
    from chunkweave.retrieval.index import IndexKind

    try:
        return IndexKind(name)
    except ValueError as error:
        raise UsageError(f"no index {name!r}; there are: {', '.join(IndexKind)}") from error


def _refuse_changed(corpus: "Corpus", documents: Sequence["CorpusDocument"]) -> None:
    for document in documents:
        if document.id in corpus and not corpus.holds(document):
            raise DuplicateDocumentError(
                f"the corpus has another document {document.id!r}: --update replaces it; if both are to stay, give one "
                "another id or file name"
            )
