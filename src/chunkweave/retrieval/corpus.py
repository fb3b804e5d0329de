"""A corpus: documents that are cut into chunks, embedded and searched, in a folder or in memory."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import DuplicateDocumentError, EmbedderMismatchError, UnknownDocumentError
from chunkweave.prompt.documents import SplitConfig, split_located
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.retrieval.corpus_store import CorpusContents, CorpusStore, StoredDocument, StoredSettings
from chunkweave.retrieval.documents import CorpusDocument, checked_documents
from chunkweave.retrieval.embedders import Embedder, make_embedder
from chunkweave.retrieval.faiss_indexes import check_available
from chunkweave.retrieval.indexes import IndexConfig, IndexKind, check_top_k, checked_vectors
from chunkweave.retrieval.retrievers import RetrievalStage, RetrievedChunk
from chunkweave.retrieval.searcher import Built, MadeIndex, Searcher, document_chunks
from chunkweave.retrieval.sections import Place, place_of
from chunkweave.types import Chunk

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """Maximum chunks and bytes of a corpus during a change; bytes are counted by `document_bytes`.

    `stopped` is called between chunks, in the thread that changes the corpus; true ends the change.
    """

    max_chunks: int = sys.maxsize
    max_bytes: int = sys.maxsize
    stopped: Callable[[], bool] = lambda: False


def document_bytes(document: StoredDocument, dimension: int) -> int:
    """Bytes of a document's names, metadata and chunks in UTF-8, and of its vectors of `dimension` columns."""
    texts = enumerate(document.chunks)
    return _head_bytes(document) + sum(_chunk_bytes(text, document.place_of(at), dimension) for at, text in texts)


class Growth:
    """Counts what one change adds to a corpus, against its limits. Used by one thread."""

    def __init__(self, limits: GrowthLimits, *, chunks: int, nbytes: int, dimension: int) -> None:
        """Start from the present number of `chunks` and bytes of a corpus."""
        self._limits = limits
        self._chunks = chunks
        self._nbytes = nbytes
        self._dimension = dimension

    def take(
        self, document: CorpusDocument, pieces: Iterable[tuple[int, str]], replaced: StoredDocument | None
    ) -> StoredDocument | None:
        """The document with these `pieces` as chunks; None if it does not fit, or if the change is stopped.

        A piece is the position of its first character in the text, and the piece itself. Pieces are counted one by one;
        after None no more are read. `replaced` is the document that this one replaces.
        """
        bare = StoredDocument(document.id, document.title, document.digest, (), dict(document.metadata))
        chunks = self._chunks
        nbytes = self._nbytes + _head_bytes(bare)
        if replaced is not None:
            chunks = chunks - len(replaced.chunks)
            nbytes = nbytes - document_bytes(replaced, self._dimension)
        texts: list[str] = []
        places: list[Place] = []
        for start, text in pieces:
            texts.append(text)
            places.append(place_of(document.sections, start, start + len(text)))
            nbytes += _chunk_bytes(text, places[-1], self._dimension)
            full = chunks + len(texts) > self._limits.max_chunks or nbytes > self._limits.max_bytes
            if full or self._limits.stopped():
                return None
        self._chunks, self._nbytes = chunks + len(texts), nbytes
        return replace(bare, chunks=tuple(texts), places=tuple(places) if document.sections else ())


def _head_bytes(document: StoredDocument) -> int:
    return len(json.dumps([document.id, document.title, document.metadata], ensure_ascii=False).encode())


def _chunk_bytes(text: str, place: Place, dimension: int) -> int:
    return len(text.encode()) + len(place.heading.encode()) + _FLOAT_BYTES * dimension


Progress = Callable[[int, int], None]
"""Called with (done, total) during long work."""

_EMBED_BATCH = 64
_COMMIT_CHUNKS = 512
"""Chunks embedded between two commits: the maximum that an interruption loses."""


@dataclass(frozen=True, slots=True)
class CorpusChange:
    """Result of a change of a corpus: ids of documents, in the given order.

    `gone` are chunks whose text is in no document any more; `Engine.forget` removes their KV. `left` were neither added
    nor replaced, because the first of them did not fit, or the call was stopped.
    """

    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    gone: tuple[Chunk, ...] = ()
    left: tuple[str, ...] = ()


