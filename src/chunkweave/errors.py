"""The exceptions that chunkweave raises, named for what the caller can do about them.

ChunkweaveError
├── UsageError             the call itself is wrong: fix the argument that the message names
│   ├── UnknownMethodError     no reuse method, policy or shape of that name
│   ├── PromptTooLongError     prompt or chunk does not fit the model's context: send less
│   ├── TopKError              more chunks are asked for than there are: ask for fewer
│   ├── UnknownDocumentError   no document of that id in the corpus
│   ├── UnknownRequestError    no request of that id is under way: it never was, or it has ended
│   ├── ConversationBusyError  the conversation's last question is still being answered: wait for it
│   ├── ConversationTurnError  a turn of the conversation is not the one that comes next: look which was the last
│   └── ConversationEndedError the conversation was forgotten, or was closed: begin it anew, or another
├── ModelError             the model cannot be used
│   ├── ModelNotFoundError     no such folder or file, or files are missing or unreadable in it
│   └── UnsupportedModelError  the architecture cannot be woven; the message says which feature
├── QueueFullError         too many requests wait: try again later
├── RequestEndedError      a request ended without its answer
│   ├── DeadlineError          it took longer than it was given: ask again when there is less load, or give more
│   ├── RequestAbortedError    it was aborted, or the engine was closed
│   └── RequestFailedError     it failed twice; the cause is the second failure
├── DocumentError          a document or data set file cannot be read; the message names file and line
│   ├── DuplicateDocumentError two documents have one id: give another, or update
│   └── EmptyDocumentError     a document has no text
├── CorpusError            a corpus cannot be used: its files are missing or damaged, or another process writes it
│   ├── EmbedderMismatchError  corpus or index was made by another embedder: open it with that one
│   └── DimensionMismatchError vectors are not as wide as those of the index
├── NotRemovedError        what was to be removed is still there, though not used: let it be removed, and ask again
└── StoreError             the segment store's own invariants are broken (a bug: please report it)

A cache miss is not an error, and neither is a segment that cannot be stored.
"""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any


def install_extra(name: str) -> str:
    """How to get an extra's packages, for messages. No package index has chunkweave yet, so it is from a checkout.

    >>> install_extra("server")
    "pip install -e '.[server]' in a checkout of chunkweave"
    """
    return f"pip install -e '.[{name}]' in a checkout of chunkweave"


def unknown_names(given: Iterable[Any], known: Collection[str], form: str = "{}") -> str:
    """Those of the given names that are not known, sorted, each with the known one that it is close to; "" if none.

    Names are written in `form`.

    >>> unknown_names(["prot", "host", 3], ["host", "port"])
    '3, prot (did you mean port?)'
    """
    unknown = sorted(str(name).encode("utf-8", "backslashreplace").decode() for name in given if name not in known)
    close = [get_close_matches(name, known, n=1, cutoff=0.75) for name in unknown]
    return ", ".join(
        f"{form.format(name)} (did you mean {form.format(found[0])}?)" if found else form.format(name)
        for name, found in zip(unknown, close, strict=True)
    )


class ChunkweaveError(Exception):
    """Root of everything that chunkweave raises on purpose.

    >>> from chunkweave import ChunkweaveError, Engine
    >>> try:
    ...     Engine.load("no-such-folder")
    ... except ChunkweaveError as error:
    ...     print(type(error).__name__)
    ModelNotFoundError
    """


class UsageError(ChunkweaveError, ValueError):
    """An argument is outside what the call accepts."""


class UnknownMethodError(UsageError):
    """A reuse method, eviction policy or model shape of that name does not exist."""


class PromptTooLongError(UsageError):
    """A chunk or the whole prompt does not fit into the model's context."""


class TopKError(UsageError):
    """More chunks are asked for than the corpus or index has."""


class UnknownDocumentError(UsageError):
    """The corpus has no document of that id."""


class UnknownRequestError(UsageError):
    """No request of that id is waiting or running."""


class ConversationBusyError(UsageError):
    """A conversation is asked something while its last question is still being answered."""


class ConversationTurnError(UsageError):
    """A conversation is asked for another turn than the one that comes next."""


class ConversationEndedError(UsageError):
    """A conversation that was idle for too long, made room for others, or was closed, is asked something."""


class ModelError(ChunkweaveError):
    """A model cannot be loaded or driven."""


class ModelNotFoundError(ModelError):
    """The model's folder or file is missing, incomplete or unreadable, or cannot be kept where it is unpacked."""


class UnsupportedModelError(ModelError):
    """The model's architecture has a feature that weaving cannot handle."""


class QueueFullError(ChunkweaveError):
    """As many requests wait as may."""


class RequestEndedError(ChunkweaveError):
    """A request ended without its answer."""


class DeadlineError(RequestEndedError):
    """A request took longer than it was given."""


class RequestAbortedError(RequestEndedError):
    """A request was aborted before its answer was complete."""


class RequestFailedError(RequestEndedError):
    """A request failed, and again when it was tried once more."""


class DocumentError(ChunkweaveError):
    """A document or data set file cannot be read as what it should be."""


class DuplicateDocumentError(DocumentError):
    """Two documents have the same id."""


class EmptyDocumentError(DocumentError):
    """A document has no text, or white space alone."""


class CorpusError(ChunkweaveError):
    """A corpus cannot be opened, read or written as it is."""


class EmbedderMismatchError(CorpusError):
    """A corpus or an index was made by another embedder than the one it is used with."""


class DimensionMismatchError(CorpusError):
    """Vectors have another number of columns than the index or the embedder says."""


class NotRemovedError(ChunkweaveError):
    """Of KV that was to be removed, copies are still there, or may be.

    `removed` copies are gone. `left` are not: they are not used any more, and their removal is tried again whenever
    something is stored; with `lasting` a store that is opened later does not use them either. The tiers `unasked` did
    not say what they hold, and may have more, which may be used: ask again. Servers that are `silent` may have more,
    and answer nothing before they have removed it.
    """

    def __init__(
        self, removed: int, left: int, unasked: Sequence[str] = (), *, silent: Sequence[str] = (), lasting: bool
    ) -> None:
        until = "any more" if lasting else "until this process ends, since that could not be noted on disk"
        said = [f"{removed} stored segments were removed"]
        if left:
            said.append(f"{left} cannot be removed now, are not used {until}, and it is tried again")
        if unasked:
            said.append(f"the {' and '.join(unasked)} tier could not be asked what it holds: ask again")
        if silent:
            said.append(f"{' and '.join(silent)} did not answer, and must remove it before answering again")
        super().__init__("; ".join(said))
        self.removed = removed
        self.left = left
        self.unasked = tuple(unasked)
        self.silent = tuple(silent)
        self.lasting = lasting


class StoreError(ChunkweaveError):
    """An invariant of the segment store does not hold."""
