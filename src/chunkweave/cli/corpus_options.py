"""Options of the commands that have to do with a corpus, and how they become one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.cli.console import status

if TYPE_CHECKING:
    from chunkweave.retrieval.corpus import Corpus
    from chunkweave.retrieval.passages import RetrievedChunk

AskedCorpus = Annotated[
    Path | None,
    typer.Option("--corpus", help="Folder that `chunkweave ingest` made: its nearest chunks are the documents."),
]
CorpusFolder = Annotated[Path, typer.Argument(metavar="CORPUS", help="Folder that `chunkweave ingest` made.")]
TopK = Annotated[
    int | None, typer.Option("--top-k", min=1, help="Chunks from the corpus for each question.", show_default="6")
]


def open_corpus(folder: Path) -> "Corpus":
    """The corpus in a folder, with a spinner meanwhile.

    Raises:
        CorpusError: there is none, or it is damaged.
        UsageError: its embedder is of an extra that is not installed.
    """
    from chunkweave.retrieval.corpus import Corpus

    with status("opening the corpus"):
        return Corpus.open(folder)


def retrieve(folder: Path, questions: Sequence[str], top_k: int | None) -> list[tuple["RetrievedChunk", ...]]:
    """For each question its nearest chunks, the best first; without `top_k` six, or all there are.

    Raises:
        CorpusError: there is no corpus, or it is damaged.
        TopKError: there are fewer chunks than asked for.
    """
    from chunkweave.retrieval.stages import usual_top_k

    corpus = open_corpus(folder)
    k = max(1, usual_top_k(len(corpus))) if top_k is None else top_k
    with status("searching"):
        return [corpus.search(question, k) for question in questions]


def retrieved_table(found: Sequence["RetrievedChunk"]) -> Table:
    """Chunks with rank and score, and how they begin."""
    table = Table()
    table.add_column("rank", justify="right")
    table.add_column("score", justify="right")
    table.add_column("chunk", overflow="fold")
    table.add_column("text", no_wrap=True)
    for one in found:
        beginning = " ".join(one.chunk.text.split())[:100]
        table.add_row(str(one.rank), f"{one.score:.3f}", escape(one.chunk.source), escape(beginning))
    return table
