"""What computes answers, as the server sees it: our own engine (`engine_backend`) or vLLM (`vllm_backend`)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from chunkweave.conversation.answer import AnswerEnd, Choice, PendingAnswer
from chunkweave.conversation.prepare import RequestPreparer
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.prompt.contexts import ContextPool
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.prompt.request import Request as EngineRequest
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.scheduling.shadow import ShadowMonitor
from chunkweave.types import Chunk, ChunkId
from chunkweave_server.improving import Improver
from chunkweave_server.metrics import MetricSample
from chunkweave_server.requests import CompletionBody
from chunkweave_server.threads import TenantThreads


class Stage(StrEnum):
    """How far a server is."""

    LOADING_MODEL = "loading the model"
    STARTING_VLLM = "starting vLLM"
    OPENING_CORPORA = "opening corpora"
    READY = "ready"
    FAILED = "failed to start"
    STOPPING = "stopping"


class Event(Protocol):
    """Pieces of the choices of one answer, which may be none; the last event has its end."""

    @property
    def choices(self) -> Sequence[Choice]:
        """The pieces."""

    @property
    def end(self) -> AnswerEnd | None:
        """What is known at the end."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that has passed all checks. `body` holds what only vLLM reads; the salt is the tenant's own."""

    request: EngineRequest
    method_request: MethodRequest
    body: CompletionBody
    arrived_s: float
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class BackendParts:
    """What is known of a backend once it has started."""

    tokenizer: TextTokenizer
    calibrated: bool
    """Whether a request may name a quality."""
    most_tokens: int
    """No prompt, and so no question, with more tokens is answered."""
    max_prefill_batch: int = 1
    """A prefill for a search that has not ended starts if fewer requests wait for, or are in, prefill."""
    speculate: bool = False
    """Whether to prefill for what a search has found so far."""
    order: ChunkOrder = ChunkOrder.FIXED
    """For requests that say nothing."""
    reorders: bool = False
    """Whether a request of free order is the same with its chunks in another sequence."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How many copies of segments were removed, and how many chunks that had read them are queued to be computed anew.

    None are where nothing is computed anew.
    """

    segments: int = 0
    queued: int | None = None

    def as_dict(self) -> dict[str, int]:
        """As answers have it."""
        queued = {} if self.queued is None else {"chunks_queued": self.queued}
        return {"segments_removed": self.segments, **queued}


