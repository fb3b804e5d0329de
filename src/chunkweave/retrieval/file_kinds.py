"""Recognizes the kind of a file by its content, and decodes text in many encodings."""

import codecs
import csv
import io
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice, zip_longest
from pathlib import PurePath

from chunkweave.errors import DocumentError, UnreadableFileError, install_extra


class FileKind(StrEnum):
    """Kinds of files that are read, as tables name them."""

    TEXT = "text"
    MARKDOWN = "Markdown"
    RST = "reStructuredText"
    JSON_LINES = "JSON lines"
    CSV = "CSV"
    HTML = "HTML"
    PDF = "PDF"
    DOCX = "DOCX"

    @property
    def converted(self) -> bool:
        """Whether a converter reads it, in a child process."""
        return self in (FileKind.HTML, FileKind.PDF, FileKind.DOCX)


_BY_SUFFIX = {
    ".md": FileKind.MARKDOWN,
    ".markdown": FileKind.MARKDOWN,
    ".rst": FileKind.RST,
    ".jsonl": FileKind.JSON_LINES,
    ".ndjson": FileKind.JSON_LINES,
    ".csv": FileKind.CSV,
    ".tsv": FileKind.CSV,
    ".html": FileKind.HTML,
    ".htm": FileKind.HTML,
    ".xhtml": FileKind.HTML,
}
"""Kinds by suffix, of files whose content is text. For other files the suffix does not count."""

