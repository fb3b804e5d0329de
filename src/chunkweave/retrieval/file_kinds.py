"""Recognizes the kind of a file by its content, and decodes text. Runs in the confined process only."""

import codecs
import re
from encodings import normalize_encoding
from encodings.aliases import aliases
from enum import StrEnum
from pathlib import PurePath

from chunkweave.errors import UnreadableFileError, install_extra


class FileKind(StrEnum):
    """Kinds of files that are read, as tables name them."""

    TEXT = "text"
    MARKDOWN = "Markdown"
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
    ".jsonl": FileKind.JSON_LINES,
    ".ndjson": FileKind.JSON_LINES,
    ".csv": FileKind.CSV,
    ".tsv": FileKind.CSV,
    ".html": FileKind.HTML,
    ".htm": FileKind.HTML,
    ".xhtml": FileKind.HTML,
}
"""Kinds by suffix, of files whose content is text. For other files the suffix does not count."""

NOT_READ = f"it is of a kind that is not read; these are: {', '.join(FileKind)}"
_NO_TEXT = ("{\\rtf", "<?xml")
"""Beginnings of files that are text to a machine only."""

_LOOK = 4096
"""Bytes or characters at the beginning of a file by which its kind is recognized."""

_HTML_BEGINS = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
)
_MARKUP = re.compile(r"<(?:p|div|h[1-6]|table|ul|ol|a|span|br|section|article)\b[^>]*>", re.I)


def binary_kind(begin: bytes) -> FileKind | None:
    """PDF, or DOCX for any archive, recognized by a file's first bytes; None if the file may be text.

    Raises:
        UnreadableFileError: the file is not text.
    """
    if begin.lstrip(b"\0\t\n\f\r \xef\xbb\xbf").startswith(b"%PDF-"):
        return FileKind.PDF
    if begin.startswith(b"PK\x03\x04"):
        return FileKind.DOCX
    if b"\0" in begin and not begin.startswith(tuple(mark for mark, _ in _MARKS)):
        raise UnreadableFileError(NOT_READ)
    return None


def text_kind(name: str, text: str) -> FileKind:
    """The kind of a text, by its content first, then by its name.

    Raises:
        UnreadableFileError: it is JSON that is not lines of objects, XML or RTF.
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
    first = begin.lstrip().partition("\n")[0]
    if first.startswith("{") and ('"text"' in first or '"page_content"' in first):
        return FileKind.JSON_LINES
    if first.startswith(_NO_TEXT) or (suffix == ".json" and first.startswith(("{", "["))):
        raise UnreadableFileError(NOT_READ)
    return FileKind.TEXT


_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LIKELY = ("gb18030", "cp1252")
"""Encodings that are tried first: with many candidates, a short text is often taken for a rare encoding."""

_POSSIBLE = (
    *("cp1250", "cp1251", "cp1252", "cp1253", "cp1255", "koi8_r", "mac_roman"),
    *("gb18030", "big5", "shift_jis", "euc_jp", "euc_kr"),
)
_DECLARABLE = (
    *("ascii", "latin_1", "iso8859_2", "iso8859_5", "iso8859_7", "iso8859_9", "iso8859_15", "cp1254", "cp1256"),
    *("cp1257", "cp1258", "cp874", "cp932", "cp949", "gb2312", "gbk", "utf_8"),
)
CODECS = (*_LIKELY, *_POSSIBLE, *_DECLARABLE, *(encoding for _, encoding in _MARKS))
"""All codecs that are used for text. They are loaded before the process is confined: Python opens a file for each."""

_NAMES = {"gb18030": "GB18030", "cp1252": "Windows-1252"}
_SAMPLE_BYTES = 1 << 16
_MOST_WRONG = 0.02
"""Maximum share of wrong multi-byte sequences in a UTF-8 file, such as a log that was cut or joined."""

_MOST_CONTROLS = 0.02
_CONTROLS = frozenset(map(chr, range(32))) - frozenset("\t\n\v\f\r\x1b")
_DECLARED = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.-]{1,40})", re.I)


def decode(data: bytes) -> tuple[str, str]:
    """The text of a file, and what was assumed about its encoding, or about wrong bytes; "" if nothing was.

    Line ends are line feeds, and there is no byte order mark. An encoding that a web page declares is tried before
    others are guessed.

    Raises:
        UnreadableFileError: it is not text, or its encoding can only be recognized with the extra `documents`.
    """
    encoding = next((encoding for mark, encoding in _MARKS if data.startswith(mark)), "utf-8")
    try:
        return _checked(data.decode(encoding)), ""
    except UnicodeDecodeError as error:
        if encoding != "utf-8":
            message = f"it begins with the mark of {encoding}, but byte {error.start} is wrong"
            raise UnreadableFileError(message) from error
        return _as_declared(data) or _mostly_utf8(data) or _guessed(data, error.start)


def _checked(text: str) -> str:
    """The text with line feeds, if there are hardly any control characters at its beginning."""
    begin = text[:_LOOK]
    if sum(character in _CONTROLS for character in begin) > _MOST_CONTROLS * len(begin):
        raise UnreadableFileError(NOT_READ)
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _as_declared(data: bytes) -> tuple[str, str] | None:
    declared = _DECLARED.search(data[:_LOOK])
    if declared is None:
        return None
    name = normalize_encoding(declared[1].decode()).lower()
    name = aliases.get(name, name)
    if name not in CODECS:  # others may take quadratic time, or decode to no text
        message = f"it declares the encoding {name}, which is not read: save it as UTF-8"
        raise UnreadableFileError(message)
    try:
        return _checked(data.decode(name)), ""
    except UnicodeDecodeError:
        return None


def _mostly_utf8(data: bytes) -> tuple[str, str] | None:
    """UTF-8 with a few wrong bytes; None if there are too many."""
    text = data.decode(errors="replace")
    wrong = text.count("\ufffd")
    right = len(text) - len(text.encode("ascii", "ignore")) - wrong
    if wrong > _MOST_WRONG * right:
        return None
    return _checked(text), f"UTF-8 was assumed: {wrong} wrong bytes are shown as \ufffd"


def _guessed(data: bytes, wrong_at: int) -> tuple[str, str]:
    try:
        from charset_normalizer import from_bytes
    except ImportError as error:
        message = f"it is not UTF-8 (byte {wrong_at}); other encodings need {install_extra('documents')}"
        raise UnreadableFileError(message) from error
    sample = data[:_SAMPLE_BYTES]
    best = None
    for candidates in (_LIKELY, _POSSIBLE):
        if best is None or best.chaos > 0:
            matches = from_bytes(sample, cp_isolation=list(candidates), preemptive_behaviour=False)
            best = matches.best()
    if best is None:
        raise UnreadableFileError(f"its encoding is not known (byte {wrong_at})")
    text = _checked(data.decode(best.encoding, errors="replace"))
    as_good = [match for match in matches if (match.chaos, match.coherence) == (best.chaos, best.coherence)]
    doubtful = best.chaos > 0 or "\ufffd" in text or any(str(match) != str(best) for match in as_good)
    assumed = f"{_NAMES.get(best.encoding, best.encoding)} was assumed"
    return text, f"{assumed}, perhaps wrongly" if doubtful else assumed
