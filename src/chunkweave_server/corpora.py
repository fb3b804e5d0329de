"""The corpora of all tenants: those that the operator shares, and those that tenants create over HTTP."""

import asyncio
import logging
import re
import secrets
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from chunkweave.errors import CorpusError, RequestAbortedError, UsageError
from chunkweave.prompt.documents import SplitConfig
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.retrieval.conversion import Conversion, FileRead
from chunkweave.retrieval.corpus import Corpus, CorpusChange, GrowthLimits
from chunkweave.retrieval.documents import CorpusDocument, checked_documents
from chunkweave.retrieval.faiss_indexes import search_in_one_thread
from chunkweave.retrieval.indexes import IndexConfig, IndexKind
from chunkweave.retrieval.searcher import MadeIndex
from chunkweave.scheduling.queue import TenantWeights
from chunkweave_server.errors import HttpError
from chunkweave_server.settings import CorpusSettings, LimitSettings
from chunkweave_server.tenants import Tenant
from chunkweave_server.threads import TenantThreads, in_thread

logger = logging.getLogger(__name__)

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_AT_A_TIME = 16
_CHARACTERS_AT_A_TIME = 1 << 20
"""Documents, and their characters, that are embedded between two releases of the corpus's lock."""

_READING_THREADS = _CHANGING_THREADS = _INDEXING_THREADS = 2
_SEARCHING_THREADS = 4


class SharedLock:
    """A readers-writer lock for one event loop.

    A waiting writer blocks later readers, so it cannot starve.
    """

    def __init__(self) -> None:
        self._changing = asyncio.Lock()
        self._looking = 0
        self._no_readers = asyncio.Event()
        self._no_readers.set()

    @asynccontextmanager
    async def to_look(self) -> AsyncIterator[None]:
        """Hold the lock as one of several readers."""
        async with self._changing:
            self._looking += 1
            self._no_readers.clear()
        try:
            yield
        finally:
            self._looking -= 1
            if not self._looking:
                self._no_readers.set()

    @asynccontextmanager
    async def to_change(self) -> AsyncIterator[None]:
        """Hold the lock as the only writer."""
        async with self._changing:
            await self._no_readers.wait()
            yield


