"""Reads files in a confined process, with limits on time, memory and output; see `converter`."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any, BinaryIO, Self

from chunkweave.errors import DocumentError
from chunkweave.prompt.tables import Table
from chunkweave.retrieval.documents import CorpusDocument
from chunkweave.retrieval.file_kinds import FileKind
from chunkweave.retrieval.sections import Section

_MIB = 1 << 20
_MEMORY_BYTES = 512 * _MIB
_MEMORY_PER_BYTE = 6
_OUTPUT_BYTES = 16 * _MIB
_OUTPUT_PER_BYTE = 3
"""Limits of memory and output: a constant, and so much more for each byte of the file."""

MOST_FILE_BYTES = 1 << 30
"""Maximum bytes of a file on the command line or in a folder."""

_S_PER_MIB = 3.0
"""Processor time to read a file, per begun MiB."""

_MOST_S = 120.0
_POLL_S = 0.02
_READ_BYTES = 1 << 16
_WAITED = 10
"""Limit of elapsed time, as a multiple of the limit of processor time: other processes may be busy."""

_MOST_REASON_CHARACTERS = 400
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "VIRTUAL_ENV")
"""Environment variables that the converter receives; others may have keys."""


def seconds_for(nbytes: int) -> float:
    """Maximum processor time to read a file of `nbytes` bytes."""
    return min(_MOST_S, _S_PER_MIB * max(1, ceil(nbytes / _MIB)))


@dataclass(frozen=True, slots=True)
class FileRead:
    """The result of reading one file: its documents, or why it was `left_out`.

    `assumed` describes a guessed encoding; `lines_left_out` has the first reasons why lines were left out. A file is
    `unreadable` if its kind is not supported.
    """

    name: str
    kind: FileKind | None = None
    documents: tuple[CorpusDocument, ...] = ()
    assumed: str = ""
    left_out: str = ""
    unreadable: bool = False
    lines_left_out: tuple[str, ...] = ()
    num_lines_left_out: int = 0

    @property
    def complete(self) -> bool:
        """Whether no part of the file was left out."""
        return not (self.left_out or self.num_lines_left_out)

    @property
    def reason(self) -> str:
        """Why the file, or lines of it, were left out; "" if none were."""
        if self.left_out or not self.num_lines_left_out:
            return self.left_out
        return f"{self.num_lines_left_out} lines left out: {self.lines_left_out[0]}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "file": self.name,
            "kind": None if self.kind is None else str(self.kind),
            "documents": len(self.documents),
            "converted": self.kind is not None and self.kind.converted and not self.left_out,
            "assumed": self.assumed,
            "left_out": self.left_out,
            "lines_left_out": list(self.lines_left_out),
        }


class Conversion:
    """A process that reads files one after another, each confined. Used by one thread at a time, and then closed.

    The process is started with the first file, and again if a file had to be stopped.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the process, and the file that it reads."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._channel = None

    def read(
        self, name: str, file: BinaryIO, *, bounded: bool = False, stopped: Callable[[], bool] = lambda: False
    ) -> FileRead:
        """Read an open file from its beginning. `name` is its document's id and a hint of its kind.

        With `bounded` (an upload), texts and lines are limited. Polls `stopped`, and ends once it returns true.
        """
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > MOST_FILE_BYTES:
            return FileRead(name, left_out=f"it has {nbytes} bytes, and a file may have {MOST_FILE_BYTES}: split it")
        seconds = seconds_for(nbytes)
        request = {
            "name": name,
            "bounded": bounded,
            "seconds": seconds,
            "memory_bytes": _MEMORY_BYTES + _MEMORY_PER_BYTE * nbytes,
        }
        documents: list[CorpusDocument] = []
        result: dict[str, Any] = {}
        try:
            output = self._send(request, file)
            try:
                for line in _lines(output, nbytes, seconds, stopped):
                    result = json.loads(line)
                    if "document" in result:
                        documents.append(_document(result["document"]))
            finally:
                os.close(output)
            if self._exit_code() == -signal.SIGXCPU:
                raise _too_long(seconds)
            return _file_read(name, result, documents)
        except DocumentError as error:
            self.close()
            return FileRead(name, left_out=str(error))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.close()
            return FileRead(name, left_out=f"it is damaged, or takes too much memory ({type(error).__name__})")
        except BaseException:
            self.close()
            raise

    def _send(self, request: dict[str, Any], file: BinaryIO) -> int:
        """Send a file to the process; returns the descriptor from which its output is read."""
        if self._channel is None:
            self._start()
        assert self._channel is not None
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        output, sink = os.pipe()
        try:
            socket.send_fds(self._channel, [b"F"], [file.fileno(), sink])
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(sink)
        return output

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "chunkweave.retrieval.converter", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            )

    def _exit_code(self) -> int:
        """The exit code of the child that read the last file. Its output has ended."""
        assert self._channel is not None
        self._channel.settimeout(_MOST_S)
        code = b""
        while not code.endswith(b"\n"):
            received = self._channel.recv(16)
            if not received:
                raise OSError("the converter ended")
            code += received
        return int(code)


def _too_long(seconds: float) -> DocumentError:
    return DocumentError(
        f"reading it takes more than {seconds:g} s of processor time, or {_WAITED} times as long by the clock: split it"
    )


def _lines(output: int, nbytes: int, seconds: float, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the lines that a converter writes about a file of `nbytes` bytes, which may take `seconds`.

    Raises:
        DocumentError: it writes too much or takes too long, or `stopped` returns true.
    """
    most_bytes = _OUTPUT_BYTES + _OUTPUT_PER_BYTE * nbytes
    ends = time.monotonic() + _WAITED * seconds
    pending = bytearray()
    while True:
        if stopped():
            raise DocumentError("reading it was stopped")
        if time.monotonic() > ends:
            raise _too_long(seconds)
        if not select.select([output], [], [], _POLL_S)[0]:
            continue
        received = os.read(output, _READ_BYTES)
        if not received:
            return
        most_bytes -= len(received)
        if most_bytes < 0:
            raise DocumentError("it has too much text: split it")
        *whole, rest = received.split(b"\n")
        for line in whole:
            yield bytes(pending + line)
            pending.clear()
        pending += rest


def _document(fields: Mapping[str, Any]) -> CorpusDocument:
    """A document that a converter wrote. A process that has read a file is not trusted: all types are checked."""
    sections = [
        Section(int(start), None if page is None else int(page), str(heading))
        for start, page, heading in fields.get("sections", ())
    ]
    tables = [Table(int(start), int(rows), int(stop)) for start, rows, stop in fields.get("tables", ())]
    metadata = dict(fields.get("metadata", {}))
    title = str(fields.get("title", ""))
    return CorpusDocument(str(fields["id"]), str(fields["text"]), title, metadata, tuple(sections), tuple(tables))


def _file_read(name: str, result: Mapping[str, Any], documents: Sequence[CorpusDocument]) -> FileRead:
    """The result that a converter wrote last."""
    if "error" in result:
        documents = ()
    return FileRead(
        name,
        FileKind(result["kind"]) if result["kind"] else None,
        tuple(documents),
        assumed=str(result["assumed"]),
        left_out=str(result.get("error", ""))[:_MOST_REASON_CHARACTERS],
        unreadable=bool(result.get("unreadable")),
        lines_left_out=tuple(map(str, result.get("lines_left_out", ()))),
        num_lines_left_out=int(result.get("num_lines_left_out", 0)),
    )
