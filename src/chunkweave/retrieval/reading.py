"""Reads files and folders of all supported kinds into documents, with a result for each file."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from chunkweave.errors import DocumentError, EmptyDocumentError, UnreadableFileError
from chunkweave.retrieval.conversion import ConversionLimits, convert
from chunkweave.retrieval.documents import (
    MOST_TITLE_CHARACTERS,
    CorpusDocument,
    check_document,
    check_text_bytes,
    parsed_lines,
)
from chunkweave.retrieval.file_kinds import FileKind, binary_kind, decoded, refuse_binary, rows_as_text, text_kind
from chunkweave.retrieval.sections import Section, markdown_sections, page_sections, rst_sections

_LINES = (".jsonl", ".ndjson")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LOOK_BYTES = 4096

MOST_FILE_BYTES = 1 << 30
"""Maximum bytes of a file on the command line or in a folder; it is in memory while it is read."""

Stopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class FileRead:
    """The result of reading one file: its documents, or why it was `left_out`.

    `assumed` describes a guessed encoding; `lines_left_out` has the first reasons why lines were left out. A file is
    `unreadable` if its kind is not supported.
    """

    name: str
    kind: FileKind | None = None
    documents: tuple[CorpusDocument, ...] = ()
    assumed: str = ""
    left_out: str = ""
    unreadable: bool = False
    lines_left_out: tuple[str, ...] = ()
    num_lines_left_out: int = 0

    @property
    def complete(self) -> bool:
        """Whether no part of the file was left out."""
        return not (self.left_out or self.num_lines_left_out)

    @property
    def reason(self) -> str:
        """Why the file, or lines of it, were left out; "" if none were."""
        if self.left_out or not self.num_lines_left_out:
            return self.left_out
        return f"{self.num_lines_left_out} lines left out: {self.lines_left_out[0]}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "file": self.name,
            "kind": None if self.kind is None else str(self.kind),
            "documents": len(self.documents),
            "converted": self.kind is not None and self.kind.converted and not self.left_out,
            "assumed": self.assumed,
            "left_out": self.left_out,
            "lines_left_out": list(self.lines_left_out),
        }


def read_files(
    paths: Sequence[Path],
    limits: ConversionLimits | None = None,
    *,
    without: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[FileRead]:
    """Read files and folders (recursively, sorted); skips hidden files, and the folder `without` inside a folder.

    The id of a document is its path inside its folder, or its file name; if that is not unique, its whole path. A file
    that is reached twice is read once. A file that cannot be read is in the result with the reason.

    Raises:
        DocumentError: a path does not exist.
    """
    limits = ConversionLimits() if limits is None else limits
    inside = {
        path.resolve(): (path, name)
        for given in paths
        for path, name in _files(Path(given))
        if without is None or not _within(path, without) or _within(Path(given), without)
    }
    found = list(inside.values())
    uses = Counter(name for _, name in found)
    reads = []
    for done, (path, name) in enumerate(found):
        if progress is not None:
            progress(done, len(found))
        name = name if uses[name] == 1 else path.as_posix()
        reads.append(_read_file(path, name, limits))
    return without_repeated(reads)


def _read_file(path: Path, name: str, limits: ConversionLimits) -> FileRead:
    """Read one file; if its beginning shows that it is not a document, nothing more of it is read."""
    try:
        with path.open("rb") as file:
            begin = file.read(_LOOK_BYTES)
            refuse_binary(begin)
            if (size := path.stat().st_size) > MOST_FILE_BYTES:
                raise DocumentError(f"it has {size} bytes, and a file may have {MOST_FILE_BYTES}: split it")
            data = begin + file.read()
    except DocumentError as error:
        return FileRead(name, left_out=str(error), unreadable=isinstance(error, UnreadableFileError))
    except OSError as error:
        return FileRead(name, left_out=f"it cannot be read: {error.strerror or error}")
    return read_bytes(name, data, limits)


def read_bytes(
    name: str,
    data: bytes,
    limits: ConversionLimits,
    *,
    from_elsewhere: bool = False,
    stopped: Stopped = lambda: False,
) -> FileRead:
    """Read the bytes of a file. `name` is its id and a hint of its kind; no file is opened.

    With `from_elsewhere` (another machine), its length is limited. Conversion ends early once `stopped` returns true.
    """
    try:
        return _read(name, data, limits, from_elsewhere, stopped)
    except DocumentError as error:
        return FileRead(name, left_out=str(error), unreadable=isinstance(error, UnreadableFileError))


def without_repeated(reads: Iterable[FileRead]) -> list[FileRead]:
    """The reads without documents whose id an earlier document has."""
    seen: set[str] = set()
    kept = []
    for read in reads:
        new = tuple({one.id: one for one in reversed(read.documents) if one.id not in seen}.values())[::-1]
        if repeated := len(read.documents) - len(new):
            why = f"the id of {repeated} is that of another document"
            lines, count = (*read.lines_left_out, why), read.num_lines_left_out + repeated
            read = replace(read, documents=new, lines_left_out=lines, num_lines_left_out=count)
        seen |= {one.id for one in new}
        kept.append(read)
    return kept


def documents_of(reads: Sequence[FileRead], *, strict: bool = False) -> list[CorpusDocument]:
    """All documents that were read.

    Raises:
        EmptyDocumentError: there is none.
        DocumentError: `strict`, and something was left out.
    """
    bad = [f"{read.name}: {read.reason}" for read in reads if not read.complete]
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    if strict and bad:
        raise DocumentError(f"{bad[0]}{more}")
    documents = [document for read in reads for document in read.documents]
    if not documents:
        raise EmptyDocumentError(f"no document that can be read: {bad[0]}{more}" if bad else "no file is there")
    return documents


def rows_of(reads: Iterable[FileRead], changes: Mapping[str, Iterable[str]]) -> list[dict[str, Any]]:
    """A JSON-able row per file; `result` counts its documents by the change that has their id."""
    fate = {one: what for what, ids in changes.items() for one in ids}
    rows = []
    for read in reads:
        counts = Counter(fate[document.id] for document in read.documents if document.id in fate)
        rows.append({**read.as_dict(), "result": dict(counts)})
    return rows


def _within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    """Files under `path` with the names of their documents.

    Raises:
        DocumentError: there is no such path.
    """
    if path.is_dir():
        inside = sorted((file.relative_to(path) for file in path.rglob("*") if file.is_file()), key=PurePath.as_posix)
        for relative in inside:
            if not any(part.startswith(".") for part in relative.parts):
                yield path / relative, relative.as_posix()
    elif path.exists():
        yield path, path.name
    else:
        raise DocumentError(f"no such file or folder: {path}")


def _read(name: str, data: bytes, limits: ConversionLimits, from_elsewhere: bool, stopped: Stopped) -> FileRead:
    if not data[:_LOOK_BYTES].strip() and not data.strip():
        raise EmptyDocumentError("it is empty")
    kind = binary_kind(data)
    if kind is not None:
        return _converted(name, kind, data, limits, stopped)
    if PurePath(name).suffix.lower() in _LINES and not data.startswith(_UTF16_MARKS):
        return _of_lines(name, data, from_elsewhere)
    if from_elsewhere:
        check_text_bytes(name, len(data))
    found = decoded(data, page=b"<html" in data[:_LOOK_BYTES].lower())
    if not found.text.strip():
        raise EmptyDocumentError("it is empty")
    kind = text_kind(name, found.text)
    if kind is FileKind.JSON_LINES:
        read = _of_lines(name, found.text.encode(), from_elsewhere)
    elif kind.converted:
        read = _converted(name, kind, found.text.encode(), limits, stopped)
    else:
        read = _of_text(name, kind, found.text)
    return replace(read, assumed=found.assumed)


def _of_lines(name: str, data: bytes, from_elsewhere: bool) -> FileRead:
    found = parsed_lines(name, data, from_elsewhere=from_elsewhere)
    if not found.documents:
        reason = f"no line of it is a document: {found.left_out[0]}" if found.left_out else "it is empty"
        return FileRead(name, FileKind.JSON_LINES, left_out=reason)
    return FileRead(
        name,
        FileKind.JSON_LINES,
        found.documents,
        lines_left_out=found.left_out,
        num_lines_left_out=found.num_left_out,
    )


def _of_text(name: str, kind: FileKind, text: str) -> FileRead:
    sections: tuple[Section, ...] = ()
    if kind is FileKind.CSV:
        text = rows_as_text(text)
    elif kind is FileKind.MARKDOWN:
        sections = markdown_sections(text)
    elif kind is FileKind.RST:
        sections = rst_sections(text)
    return _document(name, kind, "", text, sections)


def _converted(name: str, kind: FileKind, data: bytes, limits: ConversionLimits, stopped: Stopped) -> FileRead:
    found = convert(kind, data, limits, stopped)
    if found.pages:
        text, sections = page_sections(found.pages)
    else:
        text, sections = found.markdown, markdown_sections(found.markdown)
    return _document(name, kind, " ".join(found.title.split())[:MOST_TITLE_CHARACTERS], text, sections)


def _document(name: str, kind: FileKind, title: str, text: str, sections: tuple[Section, ...]) -> FileRead:
    if not text.strip():
        raise EmptyDocumentError("it has no text")
    document = CorpusDocument(name, text, title, sections=sections)
    check_document(document)
    return FileRead(name, kind, (document,))
