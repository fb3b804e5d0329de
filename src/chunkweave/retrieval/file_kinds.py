"""Recognizes the kind of a file by its content, and decodes text. Runs in the confined process only."""

import codecs
import re
from dataclasses import dataclass
from encodings import normalize_encoding
from encodings.aliases import aliases
from enum import StrEnum
from pathlib import PurePath
from typing import TYPE_CHECKING

from chunkweave.errors import UnreadableFileError, install_extra

if TYPE_CHECKING:
    from charset_normalizer import CharsetMatch


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
        """Whether the file's text is not the document's text."""
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
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file (.doc, .xls or .ppt): save it as .docx or .csv"),
    (b"{\\rtf", "RTF: save it as .docx"),
    (b"\x1f\x8b", "an archive (gzip): unpack it"),
)
_ZIP = b"PK\x03\x04"
_ZIPPED = (
    (b"xl/workbook.xml", "XLSX: save its sheets as .csv"),
    (b"ppt/presentation.xml", "PPTX: save it as PDF"),
    (b"", "an archive (ZIP): unpack it"),
)
_PDF_WITHIN = 1024
"""White space before `%PDF-`, in bytes, that readers of PDF allow."""

_NO_TEXT = "it is not text, and of no known kind"
_LOOK = 4096
"""Bytes or characters at the beginning of a file by which its kind is recognized."""

_HTML_BEGINS = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
)
_MARKUP = re.compile(r"<(?:p|div|h[1-6]|table|ul|ol|a|span|br|section|article)\b[^>]*>", re.I)


def binary_kind(data: bytes) -> FileKind | None:
    """PDF or DOCX, recognized by magic bytes; None if the file may be text.

    Raises:
        UnreadableFileError: the file is of another kind that is not text; the message names it.
    """
    if data[:_PDF_WITHIN].lstrip(b"\0\t\n\f\r \xef\xbb\xbf").startswith(b"%PDF-"):
        return FileKind.PDF
    if data.startswith(_ZIP):
        if b"word/document.xml" in data:  # the names of entries are not compressed
            return FileKind.DOCX
        raise UnreadableFileError(f"it is {next(kind for name, kind in _ZIPPED if name in data)}")
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            raise UnreadableFileError(f"it is {kind}")
    return None


def refuse_binary(begin: bytes) -> None:
    """Refuse a file by its first bytes, before the others are read, if it can be neither text nor PDF nor DOCX.

    Raises:
        UnreadableFileError: the file is refused; the message says what it is.
    """
    if begin.startswith(_ZIP) or binary_kind(begin) is not None:
        return
    if b"\0" in begin and not begin.startswith(tuple(mark for mark, _ in _MARKS)):
        decode(begin)


def text_kind(name: str, text: str) -> FileKind:
    """The kind of a text, by its content first, then by its name.

    Raises:
        UnreadableFileError: it is JSON that is not lines of objects, or XML.
    """
    begin = text[:_LOOK]
    suffix = PurePath(name).suffix.lower()
    named = _BY_SUFFIX.get(suffix)
    if _HTML_BEGINS.match(begin):
        return FileKind.HTML
    if named is FileKind.HTML:
        return FileKind.HTML if _MARKUP.search(begin) else FileKind.TEXT
    if named is not None:
        return named
    if begin.lstrip().startswith("<?xml"):
        raise UnreadableFileError("it is XML: convert it to HTML or text")
    first = begin.lstrip().partition("\n")[0]
    if first.startswith("{") and '"text"' in first:
        return FileKind.JSON_LINES
    if suffix == ".json" and first.startswith(("{", "[")):
        raise UnreadableFileError('it is JSON: give one object a line with a "text", in a .jsonl file')
    return FileKind.TEXT


@dataclass(frozen=True, slots=True)
class Decoded:
    """The text of a file. Line ends are line feeds, and there is no byte order mark.

    `assumed` describes a guessed encoding, or wrong bytes; "" if there are none.
    """

    text: str
    assumed: str = ""


_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LIKELY = ("gb18030", "cp1252")
"""Encodings that are tried first: with many candidates, a short text is often taken for a rare encoding."""

_POSSIBLE = (
    *("cp1250", "cp1251", "cp1252", "cp1253", "cp1255", "koi8_r", "mac_roman"),
    *("gb18030", "big5", "shift_jis", "euc_jp", "euc_kr"),
)
_WIDE = ("utf_16_le", "utf_16_be")
_DECLARABLE = (
    *("ascii", "latin_1", "iso8859_2", "iso8859_5", "iso8859_7", "iso8859_9", "iso8859_15", "cp1254", "cp1256"),
    *("cp1257", "cp1258", "cp874", "cp932", "cp949", "gb2312", "gbk", "utf_8"),
)
CODECS = (*_LIKELY, *_POSSIBLE, *_DECLARABLE, *_WIDE, *(encoding for _, encoding in _MARKS))
"""All codecs that are used for text. They are loaded before the process is confined: Python opens a file for each."""