class Corpus:
    """Documents by id, searched by meaning or by words, depending on the embedder.

    In a folder, a call that returns has been written to disk. After an interrupted call the committed documents stay,
    and `update` continues from there: it skips unchanged documents. Searches may run in several threads. A change must
    not run beside another call, except `make_index`.

    >>> from chunkweave import Corpus, CorpusDocument
    >>> corpus = Corpus()
    >>> change = corpus.add([CorpusDocument("tower", "It has 230 steps."), CorpusDocument("choir", "Otto leads it.")])
    >>> [found.chunk.text for found in corpus.search("Who leads the choir?", 1)]
    ['Otto leads it.']
    """

    def __init__(
        self,
        embedder: Embedder | None = None,
        *,
        split: SplitConfig | None = None,
        index: IndexConfig | None = None,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        """An empty corpus in memory.

        Args:
            embedder: makes the vectors; None = a model if one is installed, else `hashed-ngrams` (`usual_embedder`).
            split: how documents are cut.
            index: how vectors are searched; `flat` is exact and needs no extra.
            tokenizer: counts the tokens of chunks; None = the bundled one. With the engine's, `split` counts its
                model's tokens.

        Raises:
            UsageError: the index needs an extra that is not installed.
        """
        self._embedder: Embedder = make_embedder() if embedder is None else embedder
        split = split or SplitConfig()
        index = index or IndexConfig()
        check_available(index.kind)
        settings = StoredSettings(
            self._embedder.name,
            self._embedder.fingerprint,
            self._embedder.dimension,
            split.max_tokens,
            split.overlap_tokens,
            index,
        )
        empty = np.zeros((0, settings.dimension), dtype=np.float32)
        self._given_tokenizer = tokenizer
        self._nbytes: int | None = None  # counted on first use
        self._store: CorpusStore | None = None
        self._buffer = empty
        """The vectors, with room for more."""
        self._take(CorpusContents(settings, (), empty), Built())

    def _take(self, contents: CorpusContents, built: Built) -> None:
        """Use these `contents`, whose first rows `built` has, or all."""
        self._contents = contents
        self._by_id = {document.id: document for document in contents.documents}
        self._searcher = Searcher(contents, self._store, built)

    @classmethod
    def create(
        cls,
        folder: str | Path,
        embedder: Embedder | None = None,
        *,
        split: SplitConfig | None = None,
        index: IndexConfig | None = None,
        tokenizer: TextTokenizer | None = None,
    ) -> Self:
        """Create an empty corpus in a folder, and the folder if it is missing. Arguments as for `Corpus`.

        Raises:
            UsageError: there is a corpus already, the folder holds other files, or the index needs an extra that is
                not installed.
            CorpusError: the folder cannot be written.
        """
        corpus = cls(embedder, split=split, index=index, tokenizer=tokenizer)
        corpus._store = CorpusStore(Path(folder))
        corpus._store.create(corpus._contents.settings)
        corpus._take(corpus._contents, Built())
        return corpus

    @classmethod
    def open(
        cls, folder: str | Path, embedder: Embedder | None = None, *, tokenizer: TextTokenizer | None = None
    ) -> Self:
        """Open the corpus in a folder, with the settings that it was created with.

        With `embedder=None`, the embedder is made by the name that the corpus has stored.

        Raises:
            CorpusError: there is none, or a file of it is missing or damaged.
            EmbedderMismatchError: it was made by another embedder.
            UsageError: its embedder needs an extra that is not installed.
        """
        store = CorpusStore(Path(folder))
        contents = store.read()
        settings = contents.settings
        embedder = make_embedder(settings.embedder) if embedder is None else embedder
        if embedder.fingerprint != settings.fingerprint:
            raise EmbedderMismatchError(
                f"the corpus in {folder} was made by the embedder {settings.embedder} ({settings.fingerprint}), not by "
                f"{embedder.name} ({embedder.fingerprint}): open it with that one, or make it again"
            )
        corpus = cls(embedder, tokenizer=tokenizer)
        corpus._store = store
        corpus._buffer = contents.vectors
        corpus._take(contents, Built(looked=False))
        return corpus

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Whether there is a corpus in a folder."""
        return CorpusStore(Path(folder)).exists

    @property
    def embedder(self) -> Embedder:
        """The embedder, which makes the vectors."""
        return self._embedder

    @property
    def split(self) -> SplitConfig:
        """How documents are cut."""
        settings = self._contents.settings
        return SplitConfig(settings.max_tokens, settings.overlap_tokens)

    @property
    def index_config(self) -> IndexConfig:
        """The configuration of the index."""
        return self._contents.settings.index

    @property
    def documents(self) -> tuple[StoredDocument, ...]:
        """All documents, cut into chunks, in the order in which they were added."""
        return self._contents.documents

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self._by_id)

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._contents.vectors)

    @property
    def nbytes(self) -> int:
        """Bytes of all documents: names, metadata and chunks in UTF-8, and their vectors."""
        if self._nbytes is None:
            self._nbytes = self._bytes_of(self._by_id.values())
        return self._nbytes

    def __contains__(self, document: str) -> bool:
        """Whether there is a document of this id."""
        return document in self._by_id

    def document(self, document: str) -> StoredDocument:
        """A document by its id.

        Raises:
            UnknownDocumentError: there is none.
        """
        if document not in self._by_id:
            raise UnknownDocumentError(f"no document {document!r} in the corpus")
        return self._by_id[document]

    def holds(self, document: CorpusDocument) -> bool:
        """Whether the corpus has this document, with the same id, text, title and metadata."""
        stored = self._by_id.get(document.id)
        return stored is not None and stored.digest == document.digest

    def chunks(self) -> list[Chunk]:
        """All chunks in the order of the documents, for `Engine.precompute`."""
        return [chunk for document in self.documents for chunk in document_chunks(document)]

    def add(self, documents: Iterable[CorpusDocument], *, progress: Progress | None = None) -> CorpusChange:
        """Cut, embed and store new documents.

        Raises:
            DuplicateDocumentError: an id is there already, or is given twice.
            EmptyDocumentError: a document has no text.
            DocumentError: a document has no id, or metadata that is not JSON-able. In these three cases nothing was
                added.
            CorpusError: the corpus cannot be written; documents that were committed before stay.
            DimensionMismatchError: the embedder returns vectors of another shape than it says.
        """
        checked = checked_documents(documents)
        for document in checked:
            if document.id in self._by_id:
                raise DuplicateDocumentError(f"there is a document {document.id!r} already: update it, or remove it")
        return self._put(checked, progress, GrowthLimits())

    def update(
        self,
        documents: Iterable[CorpusDocument],
        *,
        progress: Progress | None = None,
        limits: GrowthLimits | None = None,
    ) -> CorpusChange:
        """Add new documents, replace those that differ in text, title or metadata, and skip unchanged ones.

        With `limits`, the first document that does not fit, and all after it, are neither added nor replaced.

        Raises:
            DuplicateDocumentError: an id is given twice.
            EmptyDocumentError: a document has no text.
            DocumentError: a document has no id, or metadata that is not JSON-able. In these three cases nothing was
                changed.
            CorpusError: the corpus cannot be written; documents that were committed before stay.
            DimensionMismatchError: the embedder returns vectors of another shape than it says.
        """
        return self._put(checked_documents(documents), progress, limits or GrowthLimits())

    def remove(self, documents: Iterable[str]) -> CorpusChange:
        """Remove documents by id, also from the disk, where their bytes are overwritten.

        Raises:
            UnknownDocumentError: an id is not there; nothing was removed.
            CorpusError: it cannot be written; nothing was removed.
        """
        ids = tuple(dict.fromkeys(documents))
        removed = [self.document(document) for document in ids]
        if removed:
            self._commit(removed, [], self._contents.vectors[:0])
        return CorpusChange(removed=ids, gone=self._gone(removed))

    def embed_query(self, question: str) -> NDArray[np.float32]:
        """The vector of a question, `[dimension]`.

        Raises:
            DimensionMismatchError: the embedder returns a vector of another shape than it says.
        """
        vector = self._embedder.embed_query(question)
        checked: NDArray[np.float32] = checked_vectors(vector[np.newaxis], 1, self._embedder.dimension)[0]
        return checked

    def search(self, question: str | NDArray[np.float32], k: int) -> tuple[RetrievedChunk, ...]:
        """The `k` chunks nearest to a question, or to the vector of one, best first.

        Of chunks with the same text only the best is returned. Where more than 15 of 16 of the nearest are copies there
        may be fewer than `k`: copies must not make a search read a whole corpus.

        Raises:
            TopKError: there are fewer chunks.
            UsageError: `k` is not positive.
            DimensionMismatchError: the vector has another shape than `[dimension]`.
        """
        return self._searcher.search(self._vector(question, k), k)

    def search_stages(self, question: str | NDArray[np.float32], k: int) -> Iterator[RetrievalStage]:
        """Search in stages, each with the best chunks so far; the last stage has the chunks of `search`.

        A stage runs when the iterator is advanced (RAGCache §5.3). The call itself raises what `search` raises.
        """
        return self._searcher.stages(self._vector(question, k), k)

    @property
    def searched_by(self) -> IndexKind:
        """The index that searches use now: `flat` if the configured one is for larger corpora, or is not built yet."""
        return self._searcher.searched_by

    @property
    def index_outdated(self) -> bool:
        """Whether `build_index` would make searches faster."""
        return self._searcher.outdated

    def build_index(self) -> None:
        """Build the index now, if the corpus needs one, and store it in the folder. Until then searches are flat.

        Raises:
            CorpusError: it cannot be written.
        """
        made = self.make_index()
        if made is None:
            self._searcher.save()
        else:
            self.take_index(made)

    def make_index(self) -> MadeIndex | None:
        """Build an index for `take_index`; None if there is nothing to build. May run beside searches and changes."""
        return self._searcher.make()

    def take_index(self, made: MadeIndex, *, keep: bool = True) -> None:
        """Use an index in searches, unless documents were removed meanwhile; `keep` stores it.

        May run beside searches.

        Raises:
            CorpusError: it cannot be written; searches use it nevertheless.
        """
        self._searcher.take(made, keep=keep)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        if self._given_tokenizer is not None:
            return self._given_tokenizer
        from chunkweave.models.loading import bundled_tokenizer

        return bundled_tokenizer()

    def _vector(self, question: str | NDArray[np.float32], k: int) -> NDArray[np.float32]:
        check_top_k(k, len(self))
        return self.embed_query(question) if isinstance(question, str) else question

    def _pieces(self, document: CorpusDocument) -> Iterator[tuple[int, str]]:
        return split_located(document.text, self._tokenizer, self.split, document.tables)

    def _put(self, documents: list[CorpusDocument], progress: Progress | None, limits: GrowthLimits) -> CorpusChange:
        unchanged = tuple(document.id for document in documents if self.holds(document))
        todo = [document for document in documents if not self.holds(document)]
        old = {document.id: self._by_id[document.id] for document in todo if document.id in self._by_id}
        growth = Growth(limits, chunks=len(self), nbytes=self.nbytes, dimension=self._embedder.dimension)
        cut = (growth.take(document, self._pieces(document), old.get(document.id)) for document in todo)
        fitting = (
            document for document in takewhile(lambda document: document is not None, cut) if document is not None
        )
        done = len(unchanged)
        while batch := _next_batch(fitting):
            vectors = self._embed(batch, done, len(documents), progress, limits)
            if vectors is None:
                break
            self._commit([old[document.id] for document in batch if document.id in old], batch, vectors)
            done += len(batch)
        if progress is not None:
            progress(done, len(documents))
        put = [document.id for document in todo[: done - len(unchanged)]]
        replaced = tuple(name for name in put if name in old)
        return CorpusChange(
            tuple(name for name in put if name not in old),
            replaced,
            unchanged,
            gone=self._gone([old[name] for name in replaced]),
            left=tuple(document.id for document in todo[len(put) :]),
        )

    def _embed(
        self,
        documents: Sequence[StoredDocument],
        done: int,
        total: int,
        progress: Progress | None,
        limits: GrowthLimits,
    ) -> NDArray[np.float32] | None:
        """Vectors of all chunks of `documents`, computed in batches; None if `limits` stop it."""
        texts = [text for document in documents for text in document.chunks]
        ends = np.cumsum([len(document.chunks) for document in documents])
        blocks = []
        for start in range(0, len(texts), _EMBED_BATCH):
            if limits.stopped():
                return None
            batch = texts[start : start + _EMBED_BATCH]
            vectors = self._embedder.embed_documents(batch)
            blocks.append(checked_vectors(vectors, len(batch), self._embedder.dimension))
            if progress is not None:
                progress(done + int(np.searchsorted(ends, start + len(batch), side="right")), total)
        return np.concatenate(blocks)

    def _commit(
        self, removed: Sequence[StoredDocument], added: Sequence[StoredDocument], vectors: NDArray[np.float32]
    ) -> None:
        """Remove and add documents in one commit; `vectors` are those of all chunks of `added`."""
        contents = self._contents
        last = contents.documents[-1].number if contents.documents else 0
        new = [replace(document, number=last + count) for count, document in enumerate(added, start=1)]
        generation = contents.generation + 1
        if self._store is not None:
            generation = self._store.commit(contents.generation, removed, new, vectors)
        if self._nbytes is not None:
            self._nbytes += self._bytes_of(new) - self._bytes_of(removed)
        built = self._searcher.built
        documents = contents.documents
        buffer = self._buffer
        rows = len(contents.vectors)
        if removed:
            built = Built()
            documents, buffer = _without({document.id for document in removed}, documents, contents.vectors)
            rows = len(buffer)
        self._buffer = _extended(buffer, rows, vectors)
        vectors = self._buffer[: rows + len(vectors)]
        self._take(CorpusContents(contents.settings, (*documents, *new), vectors, generation), built)

    def _bytes_of(self, documents: Iterable[StoredDocument]) -> int:
        return sum(document_bytes(document, self._embedder.dimension) for document in documents)

    def _gone(self, old: Sequence[StoredDocument]) -> tuple[Chunk, ...]:
        """Chunks of the documents `old` whose text is not in the corpus any more."""
        gone = {chunk.text: chunk for document in old for chunk in document_chunks(document)}
        for document in self._by_id.values() if gone else ():
            for text in document.chunks:
                gone.pop(text, None)
        return tuple(gone.values())


def _next_batch(documents: Iterator[StoredDocument]) -> list[StoredDocument]:
    """The next documents that together have enough chunks for one commit; none at the end."""
    batch: list[StoredDocument] = []
    chunks = 0
    for document in documents:
        batch.append(document)
        chunks += len(document.chunks)
        if chunks >= _COMMIT_CHUNKS:
            break
    return batch


def _without(
    removed: set[str], documents: Sequence[StoredDocument], vectors: NDArray[np.float32]
) -> tuple[tuple[StoredDocument, ...], NDArray[np.float32]]:
    """The documents but for those with the ids `removed`, and the vectors of their chunks, copied."""
    kept_rows = [document.id not in removed for document in documents for _ in document.chunks]
    remaining = tuple(document for document in documents if document.id not in removed)
    return remaining, vectors[np.array(kept_rows, dtype=bool)]


_LEAST_ROWS = 1 << 15
"""Rows of the smallest buffer with room: rows that are not written take no memory, and a larger buffer is a copy."""


def _extended(buffer: NDArray[np.float32], rows: int, new: NDArray[np.float32]) -> NDArray[np.float32]:
    """A buffer with the first `rows` rows of `buffer`, then `new`: `buffer` itself if they fit, else a larger one.

    The first rows never change, so that searches over them may run meanwhile.
    """
    end = rows + len(new)
    if end > len(buffer):
        larger = np.empty((max(end, 2 * rows, _LEAST_ROWS), buffer.shape[1]), dtype=np.float32)
        larger[:rows] = buffer[:rows]
        buffer = larger
    buffer[rows:end] = new
    return buffer
