"""The exceptions that chunkweave raises, grouped by what the caller can do about them.

ChunkweaveError
├── UsageError             the call itself is wrong: fix the argument that the message names
│   ├── UnknownMethodError     no reuse method, policy or shape of that name
│   ├── PromptTooLongError     prompt or chunk does not fit the model's context: send less
│   ├── TopKError              more chunks requested than exist: ask for fewer
│   ├── UnknownDocumentError   no document of that id in the corpus
│   ├── UnknownRequestError    no pending or running request has that id: unknown id, or the request has ended
├── ModelError             the model cannot be used
│   ├── ModelNotFoundError     no such folder or file, or files in it are missing or unreadable
│   └── UnsupportedModelError  the architecture cannot be woven; the message says which feature
├── QueueFullError         too many pending requests: retry later
├── RequestEndedError      a request ended without its answer
│   ├── DeadlineError          its deadline passed: retry at lower load, or with a longer deadline
│   ├── RequestAbortedError    it was aborted, or the engine was closed
│   ├── AnswerFormError        no token continues it within its grammar (a bug: please report it)
│   └── RequestFailedError     it failed and its retry failed; the cause is the second failure
├── DocumentError          a document or data set file cannot be read; the message names file and line
│   ├── UnreadableFileError    a file of a kind that is not read: convert it first, or leave it out
│   ├── DuplicateDocumentError two documents have the same id: choose another, or update
│   └── EmptyDocumentError     a document has no text
├── CorpusError            a corpus cannot be used: files missing or damaged, or another process writes it
│   ├── EmbedderMismatchError  the corpus was made by another embedder: open it with that one
│   └── DimensionMismatchError vectors and index differ in width
├── NotRemovedError        KV that should be removed still exists, though unused: retry the removal
└── StoreError             an invariant of the segment store is broken (a bug: please report it)

A cache miss is not an error, and neither is a segment that cannot be stored.
"""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any


def install_extra(name: str) -> str:
    """How to install an extra, for messages. No package index has chunkweave yet, so it needs a checkout.

    >>> install_extra("server")
    "pip install '.[server]' in a checkout of chunkweave"
    """
    return f"pip install '.[{name}]' in a checkout of chunkweave"


def unknown_names(names: Iterable[Any], known_names: Collection[str], form: str = "{}") -> str:
    """The given names that are unknown, sorted, each with the closest known name; "" if all are known.

    Each name is written in the format `form`.

    >>> unknown_names(["prot", "host", 3], ["host", "port"])
    '3, prot (did you mean port?)'
    """
    unknown = sorted(
        str(name).encode("utf-8", "backslashreplace").decode() for name in names if name not in known_names
    )
    close = [get_close_matches(name, known_names, n=1, cutoff=0.75) for name in unknown]
    return ", ".join(
        f"{form.format(name)} (did you mean {form.format(matches[0])}?)" if matches else form.format(name)
        for name, matches in zip(unknown, close, strict=True)
    )


def one_line(error: BaseException) -> str:
    r"""The whole message of an error of another library, its lines joined.

    >>> one_line(ValueError("no tokenizer, \n  from one of:\n a, b"))
    'no tokenizer, from one of: a, b'
    """
    return " ".join(str(error).split()) or type(error).__name__


class ChunkweaveError(Exception):
    """Base class of all exceptions that chunkweave raises itself.

    >>> from chunkweave import ChunkweaveError, Engine
    >>> try:
    ...     Engine.load("no-such-folder")
    ... except ChunkweaveError as error:
    ...     print(type(error).__name__)
    ModelNotFoundError
    """


class UsageError(ChunkweaveError, ValueError):
    """An argument has a value that the call does not accept."""


class UnknownMethodError(UsageError):
    """No reuse method, eviction policy or model shape has this name."""


class PromptTooLongError(UsageError):
    """A chunk or the whole prompt does not fit the model's context."""


class TopKError(UsageError):
    """More chunks were requested than the corpus or index has."""


class UnknownDocumentError(UsageError):
    """The corpus has no document with this id."""


class UnknownRequestError(UsageError):
    """No pending or running request has this id."""


class ModelError(ChunkweaveError):
    """A model cannot be loaded or driven."""


class ModelNotFoundError(ModelError):
    """The model's folder or file is missing, incomplete or unreadable, or its unpacked form cannot be stored."""


class UnsupportedModelError(ModelError):
    """The model's architecture has a feature that weaving cannot handle."""


class QueueFullError(ChunkweaveError):
    """The queue has its maximum number of pending requests."""


class RequestEndedError(ChunkweaveError):
    """A request ended without its answer."""


class DeadlineError(RequestEndedError):
    """The request's deadline passed."""


class RequestAbortedError(RequestEndedError):
    """A request was aborted before its answer was complete."""


class AnswerFormError(RequestEndedError):
    """An answer cannot continue within its grammar: the grammar refused a token that it had allowed."""


class RequestFailedError(RequestEndedError):
    """A request failed, and so did its retry."""


class DocumentError(ChunkweaveError):
    """A document or data set file cannot be read in the expected format."""


class UnreadableFileError(DocumentError):
    """A file is of a kind that is not read, or that takes packages that are not installed."""


class DuplicateDocumentError(DocumentError):
    """Two documents have the same id."""


class EmptyDocumentError(DocumentError):
    """A document has no text, or only white space."""


class CorpusError(ChunkweaveError):
    """A corpus cannot be opened, read or written."""


class EmbedderMismatchError(CorpusError):
    """A corpus is used with another embedder than the one that made it."""


class DimensionMismatchError(CorpusError):
    """Vectors have a different width than the index or the embedder."""


class NotRemovedError(ChunkweaveError):
    """Copies of KV that should be removed still exist, or may exist.

    `removed` counts copies that are gone. `left` counts copies that remain on `tiers`: they are not used any more, and
    each later put retries their removal; with `lasting`, a store that is opened later does not use them either. The
    tiers in `unasked` could not list what they hold and may hold more that is still used: retry. Servers in `silent`
    may hold more; they answer no request before they have removed it.
    """

    def __init__(
        self,
        removed: int,
        left: int,
        unasked: Sequence[str] = (),
        *,
        tiers: Sequence[str] = (),
        silent: Sequence[str] = (),
        lasting: bool,
    ) -> None:
        until = "any more" if lasting else "until this process ends, because the removal could not be recorded on disk"
        sentences = [f"{removed} stored segments were removed"]
        if left:
            where = f" from {' and '.join(tiers)}" if tiers else ""
            sentences.append(f"{left} cannot be removed{where} now, are not used {until}, and their removal is retried")
        if unasked:
            sentences.append(f"the {' and '.join(unasked)} tier could not list what it holds: retry")
        if silent:
            sentences.append(f"{' and '.join(silent)} did not answer, and must remove it before answering again")
        super().__init__("; ".join(sentences))
        self.removed = removed
        self.left = left
        self.unasked = tuple(unasked)
        self.tiers = tuple(tiers)
        self.silent = tuple(silent)
        self.lasting = lasting


class StoreError(ChunkweaveError):
    """An invariant of the segment store does not hold."""