_NAMES = {"gb18030": "GB18030", "cp1252": "Windows-1252", "utf_16_le": "UTF-16", "utf_16_be": "UTF-16"}
_SAMPLE_BYTES = 1 << 16
_MOST_WRONG = 0.02
"""Maximum share of wrong multi-byte sequences in a UTF-8 file, such as a log that was cut or joined."""

_MOST_CONTROLS = 0.02
_CONTROLS = frozenset(map(chr, range(32))) - frozenset("\t\n\v\f\r\x1b")
_DECLARED = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.-]{1,40})", re.I)


def decode(data: bytes) -> Decoded:
    """Decode the bytes of a text file. An encoding that a web page declares is tried before others are guessed.

    Raises:
        UnreadableFileError: it is not text, or its encoding can only be recognized with the extra `documents`.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return Decoded(_checked(data[len(mark) :].decode(encoding)))
            except UnicodeDecodeError as error:
                message = f"it begins with the mark of {encoding}, but byte {error.start} is wrong"
                raise UnreadableFileError(message) from error
    if b"\0" in data[:_LOOK]:
        return _guessed(data, _WIDE, 0)
    try:
        return Decoded(_checked(data.decode()))
    except UnicodeDecodeError as error:
        return _as_declared(data) or _mostly_utf8(data) or _guessed(data, _LIKELY, error.start)


def _checked(text: str) -> str:
    """The text with line feeds, if there are hardly any control characters at its beginning."""
    begin = text[:_LOOK]
    if sum(character in _CONTROLS for character in begin) > _MOST_CONTROLS * len(begin):
        raise UnreadableFileError(_NO_TEXT)
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _as_declared(data: bytes) -> Decoded | None:
    declared = _DECLARED.search(data[:_LOOK])
    if declared is None:
        return None
    name = normalize_encoding(declared[1].decode()).lower()
    name = aliases.get(name, name)
    if name not in CODECS:  # others may take quadratic time, or decode to no text
        message = f"it declares the encoding {name}, which is not read: save it as UTF-8"
        raise UnreadableFileError(message)
    try:
        return Decoded(_checked(data.decode(name)))
    except UnicodeDecodeError:
        return None


def _mostly_utf8(data: bytes) -> Decoded | None:
    """UTF-8 with a few wrong bytes; None if there are too many."""
    text = data.decode(errors="replace")
    wrong = text.count("\ufffd")
    right = len(text) - len(text.encode("ascii", "ignore")) - wrong
    if wrong > _MOST_WRONG * right:
        return None
    return Decoded(_checked(text), f"UTF-8 was assumed: {wrong} wrong bytes are shown as \ufffd")


def _guessed(data: bytes, candidates: tuple[str, ...], wrong_at: int) -> Decoded:
    try:
        from charset_normalizer import from_bytes
    except ImportError as error:
        message = f"it is not UTF-8 (byte {wrong_at}); other encodings need {install_extra('documents')}"
        raise UnreadableFileError(message) from error
    sample = data[:_SAMPLE_BYTES]
    matches = from_bytes(sample, cp_isolation=list(candidates), preemptive_behaviour=False)
    best = matches.best()
    if candidates is _LIKELY and (best is None or best.chaos > 0):
        matches = from_bytes(sample, cp_isolation=list(_POSSIBLE), preemptive_behaviour=False)
        best = matches.best()
    if best is None:
        raise UnreadableFileError(_NO_TEXT if candidates is _WIDE else f"its encoding is not known (byte {wrong_at})")
    text = _checked(data.decode(best.encoding, errors="replace"))
    doubts = [f"{_NAMES.get(match.encoding, match.encoding)} fits as well" for match in matches if _equal(match, best)]
    if best.chaos > 0:
        doubts.append(f"{best.chaos:.0%} of it looks unlike text")
    if wrong := text.count("\ufffd"):
        doubts.append(f"{wrong} bytes are wrong")
    assumed = f"{_NAMES.get(best.encoding, best.encoding)} was assumed"
    return Decoded(text, f"{assumed}, perhaps wrongly: {doubts[0]}" if doubts else assumed)


def _equal(match: "CharsetMatch", best: "CharsetMatch") -> bool:
    """Whether another encoding fits as well, and gives another text."""
    return (match.chaos, match.coherence) == (best.chaos, best.coherence) and str(match) != str(best)
