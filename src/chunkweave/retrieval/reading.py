"""Reads files and folders of all supported kinds into documents, with a result for each file."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from chunkweave.errors import DocumentError, EmptyDocumentError
from chunkweave.retrieval.conversion import Conversion, FileRead
from chunkweave.retrieval.documents import CorpusDocument


def read_files(
    paths: Sequence[Path],
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
    inside = {
        path.resolve(): (path, name)
        for root in paths
        for path, name in _files(Path(root))
        if without is None or not _within(path, without) or _within(Path(root), without)
    }
    files = list(inside.values())
    uses = Counter(name for _, name in files)
    reads = []
    with Conversion() as conversion:
        for done, (path, name) in enumerate(files):
            if progress is not None:
                progress(done, len(files))
            unique = name if uses[name] == 1 else path.as_posix()
            reads.append(_read_file(path, unique, conversion))
    return without_repeated(reads)


def _read_file(path: Path, name: str, conversion: Conversion) -> FileRead:
    try:
        with path.open("rb") as file:
            return conversion.read(name, file)
    except OSError as error:
        return FileRead(name, left_out=f"it cannot be read: {error.strerror or error}")


def without_repeated(reads: Iterable[FileRead]) -> list[FileRead]:
    """The reads without documents whose id an earlier document has."""
    seen: set[str] = set()
    distinct = []
    for read in reads:
        new = tuple(
            {document.id: document for document in reversed(read.documents) if document.id not in seen}.values()
        )[::-1]
        if repeated := len(read.documents) - len(new):
            why = f"the id of {repeated} is that of another document"
            lines = (*read.lines_left_out, why)
            count = read.num_lines_left_out + repeated
            read = replace(read, documents=new, lines_left_out=lines, num_lines_left_out=count)
        seen |= {document.id for document in new}
        distinct.append(read)
    return distinct


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
    fate = {identity: change for change, ids in changes.items() for identity in ids}
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
