"""The process that converts one PDF, DOCX or HTML file to text; `conversion` starts it, and passes its limits.

Its input may be malicious. It imports everything that it needs first. Then it sets kernel limits that it cannot raise
again: on memory and time, with no new processes, core files or file descriptors, so that it can neither connect nor
open a file. It reads the file's bytes from standard input, and writes one line of JSON: `title` and either `pages` or
`markdown`, or `error`, or `missing`.
"""

import codecs
import json
import os
import resource
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from math import ceil
from typing import Any, NoReturn

MOST_TEXT_BYTES = 8 << 20
"""Maximum bytes of the text of one document that was converted or came over HTTP."""

MOST_PAGES = 20_000

_MOST_UNPACKED_BYTES = 64 << 20
_MOST_RATIO = 100
"""Maximum unpacked bytes per byte of an archive. A text of one repeated letter reaches a thousand."""

_SMALL_BYTES = 1 << 20
"""An archive that unpacks to less may have any ratio."""

_MOST_ENTRIES = 4096

_CODECS = (
    *("ascii", "latin_1", "iso8859_1", "mac_roman", "charmap", "cp437", "cp1250", "cp1251", "cp1252"),
    *("utf_8", "utf_8_sig", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "raw_unicode_escape", "unicode_escape"),
    *("big5", "big5hkscs", "cp932", "cp949", "cp950", "euc_jp", "euc_kr", "gb18030", "gb2312", "gbk", "shift_jis"),
)
"""Codecs that are loaded before the limits are set, because Python opens a file for each."""


class RefusedError(Exception):
    """A file that is not converted; the message says why."""


def confine(seconds: float, memory_bytes: int, output_bytes: int) -> None:
    """Limit this process, until it ends, to what converting a file needs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
    most_s = ceil(seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except (OSError, ValueError):  # macOS has no such limit
        threading.Thread(target=_watch_memory, args=(memory_bytes,), daemon=True).start()
    with suppress(OSError, ValueError):  # no effect for root; without descriptors a child could do nothing
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # standard input, output and error


def _watch_memory(most_bytes: int) -> None:
    while _used_bytes() <= most_bytes:
        time.sleep(0.02)
    _write(_json({"error": _too_much_memory(most_bytes)}))


def _used_bytes() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10


def _too_much_memory(most_bytes: int) -> str:
    return f"converting it takes more than {most_bytes >> 20} MiB of memory"


def pdf_converter() -> Callable[[bytes], dict[str, Any]]:
    """A function that returns the texts of a PDF's pages. It ignores pictures, attachments, scripts and links."""
    for name in ("PIL", "fontTools", "brotli"):  # not needed, and each has its own decoders
        sys.modules[name] = None  # type: ignore[assignment]
    import pypdf._writer
    import pypdf.filters
    import pypdf.xmp
    from pypdf.errors import DependencyError, FileNotDecryptedError

    def convert(data: bytes) -> dict[str, Any]:
        reader = pypdf.PdfReader(BytesIO(data), strict=False)
        try:
            if reader.is_encrypted and not reader.decrypt(""):
                raise RefusedError("it is encrypted: save it without a password")
            texts = _bounded(page.extract_text() for page in reader.pages)
        except (DependencyError, FileNotDecryptedError) as error:
            raise RefusedError("it is encrypted: save it without a password") from error
        if not any(text.strip() for text in texts):
            raise RefusedError("its pages have no text: a scan has to go through OCR first")
        title = None if reader.metadata is None else reader.metadata.title
        return {"title": str(title or ""), "pages": texts}

    return convert


def _bounded(pages: Iterator[str]) -> list[str]:
    """The texts of pages, within the limits.

    Raises:
        RefusedError: there are too many, or they are too long.
    """
    texts: list[str] = []
    length = 0
    for text in pages:
        length += len(text)
        texts.append(text)
        if length > MOST_TEXT_BYTES or len(texts) > MOST_PAGES:
            raise RefusedError(f"it has more than {MOST_PAGES} pages, or {MOST_TEXT_BYTES >> 20} MiB of text: split it")
    return texts


_DROPPED = ("script", "style", "noscript", "template", "svg", "math", "iframe", "object", "embed", "form", "head")