@dataclass(slots=True, eq=False)
class ServedCorpus:
    """A corpus with its name. Searches and changes hold `lock`, in any thread.

    A `shared` corpus is the operator's: every tenant may search it, and it cannot be changed over HTTP.
    """

    name: str
    corpus: Corpus
    shared: bool = False
    folder: Path | None = None
    lock: SharedLock = field(default_factory=SharedLock)
    gone: bool = False
    indexing: asyncio.Task[None] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Fields of the response, as JSON values."""
        split = self.corpus.split
        return {
            "name": self.name,
            "object": "corpus",
            "shared": self.shared,
            "documents": self.corpus.num_documents,
            "chunks": len(self.corpus),
            "embedder": self.corpus.embedder.name,
            "index": str(self.corpus.index_config.kind),
            "searched_by": str(self.corpus.searched_by),
            "chunk_tokens": split.max_tokens,
            "overlap_tokens": split.overlap_tokens,
        }


class Corpora:
    """Finds corpora by tenant and name. Used in the event loop's thread only.

    A tenant's folder is named by a hash, a corpus's folder by its name. Names have no character with a meaning in
    paths, so no text of a request is interpreted as a path.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        settings: CorpusSettings,
        limits: LimitSettings,
        *,
        weights: TenantWeights | None = None,
    ) -> None:
        """Without corpora at first. `weights` share the threads between tenants."""
        self._tokenizer = tokenizer
        self._settings = settings
        self._data_dir = settings.data_dir
        self._limits = limits
        self._conversions: list[Conversion] = []  # idle ones
        self._closed = False
        self._reading = TenantThreads(_READING_THREADS, weights=weights, behind=True)
        self.changing = TenantThreads(_CHANGING_THREADS, weights=weights, behind=True)
        self.searching = TenantThreads(_SEARCHING_THREADS, weights=weights)
        """Separate threads for changes and searches: changes take long. Neither delays the tokenization of requests."""
        self._indexing = TenantThreads(_INDEXING_THREADS, weights=weights, behind=True)
        self._shared: dict[str, ServedCorpus] = {}
        self._own: dict[str, dict[str, ServedCorpus]] = {}
        self._creating = asyncio.Lock()

    def share(self, entry: str) -> None:
        """Open a corpus for all tenants: `FOLDER`, under the folder's name, or `NAME=FOLDER`.

        Raises:
            UsageError: the name is invalid or already used.
            CorpusError: the folder has no corpus, or a damaged one.
        """
        given, equals, folder = entry.rpartition("=")
        name = given if equals else Path(folder).resolve().name.lower()
        if NAME.fullmatch(name) is None:
            raise UsageError(f"{name!r} is not a valid corpus name (a-z, 0-9, - and _): give NAME={folder}")
        if name in self._shared:
            raise UsageError(f"two shared corpora have the name {name}: give one of them another NAME=FOLDER")
        self._shared[name] = ServedCorpus(name, Corpus.open(folder, tokenizer=self._tokenizer), shared=True)

    def load(self, tenants: Iterable[Tenant]) -> None:
        """Open corpora that tenants created in earlier runs. One that cannot be opened is logged and not served."""
        for tenant in tenants:
            home = None if self._data_dir is None else self._data_dir / tenant.folder
            corpora = self._own.setdefault(tenant.folder, {})
            for folder in sorted(home.iterdir()) if home is not None and home.is_dir() else ():
                if NAME.fullmatch(folder.name) is None:
                    continue
                if not Corpus.exists(folder):
                    logger.warning("%s has no corpus of this version, and is not served", folder)
                    continue
                try:
                    corpus = Corpus.open(folder, tokenizer=self._tokenizer)
                    corpora[folder.name] = ServedCorpus(folder.name, corpus, folder=folder)
                except Exception:  # a damaged corpus must not prevent serving the others
                    logger.exception("the corpus in %s is not served", folder)

    def all(self, tenant: Tenant) -> list[ServedCorpus]:
        """The corpora that a tenant may search, by name. Its own corpus hides a shared one of the same name."""
        seen = {**self._shared, **self._own.get(tenant.folder, {})}
        return [seen[name] for name in sorted(seen)]

    def get(self, tenant: Tenant, name: str, *, to_change: bool = False) -> ServedCorpus:
        """A corpus by its name.

        Raises:
            HttpError: 404, the tenant has no corpus of that name; 403, the corpus is shared and `to_change` is set.
        """
        corpus = self._own.get(tenant.folder, {}).get(name) or self._shared.get(name)
        if corpus is None:
            raise HttpError(404, f"no corpus {name!r}", param="corpus", code="corpus_not_found")
        if to_change and corpus.shared:
            raise HttpError(403, f"the corpus {name!r} is shared and cannot be changed", code="corpus_shared")
        return corpus

    async def create(
        self, tenant: Tenant, name: str, split: SplitConfig, kind: IndexKind | None = None
    ) -> ServedCorpus:
        """Create an empty corpus of a tenant. Once large, it gets an index of this `kind`, else the default one.

        Raises:
            HttpError: 400, the name is invalid; 409, it is used; 403, the tenant has as many corpora as allowed.
            UsageError: the index needs an extra that is not installed.
        """
        index = self._settings.index(kind)
        if NAME.fullmatch(name) is None:
            message = f"{name!r} is not a valid corpus name: use up to 63 of a-z, 0-9, - and _, a letter or digit first"
            raise HttpError(400, message, param="name")
        async with self._creating:
            corpora = self._own.setdefault(tenant.folder, {})
            if name in corpora or name in self._shared:
                raise HttpError(409, f"the corpus {name!r} exists already", param="name", code="corpus_exists")
            if len(corpora) >= self._limits.max_corpora:
                raise HttpError(403, f"you have {len(corpora)} corpora already, the maximum", code="too_many_corpora")
            folder = None if self._data_dir is None else self._data_dir / tenant.folder / name
            corpora[name] = ServedCorpus(name, await in_thread(lambda: self._new(folder, split, index)), folder=folder)
            return corpora[name]

    async def delete(self, tenant: Tenant, name: str) -> tuple[str, ...]:
        """Delete a tenant's corpus, also from disk; returns the texts of its chunks."""
        async with self.locked(self.get(tenant, name, to_change=True), to_change=True) as served:
            texts = await in_thread(lambda: tuple(chunk.text for chunk in served.corpus.chunks()))
            if served.folder is not None:
                await in_thread(lambda: _remove_folder(served.folder))
            served.gone = True
            del self._own[tenant.folder][name]
            return texts

    async def read(self, tenant: Tenant, name: str, file: BinaryIO) -> FileRead:
        """Read an uploaded file in a process with low priority; it is stopped if the caller is cancelled."""
        stopped = threading.Event()
        work = partial(self._read, name, file, stopped.is_set)
        return await self._reading.run(tenant.name, work, stop=stopped.set)

    def _read(self, name: str, file: BinaryIO, stopped: Callable[[], bool]) -> FileRead:
        """Read a file with an idle process, in a thread. Files share no state: each is read in a fork of its own."""
        try:
            conversion = self._conversions.pop()
        except IndexError:
            conversion = Conversion()
        try:
            return conversion.read(name, file, bounded=True, stopped=stopped)
        finally:
            self._conversions.append(conversion)
            if self._closed:
                self._close_conversions()

    def _close_conversions(self) -> None:
        while self._conversions:
            self._conversions.pop().close()

    async def ingest(
        self,
        tenant: Tenant,
        served: ServedCorpus,
        documents: Sequence[CorpusDocument],
        changes: list[CorpusChange],
        *,
        update: bool,
    ) -> None:
        """Add documents in batches; with `update` replace changed ones. Appends each batch's change to `changes`.

        Batches before an error or a cancellation stay in the corpus and in `changes`.

        Raises:
            HttpError: 409, an id exists with other content, without `update`; 413, the corpus would be too large.
            DocumentError: a document is invalid.
        """
        batches = await self.changing.run(tenant.name, lambda: _batches(checked_documents(documents)))
        stopped = threading.Event()
        limits = GrowthLimits(self._limits.max_corpus_chunks, self._limits.max_corpus_bytes, stopped.is_set)
        for batch in batches:
            try:
                async with self.locked(served, to_change=True):
                    new = () if update else batch if changes else chain(*batches)
                    work = partial(_change, served.corpus, batch, new, limits, changes)
                    await self.changing.run(tenant.name, work, stop=stopped.set)
            finally:
                self._make_index(tenant.name, served)
            if changes[-1].left:
                raise self._full(served, documents, changes)

    def make_indexes(self) -> None:
        """Build outdated or missing indexes in the background. Needs a running event loop."""
        for served in self._shared.values():
            self._make_index("", served)
        for corpora in self._own.values():
            for served in corpora.values():
                self._make_index("", served)

    def _make_index(self, tenant: str, served: ServedCorpus) -> None:
        """Start building the index that a corpus needs for its size, unless it has it or it is being built."""
        if served.indexing is None and not served.gone and served.corpus.index_outdated:
            served.indexing = asyncio.create_task(self._indexed(tenant, served), name="make an index")

    async def _indexed(self, tenant: str, served: ServedCorpus) -> None:
        """Build indexes until the corpus has a current one. Only installing an index blocks changes."""
        try:
            while not served.gone and served.corpus.index_outdated:
                if made := await self._indexing.run(tenant, partial(_make_index, served.corpus)):
                    async with self.locked(served):
                        take = partial(served.corpus.take_index, made, keep=not served.shared)
                        await self._indexing.run(tenant, take)
        except (HttpError, RequestAbortedError):
            logger.debug("no index for the corpus %s: it was deleted, or the server stops", served.name)
        except Exception:  # searches compare every vector instead
            logger.exception("no index for the corpus %s", served.name)
        finally:
            served.indexing = None

    def _full(
        self, served: ServedCorpus, documents: Sequence[CorpusDocument], changes: Sequence[CorpusChange]
    ) -> HttpError:
        done = sum(len(change.added) + len(change.replaced) + len(change.unchanged) for change in changes)
        return HttpError(
            413,
            f"the corpus {served.name!r} may have {self._limits.max_corpus_chunks} chunks and "
            f"{self._limits.max_corpus_bytes} bytes, and has {len(served.corpus)} and {served.corpus.nbytes}: "
            f"{done} of the {len(documents)} documents were added, and document {changes[-1].left[0]!r} does not fit",
            code="corpus_full",
        )

    def close(self) -> None:
        """Accept no further changes and searches. Running ones finish."""
        for threads in (self._reading, self.changing, self.searching, self._indexing):
            threads.close()
        self._closed = True
        self._close_conversions()

    async def remove(self, served: ServedCorpus, document: str) -> CorpusChange:
        """Remove a document.

        Raises:
            UnknownDocumentError: the corpus has no document with that id.
        """
        async with self.locked(served, to_change=True):
            change = await in_thread(lambda: served.corpus.remove([document]))
        self._make_index("", served)
        return change

    @asynccontextmanager
    async def locked(self, served: ServedCorpus, *, to_change: bool = False) -> AsyncIterator[ServedCorpus]:
        """Hold a corpus's lock: shared by searches, exclusive with `to_change`.

        Raises:
            HttpError: 404, the corpus was deleted while this waited.
        """
        async with served.lock.to_change() if to_change else served.lock.to_look():
            if served.gone:
                raise HttpError(404, f"no corpus {served.name!r}", code="corpus_not_found")
            yield served

    def _new(self, folder: Path | None, split: SplitConfig, index: IndexConfig) -> Corpus:
        if folder is None:
            return Corpus(split=split, index=index, tokenizer=self._tokenizer)
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CorpusError(f"{folder.parent} cannot be created: {error.strerror or error}") from error
        return Corpus.create(folder, split=split, index=index, tokenizer=self._tokenizer)


