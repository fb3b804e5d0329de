"""Files into the documents of a corpus: text and Markdown, one document a file, and JSONL, one a line."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any, Literal

from chunkweave.errors import DocumentError, DuplicateDocumentError, EmptyDocumentError
from chunkweave.prompt.documents import TEXT_SUFFIXES, decoded_text, read_documents

logger = logging.getLogger(__name__)

JSONL_SUFFIXES = (".jsonl", ".ndjson")
_ID_KEYS = ("id", "_id")
_TITLE_KEYS = ("title", "source")
_TEXT_KEY, _METADATA_KEY = "text", "metadata"

MOST_LEVELS = 64
"""Lists and objects inside each other that metadata may have: what it is written and shown by ends somewhere."""

MOST_ID_CHARACTERS = 512
MOST_TITLE_CHARACTERS = 1024
MOST_METADATA_BYTES = 16 << 10
"""Of a document's metadata as JSON. It is kept in memory, and listed and found with every chunk."""

MOST_LINE_BYTES = 1 << 20
"""Of a line of an uploaded JSONL file: parsing it is one call that no other thread can interrupt."""

MOST_TEXT_BYTES = 8 << 20
"""Of the text of one document that is uploaded: so are decoding it and hashing it."""

MOST_DOCUMENTS = 100_000
"""Documents of one upload, and lines of one of its files."""