class CacheCommands(Protocol):
    """What `/v1/cache` does to the chunks that a backend has stored. A tenant's salt keeps its chunks apart."""

    @property
    def pins(self) -> bool:
        """Whether chunks can be pinned."""

    async def warm(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Compute chunks before a request needs them, behind all requests; returns how many were computed.

        Raises:
            ChunkweaveError, HttpError: one is too long, or was not computed; those before it are computed.
        """

    async def pin(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Pin what is stored of chunks; returns how many segments are.

        Raises:
            HttpError: 403, that and what the tenant has pinned is more than it may; 501, this backend pins nothing.
        """

    async def unpin(self, tenant: str, chunks: Sequence[Chunk], salt: str) -> int:
        """Take pins back; returns how many chunks were pinned.

        Raises:
            HttpError: 501, this backend pins nothing.
        """

    @property
    def improving(self) -> Improver:
        """What computes chunks anew in idle time."""

    async def forget(self, tenant: str, texts: Sequence[str], salt: str) -> Forgotten:
        """Remove the KV of chunks from every tier.

        It costs `tenant` one of its turns, and no running answer a step.

        Raises:
            NotRemovedError: copies are still there. What could be removed is.
        """

    async def clear(self) -> int:
        """Remove everything of all tenants; returns how many segments there were.

        Raises:
            NotRemovedError: copies are still there.
        """

    def stats(self) -> Mapping[str, Any]:
        """What `/v1/cache` shows admins; called in a thread."""


class Passthrough(Protocol):
    """Hands requests to the servers behind a backend as they are."""

    @property
    def router(self) -> APIRouter:
        """The paths of these servers that are handed on."""

    async def plain(self, request: Request) -> Response | None:
        """The answer to a completion request that says nothing of documents; None if it does.

        Raises:
            HttpError: 400, the body has more values than vLLM is handed.
        """


class Backend(Protocol):
    """Computes answers. Belongs to the event loop's thread; nothing but `start` and `stop` before and after these."""

    @property
    def name(self) -> str:
        """What clients call the model; never a path."""

    @property
    def first_stage(self) -> Stage:
        """What `start` does."""

    @property
    def passthrough(self) -> Passthrough | None:
        """What takes requests without documents and unknown paths; None if the server itself does."""

    @property
    def unavailable(self) -> str | None:
        """Why no request can be answered now; None if they can."""

    @property
    def shadow(self) -> ShadowMonitor | None:
        """What checks woven answers against full prefill, if anything does."""

    @property
    def cache(self) -> CacheCommands:
        """The chunks that are stored; there once it has started."""

    async def start(self, threads: TenantThreads) -> BackendParts:
        """Load or start everything. Requests are tokenized in `threads`.

        Raises:
            ChunkweaveError: it cannot start; what had been started is stopped again.
        """

    async def stop(self) -> None:
        """End what runs, write what is still to be written, and close everything; a no-op if it was not started."""

    def check(self, body: CompletionBody) -> None:
        """Hold a request against what this backend does.

        Raises:
            HttpError: a field or a model that the backend does not know, or it is not ready.
        """

    async def submit(self, submission: Submission, *, speculative: bool = False) -> PendingAnswer[Event]:
        """Tokenize a request and let it wait for its turn. A `speculative` one delays no other until it is confirmed.

        Raises:
            ChunkweaveError: the request is wrong, or too many wait.
        """

    def samples(self) -> Iterator[MetricSample]:
        """What its metrics are now; called in a thread."""

    async def metrics(self) -> bytes:
        """Metrics of other processes, in Prometheus's text format; empty where there are none."""


_AT_A_TIME = 16
"""Chunks that are tokenized in one of a tenant's turns."""


class Warmings:
    """The calls that compute chunks now, and what was removed since each began: it is no context any more.

    Belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        self._gone: list[set[ChunkId]] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._gone)

    @contextmanager
    def begun(self) -> Iterator[AbstractSet[ChunkId]]:
        """What leaves while the call lasts."""
        gone: set[ChunkId] = set()
        self._gone.append(gone)
        try:
            yield gone
        finally:
            self._gone = [one for one in self._gone if one is not gone]

    def removed(self, chunks: Iterable[ChunkId]) -> None:
        """Chunks are removed now."""
        chunks = tuple(chunks)
        for gone in self._gone:
            gone.update(chunks)


def reads(prompt: Prompt, gone: AbstractSet[ChunkId]) -> bool:
    """Whether a prompt has a chunk that is gone."""
    return not gone.isdisjoint(part.id for part in prompt.parts if part.id is not None)


async def context_pool(
    preparer: RequestPreparer, threads: TenantThreads, tenant: str, chunks: Sequence[Chunk], salt: str
) -> ContextPool | None:
    """Chunks that are computed beforehand together, behind each other; None if neutral passages are wanted."""
    if preparer.rule is None:
        return None
    parts = await storable_parts(preparer, threads, tenant, chunks, salt)
    return await threads.run(tenant, partial(ContextPool, parts))


async def storable_parts(
    preparer: RequestPreparer, threads: TenantThreads, tenant: str, chunks: Sequence[Chunk], salt: str
) -> list[PromptPart]:
    """Chunks as they are in every prompt, without those that no context can hold, tokenized in a tenant's turns."""
    parts: list[PromptPart] = []
    for start in range(0, len(chunks), _AT_A_TIME):
        some = chunks[start : start + _AT_A_TIME]
        parts += await threads.run(tenant, partial(preparer.storable_parts, some, cache_salt=salt))
    return parts
