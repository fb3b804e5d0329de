"""Converts a PDF, DOCX or HTML file in a child process, with limits on its time, memory and output."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from tempfile import TemporaryFile
from typing import Any

from chunkweave.errors import DocumentError, UnreadableFileError, install_extra
from chunkweave.retrieval.converter import MOST_TEXT_BYTES
from chunkweave.retrieval.file_kinds import FileKind
from chunkweave.settings import PROGRAMS, configuration, setting

_MIB = 1 << 20
_OUTPUT_BYTES = 4 * MOST_TEXT_BYTES
"""Maximum bytes of a text as JSON, in which a character may have more bytes than in UTF-8."""

_MOST_S = 120.0
_POLL_S = 0.02
_WAITED = 10
"""Limit of elapsed time, as a multiple of the limit of processor time: other processes may be busy."""

_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "VIRTUAL_ENV")
"""Environment variables that the converter receives; others may have keys."""


@configuration(PROGRAMS)
@dataclass(frozen=True, slots=True)
class ConversionLimits:
    """Limits for converting one file."""

    convert_time_s: float = setting(
        3.0,
        "Maximum processor time to convert a PDF, DOCX or HTML file, per begun MiB; two minutes at most.",
        above=0,
    )
    convert_memory_bytes: int = setting(512 * _MIB, "Maximum memory to convert a file.", least=64 * _MIB)

    def seconds(self, nbytes: int) -> float:
        """The limit of processor time for a file of `nbytes` bytes."""
        return min(max(_MOST_S, self.convert_time_s), self.convert_time_s * max(1, ceil(nbytes / _MIB)))


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted file: its title, "" if it has none, and either Markdown or the texts of its pages."""

    title: str
    markdown: str
    pages: tuple[str, ...] = ()


def convert(
    kind: FileKind, data: bytes, limits: ConversionLimits, stopped: Callable[[], bool] = lambda: False
) -> Converted:
    """Convert the bytes of a file. Polls `stopped`, and kills the converter once it returns true.

    Raises:
        UnreadableFileError: the extra `documents` is not installed.
        DocumentError: the file cannot be converted within the limits; the message says why.
    """
    longest_s = limits.seconds(len(data))
    with TemporaryFile() as given, TemporaryFile() as made:
        given.write(data)
        given.seek(0)
        most = [str(longest_s), str(limits.convert_memory_bytes), str(_OUTPUT_BYTES)]
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "chunkweave.retrieval.converter", kind.value, *most],
            stdin=given,
            stdout=made,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        )
        try:
            _wait(process, longest_s, stopped)
        finally:
            process.kill()
            process.wait()
        made.seek(0)
        if process.returncode == -signal.SIGXCPU:
            raise _too_long(longest_s)
        return _result(kind, process.returncode, made.read(_OUTPUT_BYTES))


def _wait(process: "subprocess.Popen[bytes]", longest_s: float, stopped: Callable[[], bool]) -> None:
    """Wait until a converter ends.

    Raises:
        DocumentError: it takes too long, or `stopped` returns true.
    """
    ends = time.monotonic() + _WAITED * longest_s
    while process.poll() is None:
        if stopped():
            raise DocumentError("converting it was stopped")
        if time.monotonic() > ends:
            raise _too_long(longest_s)
        time.sleep(_POLL_S)


def _too_long(longest_s: float) -> DocumentError:
    return DocumentError(
        f"converting it takes more than {longest_s:g} s of processor time, or {_WAITED} times as long by the clock: "
        "split it, or raise the setting convert_time"
    )


def _result(kind: FileKind, code: int, output: bytes) -> Converted:
    """Parse the output of a converter, which is not trusted."""
    if code != 0 or not output:
        raise DocumentError(f"the converter of {kind} failed (exit code {code})")
    try:
        found: Any = json.loads(output)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"it has more than {MOST_TEXT_BYTES >> 20} MiB of text: split it") from error
    if "missing" in found:
        raise UnreadableFileError(f"it is {kind}, which needs {install_extra('documents')} ({found['missing']})")
    if "error" in found:
        raise DocumentError(str(found["error"])[:_MOST_REASON_CHARACTERS])
    pages = tuple(_clean(str(page)) for page in found.get("pages", ()))
    return Converted(_clean(str(found.get("title", ""))), _clean(str(found.get("markdown", ""))), pages)


_MOST_REASON_CHARACTERS = 400


def _clean(text: str) -> str:
    """Valid Unicode without NUL. Line ends are line feeds, at most two in a row."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "")
    text = "\n".join(line.rstrip() for line in text.splitlines())
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip()
