"""The documents of a corpus, and their checks."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chunkweave.errors import DocumentError, DuplicateDocumentError, EmptyDocumentError
from chunkweave.prompt.tables import Table
from chunkweave.retrieval.sections import Section

MOST_TEXT_BYTES = 8 << 20
"""Maximum bytes of the text of one document that was converted or came over HTTP."""

MOST_LEVELS = 64
"""Maximum nesting of lists and objects in metadata, because code that writes and shows it has limits."""

MOST_ID_CHARACTERS = 512
MOST_TITLE_CHARACTERS = 1024
MOST_METADATA_BYTES = 16 << 10
"""Maximum bytes of a document's metadata as JSON. It is in memory, and returned with every chunk."""

MOST_LINE_BYTES = 1 << 20
"""Maximum bytes of a line in an uploaded JSONL file."""

MOST_DOCUMENTS = 100_000
"""Maximum documents of one upload, and lines of one of its files."""


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """A text with an id that stays the same each time it is read, and data that is stored with it.

    `metadata` must be JSON-able. `sections` are the starts of pages and headings in the text; each chunk keeps its own.
    Chunks of `tables` begin with the table's header row.

    >>> from chunkweave import CorpusDocument
    >>> CorpusDocument("choir", "It is led by Otto Gunmark.", title="The choir", metadata={"year": 1998}).title
    'The choir'
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()
    tables: tuple[Table, ...] = ()

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
        check_document(document)
        if document.id in checked:
            raise DuplicateDocumentError(f"two documents have the id {document.id!r}: give each its own")
        if not document.text.strip():
            raise EmptyDocumentError(f"document {document.id!r} is empty")
        checked[document.id] = document
    return list(checked.values())


def renamed_langchain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a document, those of LangChain's by our names: without a `text` it is `page_content`.

    The title is that of the metadata, if there is no other.

    >>> renamed_langchain({"page_content": "It sings.", "metadata": {"title": "The choir"}, "type": "Document"})
    {'metadata': {'title': 'The choir'}, 'text': 'It sings.', 'title': 'The choir'}
    """
    if "text" in fields or "page_content" not in fields:
        return dict(fields)
    renamed = {key: value for key, value in fields.items() if value is not None and key not in ("page_content", "type")}
    renamed["text"] = fields["page_content"]
    metadata = renamed.get("metadata")
    if isinstance(metadata, Mapping) and isinstance(metadata.get("title"), str):
        renamed.setdefault("title", metadata["title"])
    return renamed


def nested_too_deeply(metadata: Any) -> bool:
    """Whether lists and objects are nested more than `MOST_LEVELS` deep."""
    level = [metadata]
    for _ in range(MOST_LEVELS + 1):
        inside = [container.values() if isinstance(container, Mapping) else container for container in level]
        level = [value for values in inside for value in values if isinstance(value, Mapping | list | tuple)]
    return bool(level)


def check_document(document: CorpusDocument) -> None:
    """Refuse a document whose id, title or metadata is too long, or that cannot be written as JSON.

    Raises:
        DocumentError: the document is refused.
    """
    bounds = (("id", document.id, MOST_ID_CHARACTERS), ("title", document.title, MOST_TITLE_CHARACTERS))
    for field_name, text, most in bounds:
        if len(text) > most:
            raise DocumentError(
                f"the {field_name} of document {document.id[:_SHOWN]!r} has {len(text)} characters, and may have {most}"
            )
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


_SHOWN = 60
"""Characters of an id that a message shows if the id is too long."""
