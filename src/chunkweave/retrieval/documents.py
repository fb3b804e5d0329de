"""The documents of a corpus, their checks, and the parser of JSON lines, one document per line."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from chunkweave.errors import DocumentError, DuplicateDocumentError, EmptyDocumentError
from chunkweave.retrieval.converter import MOST_TEXT_BYTES
from chunkweave.retrieval.sections import Section

_ID_KEYS = ("id", "_id")
_TITLE_KEYS = ("title", "source")
_TEXT_KEY, _METADATA_KEY = "text", "metadata"

MOST_LEVELS = 64
"""Maximum nesting of lists and objects in metadata, because code that writes and shows it has limits."""

MOST_ID_CHARACTERS = 512
MOST_TITLE_CHARACTERS = 1024
MOST_METADATA_BYTES = 16 << 10
"""Maximum bytes of a document's metadata as JSON. It is in memory, and returned with every chunk."""

MOST_LINE_BYTES = 1 << 20
"""Maximum bytes of a line in an uploaded JSONL file: other threads cannot run while one is parsed."""

MOST_DOCUMENTS = 100_000
"""Maximum documents of one upload, and lines of one of its files."""


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """A text with an id that stays the same each time it is read, and data that is stored with it.

    `metadata` must be JSON-able. `sections` are the starts of pages and headings in the text; each chunk keeps its own.

    >>> from chunkweave import CorpusDocument
    >>> CorpusDocument("choir", "It is led by Otto Gunmark.", title="The choir", metadata={"year": 1998}).title
    'The choir'
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()

    @property
    def digest(self) -> str:
        """Hash of text, title and metadata: 32 hex digits. Equal digests mean equal documents."""
        content = json.dumps([self.text, self.title, dict(self.metadata)], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def checked_documents(documents: Iterable[CorpusDocument]) -> list[CorpusDocument]:
    """The documents, if each has a unique id and a text.

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
    """Whether lists and objects are nested more than `MOST_LEVELS` deep."""
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
    """Refuse a text from another machine that is too long.

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
"""Characters of an id that a message shows if the id is too long."""


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Documents of JSON lines. `left_out` has reasons for invalid lines, at most the first `MOST_REASONS`."""

    documents: tuple[CorpusDocument, ...]
    left_out: tuple[str, ...] = ()
    num_left_out: int = 0


MOST_REASONS = 20


def parsed_lines(name: str, data: bytes, *, from_elsewhere: bool) -> JsonLines:
    """Documents of JSON lines in UTF-8: `{"text": .., "id": .., "title": .., "metadata": {..}}`, one per line.

    Only `text` is required. The default id is `NAME:LINE`. `_id` is read as id and `source` as title; other keys become
    metadata. With `from_elsewhere` (another machine), number and length of lines are limited.

    Raises:
        DocumentError: there are too many lines.
    """
    documents: list[CorpusDocument] = []
    reasons: list[str] = []
    wrong = 0
    if from_elsewhere and data.count(b"\n") + (not data.endswith(b"\n")) > MOST_DOCUMENTS:
        raise DocumentError(f"{name} has more than {MOST_DOCUMENTS} lines")
    for number, line in enumerate(BytesIO(data.removeprefix(b"\xef\xbb\xbf")), start=1):
        if not line.strip():
            continue
        try:
            if from_elsewhere and len(line) > MOST_LINE_BYTES:
                raise DocumentError(f"it has {len(line)} bytes, and a line may have {MOST_LINE_BYTES}")
            document = _parsed(line, f"{name}:{number}")
            check_document(document)  # before the next line, because parsed metadata is many times as large
            documents.append(document)
        except DocumentError as error:
            wrong += 1
            if wrong <= MOST_REASONS:
                reasons.append(f"line {number}: {error}")
    return JsonLines(tuple(documents), tuple(reasons), wrong)


def check_document(document: CorpusDocument) -> None:
    """Refuse a document whose id, title or metadata is too long, or that cannot be written as JSON.

    Raises:
        DocumentError: the document is refused.
    """
    _check_lengths(document)
    _check_writable(document)


def _parsed(line: bytes, usual_id: str) -> CorpusDocument:
    """One line as a document."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DocumentError(f"not UTF-8: bad byte at offset {error.start}") from error
    except json.JSONDecodeError as error:
        raise DocumentError(f"not JSON: {error}") from error
    except ValueError as error:
        raise DocumentError("a number has too many digits") from error
    except RecursionError as error:
        raise DocumentError("nested too deeply") from error
    if not isinstance(row, dict) or not isinstance(row.get(_TEXT_KEY), str):
        raise DocumentError('not an object with a "text": {"text": "...", "id": "...", "title": "..."}')
    if not row[_TEXT_KEY].strip():
        raise EmptyDocumentError("the text is empty")
    metadata = row.pop(_METADATA_KEY, None) or {}
    if not isinstance(metadata, dict):
        raise DocumentError('"metadata" is no object')
    text = str(row.pop(_TEXT_KEY))
    found_id = _taken(row, _ID_KEYS)
    title = _taken(row, _TITLE_KEYS)
    return CorpusDocument(
        usual_id if found_id is None else str(found_id), text, "" if title is None else str(title), {**row, **metadata}
    )


def _taken(row: dict[str, Any], keys: Sequence[str]) -> Any:
    """Remove the first of `keys` that has a value from the row, and return the value; None if there is none."""
    for key in keys:
        if row.get(key) is not None:
            return row.pop(key)
    return None
