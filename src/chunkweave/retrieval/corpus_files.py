"""A corpus on disk: parts that are never changed, and a manifest that names the valid ones."""

import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from chunkweave.errors import CorpusError, UsageError
from chunkweave.retrieval.sections import NO_PLACE, Place
from chunkweave.store.shared_folder import locked_folder, sync_folder

logger = logging.getLogger(__name__)


MANIFEST = "corpus.json"
_FORMAT = 1
_PART = re.compile(r"part-\d{8}-\d{4}\.(jsonl|safetensors)")
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial")
_VECTORS = "vectors"
_READ_ATTEMPTS = 5
_COMMIT_CHUNKS = 512
"""Chunks embedded between two commits: the maximum that an interruption loses."""

_MOST_PART_CHUNKS = 4096
"""Parts are joined up to this size, because removing a document rewrites its part."""


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document in a corpus: its chunks, and the digest of the document that was cut.

    `places` has the page and heading of each chunk, or is empty if none is known.
    """

    id: str
    title: str
    digest: str
    chunks: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    places: tuple[Place, ...] = ()

    def place_of(self, number: int) -> Place:
        """Where a chunk is, by its number from 0."""
        return self.places[number] if self.places else NO_PLACE


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Documents and the vectors of all their chunks in order, float32 `[chunks, dimension]`.

    `entry` is its entry in the manifest; None until it is written.
    """

    documents: tuple[StoredDocument, ...]
    vectors: NDArray[np.float32]
    entry: "PartEntry | None" = None

    def __len__(self) -> int:
        return len(self.vectors)


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A part in the manifest: the stem of its two files, its sizes, and BLAKE2b-128 of the files' bytes."""

    name: str
    documents: int
    chunks: int
    text_digest: str
    vectors_digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A corpus: its embedder, how documents are cut, its index, and its valid parts, in order.

    `generation` counts the commits.
    """

    embedder: str
    fingerprint: str
    dimension: int
    max_tokens: int
    overlap_tokens: int
    index: Mapping[str, Any]
    generation: int = 0
    parts: tuple[PartEntry, ...] = ()


class CorpusFiles:
    """The folder of a corpus: `corpus.json` and, for each part, `part-N.jsonl` and `part-N.safetensors`.

    A commit writes new parts, then replaces the manifest atomically. Files that the manifest does not name are ignored,
    and removed by the next commit. A process that dies loses only what it had not committed. Any number of processes
    may read while one writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exist(self) -> bool:
        """Whether there is a corpus in the folder."""
        return (self.folder / MANIFEST).is_file()

    def create(self, manifest: Manifest) -> None:
        """Create the folder with an empty corpus.

        Raises:
            CorpusError: it cannot be written.
            UsageError: there is a corpus already, or a folder with other files.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            foreign = [path.name for path in self.folder.iterdir() if not _PARTIAL.fullmatch(path.name)]
        except OSError as error:
            raise CorpusError(f"no corpus can be made in {self.folder}: {error.strerror or error}") from error
        with locked_folder(self.folder, CorpusError):
            if self.exist:
                raise UsageError(f"there is a corpus in {self.folder} already: open it")
            if foreign:
                raise UsageError(f"{self.folder} holds other files ({foreign[0]}): a corpus needs its own folder")
            self._write_manifest(manifest)

    def read(self) -> tuple[Manifest, list[Part]]:
        """The manifest and all parts of the last commit.

        Raises:
            CorpusError: there is no corpus, or a file of it is missing, damaged or of another version.
        """
        for _ in range(_READ_ATTEMPTS - 1):
            manifest = self.manifest()
            try:
                return manifest, [self._read_part(entry) for entry in manifest.parts]
            except CorpusError:
                if self.manifest().generation == manifest.generation:
                    raise
        manifest = self.manifest()
        return manifest, [self._read_part(entry) for entry in manifest.parts]

    def manifest(self) -> Manifest:
        """The manifest alone.

        Raises:
            CorpusError: there is none, or it cannot be read.
        """
        path = self.folder / MANIFEST
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("format") != _FORMAT:
                raise CorpusError(f"{path} was written by another version of chunkweave: make the corpus again")
            return Manifest(**{**data, "parts": tuple(PartEntry(**part) for part in data["parts"])})
        except FileNotFoundError as error:
            raise CorpusError(f"no corpus in {self.folder}: make one with `chunkweave ingest`") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorpusError(f"{path} is no manifest of a corpus: {error}") from error

    def commit(self, before: Manifest, parts: Sequence[Part]) -> tuple[Manifest, list[Part]]:
        """Make `parts` the corpus; parts without an entry are written. Returns the new manifest and parts.

        Raises:
            CorpusError: another process committed since `before`, or a file cannot be written; nothing has changed.
        """
        generation = before.generation + 1
        with locked_folder(self.folder, CorpusError):
            if self.manifest().generation != before.generation:
                raise CorpusError(f"another process changed the corpus in {self.folder}: open it again")
            try:
                written = [
                    part if part.entry is not None else self._write_part(part, f"part-{generation:08d}-{number:04d}")
                    for number, part in enumerate(parts)
                ]
                entries = tuple(part.entry for part in written if part.entry is not None)
                manifest = replace(before, generation=generation, parts=entries)
                self._write_manifest(manifest)
            except CorpusError:  # frees space on a full disk
                self._remove_unnamed(self.manifest())
                raise
            self._remove_unnamed(manifest)
        return manifest, written

    def write(self, files: Mapping[str, bytes]) -> None:
        """Replace files beside the parts, each atomically, in this order.

        Raises:
            CorpusError: one cannot be written.
        """
        with locked_folder(self.folder, CorpusError):
            for name, data in files.items():
                self._write(name, data)

    def _write(self, name: str, data: bytes) -> None:
        """Replace a file atomically; on return it has reached the disk."""
        partial = self.folder / f".{name}.{secrets.token_hex(8)}.partial"
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.folder / name)
            sync_folder(self.folder)
        except OSError as error:
            with suppress(OSError):  # a read-only disk refuses this too
                partial.unlink(missing_ok=True)
            raise CorpusError(f"{self.folder / name} cannot be written: {error.strerror or error}") from error

    def _write_manifest(self, manifest: Manifest) -> None:
        data = {"format": _FORMAT, **asdict(manifest)}
        self._write(MANIFEST, (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())

    def _write_part(self, part: Part, name: str) -> Part:
        rows = (json.dumps(_row(document), ensure_ascii=False, allow_nan=False) for document in part.documents)
        text = "".join(row + "\n" for row in rows).encode()
        vectors = save({_VECTORS: part.vectors})
        self._write(f"{name}.jsonl", text)
        self._write(f"{name}.safetensors", vectors)
        entry = PartEntry(name, len(part.documents), len(part), digest_of(text), digest_of(vectors))
        return replace(part, entry=entry)

    def _read_part(self, entry: PartEntry) -> Part:
        text = self._read_checked(f"{entry.name}.jsonl", entry.text_digest)
        packed = self._read_checked(f"{entry.name}.safetensors", entry.vectors_digest)
        try:
            rows = map(json.loads, text.decode().split("\n")[:-1])
            documents = tuple(_stored_document(row) for row in rows)
            vectors: NDArray[np.float32] = load(packed)[_VECTORS]
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CorpusError(f"part {entry.name} in {self.folder} is not one: {error}") from error
        return Part(documents, vectors, entry)

    def _read_checked(self, name: str, digest: str) -> bytes:
        try:
            data = (self.folder / name).read_bytes()
        except OSError as error:
            raise CorpusError(f"{self.folder / name} cannot be read: {error.strerror or error}") from error
        if digest_of(data) != digest:
            raise CorpusError(f"{self.folder / name} is damaged: its checksum is wrong; make the corpus again")
        return data

    def _remove_unnamed(self, manifest: Manifest) -> None:
        """Remove parts and partial files that the manifest does not name, left by this commit or by a dead process."""
        named = {f"{part.name}.{suffix}" for part in manifest.parts for suffix in ("jsonl", "safetensors")}
        for path in self.folder.iterdir():
            if path.name not in named and (_PART.fullmatch(path.name) or _PARTIAL.fullmatch(path.name)):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    logger.warning("%s is not needed any more and cannot be removed: %s", path, error)


def _row(document: StoredDocument) -> dict[str, Any]:
    """A document as JSON in its part; the field `places` is left out if it is empty."""
    row = asdict(document)
    return row if row["places"] else {name: value for name, value in row.items() if name != "places"}


def _stored_document(row: Mapping[str, Any]) -> StoredDocument:
    places = tuple(Place(**place) for place in row.get("places", ()))
    return StoredDocument(**{**row, "chunks": tuple(row["chunks"]), "places": places})


def digest_of(data: bytes) -> str:
    """BLAKE2b-128 as 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def next_batch(documents: Iterator[StoredDocument]) -> list[StoredDocument]:
    """The next documents that together have enough chunks for one commit; none at the end."""
    batch: list[StoredDocument] = []
    chunks = 0
    for document in documents:
        batch.append(document)
        chunks += len(document.chunks)
        if chunks >= _COMMIT_CHUNKS:
            break
    return batch


def without(parts: Sequence[Part], leaving: frozenset[str]) -> list[Part]:
    """The parts without the documents `leaving`; parts that have none of these are the same objects."""
    kept = []
    for part in parts:
        if not any(document.id in leaving for document in part.documents):
            kept.append(part)
            continue
        documents = tuple(document for document in part.documents if document.id not in leaving)
        stays = [document.id not in leaving for document in part.documents for _ in document.chunks]
        if documents:
            kept.append(Part(documents, part.vectors[np.array(stays)]))
    return kept


def appended(parts: Sequence[Part], new: Part) -> list[Part]:
    """Parts with one more, which is joined with parts before it while these are no larger and the sum stays small.

    This keeps the number of small parts low, and rewrites a part only when its size doubles.
    """
    kept = list(parts)
    while kept and len(kept[-1]) <= len(new) and len(kept[-1]) + len(new) <= _MOST_PART_CHUNKS:
        last = kept.pop()
        new = Part((*last.documents, *new.documents), np.concatenate([last.vectors, new.vectors]))
    return [*kept, new]
