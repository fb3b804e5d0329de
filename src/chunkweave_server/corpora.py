"""The corpora of all tenants: those that the operator shares, and those that a tenant made for itself."""

import asyncio
import logging
import re
import secrets
import shutil
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from chunkweave.errors import CorpusError, RequestAbortedError, UsageError
from chunkweave.prompt.documents import SplitConfig
from chunkweave.prompt.tokenizer import TextTokenizer
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
"""Documents, and their characters, that are embedded before a search may come in between."""

_CHANGING_THREADS = _INDEXING_THREADS = 2
_SEARCHING_THREADS = 4


class SharedLock:
    """Held by one who changes something, or by any number who look. Belongs to one event loop.

    Who wants to change is next: those who look and come later wait for it, so that it is not kept out for ever.
    """

    def __init__(self) -> None:
        self._changing = asyncio.Lock()
        self._looking = 0
        self._nobody_looks = asyncio.Event()
        self._nobody_looks.set()

    @asynccontextmanager
    async def to_look(self) -> AsyncIterator[None]:
        """Beside others who look."""
        async with self._changing:
            self._looking += 1
            self._nobody_looks.clear()
        try:
            yield
        finally:
            self._looking -= 1
            if not self._looking:
                self._nobody_looks.set()

    @asynccontextmanager
    async def to_change(self) -> AsyncIterator[None]:
        """Alone."""
        async with self._changing:
            await self._nobody_looks.wait()
            yield


