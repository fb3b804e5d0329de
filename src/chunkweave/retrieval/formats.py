"""Turns one file's bytes into documents, by libraries. Runs in the confined process only; its input may be malicious.

Documents are yielded one by one, so that the process writes each before it makes the next.
"""

import csv
import html
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, BinaryIO

from chunkweave.errors import DocumentError, EmptyDocumentError, UnreadableFileError, install_extra
from chunkweave.prompt.tables import Table
from chunkweave.retrieval.documents import (
    MOST_DOCUMENTS,
    MOST_LINE_BYTES,
    MOST_TEXT_BYTES,
    MOST_TITLE_CHARACTERS,
    CorpusDocument,
    check_document,
    check_text_bytes,
    renamed_langchain,
)
from chunkweave.retrieval.file_kinds import NOT_READ, FileKind, binary_kind, decode, text_kind
from chunkweave.retrieval.sections import (
    MOST_HEADER_CHARACTERS,
    markdown_sections,
    markdown_tables,
    page_sections,
)

MOST_PAGES = 20_000
MOST_REASONS = 20

_MOST_UNPACKED_BYTES = 64 << 20
_MOST_RATIO = 100
"""Maximum unpacked bytes per byte of an archive. A text of one repeated letter reaches a thousand."""

_SMALL_BYTES = 1 << 20
"""An archive that unpacks to less may have any ratio."""

_MOST_ENTRIES = 4096
_MOST_ROW_CHARACTERS = 1 << 16

_DROPPED = ["iframe", "object", "embed", "form", "svg", "math", "video", "audio", "noscript", "template"]
_TITLE = re.compile(r"<title[^>]{0,200}>([^<]{0,4096})", re.I)
_DELIMITERS = ",;\t|"
_NUMBER = re.compile(r"[-+\d.,:/ %]+")
_LINES = (".jsonl", ".ndjson")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LOOK_BYTES = 4096

Converter = Callable[[bytes], tuple[str, str | Sequence[str]]]
"""Converts a file's bytes to its title, "" if it has none, and either Markdown or the texts of its pages."""


class FileReader:
    """Reads one file. After `documents` is exhausted, `kind`, `assumed` and `reasons` describe the result."""

    def __init__(self, converters: Mapping[FileKind, Converter | str], *, bounded: bool) -> None:
        """`converters` has the missing package's name where a library is not installed. `bounded`: an upload's limits
        of text and lines hold.
        """
        self._converters = converters
        self._bounded = bounded
        self.kind: FileKind | None = None
        self.assumed = ""
        self.reasons: list[str] = []
        self.num_left_out = 0

    def documents(self, name: str, file: BinaryIO) -> Iterator[CorpusDocument]:
        """Yield the documents of a file.

        Raises:
            DocumentError: the file is left out; the message says why.
        """
        begin = file.read(_LOOK_BYTES)
        self.kind = binary_kind(begin)  # before the whole file is read
        data = begin + file.read()
        if not data.strip():
            raise EmptyDocumentError("it is empty")
        if self.kind is not None:
            yield self._converted(name, self.kind, data)
            return
        if PurePath(name).suffix.lower() in _LINES and not data.startswith(_UTF16_MARKS):
            yield from self._of_lines(name, data)
            return
        if self._bounded:
            check_text_bytes(name, len(data))
        text, self.assumed = decode(data)
        if not text.strip():
            raise EmptyDocumentError("it is empty")
        self.kind = text_kind(name, text)
        if self.kind is FileKind.JSON_LINES:
            yield from self._of_lines(name, text.encode())
        elif self.kind is FileKind.HTML:
            yield self._converted(name, self.kind, text.encode())
        else:
            yield _checked(_of_text(name, self.kind, text))

    def _converted(self, name: str, kind: FileKind, data: bytes) -> CorpusDocument:
        converter = self._converters[kind]
        if isinstance(converter, str):
            raise UnreadableFileError(f"it is {kind}, which needs {install_extra('documents')} ({converter})")
        try:
            title, content = converter(data)
        except (DocumentError, MemoryError):
            raise
        except RecursionError as error:
            raise DocumentError("it is nested too deeply") from error
        except Exception as error:
            what = type(error).__name__
            if what in ("EntitiesForbidden", "DTDForbidden", "ExternalReferenceForbidden"):
                raise DocumentError("it declares XML entities, which no Word document needs") from error
            raise DocumentError(f"it is damaged, or no {kind}: {what}: {str(error)[:200]}") from error
        title = " ".join(_clean(title).split())[:MOST_TITLE_CHARACTERS]
        if isinstance(content, str):
            if len(content) > MOST_TEXT_BYTES:
                raise DocumentError(f"it has more than {MOST_TEXT_BYTES >> 20} MiB of text: split it")
            text = _clean(content)
            return _checked(CorpusDocument(name, text, title, {}, markdown_sections(text), markdown_tables(text)))
        text, sections = page_sections([_clean(page) for page in content])
        return _checked(CorpusDocument(name, text, title, {}, sections))

    def _of_lines(self, name: str, data: bytes) -> Iterator[CorpusDocument]:
        """Documents of JSON lines in UTF-8: `{"text": .., "id": .., "title": .., "metadata": {..}}`, one per line."""
        self.kind = FileKind.JSON_LINES
        if self._bounded and data.count(b"\n") + (not data.endswith(b"\n")) > MOST_DOCUMENTS:
            raise DocumentError(f"{name} has more than {MOST_DOCUMENTS} lines")
        count = 0
        for number, line in enumerate(io.BytesIO(data.removeprefix(b"\xef\xbb\xbf")), start=1):
            if not line.strip():
                continue
            try:
                if self._bounded and len(line) > MOST_LINE_BYTES:
                    raise DocumentError(f"it has {len(line)} bytes, and a line may have {MOST_LINE_BYTES}")
                document = parse_line(line, f"{name}:{number}")
                check_document(document)
            except DocumentError as error:
                self.num_left_out += 1
                if self.num_left_out <= MOST_REASONS:
                    self.reasons.append(f"line {number}: {error}")
            else:
                count += 1
                yield document
        if not count:
            raise DocumentError(f"no line of it is a document: {self.reasons[0]}" if self.reasons else "it is empty")


