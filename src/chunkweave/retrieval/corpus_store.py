"""A corpus on disk: one SQLite file with the documents, their chunks and vectors, and the trained index."""

import errno
import hashlib
import json
import logging
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import CorpusError, UsageError
from chunkweave.retrieval.indexes import IndexConfig, IndexKind
from chunkweave.retrieval.sections import NO_PLACE, Place

logger = logging.getLogger(__name__)

CORPUS_FILE = "corpus.sqlite"
_JOURNAL = f"{CORPUS_FILE}-journal"
_FORMAT = 1
_LOCK_TIMEOUT_S = 60.0
_PAGE_BYTES = 1024
_PAD = bytes(_PAGE_BYTES)
_PRAGMAS = (
    f"page_size = {_PAGE_BYTES}",
    "journal_mode = DELETE",  # unlike WAL, it leaves no removed text beside the file
    "synchronous = EXTRA",
    "secure_delete = ON",
    "temp_store = MEMORY",
)
_DISK_ERRORS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_IOERR: errno.EIO,
}
"""The likeliest errno by SQLite's primary result code."""

_PROBE_BYTES = 1 << 20
_SCHEMA = (
    "CREATE TABLE corpus (settings TEXT NOT NULL, generation INTEGER NOT NULL, documents INTEGER NOT NULL)",
    "CREATE TABLE documents"
    " (number INTEGER PRIMARY KEY, pad BLOB, record TEXT NOT NULL, vectors BLOB NOT NULL, checksum BLOB NOT NULL)",
    "CREATE TABLE ivf (pad BLOB, config TEXT NOT NULL, centroids BLOB NOT NULL, lists BLOB NOT NULL, checksum BLOB)",
    f"PRAGMA user_version = {_FORMAT}",
)


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document in a corpus: its chunks, and the digest of the document that was cut.

    `places` has the page and heading of each chunk, or is empty if none is known. Documents are ordered by `number`;
    the number of a removed document may be used again.
    """

    id: str
    title: str
    digest: str
    chunks: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    number: int = 0

    def place_of(self, number: int) -> Place:
        """Where a chunk is, by its number from 0."""
        return self.places[number] if self.places else NO_PLACE


@dataclass(frozen=True, slots=True)
class StoredSettings:
    """What a corpus was created with: its embedder, how documents are cut, its index."""

    embedder: str
    fingerprint: str
    dimension: int
    max_tokens: int
    overlap_tokens: int
    index: IndexConfig


@dataclass(frozen=True, slots=True, eq=False)
class CorpusContents:
    """A corpus at one commit. `generation` counts the commits.

    `vectors` are those of all chunks in the order of `documents`, float32 `[chunks, dimension]`.
    """

    settings: StoredSettings
    documents: tuple[StoredDocument, ...]
    vectors: NDArray[np.float32]
    generation: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StoredIndex:
    """A trained IVF index: `centroids` float32 `[lists, dimension]`, and the list of each of the first rows, `[rows]`.

    All sizes in `config` are chosen.
    """

    config: IndexConfig
    centroids: NDArray[np.float32]
    lists: NDArray[np.int64]


class CorpusStore:
    """The folder of a corpus, with `corpus.sqlite`. Every call opens and closes the file.

    A change is one transaction: a process that dies loses only what it had not committed, and the next call rolls it
    back. Any number of processes may read while one writes.

    The file has no free pages, so text of a change that failed is gone when it is rolled back, and the file shrinks
    with what is removed. Removed text is overwritten before a change returns. `secure_delete` alone does not do that:
    when SQLite balances a tree, copies of rows may stay in the unused part of a page. Therefore every row begins with a
    `pad` of one page, so that its text and vectors are in overflow pages, which hold nothing else and are overwritten
    with zeros when they become free. Numbers of documents and lengths of their records may stay.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / CORPUS_FILE

    @property
    def exists(self) -> bool:
        """Whether there is a corpus in the folder. A file of one page is left by a creation that was interrupted."""
        return self._path.is_file() and self._path.stat().st_size > _PAGE_BYTES

    def create(self, settings: StoredSettings) -> None:
        """Create the folder with an empty corpus.

        Raises:
            CorpusError: it cannot be written.
            UsageError: there is a corpus already, or a folder with other files.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            foreign = [path.name for path in self.folder.iterdir() if path.name not in (CORPUS_FILE, _JOURNAL)]
        except OSError as error:
            raise CorpusError(f"no corpus can be made in {self.folder}: {error.strerror or error}") from error
        if foreign:
            raise UsageError(f"the folder holds other files ({foreign[0]}): a corpus needs its own folder")
        with self._connection("rwc") as connection:
            if not self.exists:
                connection.execute("PRAGMA auto_vacuum = FULL")  # only a database without tables takes it
            connection.execute("BEGIN EXCLUSIVE")
            existing = _version(connection)
            if not existing and connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                raise CorpusError(f"{self._path} is a database of another program: a corpus needs its own folder")
            if not existing:
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute("INSERT INTO corpus VALUES (?, 0, 0)", [json.dumps(asdict(settings))])
                connection.execute("COMMIT")
        if existing:
            raise UsageError("there is a corpus in the folder already: open it")

    def read(self) -> CorpusContents:
        """The corpus at its last commit.

        Raises:
            CorpusError: there is no corpus, or its file cannot be read, is damaged or of another version.
        """
        if not self.exists:
            raise CorpusError(f"no corpus in {self.folder}: make one with `chunkweave ingest`")
        documents: list[StoredDocument] = []
        vectors: list[bytes] = []
        with self._connection() as connection:
            connection.execute("BEGIN")
            if _version(connection) != _FORMAT:
                raise CorpusError(f"{self._path} was written by another version of chunkweave: make the corpus again")
            row = connection.execute("SELECT settings, generation, documents FROM corpus").fetchone()
            settings = _settings(row[0])
            generation = row[1]
            count = row[2]
            rows = connection.execute("SELECT record, vectors, checksum FROM documents ORDER BY number").fetchall()
            connection.execute("COMMIT")  # writers wait for the reading alone
            for record, packed, checksum in rows:
                if _checksum(record.encode(), packed) != checksum:
                    raise ValueError("a checksum is wrong")
                documents.append(_document(record))
                vectors.append(packed)
            if len(documents) != count:
                raise ValueError("documents are missing")
            matrix = np.frombuffer(b"".join(vectors), dtype=np.float32).reshape(-1, settings.dimension)
        return CorpusContents(settings, tuple(documents), matrix, generation)

    def commit(
        self,
        generation: int,
        removed: Sequence[StoredDocument],
        added: Sequence[StoredDocument],
        vectors: NDArray[np.float32],
    ) -> int:
        """Remove and add documents in one transaction, and return the new generation.

        `vectors` are those of all chunks of `added`, `[chunks, dimension]`. If documents are removed, so is the index.

        Raises:
            CorpusError: another process committed since `generation`, or the file cannot be written; nothing changed.
        """
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if _generation(connection) != generation:
                raise CorpusError(f"another process changed the corpus in {self.folder}: open it again")
            if removed:
                connection.execute("DELETE FROM ivf")
            numbers = [(document.number,) for document in removed]
            connection.executemany("DELETE FROM documents WHERE number = ?", numbers)
            rows = _rows(added, vectors)
            connection.executemany("INSERT INTO documents VALUES (?, ?, ?, ?, ?)", rows)
            connection.execute(
                "UPDATE corpus SET generation = generation + 1, documents = documents + ?", [len(added) - len(removed)]
            )
            connection.execute("COMMIT")
        return generation + 1

    def read_index(self, generation: int) -> StoredIndex | None:
        """The stored index; None if there is none, or if another process committed since `generation`.

        None also if it is damaged, with a line in the log.
        """
        try:
            with self._connection() as connection:
                connection.execute("BEGIN")
                if _generation(connection) != generation:
                    return None
                row = connection.execute("SELECT config, centroids, lists, checksum FROM ivf").fetchone()
                if row is None:
                    return None
                config, centroids, lists, checksum = row
                if _checksum(config.encode(), centroids, lists) != checksum:
                    raise ValueError("a checksum is wrong")
                index_config = _index_config(json.loads(config))
                return StoredIndex(
                    index_config,
                    np.frombuffer(centroids, dtype=np.float32).reshape(index_config.lists, -1),
                    np.frombuffer(lists, dtype=np.int64),
                )
        except CorpusError as error:
            logger.warning("the index is built again: %s", error)
            return None

    def write_index(self, generation: int, index: StoredIndex) -> None:
        """Replace the stored index, unless another process committed since `generation`.

        Raises:
            CorpusError: it cannot be written.
        """
        config = json.dumps(asdict(index.config))
        centroids = index.centroids.tobytes()
        lists = index.lists.tobytes()
        checksum = _checksum(config.encode(), centroids, lists)
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if _generation(connection) != generation:
                return
            connection.execute("DELETE FROM ivf")
            connection.execute("INSERT INTO ivf VALUES (?, ?, ?, ?, ?)", [_PAD, config, centroids, lists, checksum])
            connection.execute("COMMIT")

    @contextmanager
    def _connection(self, mode: str = "rw") -> Iterator[sqlite3.Connection]:
        """A connection to the file; closing it rolls back what was not committed.

        Raises:
            CorpusError: the file cannot be opened, read or written, or is damaged.
        """
        uri = f"{self._path.absolute().as_uri()}?mode={mode}"
        try:
            connection = sqlite3.connect(uri, uri=True, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
            try:
                for pragma in _PRAGMAS:
                    connection.execute(f"PRAGMA {pragma}")
                yield connection
            finally:
                connection.close()
        except (sqlite3.Error, ValueError, KeyError, TypeError, AttributeError) as error:
            cause = self._disk_error(error)
            advice = "; if it is damaged, remove the folder and make the corpus again"
            if isinstance(cause, OSError):
                advice = ""
            elif _primary_code(error) == sqlite3.SQLITE_BUSY:
                advice = "; another process uses it: try again"
            raise CorpusError(f"{self._path}: {error}{advice}") from cause

    def _disk_error(self, error: Exception) -> Exception:
        """The operating system's error that caused `error`, found by writing to the disk: SQLite does not say it."""
        number = _DISK_ERRORS.get(_primary_code(error))
        if number is None:
            return error
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as cause:
            return cause
        return OSError(number, os.strerror(number), str(self._path))


