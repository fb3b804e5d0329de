"""The process that converts files; `conversion` starts it, and sends it one request after another.

It never looks at a file itself: it forks for each. The child sets kernel limits that it cannot raise again: on memory
and time, with no new processes, core files or file descriptors, so that it can neither connect nor open a file. It
reads the file from standard input, and writes JSON lines to standard output: one per document, and last the result.
What it imports, its parent has imported before.
"""

import codecs
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from typing import Any, NoReturn

from chunkweave.errors import DocumentError, UnreadableFileError
from chunkweave.retrieval.documents import CorpusDocument
from chunkweave.retrieval.file_kinds import CODECS, FileKind
from chunkweave.retrieval.formats import Converter, FileReader, load_converters

_INPUT = 0
_OUTPUT = 1
_MOST_DESCRIPTORS = 256
_LIBRARY_CODECS = (
    *("iso8859_1", "charmap", "cp437", "utf_8_sig", "utf_16", "utf_32", "raw_unicode_escape", "unicode_escape"),
    *("big5hkscs", "cp950"),
)
"""Codecs that the libraries use."""


def confine(seconds: float, memory_bytes: int) -> None:
    """Limit this process, until it ends, to what converting a file needs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
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
    _end(_failed(most_bytes))


def _used_bytes() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10


def _failed(most_bytes: int) -> bytes:
    message = f"reading it takes more than {most_bytes >> 20} MiB of memory"
    return _line({"error": message, "kind": None, "assumed": ""})


def convert_input(request: Mapping[str, Any], converters: Mapping[FileKind, Converter | str]) -> NoReturn:
    """Convert standard input, write its documents to standard output, and end the process."""
    memory_bytes = int(request["memory_bytes"])
    too_much = _failed(memory_bytes)
    reader = FileReader(converters, bounded=bool(request["bounded"]))
    result: dict[str, Any] = {}
    try:
        confine(request["seconds"], memory_bytes)
        for document in reader.documents(request["name"], sys.stdin.buffer):
            _write(_line({"document": _fields(document)}))
        result = {"lines_left_out": reader.reasons, "num_lines_left_out": reader.num_left_out}
    except DocumentError as error:
        result = {"error": str(error), "unreadable": isinstance(error, UnreadableFileError)}
    except MemoryError:  # what failed may still hold all memory: the message exists already
        _end(too_much)
    _end(_line({**result, "kind": reader.kind, "assumed": reader.assumed}))


def _fields(document: CorpusDocument) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": document.id, "text": document.text}
    if document.title:
        fields["title"] = document.title
    if document.metadata:
        fields["metadata"] = document.metadata
    if document.sections:
        fields["sections"] = [(section.start, section.page, section.heading) for section in document.sections]
    if document.tables:
        fields["tables"] = [(table.start, table.rows, table.stop) for table in document.tables]
    return fields


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"


def _write(line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(_OUTPUT, rest) :]


def _end(line: bytes) -> NoReturn:
    _write(line)
    os._exit(0)


def main(descriptor: int) -> None:
    """Serve requests from a Unix socket until it is closed.

    A request is one byte, with the descriptors of the file and of the pipe for its output, and a line of JSON. The
    answer is the exit code of the child, as a line.
    """
    converters = load_converters()
    for name in (*CODECS, *_LIBRARY_CODECS):
        codecs.lookup(name)
    try:
        import charset_normalizer  # noqa: F401 - a child cannot import it
    except ImportError:
        sys.modules["charset_normalizer"] = None  # type: ignore[assignment]
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as lines:
        while True:
            begin, descriptors, _, _ = socket.recv_fds(channel, 1, 2)
            if not begin:
                return
            request = json.loads(lines.readline())
            child = os.fork()
            if not child:
                _take(descriptors, request, converters)
            for number in descriptors:
                os.close(number)
            _, status = os.waitpid(child, 0)
            channel.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _take(
    descriptors: list[int], request: Mapping[str, Any], converters: Mapping[FileKind, Converter | str]
) -> NoReturn:
    try:
        os.dup2(descriptors[0], _INPUT)
        os.dup2(descriptors[1], _OUTPUT)
        os.closerange(3, _MOST_DESCRIPTORS)
        convert_input(request, converters)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