_ID_KEYS = ("id", "_id")
_TITLE_KEYS = ("title", "source")
_TEXT_KEY = "text"
_METADATA_KEY = "metadata"


def parse_line(line: bytes, usual_id: str) -> CorpusDocument:
    """One JSON line as a document. `_id` is read as id, `source` as title and LangChain's `page_content` as text.

    Other keys become metadata.

    Raises:
        DocumentError: it is none.
    """
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
    row = renamed_langchain(row) if isinstance(row, dict) else {}
    if not isinstance(row.get(_TEXT_KEY), str):
        raise DocumentError('not an object with a "text": {"text": "...", "id": "...", "title": "..."}')
    if not row[_TEXT_KEY].strip():
        raise EmptyDocumentError("the text is empty")
    metadata = row.pop(_METADATA_KEY, None) or {}
    if not isinstance(metadata, dict):
        raise DocumentError('"metadata" is no object')
    text = str(row.pop(_TEXT_KEY))
    identity = _taken(row, _ID_KEYS, usual_id)
    title = _taken(row, _TITLE_KEYS, "")
    return CorpusDocument(str(identity), text, str(title), {**row, **metadata})


def _taken(row: dict[str, Any], keys: Sequence[str], default: str) -> Any:
    """Remove the first of `keys` that has a value from the row, and return the value."""
    for key in keys:
        if row.get(key) is not None:
            return row.pop(key)
    return default


def _of_text(name: str, kind: FileKind, text: str) -> CorpusDocument:
    if kind is FileKind.CSV:
        text, header = csv_text(text)
        tables = (Table(0, len(header), len(text)),) if header else ()
        return CorpusDocument(name, text, tables=tables)
    if kind is FileKind.MARKDOWN:
        return CorpusDocument(name, text, sections=markdown_sections(text), tables=markdown_tables(text))
    return CorpusDocument(name, text)


def _checked(document: CorpusDocument) -> CorpusDocument:
    if not document.text.strip():
        raise EmptyDocumentError("it has no text")
    check_document(document)
    return document


def csv_text(text: str) -> tuple[str, str]:
    """A CSV file as text, one line a row, and its header row, "" if the first row has no names of columns.

    Raises:
        DocumentError: it is not CSV, or a row is too long.
    """
    first = text.lstrip()[:_LOOK_BYTES].partition("\n")[0]
    delimiter = max(_DELIMITERS, key=first.count)  # csv.Sniffer needs more rows than many files have
    rows: list[str] = []
    header = ""
    length = 0
    try:
        for cells in csv.reader(io.StringIO(text), delimiter=delimiter):
            row = " | ".join(" ".join(cell.split()) for cell in cells).rstrip()
            if len(row) > _MOST_ROW_CHARACTERS:
                size = f"{len(row)} characters, and may have {_MOST_ROW_CHARACTERS}"
                raise DocumentError(f"row {len(rows) + 1} has {size}: give its texts as files or JSON lines")
            if not row.strip(" |"):
                continue
            if not rows and _are_names(cells) and len(row) <= MOST_HEADER_CHARACTERS:
                header = row + "\n"
            length += len(row) + 1
            if length > 2 * max(len(text), MOST_TEXT_BYTES):
                raise DocumentError("it has too many empty cells")
            rows.append(row)
    except csv.Error as error:
        raise DocumentError(f"it is not CSV: {error}") from error
    return "\n".join(rows), header if len(rows) > 1 else ""