@dataclass(slots=True, eq=False)
class ServedCorpus:
    """A corpus under its name. `lock` is held by whoever searches or changes it, in whichever thread.

    A `shared` one is the operator's: every tenant may search it, nobody changes it over HTTP.
    """

    name: str
    corpus: Corpus
    shared: bool = False
    folder: Path | None = None
    lock: SharedLock = field(default_factory=SharedLock)
    gone: bool = False
    indexing: asyncio.Task[None] | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
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
    """Finds corpora by tenant and name; belongs to the event loop's thread.

    A tenant's folder is named by a hash and a corpus's by its name, which has no character that means anything in a
    path: nothing of a request is ever read as a path.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        settings: CorpusSettings,
        limits: LimitSettings,
        *,
        weights: TenantWeights | None = None,
    ) -> None:
        """No corpora yet. `weights` are those of tenants whose corpora change at once.

        Raises:
            UsageError: the index of new corpora needs an extra that is not installed.
        """
        settings.index()
        self._tokenizer = tokenizer
        self._settings = settings
        self._data_dir = settings.data_dir
        self._limits = limits
        self.changing = TenantThreads(_CHANGING_THREADS, weights=weights, behind=True)
        self.searching = TenantThreads(_SEARCHING_THREADS, weights=weights)
        """Corpora are changed and searched apart: a change takes long, and neither delays what tokenizes requests."""
        self._indexing = TenantThreads(_INDEXING_THREADS, weights=weights, behind=True)
        self._shared: dict[str, ServedCorpus] = {}
        self._own: dict[str, dict[str, ServedCorpus]] = {}
        self._creating = asyncio.Lock()

    def share(self, entry: str) -> None:
        """Open a corpus for all tenants: `FOLDER`, under the folder's name, or `NAME=FOLDER`.

        Raises:
            UsageError: not a name, or there are two of that name.
            CorpusError: there is no corpus in the folder, or it is damaged.
        """
        given, found, folder = entry.rpartition("=")
        name = given if found else Path(folder).resolve().name.lower()
        if NAME.fullmatch(name) is None:
            raise UsageError(f"{name!r} is no name of a corpus (a-z, 0-9, - and _): give NAME={folder}")
        if name in self._shared:
            raise UsageError(f"two shared corpora are called {name}: give one of them another NAME=FOLDER")
        self._shared[name] = ServedCorpus(name, Corpus.open(folder, tokenizer=self._tokenizer), shared=True)

    def load(self, tenants: Iterable[Tenant]) -> None:
        """Open what tenants created in earlier runs; one that cannot be opened is logged and not served."""
        for tenant in tenants:
            home = None if self._data_dir is None else self._data_dir / tenant.folder
            own = self._own.setdefault(tenant.folder, {})
            for folder in sorted(home.iterdir()) if home is not None and home.is_dir() else ():
                if NAME.fullmatch(folder.name) is None or not Corpus.exists(folder):
                    continue
                try:
                    corpus = Corpus.open(folder, tokenizer=self._tokenizer)
                    own[folder.name] = ServedCorpus(folder.name, corpus, folder=folder)
                except Exception:  # one damaged corpus must not keep the others from being served
                    logger.exception("the corpus in %s is not served", folder)

    def all(self, tenant: Tenant) -> list[ServedCorpus]:
        """What a tenant may search, by name; its own before a shared one of that name."""
        seen = {**self._shared, **self._own.get(tenant.folder, {})}
        return [seen[name] for name in sorted(seen)]

    def get(self, tenant: Tenant, name: str, *, to_change: bool = False) -> ServedCorpus:
        """A corpus by its name.

        Raises:
            HttpError: 404, this tenant has none of that name; 403, it is shared and `to_change`.
        """
        found = self._own.get(tenant.folder, {}).get(name) or self._shared.get(name)
        if found is None:
            raise HttpError(404, f"no corpus {name!r}", param="corpus", code="corpus_not_found")
        if to_change and found.shared:
            raise HttpError(403, f"the corpus {name!r} is shared and cannot be changed", code="corpus_shared")
        return found

    async def create(
        self, tenant: Tenant, name: str, split: SplitConfig, kind: IndexKind | None = None
    ) -> ServedCorpus:
        """A new, empty corpus of a tenant, with an index of a `kind` once it is large; None: of the usual one.

        Raises:
            HttpError: 400, not a name; 409, there is one of that name; 403, there are as many as may be.
            UsageError: the index needs an extra that is not installed.
        """
        index = self._settings.index(kind)
        if NAME.fullmatch(name) is None:
            message = f"{name!r} is no name of a corpus: use up to 63 of a-z, 0-9, - and _, a letter or digit first"
            raise HttpError(400, message, param="name")
        async with self._creating:
            own = self._own.setdefault(tenant.folder, {})
            if name in own or name in self._shared:
                raise HttpError(409, f"there is a corpus {name!r} already", param="name", code="corpus_exists")
            if len(own) >= self._limits.max_corpora:
                raise HttpError(403, f"you have {len(own)} corpora, and no more may be", code="too_many_corpora")
            folder = None if self._data_dir is None else self._data_dir / tenant.folder / name
            own[name] = ServedCorpus(name, await in_thread(lambda: self._new(folder, split, index)), folder=folder)
            return own[name]

    async def delete(self, tenant: Tenant, name: str) -> tuple[str, ...]:
        """Remove a tenant's corpus, from the disk too; returns the texts of its chunks."""
        async with self.locked(self.get(tenant, name, to_change=True), to_change=True) as served:
            texts = await in_thread(lambda: tuple(chunk.text for chunk in served.corpus.chunks()))
            if served.folder is not None:
                await in_thread(lambda: _remove_folder(served.folder))
            served.gone = True
            del self._own[tenant.folder][name]
            return texts

    async def ingest(
        self,
        tenant: Tenant,
        served: ServedCorpus,
        documents: Sequence[CorpusDocument],
        changes: list[CorpusChange],
        *,
        update: bool,
    ) -> None:
        """Add documents, or replace those that changed. What was done before an error, or a cancellation, stays done.

        It is in `changes`, however this ends.

        Raises:
            HttpError: 409, an id is there already and not to be updated; 413, the corpus would be too large.
            DocumentError: a document is none.
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
        """Make what indexes searches would be faster with, beside these. The event loop runs."""
        for served in self._shared.values():
            self._make_index("", served)
        for own in self._own.values():
            for served in own.values():
                self._make_index("", served)

    def _make_index(self, tenant: str, served: ServedCorpus) -> None:
        """See to it that a corpus has the index that it is large enough for."""
        if served.indexing is None and not served.gone and served.corpus.index_outdated:
            served.indexing = asyncio.create_task(self._indexed(tenant, served), name="make an index")

    async def _indexed(self, tenant: str, served: ServedCorpus) -> None:
        """Make indexes until the corpus has the one that it needs. Only to use one keeps changes waiting."""
        try:
            while not served.gone and served.corpus.index_outdated:
                if made := await self._indexing.run(tenant, partial(_make_index, served.corpus)):
                    async with self.locked(served):
                        take = partial(served.corpus.take_index, made, keep=not served.shared)
                        await self._indexing.run(tenant, take)
        except (HttpError, RequestAbortedError):
            logger.debug("the corpus %s is gone, or the server stops: it gets no index", served.name)
        except Exception:  # its searches compare every vector
            logger.exception("the corpus %s gets no index", served.name)
        finally:
            served.indexing = None

    def _full(
        self, served: ServedCorpus, documents: Sequence[CorpusDocument], changes: Sequence[CorpusChange]
    ) -> HttpError:
        done = sum(len(one.added) + len(one.replaced) + len(one.unchanged) for one in changes)
        return HttpError(
            413,
            f"the corpus {served.name!r} may have {self._limits.max_corpus_chunks} chunks and "
            f"{self._limits.max_corpus_bytes} bytes, and has {len(served.corpus)} and {served.corpus.nbytes}: "
            f"{done} of the {len(documents)} documents are in it, and document {changes[-1].left[0]!r} has no room",
            code="corpus_full",
        )

    def close(self) -> None:
        """Begin no further change and no search; what has begun is done to its end."""
        for threads in (self.changing, self.searching, self._indexing):
            threads.close()

    async def remove(self, served: ServedCorpus, document: str) -> CorpusChange:
        """Remove a document.

        Raises:
            UnknownDocumentError: there is none of that id.
        """
        async with self.locked(served, to_change=True):
            change = await in_thread(lambda: served.corpus.remove([document]))
        self._make_index("", served)
        return change

    @asynccontextmanager
    async def locked(self, served: ServedCorpus, *, to_change: bool = False) -> AsyncIterator[ServedCorpus]:
        """A corpus that nobody changes meanwhile; searches go on side by side. `to_change` it, nobody else uses it.

        Raises:
            HttpError: 404, it was deleted while this waited.
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
            raise CorpusError(f"{folder.parent} cannot be made: {error.strerror or error}") from error
        return Corpus.create(folder, split=split, index=index, tokenizer=self._tokenizer)