_MAGIC = (
    (b"\x89PNG", "a picture (PNG)"),
    (b"\xff\xd8\xff", "a picture (JPEG)"),
    (b"GIF8", "a picture (GIF)"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file (.doc, .xls or .ppt): save it as .docx or .csv"),
    (b"{\\rtf", "RTF: save it as .docx"),
    (b"\x1f\x8b", "an archive (gzip): unpack it"),
    (b"BZh", "an archive (bzip2): unpack it"),
    (b"\xfd7zXZ\x00", "an archive (xz): unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "an archive (7z): unpack it"),
    (b"Rar!", "an archive (RAR): unpack it"),
    (b"\x7fELF", "a program"),
    (b"MZ\x90", "a program"),
    (b"SQLite format 3\x00", "a database (SQLite)"),
)
_ZIP = b"PK\x03\x04"
_ZIPPED = (
    (b"xl/workbook.xml", "XLSX: save its sheets as .csv"),
    (b"ppt/presentation.xml", "PPTX: save it as PDF"),
    (b"mimetype", "OpenDocument or EPUB: save it as .docx or PDF"),
)
_PDF_WITHIN = 1024
"""White space before `%PDF-`, in bytes, that readers of PDF allow."""

_NO_TEXT = "it is not text, and of no known kind"
_LOOK_CHARACTERS = 4096
"""Characters at the beginning of a text by which its kind is recognized."""

_HTML_BEGINS = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
)
_MARKUP = re.compile(r"<(?:p|div|h[1-6]|table|ul|ol|a|span|br|section|article)\b[^>]*>", re.I)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The text of a file. Line ends are line feeds, and there is no byte order mark.

    `assumed` describes a guessed encoding, or wrong bytes; "" if there are none.
    """

    text: str
    encoding: str
    assumed: str = ""


def binary_kind(data: bytes) -> FileKind | None:
    """PDF or DOCX, recognized by magic bytes; None if the file may be text.

    Raises:
        UnreadableFileError: the file is of another kind that is not text; the message names it.
    """
    if data[:_PDF_WITHIN].lstrip(b"\0\t\n\f\r \xef\xbb\xbf").startswith(b"%PDF-"):
        return FileKind.PDF
    if data.startswith(_ZIP):
        return _zipped_kind(data)
    for magic, what in _MAGIC:
        if data.startswith(magic):
            raise UnreadableFileError(f"it is {what}")
    return None


def _zipped_kind(data: bytes) -> FileKind:
    """The kind of an archive, by the names of its entries, which are not compressed: nothing is unpacked here."""
    if b"word/document.xml" in data:
        return FileKind.DOCX
    for name, what in _ZIPPED:
        if name in data:
            raise UnreadableFileError(f"it is {what}")
    raise UnreadableFileError("it is an archive (ZIP): unpack it")


def refuse_binary(begin: bytes) -> None:
    """Refuse a file by its first bytes, before the others are read, if it can be neither text nor PDF nor DOCX.

    Raises:
        UnreadableFileError: the file is refused; the message says what it is.
    """
    if begin.startswith(_ZIP) or binary_kind(begin) is not None:
        return
    if b"\0" in begin and not begin.startswith(tuple(mark for mark, _ in _BOMS)) and _unmarked_utf16(begin) is None:
        raise UnreadableFileError(_NO_TEXT)


def text_kind(name: str, text: str) -> FileKind:
    """The kind of a text, by its content first, then by its name.

    Raises:
        UnreadableFileError: it is JSON that is not lines of objects, or XML.
    """
    begin = text[:_LOOK_CHARACTERS]
    named = _BY_SUFFIX.get(PurePath(name).suffix.lower())
    if _HTML_BEGINS.match(begin):
        return FileKind.HTML
    if named is FileKind.HTML:
        return FileKind.HTML if _MARKUP.search(begin) else FileKind.TEXT
    if named is not None:
        return named
    if begin.lstrip().startswith("<?xml"):
        raise UnreadableFileError("it is XML: convert it to HTML or text")
    first = next((line for line in text.split("\n", 20)[:20] if line.strip()), "")
    if first.lstrip().startswith(("{", "[")):
        return _json_kind(name, first)
    return FileKind.TEXT


def _json_kind(name: str, first: str) -> FileKind:
    """The kind of a text whose first line looks like JSON; TEXT, if that line is not JSON."""
    row = _parsed(first)
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return FileKind.JSON_LINES
    if PurePath(name).suffix.lower() == ".json":
        raise UnreadableFileError('it is JSON: give one object a line with a "text", in a .jsonl file')
    return FileKind.TEXT


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_GUESSED = ("gb18030", "cp1252")
"""Encodings that are tried first: with many candidates, a short text is often taken for a rare encoding."""
_NAMES = {"gb18030": "GB18030", "cp1252": "Windows-1252"}
_BOUND = 1 << 20
"""Bytes at the beginning of a file by which its encoding is guessed."""

_MOST_WRONG = 0.02
"""Maximum share of wrong multi-byte sequences in a UTF-8 file, such as a log that was cut or joined."""

_DECLARED = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.-]{1,40})", re.I)
_DECLARABLE = re.compile(r"utf_8|iso8859_\d+|cp125\d|gb\w+|big5\w*|euc_\w+|shift_ji\w+|koi8_[ru]|ascii|latin_1")


def decoded(data: bytes, *, page: bool = False) -> Decoded:
    """Decode the bytes of a file. If a web `page` is not UTF-8, the encoding that it declares is tried first.

    Raises:
        UnreadableFileError: it is not text, or its encoding can only be recognized with the extra `documents`.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            try:
                return Decoded(_lines(data[len(mark) :].decode(encoding)), encoding.removesuffix("-le"))
            except UnicodeDecodeError as error:
                raise UnreadableFileError(
                    f"it begins with the mark of {encoding}, but byte {error.start} is wrong"
                ) from error
    if b"\0" in data[:_BOUND]:
        return _without_mark(data)
    try:
        return Decoded(_lines(_checked(data.decode())), "utf-8")
    except UnicodeDecodeError as error:
        return (_as_declared(data) if page else None) or _mostly_utf8(data) or _guessed(data, error.start)


def _lines(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


_CONTROLS = frozenset(map(chr, range(32))) - frozenset("\t\n\v\f\r\x1b")
_MOST_CONTROLS = 0.02
_ZEROS_OF_UTF16, _MOST_OTHER_ZEROS = 0.4, 0.05


def _checked(text: str) -> str:
    """The text, if there are hardly any control characters at its beginning."""
    begin = text[:_LOOK_CHARACTERS]
    if sum(one in _CONTROLS for one in begin) > _MOST_CONTROLS * len(begin):
        raise UnreadableFileError(_NO_TEXT)
    return text


def _unmarked_utf16(data: bytes) -> str | None:
    """UTF-16 without a byte order mark, recognized by its zero bytes: most characters of most texts have one."""
    begin = data[: _BOUND & ~1]
    zeros = [begin[half::2].count(0) / max(1, len(begin) // 2) for half in (0, 1)]
    for encoding, own, other in (("utf-16-be", zeros[0], zeros[1]), ("utf-16-le", zeros[1], zeros[0])):
        if own > _ZEROS_OF_UTF16 and other < _MOST_OTHER_ZEROS:
            return encoding
    return None


def _without_mark(data: bytes) -> Decoded:
    encoding = _unmarked_utf16(data)
    with suppress(UnicodeDecodeError):
        if encoding is not None:
            return Decoded(_lines(_checked(data.decode(encoding))), encoding, "UTF-16 was assumed")
    raise UnreadableFileError(_NO_TEXT)


def _as_declared(data: bytes) -> Decoded | None:
    declared = _DECLARED.search(data[:_LOOK_CHARACTERS])
    if declared is None:
        return None
    try:
        name = codecs.lookup(declared[1].decode()).name.replace("-", "_")
        if _DECLARABLE.fullmatch(name) is None:  # some of Python's codecs take quadratic time, or do not decode to text
            return None
        return Decoded(_lines(_checked(data.decode(name))), name)
    except (LookupError, UnicodeDecodeError):
        return None


def _mostly_utf8(data: bytes) -> Decoded | None:
    """UTF-8 with a few wrong bytes; None if there are too many."""
    text = data.decode(errors="replace")
    wrong = text.count("\ufffd")
    right = len(text) - len(text.encode("ascii", "ignore")) - wrong
    if wrong > _MOST_WRONG * right:
        return None
    return Decoded(_lines(_checked(text)), "utf-8", f"UTF-8 was assumed: {wrong} wrong bytes are shown as \ufffd")


def _guessed(data: bytes, wrong_at: int) -> Decoded:
    try:
        from charset_normalizer import from_bytes
    except ImportError as error:
        raise UnreadableFileError(
            f"it is not UTF-8 (byte {wrong_at}); other encodings need {install_extra('documents')}"
        ) from error
    whole = (data[:_BOUND] + b" ") if len(data) > _BOUND else data
    best = from_bytes(whole, cp_isolation=list(_GUESSED)).best() or from_bytes(whole).best()
    if best is not None:
        with suppress(UnicodeDecodeError):
            text = _lines(_checked(data.decode(best.encoding)))
            return Decoded(text, best.encoding, f"{_NAMES.get(best.encoding, best.encoding)} was assumed")
    raise UnreadableFileError(f"its encoding is not known: byte {wrong_at} is not UTF-8")


_DELIMITERS = ",;\t|"


def rows_as_text(text: str) -> str:
    """A CSV file as text, one line per row; each cell follows the name of its column if the first row has names.

    Raises:
        DocumentError: it is not CSV.
    """
    first = text.lstrip()[:_LOOK_CHARACTERS].partition("\n")[0]
    delimiter = max(_DELIMITERS, key=first.count)  # csv.Sniffer needs more rows than many files have
    said = io.StringIO()
    try:
        rows = (row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if any(map(str.strip, row)))
        head = list(islice(rows, 2))
        named = len(head) > 1 and _are_names(head[0])
        names = [f"{cell.strip()}: " for cell in head[0]] if named else []
        for row in chain(head[int(named) :], rows):
            cells = zip_longest(names, row, fillvalue="")
            said.write("; ".join(f"{name}{cell.strip()}" for name, cell in cells if cell.strip()) + "\n")
    except csv.Error as error:
        raise DocumentError(f"it is not CSV: {error}") from error
    return said.getvalue().rstrip("\n")


def _are_names(row: list[str]) -> bool:
    """Whether the first row has names of columns: different texts that are not numbers."""
    names = [cell.strip() for cell in row]
    return all(names) and len(set(names)) == len(names) and not any(map(_NUMBER.fullmatch, names))


_NUMBER = re.compile(r"[-+\d.,:/ %]+")