OnError = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """A text with an id that stays the same from one reading to the next, and what is to be kept beside it.

    `metadata` has to be JSON-able.

    >>> from chunkweave import CorpusDocument
    >>> CorpusDocument("choir", "It is led by Otto Gunmark.", title="The choir", metadata={"year": 1998}).title
    'The choir'
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hash of everything but the id: 32 hex digits. The same digest is the same document."""
        content = json.dumps([self.text, self.title, dict(self.metadata)], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def checked_documents(documents: Iterable[CorpusDocument]) -> list[CorpusDocument]:
    """The documents, if each has an id of its own and a text.

    Raises:
        DuplicateDocumentError: two have the same id.
        EmptyDocumentError: one has no text.
        DocumentError: one has no id, an id, title or metadata that is too long, metadata that is not JSON-able or
            nested too deeply, or text that is not valid Unicode.
    """
    checked: dict[str, CorpusDocument] = {}
    for document in documents:
        if not document.id.strip():
            raise DocumentError("a document has no id")
        _check_lengths(document)
        if document.id in checked:
            raise DuplicateDocumentError(f"two documents have the id {document.id!r}: give each its own")
        if not document.text.strip():
            raise EmptyDocumentError(f"document {document.id!r} is empty")
        _check_writable(document)
        checked[document.id] = document
    return list(checked.values())


def nested_too_deeply(metadata: Any) -> bool:
    """Whether lists and objects stand inside each other more than `MOST_LEVELS` deep."""
    level = [metadata]
    for _ in range(MOST_LEVELS + 1):
        inside = [one.values() if isinstance(one, Mapping) else one for one in level]
        level = [one for some in inside for one in some if isinstance(one, Mapping | list | tuple)]
    return bool(level)


def _check_writable(document: CorpusDocument) -> None:
    if nested_too_deeply(document.metadata):
        raise DocumentError(f"the metadata of document {document.id!r} is nested too deeply")
    try:
        json.dumps([document.id, document.title, document.text], ensure_ascii=False).encode()
        metadata = json.dumps(dict(document.metadata), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise DocumentError(f"document {document.id!r} has half of a surrogate pair: no valid Unicode") from error
    except (TypeError, ValueError) as error:
        raise DocumentError(f"the metadata of document {document.id!r} is no JSON object: {error}") from error
    if len(metadata) > MOST_METADATA_BYTES:
        size = f"{len(metadata)} bytes as JSON, and may have {MOST_METADATA_BYTES}"
        raise DocumentError(f"the metadata of document {document.id!r} has {size}")


def check_text_bytes(document: str, nbytes: int) -> None:
    """Refuse a text from elsewhere that is too long.

    Raises:
        DocumentError: it has more than `MOST_TEXT_BYTES`; the message names the `document`.
    """
    if nbytes > MOST_TEXT_BYTES:
        size = f"{nbytes} bytes, and may have {MOST_TEXT_BYTES}: make several documents of it"
        raise DocumentError(f"the text of document {document[:_SHOWN]!r} has {size}")


def _check_lengths(document: CorpusDocument) -> None:
    bounds = (("id", document.id, MOST_ID_CHARACTERS), ("title", document.title, MOST_TITLE_CHARACTERS))
    for field_name, text, most in bounds:
        if len(text) > most:
            raise DocumentError(
                f"the {field_name} of document {document.id[:_SHOWN]!r} has {len(text)} characters, and may have {most}"
            )


_SHOWN = 60
"""Characters of an id that is too long, in a message."""


def read_corpus_documents(paths: Sequence[Path], *, on_error: OnError = "raise") -> list[CorpusDocument]:
    """Documents of files and folders (recursively, sorted, hidden ones left out), in UTF-8.

    - `.txt`, `.md`, `.rst`, and every other file that is named itself: one document, its id its path inside the folder
      given, or its file name; where two would share one, its whole path.
    - `.jsonl`, `.ndjson`: one document a line, `{"text": .., "id": .., "title": .., "metadata": {..}}`. Only the text
      is needed. Without an id it is `FILE:LINE`. `_id` means id and `source` title; other keys become metadata.

    With `on_error="skip"` files and lines that cannot be read, and empty ones, are left out with a logged warning.

    Raises:
        DocumentError: a path does not exist or cannot be read, or a line is no such object; the message names
            file, line and reason.
        EmptyDocumentError: a line's text is empty, or there is no document at all.
    """
    lines, texts = _sorted_out(paths)
    documents = [
        CorpusDocument(document.name, document.text)
        for document in (read_documents(texts, on_error=on_error) if texts else ())
    ]
    for path, name in lines:
        documents += _read_lines(path, name, on_error)
    if not documents:
        raise EmptyDocumentError(f"no document with text in {', '.join(map(str, paths))}")
    return documents


def parse_corpus_documents(name: str, data: bytes) -> list[CorpusDocument]:
    """The documents in the bytes of one uploaded file called `name`, as `read_corpus_documents` would make them.

    The name is an id and tells lines from text; no file is opened. It ends at the first line that is wrong.

    Raises:
        DocumentError: not UTF-8, too long, a line is too long or no object with a text, or there are too many; the
            message names file, line and reason.
        EmptyDocumentError: a line's text is empty, or there is no text at all.
    """
    found: Iterable[CorpusDocument]
    if PurePath(name).suffix.lower() in JSONL_SUFFIXES:
        found = _parsed_lines(data, name, name, "raise", most_lines=MOST_DOCUMENTS)
    else:
        check_text_bytes(name, len(data))
        found = [CorpusDocument(name, decoded_text(data, name))]
    documents = []
    for document in found:
        _check_lengths(document)  # before the next line: what was parsed of metadata is many times as large
        _check_writable(document)
        documents.append(document)
    if not any(document.text.strip() for document in documents):
        raise EmptyDocumentError(f"no document with text in {name}")
    return documents


def _sorted_out(paths: Sequence[Path]) -> tuple[list[tuple[Path, str]], list[Path]]:
    """JSONL files with their names, and the files and folders that hold text."""
    lines: dict[Path, tuple[Path, str]] = {}
    texts: list[Path] = []
    for path in map(Path, paths):
        if path.suffix.lower() in JSONL_SUFFIXES and not path.is_dir():
            lines.setdefault(path.resolve(), (path, path.name))
            continue
        inside = list(_jsonl_files(path)) if path.is_dir() else []
        for file, name in inside:
            lines.setdefault(file.resolve(), (file, name))
        if not inside or _has_text(path):
            texts.append(path)
    return list(lines.values()), texts


def _jsonl_files(folder: Path) -> Iterator[tuple[Path, str]]:
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if file.suffix.lower() in JSONL_SUFFIXES and file.is_file() and not hidden:
            yield file, inside.as_posix()


def _has_text(folder: Path) -> bool:
    visible = (
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in TEXT_SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    return any(file.is_file() for file in visible)


def _read_lines(path: Path, name: str, on_error: OnError) -> Iterator[CorpusDocument]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = DocumentError(f"cannot read {path}: {error.strerror or error}")
        if on_error == "raise":
            raise reason from error
        logger.warning("documents left out: %s", reason)
        return
    yield from _parsed_lines(raw, str(path), name, on_error)


def _parsed_lines(
    raw: bytes, where: str, name: str, on_error: OnError, *, most_lines: int | None = None
) -> Iterator[CorpusDocument]:
    """Documents of JSON lines; errors name the file as `where`, ids as `name`.

    With `most_lines` the file comes from elsewhere: its lines are bounded in number and length.
    """
    for number, line in enumerate(BytesIO(raw.removeprefix(b"\xef\xbb\xbf")), start=1):
        if most_lines is not None and number > most_lines:
            raise DocumentError(f"{where} has more than {most_lines} lines")
        if not line.strip():
            continue
        try:
            if most_lines is not None and len(line) > MOST_LINE_BYTES:
                size = f"{len(line)} bytes, and a line may have {MOST_LINE_BYTES}"
                raise DocumentError(f"{where}, line {number} has {size}")
            yield _parsed(line, f"{where}, line {number}", f"{name}:{number}")
        except DocumentError as error:
            if on_error == "raise":
                raise
            logger.warning("document left out: %s", error)


def _parsed(line: bytes, where: str, usual_id: str) -> CorpusDocument:
    """One line as a document; errors begin with `where`."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DocumentError(f"{where}: not UTF-8: bad byte at offset {error.start}") from error
    except json.JSONDecodeError as error:
        raise DocumentError(f"{where}: not JSON: {error}") from error
    except ValueError as error:
        raise DocumentError(f"{where}: a number has too many digits") from error
    except RecursionError as error:
        raise DocumentError(f"{where}: nested too deeply") from error
    if not isinstance(row, dict) or not isinstance(row.get(_TEXT_KEY), str):
        raise DocumentError(f'{where}: not an object with a "text": {{"text": "...", "id": "...", "title": "..."}}')
    if not row[_TEXT_KEY].strip():
        raise EmptyDocumentError(f"{where}: the text is empty")
    metadata = row.pop(_METADATA_KEY, None) or {}
    if not isinstance(metadata, dict):
        raise DocumentError(f'{where}: "metadata" is no object')
    text = str(row.pop(_TEXT_KEY))
    found_id = _taken(row, _ID_KEYS)
    title = _taken(row, _TITLE_KEYS)
    return CorpusDocument(
        usual_id if found_id is None else str(found_id), text, "" if title is None else str(title), {**row, **metadata}
    )


def _taken(row: dict[str, Any], keys: Sequence[str]) -> Any:
    """The value of the first of `keys` that is there, taken out of the row; None if there is none."""
    for key in keys:
        if row.get(key) is not None:
            return row.pop(key)
    return None