def _make_index(corpus: Corpus) -> MadeIndex | None:
    search_in_one_thread()  # helpers of faiss would take the cores of answers
    return corpus.make_index()


def _batches(documents: Sequence[CorpusDocument]) -> list[list[CorpusDocument]]:
    """The documents in order, so many at a time as may be embedded before others get their turn."""
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
    """Change a corpus, unless it has other documents with ids of `new` ones.

    What was done is noted here, in the thread: a caller that was cancelled meanwhile gets no result.
    """
    for document in new:
        if document.id in corpus and not corpus.holds(document):
            message = f"there is another document {document.id!r}: give `update`, or another id"
            raise HttpError(409, message, param="documents", code="document_exists")
    changes.append(corpus.update(documents, limits=limits))


def joined(changes: Sequence[CorpusChange]) -> CorpusChange:
    """What several changes did together."""
    parts = (
        tuple(chain.from_iterable(getattr(change, one.name) for change in changes)) for one in fields(CorpusChange)
    )
    return CorpusChange(*parts)


def _remove_folder(folder: Path | None) -> None:
    """Remove a corpus's folder: out of sight in one step, then for good.

    Raises:
        CorpusError: it cannot be removed.
    """
    assert folder is not None, "only a corpus on disk has one"
    doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.removed")
    try:
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise CorpusError(f"{folder} cannot be removed: {error.strerror or error}") from error