def _are_names(row: list[str]) -> bool:
    """Whether the first row has names of columns: different texts that are not numbers."""
    names = [cell.strip() for cell in row]
    return all(names) and len(set(names)) == len(names) and not any(map(_NUMBER.fullmatch, names))


def _clean(text: str) -> str:
    """Valid Unicode without NUL. Line ends are line feeds, at most two in a row."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "")
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def pdf_converter() -> Converter:
    """Texts of a PDF's pages. Pictures, attachments, scripts and links are ignored."""
    import sys

    for name in ("PIL", "fontTools", "brotli"):  # not needed, and each has its own decoders
        sys.modules[name] = None  # type: ignore[assignment]
    import pypdf._writer
    import pypdf.filters
    import pypdf.xmp
    from pypdf.errors import DependencyError, FileNotDecryptedError

    def convert(data: bytes) -> tuple[str, Sequence[str]]:
        reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
        try:
            if reader.is_encrypted and not reader.decrypt(""):
                raise DocumentError("it is encrypted: save it without a password")
            texts = _bounded(page.extract_text() for page in reader.pages)
        except (DependencyError, FileNotDecryptedError) as error:
            raise DocumentError("it is encrypted: save it without a password") from error
        if not any(text.strip() for text in texts):
            raise DocumentError("its pages have no text: a scan has to go through OCR first")
        title = None if reader.metadata is None else reader.metadata.title
        return str(title or ""), texts

    return convert


def _bounded(pages: Iterable[str]) -> list[str]:
    """The texts of pages, within the limits.

    Raises:
        DocumentError: there are too many, or they are too long.
    """
    texts: list[str] = []
    length = 0
    for text in pages:
        length += len(text)
        texts.append(text)
        if length > MOST_TEXT_BYTES or len(texts) > MOST_PAGES:
            raise DocumentError(
                f"it has more than {MOST_PAGES} pages, or {MOST_TEXT_BYTES >> 20} MiB of text: split it"
            )
    return texts


def html_converter() -> Converter:
    """A web page's Markdown, without scripts, styles, pictures, frames, forms and link targets."""
    from html_to_markdown import ConversionOptions, convert

    options = ConversionOptions(
        skip_images=True,
        strip_tags=["a"],
        exclude_selectors=_DROPPED,
        extract_metadata=False,
        compact_tables=True,
        autolinks=False,
    )

    def converted(data: bytes) -> tuple[str, str]:
        page = data.decode()
        title = _TITLE.search(page)
        return html.unescape(title[1]) if title else "", convert(page, options).content or ""

    return converted


def docx_converter() -> Converter:
    """A Word document's Markdown, without macros, pictures, embedded and external files."""
    import defusedxml
    import mammoth

    defusedxml.defuse_stdlib()  # in this process: mammoth's XML parser refuses entities from here on
    of_html = html_converter()

    def convert(data: bytes) -> tuple[str, str | Sequence[str]]:
        check_archive(data)
        page = mammoth.convert_to_html(
            io.BytesIO(data),
            convert_image=lambda image: [],  # noqa: ARG005
            include_embedded_style_map=False,
            external_file_access=False,
        )
        return of_html(page.value.encode())

    return convert


def check_archive(data: bytes) -> None:
    """Refuse an archive that is no Word document, or by the unpacked size that it declares.

    Readers never read more than that size.

    Raises:
        UnreadableFileError: it is no Word document.
        DocumentError: it has too many entries, or its unpacked size is too large.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if "word/document.xml" not in archive.namelist():
            raise UnreadableFileError(NOT_READ)
    unpacked = sum(entry.file_size for entry in entries)
    too_dense = unpacked > _SMALL_BYTES and unpacked > _MOST_RATIO * len(data)
    if too_dense or unpacked > _MOST_UNPACKED_BYTES or len(entries) > _MOST_ENTRIES:
        size = f"{len(data)} bytes become {unpacked} in {len(entries)} parts"
        raise DocumentError(f"it is packed too densely: {size}")


def load_converters() -> dict[FileKind, Converter | str]:
    """A converter for each kind that needs a library; the missing package's name where it is not installed."""
    makers = {FileKind.PDF: pdf_converter, FileKind.HTML: html_converter, FileKind.DOCX: docx_converter}
    converters: dict[FileKind, Converter | str] = {}
    for kind, make in makers.items():
        try:
            converters[kind] = make()
        except ImportError as error:
            converters[kind] = str(error.name)
    return converters
