"""The exceptions that chunkweave raises, named for what the caller can do about them.

ChunkweaveError
├── UsageError             the call itself is wrong: fix the argument that the message names
│   ├── UnknownMethodError     no reuse method, policy or shape of that name
│   └── PromptTooLongError     prompt or chunk does not fit the model's context: send less
├── ModelError             the model cannot be used
│   ├── ModelNotFoundError     no such folder, or files are missing or unreadable in it
│   └── UnsupportedModelError  the architecture cannot be woven; the message says which feature
├── DocumentError          a document or data set file cannot be read; the message names file and line
└── StoreError             the segment store's own invariants are broken (a bug: please report it)

A cache miss is not an error, and neither is a segment that cannot be stored.
"""


class ChunkweaveError(Exception):
    """Root of everything that chunkweave raises on purpose."""


class UsageError(ChunkweaveError, ValueError):
    """An argument is outside what the call accepts."""


class UnknownMethodError(UsageError):
    """A reuse method, eviction policy or model shape of that name does not exist."""


class PromptTooLongError(UsageError):
    """A chunk or the whole prompt does not fit into the model's context."""


class ModelError(ChunkweaveError):
    """A model cannot be loaded or driven."""


class ModelNotFoundError(ModelError):
    """The model folder is missing, incomplete or unreadable."""


class UnsupportedModelError(ModelError):
    """The model's architecture has a feature that weaving cannot handle."""


class DocumentError(ChunkweaveError):
    """A document or data set file cannot be read as what it should be."""


class StoreError(ChunkweaveError):
    """An invariant of the segment store does not hold."""
