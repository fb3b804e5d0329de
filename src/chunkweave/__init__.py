"""chunkweave: RAG answers that start sooner.

The names below load on first use, so that `import chunkweave.store` and the like work without PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import fcntl  # noqa: F401 - cache folders are locked with it; Windows has neither this nor `resource`
except ImportError as error:
    raise ImportError(f"chunkweave needs Linux, macOS or WSL: this Python has no module {error.name}") from error

if TYPE_CHECKING:
    from chunkweave.config import ReuseConfig, SamplingParams, StoreConfig
    from chunkweave.conversation.answer import Answer, StreamEvent
    from chunkweave.engine.async_engine import AnswerStream, AsyncEngine
    from chunkweave.engine.engine import Engine
    from chunkweave.errors import ChunkweaveError
    from chunkweave.metrics import ReuseReport
    from chunkweave.ordering.ordering import OrderingConfig
    from chunkweave.prompt.request import Request
    from chunkweave.retrieval.corpus import Corpus
    from chunkweave.retrieval.documents import CorpusDocument
    from chunkweave.scheduling.budget import BatchingConfig
    from chunkweave.types import Chunk

__all__ = [
    "Answer",
    "AnswerStream",
    "AsyncEngine",
    "BatchingConfig",
    "Chunk",
    "ChunkweaveError",
    "Corpus",
    "CorpusDocument",
    "Engine",
    "OrderingConfig",
    "Request",
    "ReuseConfig",
    "ReuseReport",
    "SamplingParams",
    "StoreConfig",
    "StreamEvent",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "Answer": "chunkweave.conversation.answer",
    "AnswerStream": "chunkweave.engine.async_engine",
    "AsyncEngine": "chunkweave.engine.async_engine",
    "BatchingConfig": "chunkweave.scheduling.budget",
    "Chunk": "chunkweave.types",
    "ChunkweaveError": "chunkweave.errors",
    "Corpus": "chunkweave.retrieval.corpus",
    "CorpusDocument": "chunkweave.retrieval.documents",
    "Engine": "chunkweave.engine.engine",
    "OrderingConfig": "chunkweave.ordering.ordering",
    "Request": "chunkweave.prompt.request",
    "ReuseConfig": "chunkweave.config",
    "ReuseReport": "chunkweave.metrics",
    "SamplingParams": "chunkweave.config",
    "StoreConfig": "chunkweave.config",
    "StreamEvent": "chunkweave.conversation.answer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'chunkweave' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