def _make_index(corpus: Corpus) -> MadeIndex | None:
    search_in_one_thread()  # more threads of faiss would take cores from answers
    return corpus.make_index()


def _batches(documents: Sequence[CorpusDocument]) -> list[list[CorpusDocument]]:
    """The documents in order, in batches of at most `_AT_A_TIME` documents and `_CHARACTERS_AT_A_TIME` characters."""
    batches: list[list[CorpusDocument]] = []
    characters = 0
    for document in documents:
        if not batches or len(batches[-1]) == _AT_A_TIME or characters + len(document.text) > _CHARACTERS_AT_A_TIME:
            batches.append([])
            characters = 0
        batches[-1].append(document)
        characters += len(document.text)
    return batches


def _change(
    corpus: Corpus,
    documents: Sequence[CorpusDocument],
    new: Iterable[CorpusDocument],
    limits: GrowthLimits,
    changes: list[CorpusChange],
) -> None:
    """Update a corpus, unless it has different documents with the ids of `new` ones.

    Appends the change to `changes` in the thread, because a cancelled caller gets no result.

    Raises:
        HttpError: 409, the corpus has a different document with the same id.
    """
    for document in new:
        if document.id in corpus and not corpus.holds(document):
            message = f"the document {document.id!r} exists with other content: give `update`, or another id"
            raise HttpError(409, message, param="documents", code="document_exists")
    changes.append(corpus.update(documents, limits=limits))


def joined(changes: Sequence[CorpusChange]) -> CorpusChange:
    """The combined effect of several changes."""
    parts = (
        tuple(chain.from_iterable(getattr(change, change_field.name) for change in changes))
        for change_field in fields(CorpusChange)
    )
    return CorpusChange(*parts)


def _remove_folder(folder: Path | None) -> None:
    """Remove a corpus's folder: rename it first, so that a partial removal leaves no damaged corpus.

    Raises:
        CorpusError: the folder cannot be removed.
    """
    assert folder is not None, "only a corpus on disk has one"
    doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.removed")
    try:
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise CorpusError(f"{folder} cannot be removed: {error.strerror or error}") from error