def _primary_code(error: Exception) -> int:
    """SQLite's primary result code of an error; 0 if it is not SQLite's."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _generation(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT generation FROM corpus").fetchone()[0])


def _settings(text: str) -> StoredSettings:
    values = json.loads(text)
    return StoredSettings(**{**values, "index": _index_config(values["index"])})


def _index_config(values: Mapping[str, Any]) -> IndexConfig:
    return IndexConfig(**{**values, "kind": IndexKind(values["kind"])})


def _document(record: str) -> StoredDocument:
    values = json.loads(record)
    places = tuple(Place(**place) for place in values["places"])
    return StoredDocument(**{**values, "chunks": tuple(values["chunks"]), "places": places})


def _rows(
    documents: Iterable[StoredDocument], vectors: NDArray[np.float32]
) -> Iterator[tuple[int, bytes, str, bytes, bytes]]:
    """The row of each document: its number, pad, record, vectors and checksum."""
    start = 0
    for document in documents:
        stop = start + len(document.chunks)
        values = {item.name: getattr(document, item.name) for item in fields(document)}
        values["places"] = list(map(asdict, document.places))
        record = json.dumps(values, ensure_ascii=False, allow_nan=False)
        packed = vectors[start:stop].tobytes()
        yield document.number, _PAD, record, packed, _checksum(record.encode(), packed)
        start = stop


def _checksum(*parts: bytes) -> bytes:
    """BLAKE2b-128 of the parts and their lengths."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()