def html_converter() -> Callable[[bytes], dict[str, Any]]:
    """A function that turns a web page into Markdown, without scripts, styles, pictures, frames and link targets."""
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    markdown = MarkdownConverter(
        strip=["a", "img", "video", "audio"],
        heading_style="atx",
        escape_asterisks=False,
        escape_underscores=False,
        escape_misc=False,
    )

    def convert(data: bytes) -> dict[str, Any]:
        page = BeautifulSoup(data.decode(), "html.parser")
        title = page.title.get_text(" ", strip=True) if page.title is not None else ""
        for one in page(_DROPPED):
            one.decompose()
        return {"title": title, "markdown": markdown.convert_soup(page)}

    return convert


def docx_converter() -> Callable[[bytes], dict[str, Any]]:
    """A function that turns a Word document into Markdown, without macros, pictures, embedded and external files."""
    import defusedxml
    import mammoth

    defusedxml.defuse_stdlib()  # in this process: mammoth's XML parser refuses entities from here on
    of_html = html_converter()

    def convert(data: bytes) -> dict[str, Any]:
        check_archive(data)
        found = mammoth.convert_to_html(
            BytesIO(data),
            convert_image=lambda image: [],  # noqa: ARG005
            include_embedded_style_map=False,
            external_file_access=False,
        )
        return of_html(found.value.encode())

    return convert


def check_archive(data: bytes) -> None:
    """Refuse an archive by the unpacked size that it declares; readers never read more than that.

    Raises:
        RefusedError: it has too many entries, or its unpacked size is too large.
    """
    with zipfile.ZipFile(BytesIO(data)) as archive:
        entries = archive.infolist()
    unpacked = sum(entry.file_size for entry in entries)
    too_dense = unpacked > _SMALL_BYTES and unpacked > _MOST_RATIO * len(data)
    if too_dense or unpacked > _MOST_UNPACKED_BYTES or len(entries) > _MOST_ENTRIES:
        size = f"{len(data)} bytes become {unpacked} in {len(entries)} parts"
        raise RefusedError(f"it is packed too densely: {size}")


CONVERTERS: Mapping[str, Callable[[], Callable[[bytes], dict[str, Any]]]] = {
    "PDF": pdf_converter,
    "HTML": html_converter,
    "DOCX": docx_converter,
}
"""Makers of converters, by the kind of the file. Making one imports its libraries."""


def converted(kind: str, convert: Callable[[bytes], dict[str, Any]], data: bytes) -> dict[str, Any]:
    """Convert the bytes of a file; the result is the JSON object that the process writes.

    Raises:
        MemoryError: there is not enough memory.
    """
    try:
        return convert(data)
    except RefusedError as error:
        return {"error": str(error)}
    except MemoryError:
        raise
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # noqa: BLE001 - parsers in these libraries raise errors of many kinds
        what = type(error).__name__
        if what in ("EntitiesForbidden", "DTDForbidden", "ExternalReferenceForbidden"):
            return {"error": "it declares XML entities, which no Word document needs"}
        return {"error": f"it is damaged, or no {kind}: {what}: {str(error)[:200]}"}


def main(kind: str, seconds: str, memory_bytes: str, output_bytes: str) -> NoReturn:
    """Convert standard input, a file of `kind`, within limits."""
    try:
        convert = CONVERTERS[kind]()
    except ImportError as error:
        _write(_json({"missing": str(error.name)}))
    for name in _CODECS:
        codecs.lookup(name)
    too_much = _json({"error": _too_much_memory(int(memory_bytes))})
    try:
        confine(float(seconds), int(memory_bytes), int(output_bytes))
        result = _json(converted(kind, convert, sys.stdin.buffer.read()))
    except MemoryError:  # what failed may still hold all memory: the message exists already
        result = too_much
    _write(result)


def _json(result: Mapping[str, Any]) -> bytes:
    return json.dumps(result).encode()


def _write(result: bytes) -> NoReturn:
    """Write the result to standard output and end the process; allocates no buffer."""
    rest = memoryview(result)
    while rest:
        rest = rest[os.write(1, rest) :]
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
